"""Weights back to FP16, a slice of rows at a time, for a product of many rows by cuBLAS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.compiler import KernelSpec, launch
from deepinfer.kernels.linear_checks import check_tensor
from deepinfer.kernels.linear_weights import W4Weight, check_mode
from deepinfer.kernels.nested import NestedWeight

_EXPAND_W4: Final = KernelSpec("expand_w4.cu", "expand_w4", 256)
_EXPAND_NESTED: Final = {
    fp8: KernelSpec("expand_nested.cu", f"expand_nested<{int(fp8)}>", 256) for fp8 in (False, True)
}
_OUTLIERS: Final = KernelSpec("expand_nested.cu", "place_outliers", 256)


def expand_specs() -> Iterator[KernelSpec]:
    """Every kernel that this module may launch."""
    yield from (_EXPAND_W4, *_EXPAND_NESTED.values(), _OUTLIERS)


def expand_w4(out: Tensor, weight: W4Weight, row0: int) -> None:
    """``out`` half ``[n, K]`` = the rows of ``weight`` from ``row0``, each value rounded once."""
    rows = _rows(out, weight, row0)
    if rows == 0:
        return
    threads = rows * (-(-weight.columns // 128) * 4)
    launch(
        _EXPAND_W4,
        (-(-threads // _EXPAND_W4.threads), 1, 1),
        [
            out,
            weight.codes,
            weight.scales,
            weight.zeros,
            np.int32(weight.group.bit_length() - 1),
            np.int32(row0),
            np.int32(rows),
            np.int32(weight.columns),
        ],
    )


def expand_nested(out: Tensor, weight: NestedWeight, row0: int, *, fp8: bool = False) -> None:
    """``out`` half ``[n, K]`` = the values of ``weight``'s rows from ``row0``.

    Shift undone, outliers in place: as ``weight.decode()``, or with ``fp8`` as
    ``weight.decode_fp8()``. Raises ValueError without ``fp8`` if ``weight.lower`` is None.
    """
    check_mode(weight, fp8)
    rows = _rows(out, weight, row0)
    if rows == 0:
        return
    spec = _EXPAND_NESTED[fp8]
    threads = rows * (weight.columns // 8)
    launch(
        spec,
        (-(-threads // spec.threads), 1, 1),
        [
            out,
            weight.upper,
            None if fp8 else weight.lower,
            weight.row_shift,
            np.int32(row0),
            np.int32(rows),
            np.int32(weight.columns),
        ],
    )
    if weight.outlier_starts is not None:
        launch(
            _OUTLIERS,
            (-(-rows * 32 // _OUTLIERS.threads), 1, 1),
            [
                out,
                weight.outlier_starts,
                weight.outlier_columns,
                weight.outlier_values,
                np.int32(row0),
                np.int32(rows),
                np.int32(weight.columns),
            ],
        )


def _rows(out: Tensor, weight: W4Weight | NestedWeight, row0: int) -> int:
    check_tensor("out", out, torch.float16, (None, weight.columns), weight.device)
    rows = out.shape[0]
    if row0 < 0 or row0 + rows > weight.rows:
        raise ValueError(
            f"row0 = {row0} and the {rows} rows of out pass the {weight.rows} rows of weight"
        )
    return rows
