"""How the launches of the linear kernels are cut, by shape and card, from measurements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from deepinfer.kernels.compiler import KernelSpec
from deepinfer.kernels.linear_weights import F16Weight, Weight

TILE_ROWS: Final = 16
"""Rows of a weight that one tensor-core tile takes."""

DIRECT_ROWS_MAX: Final = 16
"""Up to here warps read ``x`` straight from memory; above it passes through shared memory."""

_STAGE_BYTES: Final = {"f16": 2048, "w4": 1152}
"""As in ``csrc/gemm_f16.cu`` and ``csrc/gemm_w4.cu``."""

_X_STAGES: Final = 3
"""As in ``csrc/gemm_tiled.cuh``."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a launch is cut: 16 ``row_tiles`` rows of W and 8 ``column_tiles`` rows of X a CTA,
    K over ``warps`` warps, each with ``depth`` steps of weights in flight, and ``ahead`` (0 or 1)
    of X; ``resident`` CTAs an SM that take tile after tile (0: a CTA for each tile)."""

    column_tiles: int
    row_tiles: int
    warps: int
    depth: int
    ahead: int
    resident: int = 0


@dataclass(frozen=True, slots=True)
class TiledPlan:
    """A launch whose warps share ``x``: 16 ``row_tiles`` rows of W a warp, 8 ``column_tiles`` rows
    of X a CTA, K over ``splits`` CTAs (more than one needs a ``Workspace``)."""

    column_tiles: int
    row_tiles: int
    warps: int
    depth: int
    splits: int

    @property
    def rows(self) -> int:
        """Rows of W a CTA."""
        return TILE_ROWS * self.row_tiles * self.warps


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """A launch that streams W through a ring of ``stages`` steps a warp: K over
    ``warps`` warps, 8 ``column_tiles`` rows of X a CTA, of which ``held`` steps a warp stay in
    registers (0: none). ``resident`` CTAs an SM take tile after tile of 16 rows (0: a CTA each)."""

    column_tiles: int
    warps: int
    stages: int
    held: int
    resident: int = 0

    row_tiles: ClassVar[int] = 1


AnyPlan = Plan | StreamPlan | TiledPlan

EXPAND: Final = KernelSpec("expand_w4.cu", "expand_w4", 256)

# By (tiles of rows for the card's SMs, column tiles): warps, the order of the sums, is the same for
# every column tile.
_F16_PLANS: Final = {
    ("few", 1): Plan(1, 1, 16, 2, 1),
    ("few", 2): Plan(2, 1, 16, 2, 0),
    ("some", 1): Plan(1, 1, 8, 2, 0),
    ("some", 2): Plan(2, 1, 8, 4, 0),
    ("many", 1): Plan(1, 2, 8, 2, 0, resident=2),
    ("many", 2): Plan(2, 1, 8, 2, 0, resident=2),
}
_W4_PLANS: Final = {
    ("few", 1): Plan(1, 1, 16, 2, 0),
    ("few", 2): Plan(2, 1, 16, 2, 0),
    ("some", 1): Plan(1, 2, 8, 2, 0),
    ("some", 2): Plan(2, 2, 8, 2, 0),
    ("many", 1): Plan(1, 2, 4, 2, 0, resident=3),
    ("many", 2): Plan(2, 2, 4, 2, 0, resident=2),
}
_F16_TILED: Final = {4: TiledPlan(4, 1, 4, 4, 1), 8: TiledPlan(8, 1, 8, 2, 1)}
_W4_TILED: Final = {4: TiledPlan(4, 1, 4, 4, 1), 8: TiledPlan(8, 1, 8, 2, 1)}


def partials(rows: int) -> int:
    """How many sums of squares a row gets from ``linear_residual`` with a weight of ``rows``."""
    return -(-rows // TILE_ROWS)


def plan_for(weight: Weight, m: int, sm_count: int, *, split: bool = True) -> AnyPlan:
    """The measured best cut for ``m`` rows; up to 16, ``warps`` (the order of the sums) ignores it.

    Without ``split`` K stays in one CTA, which needs no ``Workspace``.
    """
    plain = isinstance(weight, F16Weight)
    if m <= DIRECT_ROWS_MAX:
        tiles = partials(weight.rows)
        amount = "few" if tiles <= sm_count else "some" if tiles <= 2 * sm_count else "many"
        return (_F16_PLANS if plain else _W4_PLANS)[amount, 1 if m <= 8 else 2]
    column_tiles = 4 if m <= 32 else 8
    plan = (_F16_TILED if plain else _W4_TILED)[column_tiles]
    blocks = -(-weight.rows // plan.rows)
    step = 64 if plain else 128
    splits = max(1, min(2 * sm_count // blocks, weight.columns // (2 * step))) if split else 1
    return replace(plan, splits=splits)


def check_held(plan: StreamPlan, weight: Weight) -> None:
    """Raises ValueError if the plan keeps fewer steps of ``x`` than a warp of it needs."""
    steps = -(-weight.columns // (64 if isinstance(weight, F16Weight) else 128))
    if plan.held and plan.held * plan.warps < steps:
        raise ValueError(
            f"plan holds {plan.held} steps in each of {plan.warps} warps; the weight has {steps}"
        )


def specs() -> Iterator[KernelSpec]:
    """Every kernel that this module may launch."""
    f16: list[AnyPlan] = [*dict.fromkeys(_F16_PLANS.values()), *_F16_TILED.values()]
    yield from map(f16_spec, f16)
    w4: list[AnyPlan] = [*dict.fromkeys(_W4_PLANS.values()), *_W4_TILED.values()]
    for plan in w4:
        for group_chunks in (1, 2, 4):
            yield w4_spec(group_chunks, plan)
    yield EXPAND


def _spec(kind: str, leading: str, step: int, plan: AnyPlan) -> KernelSpec:
    threads = 32 * plan.warps
    if isinstance(plan, StreamPlan):
        cut = f"{leading}{plan.column_tiles}, {plan.warps}, {plan.stages}, {plan.held}"
        ring = plan.warps * plan.stages * _STAGE_BYTES[kind]
        return KernelSpec(f"gemm_{kind}.cu", f"linear_{kind}_stream<{cut}>", threads, ring, True)
    cut = f"{leading}{plan.column_tiles}, {plan.row_tiles}, {plan.warps}, {plan.depth}"
    if isinstance(plan, Plan):
        return KernelSpec(f"gemm_{kind}.cu", f"linear_{kind}<{cut}, {plan.ahead}>", threads)
    columns = 8 * plan.column_tiles
    stages = _X_STAGES * columns * step * 2
    sums = -(-plan.rows * (columns + 1) * 4 // 16) * 16
    shared = max(stages, sums) + 4 * columns
    return KernelSpec(f"gemm_{kind}.cu", f"linear_{kind}_tiled<{cut}>", threads, shared)


def f16_spec(plan: AnyPlan) -> KernelSpec:
    """The kernel for FP16 weights."""
    return _spec("f16", "", 64, plan)


def w4_spec(group_chunks: int, plan: AnyPlan) -> KernelSpec:
    """The kernel for 4-bit weights, ``group_chunks`` times 32 columns of which share a scale."""
    return _spec("w4", f"{group_chunks}, ", 128, plan)
