"""Inputs for the linear kernels, and what their outputs are held to.

Outputs are NaN before a kernel runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, TypedDict

import torch
from torch import Tensor

from deepinfer.deploy.validate import accuracy
from deepinfer.deploy.validate.accuracy import Accuracy, Miss
from deepinfer.kernels import linear, reference_linear
from deepinfer.kernels.linear import AnyPlan, F16Weight, W4Weight, Weight, Workspace

Kind = Literal["normal", "outliers", "tiny", "saturating"]
"""Of ``x``: ``outliers``: some columns a thousand times larger; ``tiny``: halves without a
leading one; ``saturating``: products beyond half's range."""

_EPS = 1e-6


class _How(TypedDict):
    fp8: bool
    workspace: Workspace
    plan: AnyPlan | None


def normal(*shape: int, device: str, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)


def f16_weight(rows: int, columns: int, *, bias: bool, device: str) -> F16Weight:
    """Random halves, of which products stay near 1 for inputs near 1."""
    weight = (normal(rows, columns, device=device, seed=1) * columns**-0.5).half()
    return F16Weight(weight, normal(rows, device=device, seed=2).half() if bias else None)


def w4_weight(
    rows: int, columns: int, group: int, *, zeros: bool, bias: bool, device: str
) -> W4Weight:
    """Random codes, scales over two binary orders, zero points of 0 to 16 if any."""
    random = torch.Generator(device).manual_seed(3)
    shape = (rows, columns // group)
    codes = torch.randint(
        0, 16, (rows, columns), generator=random, dtype=torch.uint8, device=device
    )
    steps = torch.rand(shape, generator=random, device=device)
    scales = (0.1 * columns**-0.5 * 2 ** (2 * steps)).half()
    points = torch.randint(0, 17, shape, generator=random, device=device) if zeros else None
    return linear.pack_w4(
        codes, scales, points, bias=normal(rows, device=device, seed=4) if bias else None
    )


def inputs(rows: int, columns: int, kind: Kind, device: str) -> Tensor:
    """``x`` half ``[rows, columns]``."""
    x = normal(rows, columns, device=device, seed=5)
    if kind == "outliers":
        x[:, ::37] *= 1000
    elif kind == "tiny":
        x *= 2.0**-18
    elif kind == "saturating":
        x *= 30000
    return x.clamp(-65504, 65504).half()


def check_epilogues(
    weight: Weight,
    rows: int,
    *,
    kind: Kind = "normal",
    fp8: bool = False,
    plan: AnyPlan | None = None,
) -> Iterator[Accuracy]:
    """All four ways to finish a product; two launches give the same bits."""
    device = str(weight.device)
    n, k = weight.rows, weight.columns
    how: _How = {"fp8": fp8, "workspace": Workspace.allocate(device), "plan": plan}
    x = inputs(rows, k, kind, device)
    # What a norm would have found in x, spread over a number of partials that is no round one.
    mean = float(x.double().square().mean())
    sumsq = normal(rows, 7, device=device, seed=6).square() * mean * k / 7
    if kind == "saturating":
        sumsq *= 2.0**-40

    def norm() -> Tensor:
        out = torch.full((rows, n), math.nan, dtype=torch.float16, device=device)
        linear.linear_norm(out, x, weight, sumsq=sumsq, eps=_EPS, **how)
        return out

    yield _of_half("norm", norm(), reference_linear.product(x, weight, sumsq, _EPS, fp8))
    if not torch.equal(norm(), norm()):
        raise Miss("linear_norm: two launches differ")

    logits = torch.full((rows, n), math.nan, device=device)
    linear.linear_logits(logits, x, weight, **how)
    yield accuracy.product("logits", logits, reference_linear.product(x, weight, fp8=fp8))

    if n % 16 == 0:
        out = torch.full((rows, n // 2), math.nan, dtype=torch.float16, device=device)
        linear.linear_swiglu(out, x, weight, sumsq=sumsq, eps=_EPS, **how)
        yield _of_half("swiglu", out, reference_linear.swiglu(x, weight, sumsq, _EPS, fp8))

    residual = normal(rows, n, device=device, seed=7) * 3
    gamma = normal(n, device=device, seed=8).half()
    after, scaled = reference_linear.residual(residual, x, weight, gamma, fp8)
    out = torch.full((rows, n), math.nan, dtype=torch.float16, device=device)
    sums = torch.full((rows, linear.partials(n)), math.nan, device=device)
    linear.linear_residual(out, residual, sums, x, weight, gamma, **how)
    yield accuracy.product("residual", residual, after)
    yield _of_half("scaled residual", out, scaled)
    expected = reference_linear.sums_of_squares(residual)
    if not torch.allclose(sums.double(), expected, rtol=1e-5, atol=0):
        raise Miss("linear_residual: sums of squares are not those of the residual")
    if bool(how["workspace"].tickets.any()):
        raise Miss("a ticket was not given back")


def check_batches(weight: Weight, *, fp8: bool = False) -> Iterator[Accuracy]:
    """A row has the same bits alone and in a batch of up to 16."""
    device = str(weight.device)
    x = inputs(16, weight.columns, "normal", device)
    workspace = Workspace.allocate(device)
    whole = torch.full((16, weight.rows), math.nan, device=device)
    linear.linear_logits(whole, x, weight, fp8=fp8, workspace=workspace)
    yield accuracy.product("16 rows", whole, reference_linear.product(x, weight, fp8=fp8))
    for first, count in ((0, 1), (3, 7), (5, 8)):
        part = torch.full((count, weight.rows), math.nan, device=device)
        rows = x[first : first + count].contiguous()
        linear.linear_logits(part, rows, weight, fp8=fp8, workspace=workspace)
        if not torch.equal(part, whole[first : first + count]):
            raise Miss(f"{count} rows have other bits than in a batch of 16")


def check_expand(weight: W4Weight) -> Iterator[Accuracy]:
    """Each weight is rounded once."""
    first, count = 5, weight.rows - 8
    shape = (count, weight.columns)
    out = torch.full(shape, math.nan, dtype=torch.float16, device=weight.device)
    linear.expand_w4(out, weight, first)
    expected = reference_linear.dense(weight)[first : first + count]
    if not torch.equal(out, expected.half()):
        raise Miss("expand_w4: not the weights rounded once")
    yield accuracy.product("expanded", out, expected)


def _of_half(what: str, out: Tensor, exact: Tensor) -> Accuracy:
    limit = reference_linear.HALF_MAX
    return accuracy.product(what, out, exact.clamp(-limit, limit))
