"""How a linear kernel is launched: the mode, the plan, the grid and the arguments."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.compiler import KernelSpec, device_target, launch
from deepinfer.kernels.linear_checks import check_tensor
from deepinfer.kernels.linear_hopper import HOPPER_FLOATS, WORKSPACE_TICKETS, HopperPlan
from deepinfer.kernels.linear_plans import (
    HOPPER_TARGET,
    AnyPlan,
    Plan,
    check_held,
    f16_spec,
    nested_spec,
    partials,
    plan_for,
    w4_spec,
)
from deepinfer.kernels.linear_tiled import WORKSPACE_FLOATS
from deepinfer.kernels.linear_weights import F16Weight, W4Weight, Weight, check_mode

NORM, SWIGLU, RESIDUAL, LOGITS = range(4)
"""Epilogues, as in ``csrc/gemm.cuh``."""


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """What CTAs that split K leave for each other: one for each stream that runs linears.

    ``sums`` float32, ``tickets`` int32, zero between launches.
    """

    sums: Tensor
    tickets: Tensor

    @classmethod
    def allocate(cls, device: torch.device | str) -> Workspace:
        """16 MiB (32 on Hopper) and 8,192 tickets: enough for every plan of ``plan_for``."""
        floats = HOPPER_FLOATS if is_hopper(torch.device(device)) else WORKSPACE_FLOATS
        return cls(
            torch.empty(floats, dtype=torch.float32, device=device),
            torch.zeros(WORKSPACE_TICKETS, dtype=torch.int32, device=device),
        )


@functools.cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of a card; 1 for the CPU, where kernels are emulated."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether kernels for ``device`` are compiled for ``HOPPER_TARGET``."""
    return device.type == "cuda" and device_target() == HOPPER_TARGET


def run(
    epilogue: int,
    out: Tensor,
    x: Tensor,
    weight: Weight,
    *,
    fp8: bool,
    sumsq: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gamma: Tensor | None = None,
    sumsq_out: Tensor | None = None,
    workspace: Workspace | None,
    plan: AnyPlan | None,
) -> None:
    """Launch one linear layer; ``kernels.linear`` has checked the shapes of all but ``sumsq``."""
    check_mode(weight, fp8)
    m, n = x.shape[0], weight.rows
    if sumsq is not None:
        check_tensor("sumsq", sumsq, torch.float32, (m, None), x.device)
    sms = sm_count(x.device)
    if plan is None:
        split, hopper = workspace is not None, is_hopper(x.device)
        plan = plan_for(weight, m, sms, fp8=fp8, split=split, hopper=hopper)
    spec, planes = _kernel(weight, plan, fp8)
    grid: tuple[int, int, int]
    tail: list[Tensor | np.generic | None] = []
    if isinstance(plan, Plan):
        check_held(plan, weight, fp8)
        grid = (-(-m // (8 * plan.column_tiles)), plan.blocks(partials(n), sms), 1)
    else:
        tail = [None, None] if workspace is None else [workspace.sums, workspace.tickets]
        if isinstance(plan, HopperPlan):
            grid = plan.grid(n, weight.columns, m)
            tail.append(np.int32(plan.share))
            if plan.splits(weight.columns):
                floats = plan.floats(n, weight.columns, m)
                _check_workspace(workspace, grid[0], floats, plan.tickets(n, m))
        else:
            grid = (-(-m // plan.columns), -(-n // plan.rows), plan.splits)
            if plan.splits > 1:
                blocks = grid[0] * grid[1]
                floats = blocks * plan.splits * plan.rows * plan.columns
                _check_workspace(workspace, plan.splits, floats, blocks)
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


def _kernel(
    weight: Weight, plan: AnyPlan, fp8: bool
) -> tuple[KernelSpec, list[Tensor | np.generic | None]]:
    """The kernel, and its arguments ahead of ``x``."""
    if isinstance(weight, F16Weight):
        return f16_spec(plan), [weight.weight]
    if isinstance(weight, W4Weight):
        shift = np.int32(weight.group.bit_length() - 1)
        return w4_spec(weight.group, plan), [weight.codes, weight.scales, weight.zeros, shift]
    return nested_spec(fp8, plan), [
        weight.upper,
        None if fp8 else weight.lower,
        weight.row_shift,
        weight.outlier_starts,
        weight.outlier_columns,
        weight.outlier_values,
    ]


def _check_workspace(workspace: Workspace | None, ctas: int, floats: int, tickets: int) -> None:
    if workspace is None:
        raise ValueError(f"plan splits K over {ctas} CTAs, which needs a workspace")
    if floats > workspace.sums.numel() or tickets > workspace.tickets.numel():
        raise ValueError(
            f"workspace has {workspace.sums.numel()} floats and {workspace.tickets.numel()} "
            f"tickets; plan needs {floats} and {tickets}"
        )
