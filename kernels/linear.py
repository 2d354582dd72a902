"""Linear layers of a few rows, with what follows them in the same kernel.

Weights are FP16, 4-bit, or nested; ``fp8=True`` computes with the upper plane of a nested weight
alone, and is a ValueError for any other weight. Without it a nested weight needs its lower plane;
if it has no outliers, results are the same bits as those of the ``F16Weight`` of its values.

Every function computes ``x @ weight.T`` for ``x`` half ``[M, K]``, M up to 1,024, and finishes it
in one of four ways; ``kernels.reference_linear`` says exactly what they mean. Sums are FP32. Up to
16 rows their order depends on N, K and the card, not on M: a row's result is the same bits alone
and in a batch.

RMSNorm is split: whoever writes the residual also writes ``h = residual * gamma`` as half, and
FP32 sums of the residual's squares; the linear that reads ``h`` multiplies its result by
``rstd = rsqrt(sum / K + eps)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels.compiler import KernelSpec
from deepinfer.kernels.linear_checks import check_tensor
from deepinfer.kernels.linear_expand import expand_nested, expand_specs, expand_w4
from deepinfer.kernels.linear_launch import (
    LOGITS,
    NORM,
    RESIDUAL,
    SWIGLU,
    Workspace,
    is_hopper,
    run,
)
from deepinfer.kernels.linear_plans import (
    HOPPER_TARGET,
    STREAM_ROWS_MAX,
    TILE_ROWS,
    AnyPlan,
    Plan,
    partials,
    plan_for,
    plan_specs,
)
from deepinfer.kernels.linear_tiled import ROWS_MAX, TiledPlan
from deepinfer.kernels.linear_weights import (
    F16Weight,
    W4Weight,
    Weight,
    interleave_gate_up,
    pack_w4,
    unpack_w4,
)
from deepinfer.kernels.linear_wide import GROUP_MIN, WidePlan
from deepinfer.kernels.nested import NestedWeight

__all__ = [
    "ROWS_MAX",
    "AnyPlan",
    "F16Weight",
    "NestedWeight",
    "Plan",
    "TiledPlan",
    "W4Weight",
    "Weight",
    "WidePlan",
    "Workspace",
    "expand_nested",
    "expand_w4",
    "interleave_gate_up",
    "linear_logits",
    "linear_norm",
    "linear_residual",
    "linear_swiglu",
    "max_rows",
    "pack_w4",
    "partials",
    "plan_for",
    "specs",
    "specs_for",
    "unpack_w4",
]


_TILED_ROWS: Final = 64
_ROWS_ON_HOPPER: Final = {F16Weight: 32, W4Weight: 128, NestedWeight: 256}
"""More rows of a weight that is not plain FP16 are faster expanded, by cuBLAS."""


def max_rows(weight: Weight) -> int:
    """Up to how many rows of ``x`` these functions are the fastest way; they take ``ROWS_MAX``."""
    if is_hopper(weight.device) and not (isinstance(weight, W4Weight) and weight.group < GROUP_MIN):
        return _ROWS_ON_HOPPER[type(weight)]
    return STREAM_ROWS_MAX if isinstance(weight, F16Weight) else _TILED_ROWS


def specs_for(target: str) -> Iterator[KernelSpec]:
    """Every kernel that this module may launch where kernels are compiled for ``target``."""
    yield from plan_specs(target == HOPPER_TARGET)
    yield from expand_specs()


def specs() -> Iterator[KernelSpec]:
    """Every kernel that this module may launch on the card at hand; without one, as on SM86."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return specs_for(HOPPER_TARGET if is_hopper(device) else "")


def linear_norm(
    out: Tensor,
    x: Tensor,
    weight: Weight,
    *,
    sumsq: Tensor | None = None,
    eps: float = 0.0,
    fp8: bool = False,
    workspace: Workspace | None = None,
    plan: AnyPlan | None = None,
) -> None:
    """``out`` half ``[M, N]`` = ``(x @ weight.T) * rstd + bias``, saturating.

    ``sumsq`` float32 ``[M, partials]`` gives ``rstd``; None means ``rstd = 1``. ``fp8``: see above.
    ``plan`` overrides ``plan_for``. Raises ValueError naming the argument that does not fit.
    """
    m = _rows(x, weight)
    check_tensor("out", out, torch.float16, (m, weight.rows), x.device)
    run(NORM, out, x, weight, fp8=fp8, sumsq=sumsq, eps=eps, workspace=workspace, plan=plan)


def linear_logits(
    out: Tensor,
    x: Tensor,
    weight: Weight,
    *,
    sumsq: Tensor | None = None,
    eps: float = 0.0,
    fp8: bool = False,
    workspace: Workspace | None = None,
    plan: AnyPlan | None = None,
) -> None:
    """As ``linear_norm`` with ``out`` float32 ``[M, N]``."""
    m = _rows(x, weight)
    check_tensor("out", out, torch.float32, (m, weight.rows), x.device)
    run(LOGITS, out, x, weight, fp8=fp8, sumsq=sumsq, eps=eps, workspace=workspace, plan=plan)


def linear_swiglu(
    out: Tensor,
    x: Tensor,
    weight: Weight,
    *,
    sumsq: Tensor | None = None,
    eps: float = 0.0,
    fp8: bool = False,
    workspace: Workspace | None = None,
    plan: AnyPlan | None = None,
) -> None:
    """``out`` half ``[M, N / 2]`` = ``silu(gate) * up``, saturating.

    ``weight``'s rows are those of ``interleave_gate_up``; gate and up are each
    ``(x @ weight.T) * rstd + bias``, as in ``linear_norm``.
    """
    m = _rows(x, weight)
    if weight.rows % TILE_ROWS:
        raise ValueError(
            f"weight has {weight.rows} rows; gate and up interleaved in eights have a multiple "
            f"of {TILE_ROWS}"
        )
    check_tensor("out", out, torch.float16, (m, weight.rows // 2), x.device)
    run(SWIGLU, out, x, weight, fp8=fp8, sumsq=sumsq, eps=eps, workspace=workspace, plan=plan)


def linear_residual(
    out: Tensor,
    residual: Tensor,
    sumsq_out: Tensor,
    x: Tensor,
    weight: Weight,
    gamma: Tensor,
    *,
    fp8: bool = False,
    workspace: Workspace | None = None,
    plan: AnyPlan | None = None,
) -> None:
    """``residual += x @ weight.T + bias``, and the start of the norm that follows.

    ``residual`` float32 ``[M, N]`` in place; ``out`` half ``[M, N]`` = ``residual * gamma``,
    saturating; ``gamma`` half ``[N]``; ``sumsq_out`` float32 ``[M, partials(N)]``: sums of the new
    residual's squares over 16 columns each.
    """
    m, n = _rows(x, weight), weight.rows
    check_tensor("out", out, torch.float16, (m, n), x.device)
    check_tensor("residual", residual, torch.float32, (m, n), x.device)
    check_tensor("sumsq_out", sumsq_out, torch.float32, (m, partials(n)), x.device)
    check_tensor("gamma", gamma, torch.float16, (n,), x.device)
    run(
        RESIDUAL,
        out,
        x,
        weight,
        fp8=fp8,
        residual=residual,
        gamma=gamma,
        sumsq_out=sumsq_out,
        workspace=workspace,
        plan=plan,
    )


def _rows(x: Tensor, weight: Weight) -> int:
    check_tensor("x", x, torch.float16, (None, weight.columns), weight.device)
    if not 1 <= x.shape[0] <= ROWS_MAX:
        raise ValueError(f"x has {x.shape[0]} rows; these kernels take 1 to {ROWS_MAX}")
    return x.shape[0]
