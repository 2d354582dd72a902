"""How the launches of the linear kernels are cut, by shape and card, from measurements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from deepinfer.kernels.compiler import KernelSpec
from deepinfer.kernels.linear_hopper import HopperPlan, hopper_plan, hopper_spec, hopper_specs
from deepinfer.kernels.linear_tiled import Kind, TiledPlan, tiled_plan, tiled_spec, tiled_specs
from deepinfer.kernels.linear_weights import F16Weight, W4Weight, Weight
from deepinfer.kernels.linear_wide import GROUP_MIN, WidePlan, wide_plan, wide_spec, wide_specs
from deepinfer.kernels.nested import NestedWeight

TILE_ROWS: Final = 16
"""Rows of a weight that one tensor-core tile takes."""

STREAM_ROWS_MAX: Final = 16
"""Up to here weights stream past an ``x`` in registers; above it ``x`` passes through shared
memory."""

HOPPER_TARGET: Final = "sm_90a"
"""What kernels are compiled for on a card that has more shared memory, and wgmma."""

_STAGE_BYTES: Final[dict[Kind, int]] = {"f16": 2048, "w4": 1152, "nested": 2048, "nested fp8": 2048}
"""As in ``csrc/gemm_f16.cu``, ``csrc/gemm_w4.cu`` and ``csrc/gemm_nested.cu``."""
_STEP: Final[dict[Kind, int]] = {"f16": 64, "w4": 128, "nested": 64, "nested fp8": 128}
"""Columns of a weight that a warp takes at once, there too."""

_RESIDENT_WARPS: Final = 16
"""Warps an SM that stream weights: their registers, and the loads they have under way."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch that streams W past X: 8 ``column_tiles`` rows of X a CTA, K over ``warps`` warps,
    each with ``stages`` steps of W under way and ``held`` steps of X in registers (0: none, -1:
    none, but those of the steps of W are under way with them)."""

    column_tiles: int
    warps: int
    stages: int
    held: int

    def blocks(self, tiles: int, sm_count: int) -> int:
        """CTAs along N, which take tile after tile of 16 rows."""
        return min(tiles, sm_count * max(1, _RESIDENT_WARPS // self.warps))


AnyPlan = Plan | TiledPlan | WidePlan | HopperPlan

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
_STREAM_PLANS: Final[dict[Kind, dict[tuple[str, int], Plan]]] = {
    "f16": _F16_PLANS,
    "w4": _W4_PLANS,
    "nested": _F16_PLANS,  # the same warps, for the same order of sums
    "nested fp8": _FP8_PLANS,
}
_HOPPER_PLANS: Final[dict[Kind, dict[tuple[str, int], Plan]]] = {
    "f16": {
        ("many", 1): Plan(1, 16, 4, 2),
        ("many", 2): Plan(2, 16, 4, 2),
        ("long", 2): Plan(2, 16, 3, -1),
    },
    "nested": {
        ("many", 1): Plan(1, 16, 4, 2),
        ("many", 2): Plan(2, 16, 4, 2),
        ("long", 2): Plan(2, 16, 2, -1),
    },
    "nested fp8": {("long", 2): Plan(2, 16, 2, -1)},
    "w4": {},
}
"""Instead of those on a Hopper card, which has more shared memory. "many": of "middle" weights with
so many tiles to each SM."""
_MANY: Final = 4
_LENGTHS: Final = (("short", 1024), ("middle", 2048))
"""Up to how many columns the warps of such a plan hold all their ``x``."""


def partials(rows: int) -> int:
    """How many sums of squares a row gets from ``linear_residual`` with a weight of ``rows``."""
    return -(-rows // TILE_ROWS)


def plan_for(
    weight: Weight,
    m: int,
    sm_count: int,
    *,
    fp8: bool = False,
    split: bool = True,
    hopper: bool = False,
) -> AnyPlan:
    """The measured best cut for ``m`` rows; up to 16, ``warps`` (the order of the sums) ignores it.

    ``fp8`` chooses the mode of a nested weight. Without ``split`` K stays in one CTA, which needs
    no ``Workspace``. ``hopper``: kernels are compiled for ``HOPPER_TARGET``.
    """
    kind = _kind(weight, fp8)
    if m <= STREAM_ROWS_MAX:
        length = next((name for name, most in _LENGTHS if weight.columns <= most), "long")
        # Sums of 16 columns in four groups a step would not fit in registers.
        narrow = m <= 8 or (isinstance(weight, W4Weight) and weight.group < 128)
        plan = _STREAM_PLANS[kind][length, 1 if narrow else 2]
        if hopper and length == "middle" and partials(weight.rows) >= _MANY * sm_count:
            length = "many"
        return _HOPPER_PLANS[kind].get((length, plan.column_tiles), plan) if hopper else plan
    if hopper and isinstance(weight, W4Weight) and weight.group >= GROUP_MIN:
        return wide_plan(weight.rows, weight.columns, m, sm_count, split=split)
    if hopper and kind != "w4":
        return hopper_plan(weight.rows, weight.columns, m, sm_count, split=split)
    return tiled_plan(kind, weight.rows, weight.columns, m, sm_count, split=split)


def check_held(plan: Plan, weight: Weight, fp8: bool = False) -> None:
    """Raises ValueError if a warp holds less of ``x`` than it needs."""
    steps = -(-weight.columns // _STEP[_kind(weight, fp8)])
    if 0 < plan.held * plan.warps < steps:
        raise ValueError(
            f"plan holds {plan.held} steps of x in each of {plan.warps} warps; weight has {steps}"
        )


def plan_specs(hopper: bool) -> Iterator[KernelSpec]:
    """The kernels of all plans of ``plan_for``."""
    yield from map(f16_spec, _stream_plans("f16", hopper))
    for plan in _stream_plans("w4", hopper):
        if plan.column_tiles == 1:
            yield w4_spec(32, plan)
        yield w4_spec(128, plan)
    yield from (nested_spec(False, plan) for plan in _stream_plans("nested", hopper))
    yield from (nested_spec(True, plan) for plan in _stream_plans("nested fp8", hopper))
    if hopper:
        yield from hopper_specs()
        yield from wide_specs()
    yield from tiled_specs(hopper)


def _stream_plans(kind: Kind, hopper: bool) -> Iterator[Plan]:
    more = _HOPPER_PLANS[kind].values() if hopper else ()
    yield from dict.fromkeys([*_STREAM_PLANS[kind].values(), *more])


def _kind(weight: Weight, fp8: bool) -> Kind:
    if isinstance(weight, NestedWeight):
        return "nested fp8" if fp8 else "nested"
    return "f16" if isinstance(weight, F16Weight) else "w4"


def _spec(kind: Kind, plan: AnyPlan, group: int = 128) -> KernelSpec:
    if isinstance(plan, TiledPlan):
        return tiled_spec(kind, plan, group=group)
    if isinstance(plan, WidePlan):
        return wide_spec(plan)
    if isinstance(plan, HopperPlan):
        return hopper_spec(kind, plan)
    source = kind.split()[0]
    # Of 4-bit weights: chunks of 32 that share a scale; a group of 64 reads its scale twice.
    leading = {"f16": "", "w4": f"{4 if group >= 128 else 1}, ", "nested": "0, "}.get(kind, "1, ")
    cut = f"{leading}{plan.column_tiles}, {plan.warps}, {plan.stages}, {plan.held}"
    x = plan.column_tiles * _STEP[kind] * 16 if plan.held < 0 else 0
    ring = plan.warps * plan.stages * (_STAGE_BYTES[kind] + x)
    return KernelSpec(f"gemm_{source}.cu", f"linear_{source}<{cut}>", 32 * plan.warps, ring, True)


def f16_spec(plan: AnyPlan) -> KernelSpec:
    """The kernel for FP16 weights."""
    return _spec("f16", plan)


def w4_spec(group: int, plan: AnyPlan) -> KernelSpec:
    """The kernel for 4-bit weights with a scale for every ``group`` columns."""
    return _spec("w4", plan, group)


def nested_spec(fp8: bool, plan: AnyPlan) -> KernelSpec:
    """The kernel for nested weights, in either mode."""
    return _spec("nested fp8" if fp8 else "nested", plan)
