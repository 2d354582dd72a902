"""4-bit linears of more rows by Hopper's warpgroup products, emulated, or on such a card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from deepinfer.deploy.validate import linear_cases
from deepinfer.kernels import linear
from deepinfer.kernels.linear import W4Weight, WidePlan, Workspace
from deepinfer.kernels.linear_launch import is_hopper
from deepinfer.kernels.linear_plans import HOPPER_TARGET, w4_spec
from deepinfer.kernels.linear_wide import wide_spec
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
    specs = [wide_spec(NARROW), wide_spec(WIDE)]
    with emulator(specs) if device == "cpu" else nullcontext():
        yield device


@pytest.mark.parametrize(
    ("rows", "columns", "group", "zeros", "m", "plan"),
    [
        (48, 640, 128, True, 21, NARROW),
        (136, 768, 256, False, 70, WIDE),  # N and X end inside tiles
        (40, 128, 128, True, 17, WIDE),  # more splits than steps: one adds nothing
    ],
)
def test_linears_equal_the_reference(
    rows: int, columns: int, group: int, zeros: bool, m: int, plan: WidePlan, device: str
) -> None:
    weight = linear_cases.w4_weight(rows, columns, group, zeros=zeros, bias=True, device=device)
    for result in linear_cases.check_epilogues(weight, m, plan=plan):
        assert result.problem is None


def test_plans_are_among_the_specs_and_fit_the_workspace() -> None:
    known, workspace = set(linear.specs_for(HOPPER_TARGET)), Workspace.allocate("cpu")
    for n, k in ((576, 640), (2560, 2048), (2048, 11008), (22016, 2048), (151936, 2048)):
        for group in (64, 128):
            scales = torch.empty(n, k // group, dtype=torch.float16, device="meta")
            words = torch.empty(n, k // 8, dtype=torch.int32, device="meta")
            weight = W4Weight(words, scales, group)
            for m in (17, 32, 33, 64, 65, 128, 1024):
                plan = linear.plan_for(weight, m, 132, hopper=True)
                assert isinstance(plan, WidePlan) == (group == 128)
                assert w4_spec(group, plan) in known
                if not isinstance(plan, WidePlan):
                    continue
                alone = linear.plan_for(weight, m, 132, split=False, hopper=True)
                assert isinstance(alone, WidePlan)
                assert alone.splits == 1
                if plan.splits > 1:
                    blocks = plan.blocks(n, m)
                    assert blocks <= workspace.tickets.numel()
                    floats = blocks * plan.splits * plan.rows * plan.columns
                    assert floats <= workspace.sums.numel()


def test_a_workspace_is_asked_for() -> None:
    weight = linear_cases.w4_weight(16, 128, 128, zeros=False, bias=False, device="cpu")
    out, x = torch.zeros(1, 16).half(), torch.zeros(1, 128).half()
    with pytest.raises(ValueError, match=r"plan splits K over 2 CTAs"):
        linear.linear_norm(out, x, weight, plan=WIDE)
