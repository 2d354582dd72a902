"""The linear kernels, emulated, against ``kernels.reference_linear``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from deepinfer.kernels import linear, reference_linear
from deepinfer.kernels.linear import F16Weight, Plan, TiledPlan, W4Weight, Weight, Workspace
from kernels.simt.build import COMPILER, emulator

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

EPS = 1e-6
F16_PLANS = (Plan(1, 1, 4, 2, 0), Plan(2, 2, 2, 2, 1), TiledPlan(2, 1, 2, 2, 3))
W4_PLANS = F16_PLANS


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with emulator():
        yield


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def f16_weight(n: int, k: int, *, bias: bool = True) -> F16Weight:
    return F16Weight(
        (normal(n, k, seed=1) * 0.05).half(), normal(n, seed=2).half() if bias else None
    )


def w4_weight(n: int, k: int, group: int, *, zeros: bool, bias: bool = True) -> W4Weight:
    generator = torch.Generator().manual_seed(3)
    shape = (n, k // group)
    return linear.pack_w4(
        torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8),
        (torch.rand(shape, generator=generator) * 0.02 + 0.001).half(),
        torch.randint(0, 17, shape, generator=generator) if zeros else None,
        bias=normal(n, seed=4) if bias else None,
    )


def close(result: Tensor, wanted: Tensor) -> None:
    """Every row's direction, and no value further off than two half-ulps of the largest."""
    assert result.shape == wanted.shape
    cosine = torch.nn.functional.cosine_similarity(result.double(), wanted, dim=1)
    assert float(cosine.min()) >= 0.999999
    largest = float(wanted.abs().max())
    ulp = 2.0 ** (torch.tensor(largest).log2().floor().item() - 10)
    assert float((result.double() - wanted).abs().max()) <= 2 * 0.5 * ulp


def check_all(weight: Weight, m: int, plan: Plan | TiledPlan) -> None:
    """Every epilogue on one weight; outputs start as NaN and must all be written."""
    n, k = weight.rows, weight.columns
    workspace = Workspace.allocate("cpu")
    x = normal(m, k, seed=5).half()
    sumsq = normal(m, 7, seed=6).square() * k / 7
    out = torch.full((m, n), torch.nan, dtype=torch.float16)
    linear.linear_norm(out, x, weight, sumsq=sumsq, eps=EPS, workspace=workspace, plan=plan)
    close(out, reference_linear.product(x, weight, sumsq, EPS))

    logits = torch.full((m, n), torch.nan)
    linear.linear_logits(logits, x, weight, workspace=workspace, plan=plan)
    close(logits, reference_linear.product(x, weight))

    if n % 16 == 0:
        out = torch.full((m, n // 2), torch.nan, dtype=torch.float16)
        linear.linear_swiglu(out, x, weight, sumsq=sumsq, eps=EPS, workspace=workspace, plan=plan)
        close(out, reference_linear.swiglu(x, weight, sumsq, EPS))

    residual, gamma = normal(m, n, seed=7) * 3, normal(n, seed=8).half()
    after, scaled = reference_linear.residual(residual, x, weight, gamma)
    out = torch.full((m, n), torch.nan, dtype=torch.float16)
    sumsq_out = torch.full((m, linear.partials(n)), torch.nan)
    linear.linear_residual(
        out, residual, sumsq_out, x, weight, gamma, workspace=workspace, plan=plan
    )
    close(residual, after)
    close(out, scaled)
    assert torch.allclose(sumsq_out.double(), reference_linear.sums_of_squares(residual), rtol=1e-5)
    assert not workspace.tickets.any()


@pytest.mark.parametrize("plan", F16_PLANS)
@pytest.mark.parametrize(("n", "k", "m"), [(48, 576, 1), (40, 96, 11), (16, 32, 16)])
def test_f16_linears_equal_the_reference(plan: Plan | TiledPlan, n: int, k: int, m: int) -> None:
    check_all(f16_weight(n, k), m, plan)


@pytest.mark.parametrize("plan", W4_PLANS)
@pytest.mark.parametrize(
    ("n", "k", "group", "zeros", "m"),
    [
        (48, 1152, 128, True, 3),
        (40, 576, 64, False, 9),
        (32, 96, 32, True, 17),
        (16, 512, 256, 0, 1),
    ],
)
def test_w4_linears_equal_the_reference(
    plan: Plan | TiledPlan, n: int, k: int, group: int, zeros: bool, m: int
) -> None:
    check_all(w4_weight(n, k, group, zeros=bool(zeros)), m, plan)
