"""What the linear kernels must compute, in float64; see ``kernels.linear`` for the arguments.

Inputs are taken as they are (half values, FP32 sums of squares, quantised weights), so what is left
between a kernel and this is the rounding of its sums and of its result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.kernels.linear_weights import F16Weight, Weight, unpack_w4
from deepinfer.kernels.nested import NestedWeight

HALF_MAX = 65504.0


def dense(weight: Weight, fp8: bool = False) -> Tensor:
    """The weight's values, float64 ``[N, K]``; with ``fp8`` those of a nested one's FP8 mode."""
    if isinstance(weight, F16Weight):
        return weight.weight.double()
    if isinstance(weight, NestedWeight):
        return _nested(weight, fp8)
    zeros = torch.full_like(weight.scales, 8) if weight.zeros is None else weight.zeros
    wide = [t.double().repeat_interleave(weight.group, dim=1) for t in (weight.scales, zeros)]
    return wide[0] * (unpack_w4(weight).double() - wide[1])


def _nested(weight: NestedWeight, fp8: bool) -> Tensor:
    """The planes' halves, their shift undone (as halves in FP16 mode), and the outliers."""
    upper = weight.upper.int()
    if fp8:
        bits = (upper & 0x80) << 8 | (upper & 0x7F) << 7
    else:
        assert weight.lower is not None
        lower = weight.lower.int()
        bits = (upper & 0x80 | (upper - (lower >> 7)) >> 1 & 0x3F) << 8 | lower
    values = bits.to(torch.int16).view(torch.float16).double()
    if weight.row_shift is not None:
        values *= torch.exp2(weight.row_shift.double())[:, None]
        if not fp8:
            values = values.half().double()
    if weight.outlier_columns is not None and weight.outlier_values is not None:
        places = weight.outlier_rows(), weight.outlier_columns.long()
        values[places] += weight.outlier_values.double()
    return values


def product(
    x: Tensor, weight: Weight, sumsq: Tensor | None = None, eps: float = 0.0, fp8: bool = False
) -> Tensor:
    """``(x @ weight.T) * rstd + bias``: what ``linear_norm`` rounds to half and saturates."""
    result = x.double() @ dense(weight, fp8).T
    if sumsq is not None:
        mean = sumsq.double().sum(1, keepdim=True) / weight.columns
        result *= torch.rsqrt(mean + eps)
    return result if weight.bias is None else result + weight.bias.double()


def swiglu(
    x: Tensor, weight: Weight, sumsq: Tensor | None = None, eps: float = 0.0, fp8: bool = False
) -> Tensor:
    """``silu(gate) * up`` of rows interleaved in eights: float64 ``[M, N / 2]``."""
    both = product(x, weight, sumsq, eps, fp8).reshape(x.shape[0], -1, 2, 8)
    gate, up = both[:, :, 0].flatten(1), both[:, :, 1].flatten(1)
    return gate * torch.sigmoid(gate) * up


def residual(
    before: Tensor, x: Tensor, weight: Weight, gamma: Tensor, fp8: bool = False
) -> tuple[Tensor, Tensor]:
    """The new residual, and ``residual * gamma`` within half's range; float64 ``[M, N]``."""
    after = before.double() + product(x, weight, fp8=fp8)
    return after, (after * gamma.double()).clamp(-HALF_MAX, HALF_MAX)


def sums_of_squares(residual: Tensor) -> Tensor:
    """Sums over 16 columns each, the last maybe over fewer: float64 ``[M, ceil(N / 16)]``."""
    padded = torch.nn.functional.pad(residual.double(), (0, -residual.shape[1] % 16))
    return padded.square().reshape(residual.shape[0], -1, 16).sum(2)
