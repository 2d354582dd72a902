"""Linear layers in FP8 throughout: a nested weight's upper plane times activations in E4M3.

For cards whose tensor cores multiply FP8 (SM89 and newer; measured on SM90). Activations are
quantised row by row, each with a scale of its own, so that the largest value of a row becomes the
largest code: nothing saturates, and no scale can overflow. The product is cuBLAS's, which applies
both scales to its FP32 sums: that of the row of x, and ``2**row_shift / 256`` of the row of the
weight (``upper`` is E4M3 of 256 times the weight). Outliers of the weight are added afterwards,
with the activations as they were.

This rounds activations, which the FP8 mode of ``kernels.linear`` does not: it is a mode of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.compiler import KernelSpec, launch
from deepinfer.kernels.linear_checks import check_tensor
from deepinfer.kernels.nested import NestedWeight

CAPABILITY_MIN: Final = (9, 0)
"""The oldest cards for which ``torch._scaled_mm`` takes a scale for each row and gives halves."""

_QUANTIZE: Final = KernelSpec("w8a8.cu", "quantize_rows", 256)
_OUTLIERS: Final = KernelSpec("w8a8.cu", "add_outliers", 256)
_OUTLIER_ROWS: Final = 16
"""Rows of x that a thread of ``add_outliers`` takes."""
_MULTIPLE: Final = 16
"""Of a weight's rows and columns, for FP8 matrix products."""


def specs() -> Iterator[KernelSpec]:
    """Every kernel that this module may launch."""
    yield from (_QUANTIZE, _OUTLIERS)


@dataclass(frozen=True, slots=True, eq=False)
class Scratch:
    """Activations in FP8: ``codes`` uint8 ``[rows, columns]``, ``scales`` float32 ``[rows, 1]``."""

    codes: Tensor
    scales: Tensor

    @classmethod
    def allocate(cls, rows: int, columns: int, device: torch.device | str) -> Scratch:
        """For up to ``rows`` rows of ``x``, and weights of up to ``columns`` columns."""
        return cls(
            torch.empty(rows * columns, dtype=torch.uint8, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )

    def of(self, rows: int, columns: int) -> Scratch:
        """The part that ``x`` of this shape takes; raises ValueError if there is no room."""
        if rows * columns > self.codes.numel() or rows > self.scales.numel():
            raise ValueError(
                f"scratch has {self.codes.numel()} codes and {self.scales.numel()} scales; x is "
                f"[{rows}, {columns}]"
            )
        codes = self.codes.flatten()[: rows * columns]
        return Scratch(codes.view(rows, columns), self.scales.flatten()[:rows].view(rows, 1))


@dataclass(frozen=True, slots=True, eq=False)
class W8A8Weight:
    """A nested weight, with what the product multiplies its rows by: ``scales`` float32 ``[1, N]``,
    ``2**row_shift / 256``; ``bias`` half ``[N]``. N and K are multiples of 16."""

    nested: NestedWeight
    scales: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weight: NestedWeight) -> W8A8Weight:
        """Raises ValueError for sizes that FP8 products do not take."""
        for name, size in (("rows", weight.rows), ("columns", weight.columns)):
            if size % _MULTIPLE:
                raise ValueError(f"weight has {size} {name}, which is no multiple of {_MULTIPLE}")
        exponents = torch.full((1, weight.rows), -8.0, device=weight.device)
        if weight.row_shift is not None:
            exponents += weight.row_shift.float()
        bias = None if weight.bias is None else weight.bias.half()
        return cls(weight, torch.exp2(exponents), bias)


def quantize_rows(x: Tensor, scratch: Scratch) -> Scratch:
    """``x`` half ``[M, K]`` in E4M3, ``codes`` uint8 ``[M, K]``, with ``scales`` ``[M, 1]``.

    A row is ``codes * scales``, to half a unit in the last place of a code; K is a multiple of 8.
    """
    check_tensor("x", x, torch.float16, (None, None), scratch.codes.device)
    rows, columns = x.shape
    if columns % 8:
        raise ValueError(f"x has {columns} columns, which is no multiple of 8")
    found = scratch.of(rows, columns)
    if rows:
        launch(_QUANTIZE, (rows, 1, 1), [found.codes, found.scales, x, np.int32(columns)])
    return found


def linear_w8a8(out: Tensor, x: Tensor, weight: W8A8Weight, scratch: Scratch) -> None:
    """``out`` half ``[M, N]`` = ``x`` half ``[M, K]``, quantised, times ``weight``, plus bias.

    Needs a card of ``CAPABILITY_MIN``. Raises ValueError naming the argument that does not fit.
    """
    stored = weight.nested
    check_tensor("x", x, torch.float16, (None, stored.columns), stored.device)
    check_tensor("out", out, torch.float16, (x.shape[0], stored.rows), stored.device)
    quantised = quantize_rows(x, scratch)
    multiply(out, quantised, weight)
    add_outliers(out, x, stored)


def multiply(out: Tensor, quantised: Scratch, weight: W8A8Weight) -> None:
    """The product alone, without outliers; arguments as those of ``linear_w8a8``."""
    torch._scaled_mm(
        quantised.codes.view(torch.float8_e4m3fn),
        weight.nested.upper.view(torch.float8_e4m3fn).t(),
        scale_a=quantised.scales,
        scale_b=weight.scales,
        bias=weight.bias,
        out_dtype=torch.float16,
        use_fast_accum=False,  # its sums keep 14 bits
        out=out,
    )


def add_outliers(out: Tensor, x: Tensor, weight: NestedWeight) -> None:
    """``out`` half ``[M, N]`` += the outliers of ``weight`` times ``x`` half ``[M, K]``."""
    if not weight.outliers:
        return
    rows = x.shape[0]
    launch(
        _OUTLIERS,
        (-(-weight.rows // _OUTLIERS.threads), -(-rows // _OUTLIER_ROWS), 1),
        [
            out,
            x,
            weight.outlier_starts,
            weight.outlier_columns,
            weight.outlier_values,
            np.int32(rows),
            np.int32(weight.rows),
            np.int32(weight.columns),
        ],
    )
