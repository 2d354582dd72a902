"""Runs a step: slices of requests in, logits out, KV left in the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from deepinfer.kvstore.core.precision import StepCost
from deepinfer.workers.backends.base import Backend, RowSpan
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.weights import LoadedModel
from deepinfer.workers.pool import PagedPool

LOGIT_ROWS: Final = 64
"""Rows that go through the LM head at once: bounds a step's logits of all rows."""


Visit = Callable[[int, int, Tensor], None]


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One request's rows in a step.

    ``token_ids`` are the tokens to compute, ``start`` the position of the first of them (equally:
    how many tokens are cached), ``block_table`` the blocks of positions ``0 .. start + n - 1``
    (more may follow), ``logits`` whether the last row's logits are wanted.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    logits: bool


class Levels(Protocol):
    """What computes in FP8 at which level, as ``PrecisionLevels`` says it."""

    @property
    def count(self) -> int:
        """Levels."""
        ...

    def fp8_layers(self, level: int) -> tuple[bool, ...]:
        """For each layer whether it computes in FP8. Raises ValueError for an unknown level."""
        ...

    def fp8_head(self, level: int) -> bool:
        """Whether the LM head does."""
        ...

    def w8a8(self, level: int) -> bool:
        """Whether the layers' activations are in FP8 too."""
        ...


class ModelRunner:
    """A decoder bound to a pool. Only the engine thread may call it.

    ``model`` is a loaded checkpoint, or a decoder that another runner already packed (several
    pools may share one copy of the weights). ``levels`` replace the decoder's own levels, if
    its weights are nested.

    Raises ValueError when the pool's layout is not the model's.
    """

    def __init__(
        self,
        model: LoadedModel | Decoder,
        pool: PagedPool,
        backend: Backend,
        levels: Levels | None = None,
    ) -> None:
        config = model.config
        expected = (config.layers, config.kv_heads, config.head_dim)
        layout = pool.layout
        if (layout.layers, layout.kv_heads, layout.head_dim) != expected:
            raise ValueError(
                f"pool has (layers, kv_heads, head_dim) = "
                f"{(layout.layers, layout.kv_heads, layout.head_dim)}, the model {expected}"
            )
        self.decoder = model if isinstance(model, Decoder) else Decoder(model, backend)
        self.config = config
        self.pool = pool
        self.backend = backend
        self.costs: tuple[StepCost, ...] = ()
        """What steps take at each level (``costs.measure_costs``); () if that was not measured."""
        self._levels: Levels = levels or self.decoder.levels
        self.level_min = 0
        """The lowest level that there is now: below it weights are not there."""
        with torch.inference_mode():
            backend.calibrate(self.decoder.linears(), layout)

    @property
    def levels(self) -> int:
        """How many levels the weights have; those of a model that is not nested have one."""
        return self._levels.count

    @property
    def w8a8_rows(self) -> int:
        """Steps of so many rows may be W8A8; 0: none."""
        return self.decoder.levels.w8a8_rows

    @torch.inference_mode()
    def forward(
        self, slices: Sequence[SequenceSlice], level: int = 0, next_level: int | None = None
    ) -> Tensor:
        """Compute ``slices`` in one step, at a level of 0 to ``levels - 1``, or ``levels``: W8A8.

        ``next_level``, that of the step to come, is for runners that launch ahead; unused here.

        Returns float32 ``[slices that want logits, vocab]``, in their order. Every slice's K and
        V are in the pool afterwards. Blocks that two slices share must not be written by either
        (only positions ``>= start`` are written).

        Raises ValueError for an unknown level; naming the slice for: no tokens, a token id
        outside the vocabulary, positions beyond the model's or the block table's reach, a block id
        outside the pool.
        """
        return self._last_logits(slices, self._residual(slices, level), level)

    def _last_logits(self, slices: Sequence[SequenceSlice], residual: Tensor, level: int) -> Tensor:
        last, row = [], -1
        for part in slices:
            row += len(part.token_ids)
            if part.logits:
                last.append(row)
        if not last:
            return torch.empty((0, self.config.vocab_size))
        rows = torch.tensor(last, device=self.backend.device)
        return self._logits(residual.index_select(0, rows), level)

    def _logits(self, residual: Tensor, level: int) -> Tensor:
        return self.decoder.logits(residual, self._levels.fp8_head(level))

    @torch.inference_mode()
    def forward_all(self, slices: Sequence[SequenceSlice], level: int = 0) -> Tensor:
        """As ``forward``, with logits of every row: float32 ``[rows of all slices, vocab]``.

        For prompt log-probabilities and perplexity; ``SequenceSlice.logits`` is not looked at.
        """
        rows = sum(len(part.token_ids) for part in slices)
        residual = self._residual(slices, level)[:rows]
        return torch.cat([self._logits(part, level) for part in torch.split(residual, LOGIT_ROWS)])

    @torch.inference_mode()
    def forward_and_score(
        self, slices: Sequence[SequenceSlice], rows: Sequence[range], visit: Visit, level: int = 0
    ) -> Tensor:
        """As ``forward``, and show ``visit`` the logits of further rows.

        ``rows`` has one range for each slice, of its rows counted from 0. ``visit(i, first,
        logits)`` gets float32 ``[some rows, vocab]`` of slice ``i`` from row ``first`` on, at most
        ``LOGIT_ROWS`` at once, for what is to be said of them is smaller than they are.
        """
        residual = self._residual(slices, level)
        offset = 0
        for index, (part, wanted) in enumerate(zip(slices, rows, strict=True)):
            for first in range(wanted.start, wanted.stop, LOGIT_ROWS):
                last = min(first + LOGIT_ROWS, wanted.stop)
                part_of = residual[offset + first : offset + last]
                visit(index, first, self._logits(part_of, level))
            offset += len(part.token_ids)
        return self._last_logits(slices, residual, level)

    def move_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block ``a`` to block ``b`` for each pair ``(a, b)``, all at once."""
        if pairs:
            sources, targets = (torch.tensor(ids) for ids in zip(*pairs, strict=True))
            self.pool.storage[targets] = self.pool.storage[sources]

    def _residual(self, slices: Sequence[SequenceSlice], level: int) -> Tensor:
        in_fp8 = self._levels.fp8_layers(level)
        if level < self.level_min:
            raise ValueError(f"level = {level}: must be {self.level_min} or more without planes")
        if not slices:
            raise ValueError("forward needs at least one slice")
        for index, part in enumerate(slices):
            self._validate(index, part)
        plan = self.backend.plan(
            [RowSpan(part.start, len(part.token_ids), part.block_table) for part in slices],
            self.pool.layout,
            self.config.heads,
        )
        tokens = [token for part in slices for token in part.token_ids]
        tokens += [0] * (plan.padded_rows - len(tokens))
        ids = torch.tensor(tokens, dtype=torch.int64, device=self.backend.device)
        return self.decoder.forward(ids, plan, self.pool, in_fp8, self._levels.w8a8(level))

    def _validate(self, index: int, part: SequenceSlice) -> None:
        layout = self.pool.layout
        count = len(part.token_ids)
        end = part.start + count
        if count < 1 or part.start < 0:
            raise ValueError(f"slice {index}: {count} tokens from position {part.start}")
        if min(part.token_ids) < 0 or max(part.token_ids) >= self.config.vocab_size:
            raise ValueError(
                f"slice {index}: token ids must be in 0..{self.config.vocab_size - 1}, got "
                f"{min(part.token_ids)}..{max(part.token_ids)}"
            )
        if end > self.config.max_positions:
            raise ValueError(
                f"slice {index}: position {end - 1} is beyond the model's "
                f"{self.config.max_positions} positions"
            )
        blocks = layout.blocks_for(end)
        if len(part.block_table) < blocks:
            raise ValueError(
                f"slice {index}: {end} tokens need {blocks} blocks, the table has "
                f"{len(part.block_table)}"
            )
        used = part.block_table[:blocks]
        if min(used) < 0 or max(used) >= self.pool.num_blocks:
            raise ValueError(
                f"slice {index}: block ids must be in 0..{self.pool.num_blocks - 1}, got "
                f"{min(used)}..{max(used)}"
            )
