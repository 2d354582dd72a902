"""Runs steps on a card: slices of requests in, logits and tokens out, KV left in the pool."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from deepinfer.kernels.attention import partition_for
from deepinfer.kernels.pointwise import copy_blocks
from deepinfer.kernels.prefill import PrefillSpan, plan_for
from deepinfer.kvstore.core.precision import StepCost
from deepinfer.workers.gpu.ahead import Claim, Lookout
from deepinfer.workers.gpu.decoder import GpuDecoder, PieceModes, WideStep
from deepinfer.workers.gpu.graphs import (
    Bucket,
    DecodeGraphs,
    PieceGraphs,
    buckets,
    context_bucket,
    mixed_bucket,
    mixed_buckets,
    recording,
    row_bucket,
    wide_bucket,
    wide_buckets,
)
from deepinfer.workers.gpu.inputs import InputShape, InputViews, StepInputs, on_card
from deepinfer.workers.gpu.limits import StepLimits, check_slices
from deepinfer.workers.gpu.sampler import GpuSampler
from deepinfer.workers.model.runner import LOGIT_ROWS, SequenceSlice, Visit, check_level
from deepinfer.workers.pool import PagedPool
from deepinfer.workers.sampler import SampleRow

WARM_UP_TOKENS: Final = 32
"""More than the kernels for few rows take."""


@dataclass(slots=True)
class StepCounters:
    """What steps cost the host, since start."""

    steps: int = 0
    replays: int = 0
    """Steps that were one graph."""
    launches: int = 0
    """Kernels of those."""
    prepare_ns: int = 0
    """Time that ``forward`` took: until all was launched that was not launched ahead."""
    ahead_rows: int = 0
    """Rows that were computed before they were planned."""
    ahead_used: int = 0
    """Those of them that a plan asked for."""


class WideSize(NamedTuple):
    """What the pieces of a wide step are captured for."""

    rows: int
    level: int


class GpuRunner:
    """A decoder bound to a pool on a card; what ``workers.engine.Runner`` asks for.

    Only the engine's thread may call it. Steps and their copies are on torch's current stream.
    Logits that it returns are overwritten by the next step, and by sampling from them.

    ``spares`` are blocks of the pool that no one else uses, one for each sequence of a step: with
    them the likely next step is launched while the last one's tokens are on their way (``ahead``).

    Steps are computed at one of ``levels`` of precision: 0 is FP16, the last is FP8.
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
        self.counters = StepCounters()
        self.levels = decoder.levels.count
        self.costs: tuple[StepCost, ...] = ()
        self.limits = limits
        self.spares = tuple(spares)
        self._fused_rows = fused_rows
        self._multiprocessors = multiprocessors
        self._inputs = StepInputs(
            limits.rows,
            limits.sequences,
            self._columns(context_bucket(limits.context, limits.context)),
            pool.num_blocks,
            pool.device,
        )
        self.level_min = level_min
        """No step may be computed below it: the lower planes are not there."""
        self._graphs: DecodeGraphs | None = None
        self._pieces: PieceGraphs[WideSize] | None = None
        self._mixed: PieceGraphs[Bucket] | None = None
        self._lookout = Lookout(self.spares, pool.layout.block_size, limits.context)
        if spares:
            sampler.follower = self

    @torch.inference_mode()
    def capture(self, captured: Callable[[str], None] | None = None) -> int:
        """Capture graphs for every bucket that steps may need, at all levels; returns how many.

        ``captured`` is told when those of ``decode`` steps, and of steps with ``prompts``, are
        there.
        """
        told = captured or (lambda _kind: None)
        levels = range(self.level_min, self.levels)
        with recording() as recorder:
            decode = DecodeGraphs(recorder, self._decode)
            layers = len(self.decoder.weights.layers)
            pieces = PieceGraphs(recorder, layers + 1, self._piece, self._alike)
            mixed = PieceGraphs(recorder, layers, self._mixed_decode)
            for bucket in buckets(self.limits.sequences, self.limits.context):
                self._inputs.write((), (), self._shape(bucket))
                for level in levels:
                    decode.capture(bucket, level)
            told("decode")
            for rows in wide_buckets(self.limits.rows):
                self._inputs.write((), (), self._wide_shape(rows))
                for level in levels:
                    pieces.capture(WideSize(rows, level))
            for bucket in mixed_buckets(self.limits.sequences, self.limits.context):
                mixed.capture(bucket)
            told("prompts")
        self._graphs, self._pieces, self._mixed = decode, pieces, mixed
        return len(decode) + len(pieces) + len(mixed)

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
        check_level(next_level, self.levels)
        check_slices(slices, self.config, self.pool.layout, self.limits)
        self.backend.forget()
        claim = self._claim(slices, level)
        if claim is None:
            logits = self._compute(slices, level)
        elif claim.complete:
            logits = self._claimed(claim)
        else:
            logits = self._merge(slices, claim, level)
        self._lookout.running(slices, next_level)
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
        inputs = self._inputs.write(
            [SequenceSlice((0,), row.start, row.block_table, True) for row in foreseen],
            range(len(foreseen)),
            self._shape(bucket),
            sources=[row.source for row in foreseen],
        )
        count = len(foreseen)
        tokens = inputs.token_ids[:count]
        torch.index_select(ids, 0, inputs.last_rows[:count], out=tokens)
        tokens.clamp_(min=0)  # a row without a token gets some, for the embedding's sake
        self._run(bucket, level)
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
        check_level(level, self.levels)
        if level < self.level_min:
            raise ValueError(
                f"precision level {level}: the lower planes are not on the card, only "
                f"{self.level_min} is left"
            )

    def _claim(self, slices: Sequence[SequenceSlice], level: int) -> Claim | None:
        """What of a plan was computed ahead; None: nothing."""
        claim = self._lookout.claim(slices, self.pool.copies_in, level)
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
        bucket = self._bucket(slices)
        if bucket is None:
            inputs, _ = self._wide(slices, level)
            return self._picked_logits(slices, inputs, level)
        inputs = self._inputs.write(slices, range(len(slices)), self._shape(bucket))
        self._run(bucket, level)
        return self._step_logits(slices, inputs)

    def _run(self, bucket: Bucket, level: int) -> None:
        """Launch a decode step whose inputs were written."""
        if self._graphs is None:
            self._decode(bucket, level)
            return
        self._graphs.replay(bucket, level)
        self.counters.replays += 1
        self.counters.launches += self._graphs.kernels(bucket, level)

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
        inputs, firsts = self._wide(slices, level)
        step = min(LOGIT_ROWS, self.decoder.buffers.logits.shape[0])
        for index, wanted in enumerate(rows):
            for first in range(wanted.start, wanted.stop, step):
                last = min(first + step, wanted.stop)
                at = firsts[index]
                normed = self.decoder.buffers.hidden[at + first : at + last]
                visit(index, first, self.decoder.logits(normed, level))
        return self._picked_logits(slices, inputs, level)

    def _decode(self, bucket: Bucket, level: int) -> None:
        """Launch a decode step of a bucket: what a graph of it holds."""
        inputs = self._inputs.views(self._shape(bucket))
        partition = self._partition(bucket.rows, bucket.context)
        rows, buffers = bucket.rows, self.decoder.buffers
        if rows <= self._fused_rows:
            self.decoder.fused(inputs, rows, partition, level)
            self.decoder.fused_logits(rows, level)
        else:
            columns = self._columns(bucket.context)
            self.decoder.wide(inputs, WideStep(rows, rows, partition, columns, None), level)
            self.decoder.logits(buffers.hidden[:rows], level)
        self.backend.choose_greedily(rows)

    def _piece(self, index: int, size: WideSize) -> None:
        """Launch a piece of a wide step: what a graph of it holds."""
        inputs = self._inputs.views(self._wide_shape(size.rows))
        self.decoder.piece(index, inputs, size.rows, self.decoder.modes(index, size.level))

    def _alike(self, index: int, size: WideSize) -> tuple[int, PieceModes]:
        """What a piece's launches depend on: most levels share most pieces."""
        return size.rows, self.decoder.modes(index, size.level)

    def _mixed_decode(self, index: int, bucket: Bucket) -> None:
        """Launch attention of a wide step's single tokens: what a graph of it holds."""
        # What belongs to sequences has the same place whatever the step's rows.
        self.decoder.decode(
            index,
            self._inputs.views(self._wide_shape(self.limits.rows)),
            bucket.rows,
            self._columns(bucket.context),
            self._partition(bucket.rows, bucket.context),
        )

    def _wide(self, slices: Sequence[SequenceSlice], level: int) -> tuple[InputViews, list[int]]:
        """Launch a step with prompts in it; also returns each slice's first row."""
        counts = [len(part.token_ids) for part in slices]
        order = sorted(range(len(slices)), key=lambda index: counts[index] > 1)
        firsts, row = [0] * len(slices), 0
        for index in order:
            firsts[index] = row
            row += counts[index]
        longest = max(part.start + count for part, count in zip(slices, counts, strict=True))
        context = context_bucket(longest, self.limits.context)
        columns = self._columns(context)
        rows = None if self._pieces is None else wide_bucket(row, self.limits.rows)
        if rows is None:
            shape = InputShape(row, len(slices), columns)
        else:
            shape = self._wide_shape(rows)
        inputs = self._inputs.write(slices, order, shape)
        decodes = sum(count == 1 for count in counts)
        spans = [
            PrefillSpan(firsts[index], counts[index], slices[index].start, place)
            for place, index in enumerate(order)
            if counts[index] > 1
        ]
        group = self.config.heads // self.config.kv_heads
        plan = None
        if spans:
            plan = plan_for(
                spans,
                group=group,
                kv_heads=self.config.kv_heads,
                head_dim=self.config.head_dim,
                sm_count=self._multiprocessors,
                device=self.pool.device,
            )
        partition = self._partition(row_bucket(max(1, decodes)) or decodes, context)
        step = WideStep(shape.rows, decodes, partition, columns, plan)
        if rows is None or self._pieces is None or self._mixed is None:
            self.decoder.wide(inputs, step, level)
        else:
            bucket = mixed_bucket(decodes, longest, self.limits.sequences, self.limits.context)
            fits = bucket.rows <= rows  # padding rows write zeros where others' results follow
            self.decoder.wide(
                inputs,
                step,
                level,
                piece=functools.partial(self._pieces.replay, WideSize(rows, level)),
                decode=functools.partial(self._mixed.replay, bucket) if fits else None,
            )
        return inputs, firsts

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

    def _bucket(self, slices: Sequence[SequenceSlice]) -> Bucket | None:
        """The bucket of a step in which everyone has one token; None for others."""
        rows = row_bucket(len(slices))
        if rows is None or any(len(part.token_ids) > 1 for part in slices):
            return None
        longest = max(part.start for part in slices) + 1
        return Bucket(rows, context_bucket(longest, self.limits.context))

    def _shape(self, bucket: Bucket) -> InputShape:
        return InputShape(bucket.rows, bucket.rows, self._columns(bucket.context))

    def _wide_shape(self, rows: int) -> InputShape:
        """Of a wide step whose pieces are captured: block tables have one place for all."""
        return InputShape(rows, self.limits.sequences, self._columns(self.limits.context))

    def _columns(self, context: int) -> int:
        return -(-context // self.pool.layout.block_size)

    def _partition(self, rows: int, context: int) -> int:
        return partition_for(rows, self.config.kv_heads, context, self._multiprocessors)
