"""What every kernel needs of a card, and how many blocks of it an SM then holds.

The limits are of *CUDA C++ Programming Guide*, "Compute Capabilities"; the rounding of registers
and shared memory is that of NVIDIA's occupancy calculator.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from deepinfer.kernels.compiler import Compiled, KernelSpec, Resources, precompile

Limit = Literal["threads", "blocks", "registers", "shared memory"]

_REGISTER_UNIT: Final = 256
_WARP_UNIT: Final = 4
_SHARED_UNIT: Final = 128
_SHARED_RESERVED: Final = 1024
"""Shared memory that CUDA itself takes of every block."""


@dataclass(frozen=True, slots=True)
class SmLimits:
    """What one SM has, and the most shared memory one block may have."""

    registers: int
    threads: int
    blocks: int
    shared_bytes: int
    block_shared_bytes: int


ARCHS: Final = {
    "sm_86": SmLimits(65536, 1536, 16, 100 * 1024, 99 * 1024),
    "sm_90a": SmLimits(65536, 2048, 32, 228 * 1024, 227 * 1024),
}
"""What the kernels are compiled for in CI: the target, and the card they are measured on."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks of a kernel that one SM holds at once; ``share`` is of the SM's thread slots."""

    blocks: int
    share: float
    limit: Limit


def all_specs(arch: str) -> Iterator[KernelSpec]:
    """Every kernel that production may launch where they are compiled for ``arch``.

    That is ``specs()`` of each module of this folder, or its ``specs_for(arch)`` where not all
    cards launch the same.
    """
    for name in sorted(each.name for each in pkgutil.iter_modules([str(Path(__file__).parent)])):
        module = importlib.import_module(f"deepinfer.kernels.{name}")
        specs_for: Callable[[str], Iterator[KernelSpec]] | None = getattr(module, "specs_for", None)
        specs: Callable[[], Iterator[KernelSpec]] | None = getattr(module, "specs", None)
        if specs_for is not None:
            yield from specs_for(arch)
        elif specs is not None:
            yield from specs()


def compile_all(arch: str) -> list[Compiled]:
    """Compile every kernel for ``arch``; no GPU needed. Raises CompileError for the first bad."""
    return precompile(dict.fromkeys(all_specs(arch)), arch)


def occupancy(
    limits: SmLimits, threads: int, resources: Resources, dynamic_bytes: int
) -> Occupancy:
    """How many blocks of ``threads`` fit one SM, with ``dynamic_bytes`` of dynamic shared memory.

    Zero blocks where one block alone wants more than there is.
    """
    warps = -(-threads // 32)
    registers_a_warp = _ceil(max(resources.registers, 1) * 32, _REGISTER_UNIT)
    warps_by_registers = limits.registers // registers_a_warp // _WARP_UNIT * _WARP_UNIT
    used = resources.shared_bytes + dynamic_bytes
    shared = _ceil(used + _SHARED_RESERVED, _SHARED_UNIT)
    candidates: list[tuple[int, Limit]] = [
        (limits.threads // (warps * 32), "threads"),
        (limits.blocks, "blocks"),
        (warps_by_registers // warps, "registers"),
        (
            limits.shared_bytes // shared if used <= limits.block_shared_bytes else 0,
            "shared memory",
        ),
    ]
    blocks, limit = min(candidates, key=lambda each: each[0])
    return Occupancy(blocks, blocks * warps * 32 / limits.threads, limit)


def _ceil(value: int, unit: int) -> int:
    return -(-value // unit) * unit
