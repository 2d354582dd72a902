"""How launches of 4-bit weights by Hopper's warpgroup products are cut (``gemm_w4_hopper.cu``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from deepinfer.kernels.compiler import KernelSpec
from deepinfer.kernels.linear_tiled import splits_for

GROUP_MIN: Final = 128
"""The smallest group of columns with a scale that these kernels take."""

_STEP: Final = 128
"""Columns of a weight that are copied and multiplied at once."""


@dataclass(frozen=True, slots=True)
class WidePlan:
    """A launch on sm_90a: ``columns`` rows of x a CTA (32, 64 or 128) and 64 ``groups`` rows of W,
    ``stages`` steps of K in shared memory, ``resident`` CTAs an SM; ``splits`` of them share K
    (more than one needs a ``Workspace``)."""

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


_PLANS: Final = (WidePlan(32, 1, 6, 3), WidePlan(64, 2, 4, 2), WidePlan(128, 2, 5, 1))


def wide_plan(n: int, k: int, m: int, sm_count: int, *, split: bool = True) -> WidePlan:
    """The measured best cut of a weight ``[n, k]`` times ``m`` rows; ``split``: K may be shared."""
    plan = next((each for each in _PLANS if m <= each.columns), _PLANS[-1])
    ctas, area = min(plan.resident, 2) * sm_count, plan.rows * plan.columns
    splits = splits_for(plan.blocks(n, m), ctas, k // _STEP, area) if split else 1
    return replace(plan, splits=splits)


def wide_spec(plan: WidePlan) -> KernelSpec:
    """The kernel of a plan."""
    stage = plan.columns * 2 * _STEP + plan.rows * _STEP // 2
    sums = plan.columns * (plan.rows + 4) * 4
    name = f"linear_w4_hopper<{plan.groups}, {plan.columns}, {plan.stages}, {plan.resident}>"
    threads = 128 * plan.groups
    return KernelSpec("gemm_w4_hopper.cu", name, threads, max(plan.stages * stage, sums), True)


def wide_specs() -> Iterator[KernelSpec]:
    """The kernels of all plans of ``wide_plan``."""
    yield from map(wide_spec, _PLANS)
