"""How the launches of the tiled linear kernels (17 rows and more) are cut, by shape and card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, Literal

from deepinfer.kernels.compiler import KernelSpec

Kind = Literal["f16", "w4", "nested", "nested fp8"]
"""How weights are stored, and for nested ones the mode."""

ROWS_MAX: Final = 1024
"""The most rows of ``x`` of a launch."""

WORKSPACE_FLOATS: Final = 1 << 22
"""Of the sums that splits leave for each other, at most."""

_BLOCK: Final[dict[Kind, int]] = {"f16": 64, "w4": 128, "nested": 64, "nested fp8": 64}
"""Columns of a weight that four lanes take at once, as in ``csrc/gemm_tiled.cu``."""
_BLOCK_BYTES: Final[dict[Kind, int]] = {"f16": 128, "w4": 64, "nested": 128, "nested fp8": 64}
"""What those are in memory."""

_SHARED_BYTES: Final = {2: 96 * 1024, 3: 72 * 1024}
"""Of a CTA, at most, by how many of them an H200's SM shall hold; an SM86 holds one of either."""


@dataclass(frozen=True, slots=True)
class TiledPlan:
    """A launch whose warps share tiles of W and of X.

    A warp takes 16 ``row_tiles`` rows of W and 8 ``column_tiles`` rows of X; a CTA has
    ``row_warps`` times ``column_warps`` of those, which divide every step of K among
    ``step_warps``. ``splits`` CTAs share K (more than one needs a ``Workspace``). ``resident``: for
    how many CTAs an SM of a large card has registers and shared memory.
    """

    column_tiles: int
    row_tiles: int
    row_warps: int
    column_warps: int = 1
    step_warps: int = 1
    splits: int = 1
    resident: int = 2

    @property
    def rows(self) -> int:
        """Rows of W a CTA."""
        return 16 * self.row_tiles * self.row_warps

    @property
    def columns(self) -> int:
        """Rows of X a CTA."""
        return 8 * self.column_tiles * self.column_warps

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.column_warps * self.step_warps

    def blocks(self, n: int, m: int) -> int:
        """CTAs for one split of a weight of ``n`` rows times ``m`` rows of x."""
        return -(-n // self.rows) * -(-m // self.columns)


_NARROW: Final = TiledPlan(4, 2, 4, resident=3)
_NARROW_LOW: Final = TiledPlan(4, 2, 2, step_warps=2)
_WIDE: Final = TiledPlan(8, 2, 4, resident=3)
_WIDE_LOW: Final = TiledPlan(8, 2, 2, step_warps=2)
# Sums of a group need as many registers again.
_W4_NARROW: Final = TiledPlan(4, 1, 8)
_W4_WIDE: Final = TiledPlan(8, 1, 8)


def tiled_plan(
    kind: Kind, n: int, k: int, m: int, sm_count: int, *, split: bool = True
) -> TiledPlan:
    """The measured best cut of a weight ``[n, k]`` times ``m`` rows; ``split``: K may be shared."""
    if kind == "w4":
        plan = _W4_NARROW if m <= 32 else _W4_WIDE
    else:
        high, low = (_NARROW, _NARROW_LOW) if m <= 32 else (_WIDE, _WIDE_LOW)
        plan = high if high.blocks(n, m) >= sm_count else low
    steps = k // (_BLOCK[kind] * plan.step_warps)
    ctas, area = plan.resident * sm_count, plan.rows * plan.columns
    splits = splits_for(plan.blocks(n, m), ctas, steps, area) if split else 1
    return replace(plan, splits=splits)


def splits_for(blocks: int, ctas: int, steps: int, area: int) -> int:
    """Over how many CTAs K is split: ``ctas`` in all are enough, each with two ``steps`` or more;
    their sums of ``area`` floats fit the workspace."""
    return max(1, min(ctas // blocks, steps // 2, WORKSPACE_FLOATS // (blocks * area)))


def tiled_spec(kind: Kind, plan: TiledPlan, *, group: int = 128) -> KernelSpec:
    """The kernel of a plan; ``group``: columns that share a scale of 4-bit weights."""
    stage = plan.step_warps * (plan.rows * _BLOCK_BYTES[kind] + plan.columns * 2 * _BLOCK[kind])
    stages = min(8, _SHARED_BYTES[plan.resident] // stage)
    sums = plan.columns * (plan.rows + 4) * 4
    # Chunks of 32 that share a scale; a group of 64 reads its scale twice.
    leading = {"f16": "", "w4": f"{4 if group >= 128 else 1}, ", "nested": "0, "}.get(kind, "1, ")
    cut = (
        f"{leading}{plan.column_tiles}, {plan.row_tiles}, {plan.row_warps}, {plan.column_warps}, "
        f"{plan.step_warps}, {stages}, {plan.resident}"
    )
    name = f"linear_{kind.split()[0]}_tiled<{cut}>"
    return KernelSpec("gemm_tiled.cu", name, plan.threads, max(stages * stage, sums), True)


def tiled_specs(hopper: bool) -> Iterator[KernelSpec]:
    """The kernels of all plans of ``tiled_plan`` that a worker launches: none of plain FP16, for
    which cuBLAS is faster. ``hopper``: a card that has kernels of its own for all but groups of
    fewer than 128 columns."""
    for plan in (_W4_NARROW, _W4_WIDE):
        yield tiled_spec("w4", plan, group=32)
        if not hopper:
            yield tiled_spec("w4", plan)
    if not hopper:
        for plan in (_NARROW, _NARROW_LOW, _WIDE, _WIDE_LOW):
            yield tiled_spec("nested", plan)
            yield tiled_spec("nested fp8", plan)
