"""What a worker on a card is told; without torch, for the launcher makes it."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.kvstore.core.precision import LEVELS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedSettings:
    """What a worker with a nested model is told besides; another model has none of it.

    Raises:
        ValueError: fewer levels than two, or too many; both shed and start_shed.
    """

    levels: int = 2
    """Of precision: FP16, FP8, and what is between them."""
    w8a8: bool = False
    """Large steps in FP8 have their activations in FP8 too."""
    shed: bool = False
    """The lower planes may leave the card for KV blocks, and come back."""
    shed_head: bool = False
    """Those of the LM head as well, and of an embedding that is tied to it."""
    start_shed: bool = False
    """The lower planes never come to the card: FP8 is all that there is."""

    def __post_init__(self) -> None:
        if not 2 <= self.levels <= LEVELS_MAX:
            raise ValueError(f"precision_levels = {self.levels}: must be 2 to {LEVELS_MAX}")
        if self.shed and self.start_shed:
            raise ValueError("start_shed: lower planes that are not there cannot be shed as well")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSettings:
    """What a worker on a CUDA card is told besides.

    Raises:
        ValueError: memory_utilization is not above 0 and at most 1.
    """

    memory_utilization: float = 0.9
    """The share of the card that may be in use when the worker serves."""
    shared: bool = False
    """Other workers are on the same card: ``memory_utilization`` is of what this one takes, else
    of what everybody does."""
    fill_card: bool = True
    """The KV pool takes what is left of that; ``WorkerConfig.blocks_total`` is the least that will
    do. Otherwise it has exactly so many blocks."""
    probe: bool = True
    """Measure the bus and what can be pinned."""
    deterministic: bool = False
    """Every token is computed by kernels whose order of sums no other token changes."""

    def __post_init__(self) -> None:
        if not 0 < self.memory_utilization <= 1:
            raise ValueError(
                f"memory_utilization = {self.memory_utilization}: must be above 0 and at most 1"
            )
