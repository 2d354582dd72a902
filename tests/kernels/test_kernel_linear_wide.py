"""Linears of many rows by Hopper's warpgroup products, emulated, or on such a card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from deepinfer.deploy.validate import linear_cases, nested_cases
from deepinfer.deploy.validate.accuracy import Accuracy
from deepinfer.kernels import linear
from deepinfer.kernels.linear import WidePlan, Workspace
from deepinfer.kernels.linear_launch import is_hopper
from deepinfer.kernels.linear_wide import wide_plan, wide_spec, wide_specs
from kernels.simt.build import COMPILER, emulator

emulated = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")

NARROW = WidePlan(32, 2, 3, 2)
WIDE = WidePlan(64, 1, 3, 2, splits=2)


@pytest.fixture(
    scope="module",
    params=[pytest.param("cpu", marks=emulated), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the kernels run: in the emulator, or on a card."""
    device: str = request.param
    if device == "cuda" and not is_hopper(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip("the card does not have these products")
    specs = [wide_spec(kind, WIDE) for kind in ("f16", "nested", "nested fp8", "w4")]
    specs += [wide_spec("nested", NARROW), wide_spec("w4", NARROW)]
    with emulator(specs) if device == "cpu" else nullcontext():
        yield device


def holds(results: Iterator[Accuracy]) -> None:
    for result in results:
        assert result.problem is None


@pytest.mark.parametrize(
    ("rows", "columns", "m", "plan", "fp8"),
    [
        (136, 352, 19, NARROW, False),  # N ends inside a tile, K inside a step
        (72, 160, 70, WIDE, False),
        (40, 64, 33, WIDE, True),  # more splits than steps: one adds nothing
    ],
)
def test_nested_linears_equal_the_reference(
    rows: int, columns: int, m: int, plan: WidePlan, fp8: bool, device: str
) -> None:
    weight = nested_cases.nested_weight(rows, columns, bias=True, device=device)
    holds(linear_cases.check_epilogues(weight, m, fp8=fp8, plan=plan))


def test_fp16_mode_has_the_bits_of_plain_weights(device: str) -> None:
    plain, weight = nested_cases.shifted_pair(48, 352, device=device)
    holds(nested_cases.check_same_bits(plain, weight, 41, plan=WIDE))


@pytest.mark.parametrize(
    ("rows", "columns", "group", "zeros", "m", "plan"),
    [(48, 640, 128, True, 21, NARROW), (136, 768, 256, False, 40, WIDE)],
)
def test_w4_linears_equal_the_reference(
    rows: int, columns: int, group: int, zeros: bool, m: int, plan: WidePlan, device: str
) -> None:
    weight = linear_cases.w4_weight(rows, columns, group, zeros=zeros, bias=True, device=device)
    holds(linear_cases.check_epilogues(weight, m, plan=plan))


def test_plans_are_among_the_specs_and_fit_the_workspace() -> None:
    known, workspace = set(wide_specs()), Workspace.allocate("cpu")
    for n, k in ((576, 576), (2560, 2048), (2048, 11008), (22016, 2048), (151936, 2048)):
        for m in (17, 32, 33, 64, 65, 128, 1024):
            assert wide_plan("f16", n, k, m, 132) == wide_plan("nested", n, k, m, 132)
            for kind in ("f16", "nested", "nested fp8", "w4"):
                plan = wide_plan(kind, n, k, m, 132)
                assert wide_spec(kind, plan) in known
                if plan.splits > 1:
                    blocks = plan.blocks(n, m)
                    assert blocks <= workspace.tickets.numel()
                    floats = blocks * plan.splits * plan.rows * plan.columns
                    assert floats <= workspace.sums.numel()
                assert wide_plan(kind, n, k, m, 132, split=False).splits == 1


def test_a_workspace_is_asked_for() -> None:
    weight = linear_cases.f16_weight(16, 64, bias=False, device="cpu")
    out, x = torch.zeros(1, 16).half(), torch.zeros(1, 64).half()
    with pytest.raises(ValueError, match=r"plan splits K over 2 CTAs"):
        linear.linear_norm(out, x, weight, plan=WIDE)
