"""Inputs for what reads nested weights, and what is held to the bits of plain FP16."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from deepinfer.deploy.validate import accuracy
from deepinfer.deploy.validate.accuracy import Accuracy, Miss
from deepinfer.deploy.validate.linear_cases import inputs, normal
from deepinfer.kernels import (
    linear,
    linear_w8a8,
    nested,
    pointwise,
    reference_linear,
    reference_pointwise,
)
from deepinfer.kernels.linear import AnyPlan, F16Weight, NestedWeight, Workspace
from deepinfer.kernels.reference_linear import HALF_MAX

_OUTLIERS: Final = 3
_LAST_BIT: Final = 2.0**-14 * (1 + 2.0**-10)
"""A half that loses its last bit in a row that is shifted."""


def nested_weight(rows: int, columns: int, *, bias: bool, device: str) -> NestedWeight:
    """Rows of every kind that there is, whose products all stay near 1 for inputs near 1.

    By turns: small weights; some beyond what the planes hold, which a shift brings in; some that
    none does; subnormal halves. The fourth row, if there are more, is outliers but for one weight.
    """
    values = normal(rows, columns, device=device, seed=1) * columns**-0.5
    shifted, listed, tiny = (slice(first, rows, 5) for first in (1, 2, 4))
    # Five bits of mantissa leave room for a shift.
    mantissa, exponent = torch.frexp(values[shifted])
    values[shifted] = torch.ldexp((mantissa * 32).round() / 32, exponent.clamp_min(-8))
    values[shifted, columns // 3] = 3.5
    values[listed, :: max(1, columns // _OUTLIERS)] += 2.0
    values[tiny] *= 2.0**-10
    values[tiny, columns // 2] = 1.75
    if rows > 4:
        values[3] = 1.8 + values[3].abs() * 0.1
        values[3, -1] = _LAST_BIT
    values[listed, -1] = _LAST_BIT
    offset = normal(rows, device=device, seed=2).half() if bias else None
    weight = nested.encode(values.half(), bias=offset)
    assert weight.row_shift is not None
    assert weight.outliers
    return weight


def shifted_pair(rows: int, columns: int, *, device: str) -> tuple[F16Weight, NestedWeight]:
    """The same values twice, without outliers: rows from 2^-6 to 2^14, shifted both ways."""
    # Multiples of 2^-17, which are halves times 2^-6 too.
    values = (normal(rows, columns, device=device, seed=7) * columns**-0.5).half()
    values = ((values.float() * 2**17).round() / 2**17).half()
    exponents = torch.arange(rows, device=device) % 21 - 6
    bias = normal(rows, device=device, seed=8)
    stored = nested.encode(values, bias=bias * 2.0 ** -exponents.float())
    plain = values.float() * torch.exp2(exponents.float())[:, None]
    return F16Weight(plain.half(), bias), nested.scale_rows(stored, exponents)


def check_same_bits(
    plain: F16Weight, weight: NestedWeight, rows: int, *, plan: AnyPlan | None = None
) -> Iterator[Accuracy]:
    """FP16 mode without outliers gives the bits of the plain weight, with every epilogue."""
    device, n = str(plain.device), plain.rows
    workspace = Workspace.allocate(device)
    x = inputs(rows, plain.columns, "outliers", device)
    sumsq = normal(rows, 7, device=device, seed=6).square() * plain.columns
    gamma = normal(n, device=device, seed=9).half()

    def results(source: F16Weight | NestedWeight) -> dict[str, Tensor]:
        half = torch.full((rows, n), math.nan, dtype=torch.float16, device=device)
        logits = torch.full((rows, n), math.nan, device=device)
        residual = normal(rows, n, device=device, seed=10)
        sums = torch.full((rows, linear.partials(n)), math.nan, device=device)
        hidden = half.clone()
        linear.linear_norm(half, x, source, sumsq=sumsq, eps=1e-6, workspace=workspace, plan=plan)
        linear.linear_logits(logits, x, source, workspace=workspace, plan=plan)
        linear.linear_residual(
            hidden, residual, sums, x, source, gamma, workspace=workspace, plan=plan
        )
        found = {"norm": half, "logits": logits, "residual": residual, "hidden": hidden}
        if n % 16 == 0:
            gated = torch.full((rows, n // 2), math.nan, dtype=torch.float16, device=device)
            linear.linear_swiglu(
                gated, x, source, sumsq=sumsq, eps=1e-6, workspace=workspace, plan=plan
            )
            found["swiglu"] = gated
        return found | {"sums of squares": sums}

    wanted, found = results(plain), results(weight)
    yield accuracy.product("logits", found["logits"], reference_linear.product(x, plain))
    for name, tensor in wanted.items():
        if not torch.equal(tensor, found[name]):
            off = int((tensor != found[name]).sum())
            raise Miss(f"{name}: {off} of {tensor.numel()} differ from those of plain FP16")


def check_expand(weight: NestedWeight) -> None:
    """Slices of rows are the values that were encoded, or those that FP8 mode has."""
    first, count = 3, weight.rows - 5
    for fp8 in (False, True):
        shape = (count, weight.columns)
        out = torch.full(shape, math.nan, dtype=torch.float16, device=weight.device)
        linear.expand_nested(out, weight, first, fp8=fp8)
        expected = reference_linear.dense(weight, fp8)[first : first + count]
        if not torch.equal(out.double(), expected):
            raise Miss(f"expand_nested: not the weight's values, fp8 = {fp8}")


def check_embed(columns: int, *, device: str) -> None:
    """Rows of a nested embedding, with and without its lower plane."""
    whole = nested_weight(19, columns, bias=False, device=device)
    shed = NestedWeight(
        whole.upper,
        None,
        whole.row_shift,
        whole.outlier_starts,
        whole.outlier_columns,
        whole.outlier_values,
    )
    ids = torch.tensor([3, 0, 18, 1, 2, 4], dtype=torch.int32, device=device)
    gamma = (1 + normal(columns, device=device, seed=1)).half()
    for embedding in (whole, shed):
        residual = torch.full((len(ids), columns), math.nan, device=device)
        hidden = torch.full_like(residual, math.nan, dtype=torch.float16)
        sums = torch.full((len(ids), -(-columns // 16)), math.nan, device=device)
        pointwise.embed(residual, hidden, sums, ids, embedding, gamma)
        table = reference_linear.dense(embedding, embedding.lower is None)
        expected, scaled, squares = reference_pointwise.embed(ids, table, gamma)
        if not torch.equal(residual.double(), expected):
            raise Miss("embed: not the rows of a nested embedding")
        torch.testing.assert_close(hidden.double(), scaled, rtol=2.0**-10, atol=2.0**-24)
        torch.testing.assert_close(sums.double(), squares, rtol=2.0**-20, atol=0)


def check_quantize(rows: int, columns: int, *, device: str) -> None:
    """Every value is its code times its row's scale, to half a unit of the code's last place."""
    x = inputs(rows, columns, "outliers", device)
    x[0] = 0
    x[1] *= 2.0**-20
    x[2, 3] = -HALF_MAX
    scratch = linear_w8a8.Scratch.allocate(rows, columns, device)
    scratch.codes.fill_(0x7F)  # NaN
    scratch.scales.fill_(math.nan)
    found = linear_w8a8.quantize_rows(x, scratch)
    codes = found.codes.view(torch.float8_e4m3fn).double()
    largest = x.double().abs().amax(1, keepdim=True)
    scales = torch.where(largest > 0, largest / 448, 1.0)
    torch.testing.assert_close(found.scales.double(), scales, rtol=2.0**-22, atol=0)
    # Half a unit: of a normal code 2^-4 of it, of a subnormal one 2^-10.
    room = (x.double() / scales).abs().clamp_min(2.0**-6) * (2.0**-4 + 2.0**-20)
    if bool(((codes - x.double() / scales).abs() > room).any()):
        raise Miss("quantize_rows: a code is not the nearest one")


def check_outliers(rows: int, columns: int, m: int, *, device: str) -> None:
    """What the list of outliers contributes is added, rounded once."""
    weight = nested_weight(rows, columns, bias=False, device=device)
    alone = nested.NestedWeight(
        torch.zeros_like(weight.upper),
        None,
        None,
        weight.outlier_starts,
        weight.outlier_columns,
        weight.outlier_values,
    )
    x, before = inputs(m, columns, "normal", device), normal(m, rows, device=device, seed=11).half()
    out = before.clone()
    linear_w8a8.add_outliers(out, x, weight)
    wanted = before.double() + x.double() @ reference_linear.dense(alone, fp8=True).T
    torch.testing.assert_close(out.double(), wanted, rtol=2.0**-10, atol=2.0**-20)


def check_w8a8(rows: int, columns: int, m: int, *, device: str) -> None:
    """The product of the quantised rows, against float64 on the same codes and scales."""
    weight = nested_weight(rows, columns, bias=True, device=device)
    scratch = linear_w8a8.Scratch.allocate(m, columns, device)
    x = inputs(m, columns, "outliers", device)
    out = torch.full((m, rows), math.nan, dtype=torch.float16, device=device)
    linear_w8a8.linear_w8a8(out, x, linear_w8a8.W8A8Weight.of(weight), scratch)
    quantised = scratch.of(m, columns)
    codes = quantised.codes.view(torch.float8_e4m3fn).double() * quantised.scales.double()
    planes = nested.NestedWeight(weight.upper, None, weight.row_shift)
    listed = reference_linear.dense(weight, fp8=True) - reference_linear.dense(planes, fp8=True)
    wanted = codes @ reference_linear.dense(planes, fp8=True).T + x.double() @ listed.T
    assert weight.bias is not None
    wanted += weight.bias.double()
    problem = accuracy.product("w8a8", out, wanted.clamp(-HALF_MAX, HALF_MAX)).problem
    if problem is not None:
        raise Miss(problem)
