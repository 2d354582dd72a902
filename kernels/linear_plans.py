"""How the launches of the linear kernels are cut, by shape and card, from measurements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from deepinfer.kernels.compiler import KernelSpec
from deepinfer.kernels.linear_weights import F16Weight, W4Weight, Weight
from deepinfer.kernels.nested import NestedWeight

TILE_ROWS: Final = 16
"""Rows of a weight that one tensor-core tile takes."""

STREAM_ROWS_MAX: Final = 16
"""Up to here weights stream past an ``x`` in registers; above it ``x`` passes through shared
memory."""

_STAGE_BYTES: Final = {"f16": 2048, "w4": 1152, "nested": 2048, "nested fp8": 2048}
"""As in ``csrc/gemm_f16.cu``, ``csrc/gemm_w4.cu`` and ``csrc/gemm_nested.cu``."""
_STEP: Final = {"f16": 64, "w4": 128, "nested": 64, "nested fp8": 128}
"""Columns of a weight that a warp takes at once, there too."""

_X_STAGES: Final = 3
"""As in ``csrc/gemm_tiled.cuh``."""

_RESIDENT_WARPS: Final = 16
"""Warps an SM that stream weights: their registers, and the loads they have under way."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch that streams W past X: 8 ``column_tiles`` rows of X a CTA, K over ``warps`` warps,
    each with ``stages`` steps of W under way and ``held`` steps of X in registers (0: none)."""

    column_tiles: int
    warps: int
    stages: int
    held: int

    def blocks(self, tiles: int, sm_count: int) -> int:
        """CTAs along N, which take tile after tile of 16 rows."""
        return min(tiles, sm_count * max(1, _RESIDENT_WARPS // self.warps))


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


AnyPlan = Plan | TiledPlan

# By (length of K, column tiles). The warps, which are the order of the sums, are the
# same for every column tile.
_F16_PLANS: Final = {
    ("short", 1): Plan(1, 8, 2, 2),
    ("short", 2): Plan(2, 8, 2, 2),
    ("middle", 1): Plan(1, 16, 2, 2),
    ("middle", 2): Plan(2, 16, 2, 2),
    ("long", 1): Plan(1, 16, 2, 0),
    ("long", 2): Plan(2, 16, 2, 0),
}
_W4_PLANS: Final = {
    ("short", 1): Plan(1, 8, 3, 1),
    ("short", 2): Plan(2, 8, 3, 1),
    ("middle", 1): Plan(1, 16, 4, 1),
    ("middle", 2): Plan(2, 16, 3, 1),
    ("long", 1): Plan(1, 16, 4, 0),
    ("long", 2): Plan(2, 16, 3, 0),
}
_FP8_PLANS: Final = {
    ("short", 1): Plan(1, 8, 2, 1),
    ("short", 2): Plan(2, 8, 2, 1),
    ("middle", 1): Plan(1, 16, 2, 1),
    ("middle", 2): Plan(2, 16, 2, 1),
    ("long", 1): Plan(1, 16, 2, 0),
    ("long", 2): Plan(2, 16, 2, 0),
}
_STREAM_PLANS: Final = {
    "f16": _F16_PLANS,
    "w4": _W4_PLANS,
    "nested": _F16_PLANS,  # the same warps, for the same order of sums
    "nested fp8": _FP8_PLANS,
}
_LENGTHS: Final = (("short", 1024), ("middle", 2048))
"""Up to how many columns the warps of such a plan hold all their ``x``."""
_F16_TILED: Final = {4: TiledPlan(4, 1, 4, 4, 1), 8: TiledPlan(8, 1, 8, 2, 1)}
_W4_TILED: Final = {4: TiledPlan(4, 1, 4, 4, 1), 8: TiledPlan(8, 1, 8, 2, 1)}


def partials(rows: int) -> int:
    """How many sums of squares a row gets from ``linear_residual`` with a weight of ``rows``."""
    return -(-rows // TILE_ROWS)


def plan_for(
    weight: Weight, m: int, sm_count: int, *, fp8: bool = False, split: bool = True
) -> AnyPlan:
    """The measured best cut for ``m`` rows; up to 16, ``warps`` (the order of the sums) ignores it.

    ``fp8`` chooses the mode of a nested weight. Without ``split`` K stays in one CTA, which needs
    no ``Workspace``.
    """
    kind = _kind(weight, fp8)
    if m <= STREAM_ROWS_MAX:
        length = next((name for name, most in _LENGTHS if weight.columns <= most), "long")
        # Sums of 16 columns in four groups a step would not fit in registers.
        narrow = m <= 8 or (isinstance(weight, W4Weight) and weight.group < 128)
        return _STREAM_PLANS[kind][length, 1 if narrow else 2]
    column_tiles = 4 if m <= 32 else 8
    plan = (_W4_TILED if kind == "w4" else _F16_TILED)[column_tiles]
    blocks = -(-weight.rows // plan.rows)
    most = weight.columns // (2 * _STEP[kind])
    splits = max(1, min(2 * sm_count // blocks, most)) if split else 1
    return replace(plan, splits=splits)


def check_held(plan: Plan, weight: Weight, fp8: bool = False) -> None:
    """Raises ValueError if a warp holds less of ``x`` than it needs."""
    steps = -(-weight.columns // _STEP[_kind(weight, fp8)])
    if plan.held and plan.held * plan.warps < steps:
        raise ValueError(
            f"plan holds {plan.held} steps of x in each of {plan.warps} warps; weight has {steps}"
        )


def plan_specs() -> Iterator[KernelSpec]:
    """The kernels of all plans of ``plan_for``."""
    f16: list[AnyPlan] = [*dict.fromkeys(_F16_PLANS.values()), *_F16_TILED.values()]
    yield from map(f16_spec, f16)
    w4: list[AnyPlan] = [*dict.fromkeys(_W4_PLANS.values()), *_W4_TILED.values()]
    for plan in w4:
        if not isinstance(plan, Plan) or plan.column_tiles == 1:
            yield w4_spec(32, plan)
        yield w4_spec(128, plan)
    for fp8 in (False, True):
        for nested in dict.fromkeys(_STREAM_PLANS["nested fp8" if fp8 else "nested"].values()):
            yield nested_spec(fp8, nested)


def _kind(weight: Weight, fp8: bool) -> str:
    if isinstance(weight, NestedWeight):
        return "nested fp8" if fp8 else "nested"
    return "f16" if isinstance(weight, F16Weight) else "w4"


def _spec(kind: str, leading: str, plan: AnyPlan) -> KernelSpec:
    source, threads = kind.split()[0], 32 * plan.warps
    if isinstance(plan, Plan):
        cut = f"{leading}{plan.column_tiles}, {plan.warps}, {plan.stages}, {plan.held}"
        ring = plan.warps * plan.stages * _STAGE_BYTES[kind]
        return KernelSpec(f"gemm_{source}.cu", f"linear_{source}<{cut}>", threads, ring, True)
    cut = f"{leading}{plan.column_tiles}, {plan.row_tiles}, {plan.warps}, {plan.depth}"
    columns = 8 * plan.column_tiles
    stages = _X_STAGES * columns * _STEP[kind] * 2
    sums = -(-plan.rows * (columns + 1) * 4 // 16) * 16
    shared = max(stages, sums) + 4 * columns
    return KernelSpec(f"gemm_{source}.cu", f"linear_{source}_tiled<{cut}>", threads, shared)


def f16_spec(plan: AnyPlan) -> KernelSpec:
    """The kernel for FP16 weights."""
    return _spec("f16", "", plan)


def w4_spec(group: int, plan: AnyPlan) -> KernelSpec:
    """The kernel for 4-bit weights with a scale for every ``group`` columns."""
    # Chunks of 32 that share a scale; a group of 64 reads its scale twice.
    return _spec("w4", "4, " if group >= 128 else "1, ", plan)


def nested_spec(fp8: bool, plan: AnyPlan) -> KernelSpec:
    """The kernel for nested weights, in either mode."""
    return _spec("nested fp8" if fp8 else "nested", f"{int(fp8)}, ", plan)
