"""The card's memory at start-up: who gets how much, said once, refused where it does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from deepinfer.kvstore.core.layout import KvLayout
from deepinfer.workers.gpu.card import GpuMemoryError

MIB: Final = 2**20

CONTEXT_BYTES: Final = 1024 * MIB
"""About what a process's CUDA context and kernels take: the driver tells only all processes' sum,
and on a card that workers share somebody else's may be most of it."""

GRAPH_BYTES: Final = 2 * MIB
"""Set aside for each graph of a decode step before it is captured; 1.3 MiB were seen."""

PIECE_BYTES: Final = MIB // 3
"""The same for each piece of a wide step of one bucket of rows; 9 MiB were seen for 37."""

SLACK_BYTES: Final = 256 * MIB
"""Set aside for cuBLAS's workspaces, the allocator's rounding and modules loaded later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes of the card by purpose. Frozen: stages of a start-up make it by ``replace``."""

    card: int
    utilization: float
    """The share of the card that this worker may take, with all that was taken before it."""
    context: int
    """CUDA's context and modules, and what other processes held, if the card is this worker's."""
    others: int = 0
    """What they held, if the card is shared: then ``utilization`` counts this worker alone."""
    weights: int
    """All but lower planes."""
    lower: int = 0
    """Lower planes of a nested model: blocks for KV where they may leave."""
    scratch: int
    """Activations, attention's partial results, workspaces."""
    graphs: int
    """Of decode steps, at all levels of precision."""
    pieces: int = 0
    """Graphs of steps with prompts."""
    swaps: int = 0
    """Buffers that swaps are gathered in."""
    kv: int = 0

    @property
    def used(self) -> int:
        """All of it."""
        weights, graphs = self.weights + self.lower, self.graphs + self.pieces
        return self.context + weights + self.scratch + graphs + self.swaps + self.kv

    @property
    def left(self) -> int:
        """What nobody was given; not below 0 unless something else took memory meanwhile."""
        return self.card - self.used - self.others

    def room(self) -> int:
        """Bytes that a KV pool may take within ``utilization``; may be negative."""
        return min(int(self.card * self.utilization) - self.used, self.left)

    def lines(self) -> tuple[str, ...]:
        """A table: one purpose a line, in MiB and in percent of the card."""
        rows = (
            ("CUDA context", self.context),
            ("other processes", self.others),
            ("weights", self.weights),
            *([("lower planes", self.lower)] if self.lower else []),
            ("scratch", self.scratch),
            ("graphs, decode", self.graphs),
            ("graphs, prompts", self.pieces),
            ("swap buffers", self.swaps),
            ("KV pool", self.kv),
            ("left", self.left),
            ("card", self.card),
        )
        return tuple(
            f"{name:<24}{size / MIB:>10,.0f} MiB {size / self.card:>7.1%}" for name, size in rows
        )


def blocks_that_fit(budget: MemoryBudget, layout: KvLayout, wanted: int) -> int:
    """Blocks of a pool that takes what the budget leaves: at least ``wanted``.

    Raises:
        GpuMemoryError: there is room for fewer; says both numbers.
    """
    blocks = budget.room() // layout.block_bytes
    if blocks < wanted:
        raise GpuMemoryError(
            f"gpu_memory_utilization = {budget.utilization:g} of {budget.card / MIB:,.0f} MiB "
            f"leaves {max(0, budget.room()) / MIB:,.0f} MiB for KV, {wanted} blocks of "
            f"{layout.block_bytes:,} bytes need {wanted * layout.block_bytes / MIB:,.1f} MiB: "
            + _shares(budget)
        )
    return blocks


def check_fits(budget: MemoryBudget, layout: KvLayout, blocks: int) -> None:
    """Refuse a pool of ``blocks`` that the whole card has no room for.

    Raises:
        GpuMemoryError: says what it needs and what is left.
    """
    needed = layout.payload_bytes(blocks)
    if needed > budget.left:
        raise GpuMemoryError(
            f"max_cache = {blocks} blocks needs {needed / MIB:,.0f} MiB, the card has "
            f"{max(0, budget.left) / MIB:,.0f} MiB left of {budget.card / MIB:,.0f}: "
            + _shares(budget)
        )


def _shares(budget: MemoryBudget) -> str:
    weights, graphs = budget.weights + budget.lower, budget.graphs + budget.pieces
    return (
        f"context and others take {budget.context / MIB:,.0f}, weights {weights / MIB:,.0f}, "
        f"scratch {budget.scratch / MIB:,.0f}, graphs {graphs / MIB:,.0f}, swap buffers "
        f"{budget.swaps / MIB:,.0f}"
    )
