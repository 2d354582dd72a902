"""Linears of 17 to 256 rows by Hopper's warpgroup products: ``csrc/gemm_warpgroup.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from deepinfer.kernels.compiler import KernelSpec
from deepinfer.kernels.linear_tiled import Kind

_GROUP: Final = 32
"""Rows of x that are finished at once, as in the kernel."""
_WEIGHT_BYTES: Final[dict[Kind, int]] = {"f16": 2, "nested": 2, "nested fp8": 1}
_NAMES: Final[dict[Kind, str]] = {
    "f16": "f16_warpgroup<",
    "nested": "nested_warpgroup<0, ",
    "nested fp8": "nested_warpgroup<1, ",
}
_SHARED_BYTES: Final = {1: 226 * 1024, 2: 111 * 1024}
"""Dynamic shared memory of a CTA at most, by how many of them an SM holds."""
_STAGES_MAX: Final = 12

HOPPER_FLOATS: Final = 1 << 23
WORKSPACE_TICKETS: Final = 8192
"""What plans need of a workspace, at most."""


@dataclass(frozen=True, slots=True)
class HopperPlan:
    """A launch on sm_90a whose warpgroups have 64 rows of W each and ``columns`` rows of x.

    K is taken in steps of ``step`` columns of W; a CTA takes ``share`` steps, across tiles of W if
    so many, or a part of one tile's: then the last CTA of a tile adds the sums of all (which needs
    a ``Workspace``). An SM has room for ``resident`` CTAs.
    """

    columns: int
    groups: int
    step: int
    resident: int
    share: int

    @property
    def rows(self) -> int:
        """Rows of W of a tile."""
        return 64 * self.groups

    def steps(self, k: int) -> int:
        """Steps of a tile of a weight of ``k`` columns."""
        return -(-k // self.step)

    def grid(self, n: int, k: int, m: int) -> tuple[int, int, int]:
        """CTAs for a weight ``[n, k]`` and ``m`` rows of x."""
        units = -(-n // self.rows) * self.steps(k)
        return -(-units // self.share), -(-m // self.columns), 1

    def splits(self, k: int) -> bool:
        """Whether CTAs share tiles."""
        return self.share % self.steps(k) != 0

    def floats(self, n: int, k: int, m: int) -> int:
        """Of a workspace: every CTA leaves its sums of two tiles at most."""
        across, down, _ = self.grid(n, k, m)
        return across * down * 2 * self.rows * self.columns if self.splits(k) else 0

    def tickets(self, n: int, m: int) -> int:
        """Of a workspace: one for each tile."""
        return -(-n // self.rows) * -(-m // self.columns)

    def stages(self, kind: Kind) -> int:
        """Steps in shared memory: as many as fit."""
        room = _SHARED_BYTES[self.resident] - 4 * self.columns - self._sums
        return min(_STAGES_MAX, room // (self._stage(kind) + 16))

    def shared_bytes(self, kind: Kind) -> int:
        """Dynamic shared memory of a CTA: the stages, sums to be finished, two barriers a stage."""
        return self.stages(kind) * (self._stage(kind) + 16) + self._sums

    def _stage(self, kind: Kind) -> int:
        return self.step * (2 * self.columns + self.rows * _WEIGHT_BYTES[kind])

    @property
    def _sums(self) -> int:
        return _GROUP * (self.rows + 4) * 4


def hopper_spec(kind: Kind, plan: HopperPlan) -> KernelSpec:
    """The kernel of a plan; it compiles for ``sm_90a`` alone."""
    cut = f"{plan.columns}, {plan.groups}, {plan.step}, {plan.stages(kind)}, {plan.resident}"
    return KernelSpec(
        "gemm_warpgroup.cu",
        f"linear_{_NAMES[kind]}{cut}>",
        128 * plan.groups + 128,
        plan.shared_bytes(kind),
        True,
    )


_MANY: Final = 128
"""Rows of W for each multiprocessor, from where on tiles alone are work for all."""
_LONG: Final = 4096
"""Columns of W from where on wide tiles pay, though CTAs must share them."""
_SHARE_MIN: Final = 4
"""Steps of a CTA at least: fewer are not worth the adding up."""


def _cut(columns: int, groups: int, step: int, resident: int) -> HopperPlan:
    return HopperPlan(columns, groups, step, resident, share=1)


_TALL: Final = _cut(32, 3, 128, 1)
_NARROW: Final = _cut(32, 1, 128, 2)
_MIDDLE: Final = _cut(64, 2, 128, 1)
_WIDE: Final = _cut(128, 2, 128, 1)
_WIDEST: Final = _cut(256, 2, 64, 1)


def hopper_plan(n: int, k: int, m: int, sm_count: int, *, split: bool = True) -> HopperPlan:
    """The measured best cut of a weight ``[n, k]`` times ``m`` rows; ``split``: K may be shared.

    It does not depend on how the weight is stored: the order of sums is the same for all.
    """
    if n >= _MANY * sm_count:
        plans = ((32, _TALL), (64, _MIDDLE), (128, _WIDE))
        cut = next((plan for most, plan in plans if m <= most), _WIDEST)
    else:
        cut = _NARROW if m <= 32 or (m <= 64 and k < _LONG) else _MIDDLE
    down, tiles, steps = -(-m // cut.columns), -(-n // cut.rows), cut.steps(k)
    room = HOPPER_FLOATS // (2 * cut.rows * cut.columns * down)
    ctas = max(1, min(sm_count * cut.resident // down, room))
    if not split:
        share = -(-tiles // ctas) * steps
    elif 4 * tiles >= 3 * ctas and tiles <= ctas:
        share = steps  # what CTAs are left over would not make up for sharing
    else:
        share = max(-(-tiles * steps // ctas), min(_SHARE_MIN, steps))
    return replace(cut, share=share)


def hopper_specs() -> Iterator[KernelSpec]:
    """The kernels of all plans of ``hopper_plan``."""
    kinds: tuple[Kind, ...] = ("f16", "nested", "nested fp8")
    for kind in kinds:
        for cut in (_TALL, _NARROW, _MIDDLE, _WIDE, _WIDEST):
            yield hopper_spec(kind, cut)
