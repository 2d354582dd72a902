"""Runs steps on a card: slices of requests in, logits and tokens out, KV left in the pool."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels.pointwise import copy_blocks
from deepinfer.kvstore.core.precision import StepCost
from deepinfer.workers.gpu.ahead import Claim, Lookout
from deepinfer.workers.gpu.decoder import GpuDecoder
from deepinfer.workers.gpu.deterministic import DeterministicDecoder, DeterministicSteps
from deepinfer.workers.gpu.graphs import (
    Bucket,
    context_bucket,
    row_bucket,
)
from deepinfer.workers.gpu.inputs import InputViews, on_card
from deepinfer.workers.gpu.limits import StepLimits, check_slices
from deepinfer.workers.gpu.sampler import GpuSampler
from deepinfer.workers.gpu.steps import GpuSteps
from deepinfer.workers.model.runner import LOGIT_ROWS, SequenceSlice, Visit
from deepinfer.workers.pool import PagedPool
from deepinfer.workers.sampler import SampleRow

WARM_UP_TOKENS: Final = 32
"""More than the kernels for few rows take."""


class GpuRunner:
    """A decoder bound to a pool on a card; what ``workers.engine.Runner`` asks for.

    Only the engine's thread may call it. Steps and their copies are on torch's current stream.
    Logits that it returns are overwritten by the next step, and by sampling from them.

    ``spares`` are blocks of the pool that no one else uses, one for each sequence of a step: with
    them the likely next step is launched while the last one's tokens are on their way (``ahead``).

    Steps are computed at one of ``levels`` of precision: 0 is FP16, the last is FP8. Where the
    decoder has W8A8, ``levels`` itself is that: the last level, with the activations of
    ``w8a8_rows`` rows or more in FP8 too.
    """

    def __init__(
        self,
        decoder: GpuDecoder,
        pool: PagedPool,
        sampler: GpuSampler,
        limits: StepLimits,
        *,
        fused_rows: int,
        multiprocessors: int,
        spares: Sequence[int] = (),
        level_min: int = 0,
    ) -> None:
        self.config = decoder.weights.config
        self.decoder = decoder
        self.pool = pool
        self.backend = sampler
        steps = DeterministicSteps if isinstance(decoder, DeterministicDecoder) else GpuSteps
        self._steps = steps(
            decoder,
            pool,
            sampler,
            limits,
            fused_rows=fused_rows,
            multiprocessors=multiprocessors,
        )
        self.counters = self._steps.counters
        self.levels = decoder.levels.count
        self.w8a8_rows = decoder.levels.w8a8_rows
        self.costs: tuple[StepCost, ...] = ()
        self.limits = limits
        self.spares = tuple(spares)
        self.level_min = level_min
        """No step may be computed below it: the lower planes are not there."""
        self._lookout = Lookout(self.spares, pool.layout.block_size, limits.context)
        if spares:
            sampler.follower = self

    @torch.inference_mode()
    def capture(self, captured: Callable[[str], None] | None = None) -> int:
        """See ``GpuSteps.capture``: for all levels."""
        return self._steps.capture(range(self.level_min, self.levels), captured)

    def warm_up(self) -> None:
        """Run a step with a prompt in it, over spare blocks: libraries load on first use.

        The objects of the start are kept from the garbage collector after that: looking through
        all of them takes longer than a step.
        """
        block_size = self.pool.layout.block_size
        table = self.spares[: -(-WARM_UP_TOKENS // block_size)]
        if len(table) * block_size < WARM_UP_TOKENS or self.limits.rows < WARM_UP_TOKENS:
            return
        for level in range(self.level_min, self.levels):
            self.forward([SequenceSlice([0] * WARM_UP_TOKENS, 0, table, logits=True)], level)
        self.forget()
        gc.collect()
        gc.freeze()

    @torch.inference_mode()
    def forward(
        self, slices: Sequence[SequenceSlice], level: int = 0, next_level: int | None = None
    ) -> Tensor:
        """Compute ``slices`` in one step, at ``level`` of precision.

        ``next_level`` announces that of the step that follows, None: the same. A step at another
        level than was announced is as right, but what was computed ahead of it is thrown away.

        Returns float32 ``[slices that want logits, vocab]``, in their order, a part of a buffer.
        Every slice's K and V are in the pool once the card gets there: nothing is waited for.

        Raises ValueError naming the slice for: no tokens, a token id outside the vocabulary,
        positions beyond the model's or the block table's reach, a block id outside the pool, and
        for more rows or slices than ``StepLimits`` names; for a level that there is not.
        """
        begin = time.perf_counter_ns()
        next_level = level if next_level is None else next_level
        self._check_level(level)
        self.decoder.levels.check(next_level)
        check_slices(slices, self.config, self.pool.layout, self.limits)
        self.backend.forget()
        claim = self._claim(slices, level)
        if claim is None:
            logits = self._compute(slices, level)
        elif claim.complete:
            logits = self._claimed(claim)
        else:
            logits = self._merge(slices, claim, level)
        # What is launched ahead has too few rows for W8A8.
        self._lookout.running(slices, min(next_level, self.levels - 1))
        self.counters.steps += 1
        self.counters.prepare_ns += time.perf_counter_ns() - begin
        return logits

    def launch(self, rows: Sequence[SampleRow], ids: Tensor) -> bool:
        """Launch the step that follows the last one; what ``sampler.Follower`` asks for."""
        foreseen = self._lookout.foresee(rows)
        rows_bucket = row_bucket(len(foreseen))
        level = self._lookout.level
        if not foreseen or rows_bucket is None or level < self.level_min:
            return False
        longest = max(row.start for row in foreseen) + 1
        bucket = Bucket(rows_bucket, context_bucket(longest, self.limits.context))
        inputs = self._steps.inputs.write(
            [SequenceSlice((0,), row.start, row.block_table, True) for row in foreseen],
            range(len(foreseen)),
            self._steps.shape(bucket),
            sources=[row.source for row in foreseen],
        )
        count = len(foreseen)
        tokens = inputs.token_ids[:count]
        torch.index_select(ids, 0, inputs.last_rows[:count], out=tokens)
        tokens.clamp_(min=0)  # a row without a token gets some, for the embedding's sake
        self._steps.run(bucket, level)
        self.counters.ahead_rows += count
        return True

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn what the step ahead was computed for; what ``sampler.Follower`` asks for."""
        self._lookout.learn(tokens, self.pool.copies_in)

    def forget(self) -> None:
        """Nothing that was computed so far is to be gone on with."""
        self.backend.forget()
        self._lookout.forget()

    def move_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks within the pool, behind the steps launched so far.

        ``pairs`` are (from, to). No block may be both, or be copied to twice.
        """
        if pairs:
            copy_blocks(self.pool.storage, on_card(pairs, torch.int32, self.pool.device))

    def _check_level(self, level: int) -> None:
        self.decoder.levels.check(level)
        if level < self.level_min:
            raise ValueError(
                f"precision level {level}: the lower planes are not on the card, only "
                f"{self.level_min} is left"
            )

    def _claim(self, slices: Sequence[SequenceSlice], level: int) -> Claim | None:
        """What of a plan was computed ahead; None: nothing."""
        claim = self._lookout.claim(slices, self.pool.copies_in, min(level, self.levels - 1))
        if claim is None:
            return None
        self.counters.ahead_used += claim.used
        self.move_blocks(claim.copies)
        return claim

    def _claimed(self, claim: Claim) -> Tensor:
        """Logits of a plan that was computed ahead."""
        count = len(claim.places)
        if claim.places == list(range(count)):
            return self.backend.first(count)
        return self.backend.pick(on_card(claim.places, torch.int64, self.pool.device))

    def _merge(self, slices: Sequence[SequenceSlice], claim: Claim, level: int) -> Tensor:
        """Logits of a plan of which only a part was computed ahead."""
        hits = [place for place in claim.places if place is not None]
        there = on_card(hits, torch.int64, self.pool.device)
        known = self.decoder.buffers.logits.index_select(0, there)
        pairs = list(zip(slices, claim.places, strict=True))
        computed = self._compute([part for part, place in pairs if place is None], level)
        order: list[int] = []
        old, new = 0, len(hits)
        for part, place in pairs:
            if place is not None:
                order.append(old)
                old += 1
            elif part.logits:
                order.append(new)
                new += 1
        index = on_card(order, torch.int64, self.pool.device)
        return torch.cat((known, computed)).index_select(0, index)

    def _compute(self, slices: Sequence[SequenceSlice], level: int) -> Tensor:
        """Launch a step of ``slices``; the logits that they want."""
        bucket = self._steps.bucket(slices)
        if bucket is None:
            inputs, _ = self._steps.wide(slices, level)
            return self._picked_logits(slices, inputs, level)
        inputs = self._steps.inputs.write(slices, range(len(slices)), self._steps.shape(bucket))
        self._steps.run(bucket, min(level, self.levels - 1))
        return self._step_logits(slices, inputs)

    @torch.inference_mode()
    def forward_and_score(
        self, slices: Sequence[SequenceSlice], rows: Sequence[range], visit: Visit, level: int = 0
    ) -> Tensor:
        """As ``forward``, and show ``visit`` the logits of further rows.

        ``rows`` has one range for each slice, of its rows counted from 0. ``visit(i, first,
        logits)`` gets float32 ``[some rows, vocab]`` of slice ``i`` from row ``first`` on, a part
        of a buffer that the next call overwrites.
        """
        self._check_level(level)
        check_slices(slices, self.config, self.pool.layout, self.limits)
        self.backend.forget()
        self._lookout.forget()
        inputs, firsts = self._steps.wide(slices, level)
        step = min(LOGIT_ROWS, self.decoder.buffers.logits.shape[0])
        for index, wanted in enumerate(rows):
            for first in range(wanted.start, wanted.stop, step):
                last = min(first + step, wanted.stop)
                at = firsts[index]
                normed = self.decoder.buffers.hidden[at + first : at + last]
                visit(index, first, self.decoder.logits(normed, level))
        return self._picked_logits(slices, inputs, level)

    def _picked_logits(
        self, slices: Sequence[SequenceSlice], inputs: InputViews, level: int
    ) -> Tensor:
        """After ``_wide``: logits of the last row of each slice that wants them."""
        count = sum(part.logits for part in slices)
        buffers = self.decoder.buffers
        picked = buffers.picked[:count]
        if count:
            torch.index_select(buffers.hidden, 0, inputs.last_rows[:count], out=picked)
            self.decoder.logits(picked, level)
            self.backend.choose_greedily(count)
        return self.backend.first(count)

    def _step_logits(self, slices: Sequence[SequenceSlice], inputs: InputViews) -> Tensor:
        """After a decode step: logits of the slices that want them."""
        count = sum(part.logits for part in slices)
        if count == len(slices):
            return self.backend.first(count)
        return self.decoder.buffers.logits.index_select(0, inputs.last_rows[:count])
