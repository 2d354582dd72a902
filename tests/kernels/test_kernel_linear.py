"""The linear kernels, emulated, against ``kernels.reference_linear``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from deepinfer.kernels import linear, reference_linear
from deepinfer.kernels.linear import F16Weight, Plan, W4Weight, Weight, Workspace
from kernels.simt.build import COMPILER, emulator

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

EPS = 1e-6
# On the CPU an SM count of one: the CTA of a plan, or two of 8 warps, take all tiles.
ANEW = Plan(1, 8, 3, 0)  # x is read for every tile
WIDE = Plan(2, 8, 2, 0)
HELD = Plan(1, 8, 2, 2)
HELD_WIDE = Plan(2, 8, 2, 1)


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


def check_all(weight: Weight, m: int, plan: Plan) -> None:
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


@pytest.mark.parametrize(
    ("n", "k", "m", "plan"),
    [
        (48, 1120, 1, ANEW),  # K ends inside a step
        (72, 96, 11, WIDE),  # N and K end inside a tile, X inside a block of 16
        (16, 32, 16, ANEW),
        (104, 640, 7, HELD),
        (56, 480, 13, HELD_WIDE),
    ],
)
def test_f16_linears_equal_the_reference(n: int, k: int, m: int, plan: Plan) -> None:
    check_all(f16_weight(n, k), m, plan)


@pytest.mark.parametrize(
    ("n", "k", "group", "zeros", "m", "plan"),
    [
        (56, 1920, 128, True, 3, ANEW),  # an odd number of groups
        (16, 512, 256, False, 1, ANEW),
        (104, 576, 64, False, 9, WIDE),
        (40, 96, 32, True, 17, ANEW),
        (72, 1152, 128, True, 5, HELD),
        (40, 896, 128, False, 12, HELD_WIDE),
        (24, 1024, 32, True, 6, HELD),
    ],
)
def test_w4_linears_equal_the_reference(
    n: int, k: int, group: int, zeros: bool, m: int, plan: Plan
) -> None:
    check_all(w4_weight(n, k, group, zeros=zeros), m, plan)


def test_results_saturate_and_bias_is_optional() -> None:
    x = torch.full((2, 32), 8.0).half()
    weight = F16Weight(torch.full((16, 32), 300.0).half())
    out = torch.empty(2, 16, dtype=torch.float16)
    linear.linear_norm(out, x, weight, plan=ANEW)
    assert out.eq(65504).all()
    residual, gamma = torch.zeros(2, 16), torch.full((16,), -2.0).half()
    linear.linear_residual(out, residual, torch.empty(2, 1), x, weight, gamma, plan=ANEW)
    assert residual.eq(76800).all()
    assert out.eq(-65504).all()


def test_a_row_gets_the_same_bits_in_every_batch_up_to_16() -> None:
    weight = w4_weight(32, 1152, 128, zeros=True)
    x = normal(16, 1152, seed=9).half()
    whole = torch.empty(16, 32)
    linear.linear_logits(whole, x, weight, plan=WIDE)
    for first, m, plan in ((0, 1, ANEW), (5, 8, HELD)):
        part = torch.empty(m, 32)
        linear.linear_logits(part, x[first : first + m].contiguous(), weight, plan=plan)
        assert torch.equal(part, whole[first : first + m])


def test_expand_rounds_each_weight_once() -> None:
    weight = w4_weight(24, 96, 32, zeros=True, bias=False)
    out = torch.full((17, 96), torch.nan, dtype=torch.float16)
    linear.expand_w4(out, weight, 3)
    assert torch.equal(out, reference_linear.dense(weight)[3:20].half())
