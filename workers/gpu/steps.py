"""Launches the steps that a card may be asked for: from graphs, where they were captured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepinfer.kernels.attention import partition_for
from deepinfer.kernels.prefill import PrefillSpan, plan_for
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
from deepinfer.workers.gpu.inputs import InputShape, InputViews, StepInputs
from deepinfer.workers.gpu.limits import StepLimits
from deepinfer.workers.gpu.sampler import GpuSampler
from deepinfer.workers.model.runner import SequenceSlice
from deepinfer.workers.pool import PagedPool


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


class GpuSteps:
    """A decoder with its inputs, and graphs of what it launches for every size of step.

    Nothing here decides which step is to be computed. Steps of up to ``fused_rows`` rows are fused.
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
        self.decoder = decoder
        self.limits = limits
        self.counters = StepCounters()
        self._config = decoder.weights.config
        self._sampler = sampler
        self._fused_rows = fused_rows
        self._multiprocessors = multiprocessors
        self._block_size = pool.layout.block_size
        self._device = pool.device
        self.inputs = StepInputs(
            limits.rows,
            limits.sequences,
            self._columns(context_bucket(limits.context, limits.context)),
            pool.num_blocks,
            pool.device,
        )
        self._decode_graphs: DecodeGraphs | None = None
        self._pieces: PieceGraphs[WideSize] | None = None
        self._mixed: PieceGraphs[Bucket] | None = None

    def capture(self, levels: range, captured: Callable[[str], None] | None = None) -> int:
        """Capture graphs for every bucket that steps may need, at all ``levels``; returns how many.

        ``captured`` is told when those of ``decode`` steps, and of steps with ``prompts``, are
        there.
        """
        told = captured or (lambda _kind: None)
        of_model = self.decoder.levels
        with recording() as recorder:
            decode = DecodeGraphs(recorder, self._decode)
            layers = len(self.decoder.weights.layers)
            pieces = PieceGraphs(recorder, layers + 1, self._piece, self._alike)
            mixed = PieceGraphs(recorder, layers, self._mixed_decode)
            for bucket in buckets(self.limits.sequences, self.limits.context):
                self.inputs.write((), (), self.shape(bucket))
                for level in levels:
                    decode.capture(bucket, level)
            told("decode")
            for rows in wide_buckets(self.limits.rows):
                self.inputs.write((), (), self._wide_shape(rows))
                for level in levels:
                    pieces.capture(WideSize(rows, level))
                if 0 < of_model.w8a8_rows <= rows:
                    pieces.capture(WideSize(rows, of_model.count))
            for bucket in mixed_buckets(self.limits.sequences, self.limits.context):
                mixed.capture(bucket)
            told("prompts")
        self._decode_graphs, self._pieces, self._mixed = decode, pieces, mixed
        return len(decode) + len(pieces) + len(mixed)

    def run(self, bucket: Bucket, level: int) -> None:
        """Launch a decode step whose inputs were written."""
        if self._decode_graphs is None:
            self._decode(bucket, level)
            return
        self._decode_graphs.replay(bucket, level)
        self.counters.replays += 1
        self.counters.launches += self._decode_graphs.kernels(bucket, level)

    def _decode(self, bucket: Bucket, level: int) -> None:
        """Launch a decode step of a bucket: what a graph of it holds."""
        inputs = self.inputs.views(self.shape(bucket))
        partition = self._partition(bucket.rows, bucket.context)
        rows, buffers = bucket.rows, self.decoder.buffers
        if rows <= self._fused_rows:
            self.decoder.fused(inputs, rows, partition, level)
            self.decoder.fused_logits(rows, level)
        else:
            columns = self._columns(bucket.context)
            self.decoder.wide(inputs, WideStep(rows, rows, partition, columns, None), level)
            self.decoder.logits(buffers.hidden[:rows], level)
        self._sampler.choose_greedily(rows)

    def _piece(self, index: int, size: WideSize) -> None:
        """Launch a piece of a wide step: what a graph of it holds."""
        inputs = self.inputs.views(self._wide_shape(size.rows))
        self.decoder.piece(index, inputs, size.rows, self.decoder.modes(index, size.level))

    def _alike(self, index: int, size: WideSize) -> tuple[int, PieceModes]:
        """What a piece's launches depend on: most levels share most pieces."""
        return size.rows, self.decoder.modes(index, size.level)

    def _mixed_decode(self, index: int, bucket: Bucket) -> None:
        """Launch attention of a wide step's single tokens: what a graph of it holds."""
        # What belongs to sequences has the same place whatever the step's rows.
        self.decoder.decode(
            index,
            self.inputs.views(self._wide_shape(self.limits.rows)),
            bucket.rows,
            self._columns(bucket.context),
            self._partition(bucket.rows, bucket.context),
        )

    def wide(self, slices: Sequence[SequenceSlice], level: int) -> tuple[InputViews, list[int]]:
        """Launch a step with prompts in it; also returns each slice's first row.

        One that is to be W8A8, but is left with fewer rows than gain by it (others were computed
        ahead), is computed in FP8.
        """
        counts = [len(part.token_ids) for part in slices]
        levels = self.decoder.levels
        if sum(counts) < levels.w8a8_rows:
            level = min(level, levels.last)
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
        inputs = self.inputs.write(slices, order, shape)
        decodes = sum(count == 1 for count in counts)
        spans = [
            PrefillSpan(firsts[index], counts[index], slices[index].start, place)
            for place, index in enumerate(order)
            if counts[index] > 1
        ]
        group = self._config.heads // self._config.kv_heads
        plan = None
        if spans:
            plan = plan_for(
                spans,
                group=group,
                kv_heads=self._config.kv_heads,
                head_dim=self._config.head_dim,
                sm_count=self._multiprocessors,
                device=self._device,
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

    def bucket(self, slices: Sequence[SequenceSlice]) -> Bucket | None:
        """The bucket of a step in which everyone has one token; None for others."""
        rows = row_bucket(len(slices))
        if rows is None or any(len(part.token_ids) > 1 for part in slices):
            return None
        longest = max(part.start for part in slices) + 1
        return Bucket(rows, context_bucket(longest, self.limits.context))

    def shape(self, bucket: Bucket) -> InputShape:
        """Of the inputs of a decode step."""
        return InputShape(bucket.rows, bucket.rows, self._columns(bucket.context))

    def _wide_shape(self, rows: int) -> InputShape:
        """Of a wide step whose pieces are captured: block tables have one place for all."""
        return InputShape(rows, self.limits.sequences, self._columns(self.limits.context))

    def _columns(self, context: int) -> int:
        return -(-context // self._block_size)

    def _partition(self, rows: int, context: int) -> int:
        return partition_for(rows, self._config.kv_heads, context, self._multiprocessors)
