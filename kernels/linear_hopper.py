"""Linears of 17 to 256 rows by Hopper's warpgroup products: ``csrc/gemm_warpgroup.cu``."""

from __future__ import annotations

from dataclasses import dataclass
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
