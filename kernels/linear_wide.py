"""How launches of many rows by Hopper's warpgroup products are cut (``csrc/gemm_hopper.cu``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from deepinfer.kernels.compiler import KernelSpec
from deepinfer.kernels.linear_tiled import Kind, splits_for

_STEP: Final[dict[Kind, int]] = {"f16": 64, "w4": 128, "nested": 64, "nested fp8": 64}
_ROW_BYTES: Final[dict[Kind, int]] = {"f16": 128, "w4": 64, "nested": 128, "nested fp8": 64}
"""Columns of a weight that are copied at once, and their bytes."""
_PRODUCT: Final = 128
"""Rows of x of one product, at most."""


@dataclass(frozen=True, slots=True)
class WidePlan:
    """A launch on sm_90a: ``columns`` rows of x a CTA (32, 64, 128 or 256) and 64 ``groups`` rows
    of W, ``stages`` steps of K in shared memory, ``resident`` CTAs an SM; ``splits`` of them share
    K (more than one needs a ``Workspace``)."""

    columns: int
    groups: int
    stages: int
    resident: int
    splits: int = 1

    @property
    def rows(self) -> int:
        """Rows of W a CTA."""
        return 64 * self.groups

    def blocks(self, n: int, m: int) -> int:
        """CTAs for one split of a weight of ``n`` rows times ``m`` rows of x."""
        return -(-n // self.rows) * -(-m // self.columns)


_PLANS: Final = (WidePlan(32, 2, 4, 2), WidePlan(64, 2, 4, 2), WidePlan(128, 2, 3, 2))
_W4_PLANS: Final = (WidePlan(32, 2, 6, 2), WidePlan(64, 2, 4, 2), WidePlan(128, 2, 5, 1))


def wide_plan(kind: Kind, n: int, k: int, m: int, sm_count: int, *, split: bool = True) -> WidePlan:
    """The measured best cut of a weight ``[n, k]`` times ``m`` rows; ``split``: K may be shared."""
    plans = _W4_PLANS if kind == "w4" else _PLANS
    plan = next((each for each in plans if m <= each.columns), plans[-1])
    ctas, area = plan.resident * sm_count, plan.rows * plan.columns
    splits = splits_for(plan.blocks(n, m), ctas, k // _STEP[kind], area) if split else 1
    return replace(plan, splits=splits)


def wide_spec(kind: Kind, plan: WidePlan, *, group: int = 128) -> KernelSpec:
    """The kernel of a plan; ``group``: columns that share a scale of 4-bit weights."""
    stage = plan.columns * 2 * _STEP[kind] + plan.rows * _ROW_BYTES[kind]
    sums = plan.columns * (plan.rows + 4) * 4
    leading = {"f16": "", "w4": f"{4 if group >= 128 else 1}, ", "nested": "0, "}.get(kind, "1, ")
    each = min(plan.columns, _PRODUCT)
    blocks = plan.columns // each
    cut = f"{leading}{plan.groups}, {each}, {blocks}, {plan.stages}, {plan.resident}"
    name = f"linear_{kind.split()[0]}_hopper<{cut}>"
    return KernelSpec(
        "gemm_hopper.cu", name, 128 * plan.groups, max(plan.stages * stage, sums), True
    )


def wide_specs() -> Iterator[KernelSpec]:
    """The kernels of all plans of ``wide_plan``."""
    for plan in _PLANS:
        for kind in ("f16", "nested", "nested fp8"):
            yield wide_spec(kind, plan)
    yield from (wide_spec("w4", plan) for plan in _W4_PLANS)
