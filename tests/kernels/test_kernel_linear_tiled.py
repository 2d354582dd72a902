"""Linears of 17 rows and more, emulated or on a card; every cut on shapes that fit none of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from deepinfer.deploy.validate import linear_cases, nested_cases
from deepinfer.deploy.validate.accuracy import Accuracy
from deepinfer.kernels import linear
from deepinfer.kernels.compiler import KernelSpec
from deepinfer.kernels.linear import F16Weight, NestedWeight, TiledPlan, W4Weight
from deepinfer.kernels.linear_plans import f16_spec, nested_spec, w4_spec
from deepinfer.kernels.linear_tiled import tiled_spec
from kernels.simt.build import COMPILER, emulator

emulated = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")

SHARED_K = TiledPlan(2, 2, 1, step_warps=2, splits=2)
"""The warps of a CTA share K, and so do CTAs."""
SPREAD = TiledPlan(2, 1, 2, column_warps=2, splits=3)


def specs() -> Iterator[KernelSpec]:
    """What the tests launch: compiled together that takes half the time."""
    for plan in (SHARED_K, SPREAD):
        for kind in ("f16", "nested", "nested fp8"):
            yield tiled_spec(kind, plan)
        yield tiled_spec("w4", plan, group=64)
    yield tiled_spec("w4", SPREAD, group=128)
    weight = F16Weight(torch.empty(40, 288, dtype=torch.float16))
    for m in (32, 40, 65):
        yield f16_spec(linear.plan_for(weight, m, 1))


@pytest.fixture(
    scope="module",
    params=[pytest.param("cpu", marks=emulated), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the kernels run: in the emulator, or on a card."""
    device: str = request.param
    with emulator(specs()) if device == "cpu" else nullcontext():
        yield device


def holds(results: Iterator[Accuracy]) -> None:
    for result in results:
        assert result.problem is None


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns", "m", "plan"),
    [
        (72, 352, 19, SHARED_K),  # N ends inside a tile, K inside a step
        (40, 64, 17, SPREAD),  # more splits than steps: some add nothing
        (48, 160, 37, SPREAD),
    ],
)
def test_nested_linears_equal_the_reference(
    rows: int, columns: int, m: int, plan: TiledPlan, fp8: bool, device: str
) -> None:
    weight = nested_cases.nested_weight(rows, columns, bias=True, device=device)
    assert weight.outliers
    holds(linear_cases.check_epilogues(weight, m, fp8=fp8, plan=plan))


@pytest.mark.parametrize(("columns", "m", "plan"), [(352, 21, SHARED_K), (224, 20, SPREAD)])
def test_fp16_mode_has_the_bits_of_plain_weights(
    columns: int, m: int, plan: TiledPlan, device: str
) -> None:
    plain, weight = nested_cases.shifted_pair(48, columns, device=device)
    holds(nested_cases.check_same_bits(plain, weight, m, plan=plan))


@pytest.mark.parametrize(
    ("rows", "columns", "group", "zeros", "m", "plan"),
    [
        (48, 640, 128, True, 21, SPREAD),
        (40, 96, 32, False, 17, SPREAD),
        (40, 320, 64, True, 18, SHARED_K),
    ],
)
def test_w4_linears_equal_the_reference(
    rows: int, columns: int, group: int, zeros: bool, m: int, plan: TiledPlan, device: str
) -> None:
    weight = linear_cases.w4_weight(rows, columns, group, zeros=zeros, bias=True, device=device)
    holds(linear_cases.check_epilogues(weight, m, plan=plan))


@pytest.mark.parametrize(("m", "kind"), [(32, "saturating"), (40, "tiny"), (65, "outliers")])
def test_the_plans_of_every_width(m: int, kind: linear_cases.Kind, device: str) -> None:
    weight = linear_cases.f16_weight(40, 288, bias=False, device=device)
    holds(linear_cases.check_epilogues(weight, m, kind=kind))


def test_plans_are_among_the_specs_and_cut_both_modes_alike() -> None:
    known = set(linear.specs())
    for n, k in ((576, 576), (2560, 2048), (2048, 11008), (22016, 2048), (151936, 2048)):
        plain = F16Weight(torch.empty(n, k, dtype=torch.float16, device="meta"))
        plane = torch.empty(n, k, dtype=torch.uint8, device="meta")
        nested = NestedWeight(plane, plane)
        for m in (17, 32, 33, 64, 65, 128, 1024):
            plan = linear.plan_for(plain, m, 132)
            assert plan == linear.plan_for(nested, m, 132)  # the same order of sums
            assert nested_spec(False, plan) in known
            assert nested_spec(True, linear.plan_for(nested, m, 132, fp8=True)) in known
        for group in (32, 128):
            scales = torch.empty(n, k // group, dtype=torch.float16, device="meta")
            words = torch.empty(n, -(-k // 128) * 16, dtype=torch.int32, device="meta")
            if k % group == 0:
                weight = W4Weight(words, scales, group)
                assert w4_spec(group, linear.plan_for(weight, 64, 132)) in known
