"""Linears by Hopper's warpgroup products with warps that only copy, emulated or on such a card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from deepinfer.deploy.validate import linear_cases, nested_cases
from deepinfer.deploy.validate.accuracy import Accuracy
from deepinfer.kernels import linear
from deepinfer.kernels.linear import F16Weight, NestedWeight
from deepinfer.kernels.linear_hopper import (
    HOPPER_FLOATS,
    WORKSPACE_TICKETS,
    HopperPlan,
    hopper_plan,
    hopper_spec,
)
from deepinfer.kernels.linear_launch import is_hopper
from deepinfer.kernels.linear_plans import HOPPER_TARGET, f16_spec, nested_spec
from deepinfer.kernels.linear_tiled import Kind
from kernels.simt.build import COMPILER, emulator

emulated = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")

NARROW = HopperPlan(columns=32, groups=1, step=64, resident=2, share=2)
WIDE = HopperPlan(columns=64, groups=2, step=128, resident=1, share=4)
FOURS = HopperPlan(columns=32, groups=1, step=64, resident=2, share=1, cluster=4)
PAIRS = HopperPlan(columns=64, groups=2, step=128, resident=1, share=1, cluster=2)


@pytest.fixture(
    scope="module",
    params=[pytest.param("cpu", marks=emulated), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the kernels run: in the emulator, or on a card."""
    device: str = request.param
    if device == "cuda" and not is_hopper(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("the card does not have these products")
    kinds: tuple[Kind, ...] = ("f16", "nested", "nested fp8")
    specs = [hopper_spec(kind, plan) for kind in kinds for plan in (NARROW, WIDE, FOURS, PAIRS)]
    with emulator(specs) if device == "cpu" else nullcontext():
        yield device


def holds(results: Iterator[Accuracy]) -> None:
    for result in results:
        assert result.problem is None


def sharing(plan: HopperPlan, share: int) -> HopperPlan:
    return HopperPlan(plan.columns, plan.groups, plan.step, plan.resident, share)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "m", "plan"),
    [
        (72, 160, 19, NARROW),  # N ends inside a tile, K inside a step, shares in both tiles
        (136, 96, 40, sharing(NARROW, 1)),  # two blocks of x, every step a CTA of its own
        (200, 352, 33, WIDE),  # a CTA has the end of a tile and the beginning of the next
        (272, 224, 64, WIDE),  # a CTA has two tiles and shares neither
        (40, 2080, 17, sharing(WIDE, 3)),  # more CTAs of a tile than are added at once
        (72, 352, 40, FOURS),  # CTAs of a cluster have one step or two; most have no row to finish
        (136, 672, 33, PAIRS),  # K ends inside a step
    ],
)
def test_nested_linears_equal_the_reference(
    rows: int, columns: int, m: int, plan: HopperPlan, fp8: bool, device: str
) -> None:
    weight = nested_cases.nested_weight(rows, columns, bias=True, device=device)
    assert weight.outliers
    holds(linear_cases.check_epilogues(weight, m, fp8=fp8, plan=plan))


@pytest.mark.parametrize(
    ("columns", "m", "plan"), [(352, 21, NARROW), (352, 41, WIDE), (352, 21, FOURS)]
)
def test_fp16_mode_has_the_bits_of_plain_weights(
    columns: int, m: int, plan: HopperPlan, device: str
) -> None:
    plain, weight = nested_cases.shifted_pair(144, columns, device=device)
    holds(nested_cases.check_same_bits(plain, weight, m, plan=plan))


@pytest.mark.parametrize("kind", ["saturating", "tiny", "outliers"])
def test_plain_linears_equal_the_reference(kind: linear_cases.Kind, device: str) -> None:
    weight = linear_cases.f16_weight(80, 288, bias=False, device=device)
    holds(linear_cases.check_epilogues(weight, 20, kind=kind, plan=NARROW))


def test_a_shared_tile_needs_room_for_its_sums() -> None:
    weight = linear_cases.f16_weight(80, 288, bias=False, device="cpu")
    x, out = torch.zeros(20, 288).half(), torch.zeros(20, 80).half()
    with pytest.raises(ValueError, match="needs a workspace"):
        linear.linear_norm(out, x, weight, plan=NARROW)
    small = linear.Workspace(torch.zeros(64), torch.zeros(64, dtype=torch.int32))
    with pytest.raises(ValueError, match="plan needs 20480 and 2"):
        linear.linear_norm(out, x, weight, plan=NARROW, workspace=small)


def test_a_cluster_needs_a_step_for_each_of_its_ctas() -> None:
    weight = linear_cases.f16_weight(80, 160, bias=False, device="cpu")
    x, out = torch.zeros(20, 160).half(), torch.zeros(20, 80).half()
    with pytest.raises(ValueError, match="divides 3 steps of K by 4 CTAs"):
        linear.linear_norm(out, x, weight, plan=FOURS)


def test_plans_are_among_the_specs_and_fit_the_workspace() -> None:
    known = set(linear.specs_for(HOPPER_TARGET))
    for n, k in ((576, 576), (2560, 2048), (2048, 11008), (22016, 2048), (151936, 2048)):
        plain = F16Weight(torch.empty(n, k, dtype=torch.float16, device="meta"))
        plane = torch.empty(n, k, dtype=torch.uint8, device="meta")
        weight = NestedWeight(plane, plane)
        for m in (17, 32, 33, 64, 65, 128, 129, 256, 1024):
            plan = linear.plan_for(plain, m, 132, hopper=True)
            assert isinstance(plan, HopperPlan)
            assert plan == linear.plan_for(weight, m, 132, hopper=True)  # the same order of sums
            assert f16_spec(plan) in known
            assert nested_spec(False, plan) in known
            assert (
                nested_spec(True, linear.plan_for(weight, m, 132, fp8=True, hopper=True)) in known
            )
            assert plan.floats(n, k, m) <= HOPPER_FLOATS
            assert plan.tickets(n, m) <= WORKSPACE_TICKETS
            assert not hopper_plan(n, k, m, 132, split=False).splits(k)
