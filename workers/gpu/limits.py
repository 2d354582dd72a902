"""The largest step that was allocated for, and what no step may ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.kvstore.core.layout import KvLayout
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.runner import SequenceSlice


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest step: ``rows`` tokens of ``sequences`` requests, none longer than ``context``.

    ``sequences`` is a bucket of graphs, or beyond them all, and at most ``rows``.
    """

    rows: int
    sequences: int
    context: int


def check_slices(
    slices: Sequence[SequenceSlice], config: ModelConfig, layout: KvLayout, limits: StepLimits
) -> None:
    """Refuse a step that cannot be computed; block ids are looked at when they are written.

    Raises ValueError as ``GpuRunner.forward`` says.
    """
    if not slices:
        raise ValueError("forward needs at least one slice")
    rows = 0
    for index, part in enumerate(slices):
        count = len(part.token_ids)
        end = part.start + count
        rows += count
        if count < 1 or part.start < 0:
            raise ValueError(f"slice {index}: {count} tokens from position {part.start}")
        if min(part.token_ids) < 0 or max(part.token_ids) >= config.vocab_size:
            raise ValueError(
                f"slice {index}: token ids must be in 0..{config.vocab_size - 1}, got "
                f"{min(part.token_ids)}..{max(part.token_ids)}"
            )
        if end > limits.context:
            raise ValueError(
                f"slice {index}: position {end - 1} is beyond the {limits.context} "
                "positions that this runner was opened for"
            )
        if len(part.block_table) * layout.block_size < end:
            raise ValueError(
                f"slice {index}: {end} tokens need {layout.blocks_for(end)} blocks, the table has "
                f"{len(part.block_table)}"
            )
    if rows > limits.rows or len(slices) > limits.sequences:
        raise ValueError(
            f"a step of {rows} rows in {len(slices)} slices: at most {limits.rows} and "
            f"{limits.sequences} were allocated for"
        )
