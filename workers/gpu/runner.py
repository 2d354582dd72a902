"""Runs steps on a card: slices of requests in, logits and tokens out, KV left in the pool."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.attention import partition_for
from deepinfer.kernels.prefill import PrefillSpan, plan_prefill, tile_rows_for
from deepinfer.workers.gpu.decoder import GpuDecoder, WideStep
from deepinfer.workers.gpu.graphs import (
    Bucket,
    DecodeGraphs,
    buckets,
    context_bucket,
    row_bucket,
)
from deepinfer.workers.gpu.inputs import InputShape, InputViews, StepInputs
from deepinfer.workers.gpu.sampler import GpuSampler
from deepinfer.workers.model.runner import LOGIT_ROWS, SequenceSlice, Visit
from deepinfer.workers.pool import PagedPool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest step: ``rows`` tokens of ``sequences`` requests, none longer than ``context``.

    ``sequences`` is a bucket of graphs, or beyond them all, and at most ``rows``.
    """

    rows: int
    sequences: int
    context: int


@dataclass(slots=True)
class StepCounters:
    """What steps cost the host, since start."""

    steps: int = 0
    replays: int = 0
    """Steps that were one graph."""
    launches: int = 0
    """Kernels of those."""
    prepare_ns: int = 0
    """Time until all of a step was launched, sampling apart."""


class GpuRunner:
    """A decoder bound to a pool on a card; what ``workers.engine.Runner`` asks for.

    Only the engine's thread may call it. Steps and their copies are on torch's current stream.
    Logits that it returns are overwritten by the next step.
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
    ) -> None:
        self.config = decoder.weights.config
        self.decoder = decoder
        self.pool = pool
        self.backend = sampler
        self.counters = StepCounters()
        self._limits = limits
        self._fused_rows = fused_rows
        self._multiprocessors = multiprocessors
        self._inputs = StepInputs(
            limits.rows,
            limits.sequences,
            self._columns(context_bucket(limits.context, limits.context)),
            pool.num_blocks,
            pool.device,
        )
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def capture(self) -> int:
        """Capture a graph for every bucket that steps may need; returns how many."""
        graphs = DecodeGraphs(self._decode)
        for bucket in buckets(self._limits.sequences, self._limits.context):
            self._inputs.write((), (), self._shape(bucket))
            graphs.capture(bucket)
        self._graphs = graphs
        return len(graphs)

    @torch.inference_mode()
    def forward(self, slices: Sequence[SequenceSlice]) -> Tensor:
        """Compute ``slices`` in one step.

        Returns float32 ``[slices that want logits, vocab]``, in their order, a part of a buffer.
        Every slice's K and V are in the pool once the card gets there: nothing is waited for.

        Raises ValueError naming the slice for: no tokens, a token id outside the vocabulary,
        positions beyond the model's or the block table's reach, a block id outside the pool, and
        for more rows or slices than ``StepLimits`` names.
        """
        begin = time.perf_counter_ns()
        self._validate(slices)
        bucket = self._bucket(slices)
        if bucket is None:
            inputs, _ = self._wide(slices)
            logits = self._picked_logits(slices, inputs)
        else:
            inputs = self._inputs.write(slices, range(len(slices)), self._shape(bucket))
            if self._graphs is None:
                self._decode(bucket)
            else:
                self._graphs.replay(bucket)
                self.counters.replays += 1
                self.counters.launches += self._graphs.kernels(bucket)
            logits = self._step_logits(slices, inputs)
        self.counters.steps += 1
        self.counters.prepare_ns += time.perf_counter_ns() - begin
        return logits

    @torch.inference_mode()
    def forward_and_score(
        self, slices: Sequence[SequenceSlice], rows: Sequence[range], visit: Visit
    ) -> Tensor:
        """As ``forward``, and show ``visit`` the logits of further rows.

        ``rows`` has one range for each slice, of its rows counted from 0. ``visit(i, first,
        logits)`` gets float32 ``[some rows, vocab]`` of slice ``i`` from row ``first`` on, a part
        of a buffer that the next call overwrites.
        """
        self._validate(slices)
        inputs, firsts = self._wide(slices)
        step = min(LOGIT_ROWS, self.decoder.buffers.logits.shape[0])
        for index, wanted in enumerate(rows):
            for first in range(wanted.start, wanted.stop, step):
                last = min(first + step, wanted.stop)
                at = firsts[index]
                normed = self.decoder.buffers.hidden[at + first : at + last]
                visit(index, first, self.decoder.logits(normed))
        return self._picked_logits(slices, inputs)

    def _decode(self, bucket: Bucket) -> None:
        """Launch a decode step of a bucket: what a graph of it holds."""
        inputs = self._inputs.views(self._shape(bucket))
        partition = self._partition(bucket.rows, bucket.context)
        rows, buffers = bucket.rows, self.decoder.buffers
        if rows <= self._fused_rows:
            self.decoder.fused(inputs, rows, partition)
            self.decoder.fused_logits(rows)
        else:
            self.decoder.wide(inputs, WideStep(rows, rows, partition, None))
            self.decoder.logits(buffers.hidden[:rows])
        self.backend.choose_greedily(rows)

    def _wide(self, slices: Sequence[SequenceSlice]) -> tuple[InputViews, list[int]]:
        """Launch a step with prompts in it; also returns each slice's first row."""
        counts = [len(part.token_ids) for part in slices]
        order = sorted(range(len(slices)), key=lambda index: counts[index] > 1)
        firsts, row = [0] * len(slices), 0
        for index in order:
            firsts[index] = row
            row += counts[index]
        longest = max(part.start + count for part, count in zip(slices, counts, strict=True))
        context = context_bucket(longest, self._limits.context)
        shape = InputShape(row, len(slices), self._columns(context))
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
            tile_rows = tile_rows_for(
                spans,
                group=group,
                kv_heads=self.config.kv_heads,
                sm_count=self._multiprocessors,
            )
            plan = plan_prefill(spans, group=group, tile_rows=tile_rows, device=self.pool.device)
        partition = self._partition(row_bucket(max(1, decodes)) or decodes, context)
        self.decoder.wide(inputs, WideStep(row, decodes, partition, plan))
        return inputs, firsts

    def _picked_logits(self, slices: Sequence[SequenceSlice], inputs: InputViews) -> Tensor:
        """After ``_wide``: logits of the last row of each slice that wants them."""
        count = sum(part.logits for part in slices)
        buffers = self.decoder.buffers
        picked = buffers.picked[:count]
        if count:
            torch.index_select(buffers.hidden, 0, inputs.last_rows[:count], out=picked)
            self.decoder.logits(picked)
            self.backend.choose_greedily(count)
        return buffers.logits[:count]

    def _step_logits(self, slices: Sequence[SequenceSlice], inputs: InputViews) -> Tensor:
        """After a decode step: logits of the slices that want them."""
        count = sum(part.logits for part in slices)
        logits = self.decoder.buffers.logits
        if count == len(slices):
            return logits[:count]
        return logits.index_select(0, inputs.last_rows[:count])

    def _bucket(self, slices: Sequence[SequenceSlice]) -> Bucket | None:
        """The bucket of a step in which everyone has one token; None for others."""
        rows = row_bucket(len(slices))
        if rows is None or any(len(part.token_ids) > 1 for part in slices):
            return None
        longest = max(part.start for part in slices) + 1
        return Bucket(rows, context_bucket(longest, self._limits.context))

    def _shape(self, bucket: Bucket) -> InputShape:
        return InputShape(bucket.rows, bucket.rows, self._columns(bucket.context))

    def _columns(self, context: int) -> int:
        return -(-context // self.pool.layout.block_size)

    def _partition(self, rows: int, context: int) -> int:
        return partition_for(rows, self.config.kv_heads, context, self._multiprocessors)

    def _validate(self, slices: Sequence[SequenceSlice]) -> None:
        if not slices:
            raise ValueError("forward needs at least one slice")
        rows = 0
        for index, part in enumerate(slices):
            count = len(part.token_ids)
            end = part.start + count
            rows += count
            if count < 1 or part.start < 0:
                raise ValueError(f"slice {index}: {count} tokens from position {part.start}")
            if min(part.token_ids) < 0 or max(part.token_ids) >= self.config.vocab_size:
                raise ValueError(
                    f"slice {index}: token ids must be in 0..{self.config.vocab_size - 1}, got "
                    f"{min(part.token_ids)}..{max(part.token_ids)}"
                )
            if end > self._limits.context:
                raise ValueError(
                    f"slice {index}: position {end - 1} is beyond the {self._limits.context} "
                    "positions that this runner was opened for"
                )
            if len(part.block_table) * self.pool.layout.block_size < end:
                raise ValueError(
                    f"slice {index}: {end} tokens need {self._columns(end)} blocks, the table has "
                    f"{len(part.block_table)}"
                )
        if rows > self._limits.rows or len(slices) > self._limits.sequences:
            raise ValueError(
                f"a step of {rows} rows in {len(slices)} slices: at most {self._limits.rows} and "
                f"{self._limits.sequences} were allocated for"
            )
