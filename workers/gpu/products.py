"""Linear layers of many rows: cuBLAS, into buffers that are there already."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels.linear import (
    F16Weight,
    NestedWeight,
    W4Weight,
    Weight,
    Workspace,
    expand_nested,
    expand_w4,
    linear_norm,
    max_rows,
)
from deepinfer.kernels.linear_w8a8 import Scratch, W8A8Weight, linear_w8a8

SCRATCH_BYTES: Final = 64 * 2**20
"""Rows of a 4-bit or nested weight are expanded to float16 into so much memory at a time."""


class Products:
    """``x @ weight.T + bias`` for any number of rows, float16.

    Few rows go through our own kernels, which read a weight once; for many, 4-bit and nested
    weights are expanded slice by slice. ``weights`` are all that will be asked for, ``workspace``
    is that of the stream on which steps run. With room for ``activations`` in FP8, nested weights
    can be multiplied by such as well.

    Raises ValueError, with ``activations``, for a nested weight of a size that FP8 products do not
    take.
    """

    def __init__(
        self, weights: list[Weight], workspace: Workspace, activations: Scratch | None = None
    ) -> None:
        self._workspace = workspace
        # cuBLAS wants its bias in half, our kernels in float32.
        self._biases = {id(w): w.bias.half() for w in weights if w.bias is not None}
        columns = max((w.columns for w in weights if not isinstance(w, F16Weight)), default=0)
        rows = SCRATCH_BYTES // (2 * columns) // 8 * 8 if columns else 0
        self._scratch = torch.empty(
            rows * columns, dtype=torch.float16, device=workspace.sums.device
        )
        self._activations = activations
        self._w8a8: dict[int, W8A8Weight] = {}
        if activations is not None:
            nested = (each for each in weights if isinstance(each, NestedWeight))
            self._w8a8 = {id(each): W8A8Weight.of(each) for each in nested}

    def __call__(self, out: Tensor, x: Tensor, weight: Weight, *, fp8: bool = False) -> None:
        """``out`` half ``[rows, N]``, ``x`` half ``[rows, K]``; ``fp8`` is for a nested weight."""
        if x.shape[0] <= max_rows(weight):
            linear_norm(out, x, weight, fp8=fp8, workspace=self._workspace)
        elif isinstance(weight, F16Weight):
            self._multiply(out, x, weight.weight, self._biases.get(id(weight)))
        else:
            self._expand(out, x, weight, fp8)

    def multiply_w8a8(self, out: Tensor, x: Tensor, weight: NestedWeight) -> None:
        """The same with ``x`` rounded to FP8 row by row."""
        assert self._activations is not None, "no room for activations in FP8"
        linear_w8a8(out, x, self._w8a8[id(weight)], self._activations)

    def _expand(self, out: Tensor, x: Tensor, weight: W4Weight | NestedWeight, fp8: bool) -> None:
        bias = self._biases.get(id(weight))
        rows = self._scratch.numel() // weight.columns // 8 * 8
        for first in range(0, weight.rows, rows):
            last = min(first + rows, weight.rows)
            count = last - first
            part = self._scratch[: count * weight.columns].view(count, weight.columns)
            if isinstance(weight, NestedWeight):
                expand_nested(part, weight, first, fp8=fp8)
            else:
                expand_w4(part, weight, first)
            self._multiply(out[:, first:last], x, part, None if bias is None else bias[first:last])

    def _multiply(self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        if bias is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(bias, x, weight.t(), out=out)


def multiply_into_float32(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """``out`` float32 ``[rows, N]`` = half ``x`` times half ``weight [N, K]`` transposed; CUDA."""
    torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
