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
    a ``Workspace``). With a ``cluster`` of CTAs these divide the steps of one tile, whatever
    ``share`` says, and add up in their shared memory. An SM has room for ``resident`` CTAs.
    """

    columns: int
    groups: int
    step: int
    resident: int
    share: int
    cluster: int = 1

    @property
    def rows(self) -> int:
        """Rows of W of a tile."""
        return 64 * self.groups

    def steps(self, k: int) -> int:
        """Steps of a tile of a weight of ``k`` columns."""
        return -(-k // self.step)

    def grid(self, n: int, k: int, m: int) -> tuple[int, int, int]:
        """CTAs for a weight ``[n, k]`` and ``m`` rows of x."""
        if self.cluster > self.steps(k):
            raise ValueError(f"plan divides {self.steps(k)} steps of K by {self.cluster} CTAs")
        if self.cluster > 1:
            return -(-n // self.rows) * self.cluster, -(-m // self.columns), 1
        units = -(-n // self.rows) * self.steps(k)
        return -(-units // self.share), -(-m // self.columns), 1

    def splits(self, k: int) -> bool:
        """Whether CTAs share tiles."""
        return self.cluster == 1 and self.share % self.steps(k) != 0

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
    cut = (
        f"{plan.columns}, {plan.groups}, {plan.step}, {plan.stages(kind)}, {plan.resident}, "
        f"{plan.cluster}"
    )
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
"""Columns of W from where on a tile is better wide, if many CTAs must share it anyway."""
_SHARE_MIN: Final = 4
"""Steps of a CTA at least: fewer are not worth the adding up."""
_EVEN: Final = 0.6
"""Sharing a tile takes several microseconds: rather whole tiles, or parts of one tile to each CTA,
if so many of the CTAs then have work."""


def _cut(columns: int, groups: int, step: int, resident: int, cluster: int = 1) -> HopperPlan:
    return HopperPlan(columns, groups, step, resident, share=1, cluster=cluster)


_MANY_CUTS: Final = ((32, _cut(32, 3, 128, 1)), (64, _cut(64, 3, 128, 1)))
_MANY_WIDEST: Final = _cut(128, 3, 64, 1)
_FEW_NARROW: Final = _cut(32, 1, 128, 2)
_FEW_WIDE: Final = _cut(64, 2, 128, 1)
_CLUSTERS: Final = ((32, _cut(32, 2, 128, 1, 4)), (64, _cut(64, 2, 128, 1, 4)))


def hopper_plan(n: int, k: int, m: int, sm_count: int, *, split: bool = True) -> HopperPlan:
    """The measured best cut of a weight ``[n, k]`` times ``m`` rows; ``split``: K may be shared.

    It does not depend on how the weight is stored: the order of sums is the same for all.
    """
    for most, plan in _CLUSTERS:
        ctas = -(-n // plan.rows) * plan.cluster
        if m <= most and ctas <= sm_count and plan.cluster <= plan.steps(k):
            return replace(plan, share=plan.steps(k))
    if n >= _MANY * sm_count:
        cut = next((plan for most, plan in _MANY_CUTS if m <= most), _MANY_WIDEST)
    else:
        cut = _FEW_NARROW if m <= (64 if k >= _LONG else 128) else _FEW_WIDE
    down = -(-m // cut.columns)
    room = HOPPER_FLOATS // (2 * cut.rows * cut.columns * down)
    ctas = max(1, min(sm_count * cut.resident // down, room))
    return replace(cut, share=_share(-(-n // cut.rows), cut.steps(k), ctas, split))


def _share(tiles: int, steps: int, ctas: int, split: bool) -> int:
    """Steps of each CTA, for ``tiles`` of ``steps`` and room for ``ctas``."""
    waves = -(-tiles // ctas)
    if not split or tiles >= _EVEN * waves * ctas:
        return waves * steps
    for parts in range(min(ctas // tiles, steps // _SHARE_MIN), 1, -1):
        if steps % parts == 0 and parts * tiles >= _EVEN * ctas:
            return steps // parts
    share = max(-(-tiles * steps // ctas), _SHARE_MIN)
    return steps if share < steps < 2 * share else share


def hopper_specs() -> Iterator[KernelSpec]:
    """The kernels of all plans of ``hopper_plan``."""
    kinds: tuple[Kind, ...] = ("f16", "nested", "nested fp8")
    for kind in kinds:
        measured = (*(cut for _, cut in (*_MANY_CUTS, *_CLUSTERS)), _MANY_WIDEST)
        for cut in (*measured, _FEW_NARROW, _FEW_WIDE):
            yield hopper_spec(kind, cut)
