"""Linear layers of a few rows: FP16 and 4-bit weights, with what follows them in the same kernel.

Every function computes ``x @ weight.T`` for ``x`` half ``[M, K]``, M up to 64, and finishes it in
one of four ways; ``kernels.reference_linear`` says exactly what they mean. Sums are FP32. Up to 16
rows their order depends on N, K and the card, not on M: a row's result is the same bits alone and
in a batch.

RMSNorm is split: whoever writes the residual also writes ``h = residual * gamma`` as half, and
FP32 sums of the residual's squares; the linear that reads ``h`` multiplies its result by
``rstd = rsqrt(sum / K + eps)``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.compiler import launch
from deepinfer.kernels.linear_checks import check_tensor
from deepinfer.kernels.linear_plans import (
    EXPAND,
    STREAM_ROWS_MAX,
    TILE_ROWS,
    AnyPlan,
    Plan,
    TiledPlan,
    check_held,
    f16_spec,
    partials,
    plan_for,
    specs,
    w4_spec,
)
from deepinfer.kernels.linear_weights import (
    F16Weight,
    W4Weight,
    Weight,
    interleave_gate_up,
    pack_w4,
    unpack_w4,
)

__all__ = [
    "ROWS_MAX",
    "F16Weight",
    "Plan",
    "TiledPlan",
    "W4Weight",
    "Weight",
    "Workspace",
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
    "unpack_w4",
]

ROWS_MAX: Final = 64
"""The most rows of ``x``."""

_NORM, _SWIGLU, _RESIDUAL, _LOGITS = range(4)


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """What CTAs that split K leave for each other: one for each stream that runs linears.

    ``sums`` float32, ``tickets`` int32, zero between launches.
    """

    sums: Tensor
    tickets: Tensor

    @classmethod
    def allocate(cls, device: torch.device | str) -> Workspace:
        """16 MiB and 1,024 tickets: enough for every plan of ``plan_for``."""
        return cls(
            torch.empty(1 << 22, dtype=torch.float32, device=device),
            torch.zeros(1024, dtype=torch.int32, device=device),
        )


def max_rows(weight: Weight) -> int:
    """Up to how many rows of ``x`` these functions are the fastest way; they take ``ROWS_MAX``."""
    return STREAM_ROWS_MAX if isinstance(weight, F16Weight) else ROWS_MAX


def linear_norm(
    out: Tensor,
    x: Tensor,
    weight: Weight,
    *,
    sumsq: Tensor | None = None,
    eps: float = 0.0,
    workspace: Workspace | None = None,
    plan: AnyPlan | None = None,
) -> None:
    """``out`` half ``[M, N]`` = ``(x @ weight.T) * rstd + bias``, saturating.

    ``sumsq`` float32 ``[M, partials]`` gives ``rstd``; None means ``rstd = 1``. ``plan`` overrides
    ``plan_for``. Raises ValueError naming the argument that does not fit.
    """
    m = _rows(x, weight)
    check_tensor("out", out, torch.float16, (m, weight.rows), x.device)
    _run(_NORM, out, x, weight, sumsq=sumsq, eps=eps, workspace=workspace, plan=plan)


def linear_logits(
    out: Tensor,
    x: Tensor,
    weight: Weight,
    *,
    sumsq: Tensor | None = None,
    eps: float = 0.0,
    workspace: Workspace | None = None,
    plan: AnyPlan | None = None,
) -> None:
    """As ``linear_norm`` with ``out`` float32 ``[M, N]``."""
    m = _rows(x, weight)
    check_tensor("out", out, torch.float32, (m, weight.rows), x.device)
    _run(_LOGITS, out, x, weight, sumsq=sumsq, eps=eps, workspace=workspace, plan=plan)


def linear_swiglu(
    out: Tensor,
    x: Tensor,
    weight: Weight,
    *,
    sumsq: Tensor | None = None,
    eps: float = 0.0,
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
    _run(_SWIGLU, out, x, weight, sumsq=sumsq, eps=eps, workspace=workspace, plan=plan)


def linear_residual(
    out: Tensor,
    residual: Tensor,
    sumsq_out: Tensor,
    x: Tensor,
    weight: Weight,
    gamma: Tensor,
    *,
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
    _run(
        _RESIDUAL,
        out,
        x,
        weight,
        residual=residual,
        gamma=gamma,
        sumsq_out=sumsq_out,
        workspace=workspace,
        plan=plan,
    )


def expand_w4(out: Tensor, weight: W4Weight, row0: int) -> None:
    """``out`` half ``[n, K]`` = the rows of ``weight`` from ``row0``, each value rounded once."""
    check_tensor("out", out, torch.float16, (None, weight.columns), weight.device)
    rows = out.shape[0]
    if row0 < 0 or row0 + rows > weight.rows:
        raise ValueError(
            f"row0 = {row0} and the {rows} rows of out pass the {weight.rows} rows of weight"
        )
    if rows == 0:
        return
    threads = rows * (-(-weight.columns // 128) * 4)
    launch(
        EXPAND,
        (-(-threads // EXPAND.threads), 1, 1),
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


@functools.cache
def _sm_count(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _run(
    epilogue: int,
    out: Tensor,
    x: Tensor,
    weight: Weight,
    *,
    sumsq: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gamma: Tensor | None = None,
    sumsq_out: Tensor | None = None,
    workspace: Workspace | None,
    plan: AnyPlan | None,
) -> None:
    m, n = x.shape[0], weight.rows
    if sumsq is not None:
        check_tensor("sumsq", sumsq, torch.float32, (m, None), x.device)
    if plan is None:
        plan = plan_for(weight, m, _sm_count(x.device), split=workspace is not None)
    if isinstance(weight, F16Weight):
        spec = f16_spec(plan)
        planes: list[Tensor | np.generic | None] = [weight.weight]
    else:
        spec = w4_spec(weight.group, plan)
        shift = np.int32(weight.group.bit_length() - 1)
        planes = [weight.codes, weight.scales, weight.zeros, shift]
    tiles, columns = partials(n), -(-m // (8 * plan.column_tiles))
    grid: tuple[int, int, int]
    tail: list[Tensor | None] = []
    if isinstance(plan, Plan):
        check_held(plan, weight)
        grid = (columns, plan.blocks(tiles, _sm_count(x.device)), 1)
    else:
        grid = (columns, -(-n // plan.rows), plan.splits)
        tail = [None, None] if workspace is None else [workspace.sums, workspace.tickets]
        if plan.splits > 1:
            _check_workspace(workspace, grid[0] * grid[1], plan)
    launch(
        spec,
        grid,
        [
            *planes,
            x,
            np.int32(m),
            np.int32(n),
            np.int32(weight.columns),
            np.int32(epilogue),
            out,
            weight.bias,
            sumsq,
            np.int32(0 if sumsq is None else sumsq.shape[1]),
            np.float32(eps),
            residual,
            gamma,
            sumsq_out,
            *tail,
        ],
        shared_bytes=spec.shared_bytes,
    )


def _check_workspace(workspace: Workspace | None, blocks: int, plan: TiledPlan) -> None:
    floats = blocks * plan.splits * plan.rows * 8 * plan.column_tiles
    if workspace is None:
        raise ValueError(f"plan splits K over {plan.splits} CTAs, which needs a workspace")
    if floats > workspace.sums.numel() or blocks > workspace.tickets.numel():
        raise ValueError(
            f"workspace has {workspace.sums.numel()} floats and {workspace.tickets.numel()} "
            f"tickets; plan needs {floats} and {blocks}"
        )


def _rows(x: Tensor, weight: Weight) -> int:
    check_tensor("x", x, torch.float16, (None, weight.columns), weight.device)
    if not 1 <= x.shape[0] <= ROWS_MAX:
        raise ValueError(f"x has {x.shape[0]} rows; this kernel takes 1 to {ROWS_MAX}")
    return x.shape[0]
