"""Steps in which a token's bits are its own: whatever shares them, and however a prompt is cut.

Ordinary steps choose what is fastest for their size: other kernels, other splits of K, cuBLAS, and
for prompts an attention of their own. Each sums in another order. Here there is one way for all:

* *Linear layers* are those of small steps at any number of rows (``kernels.linear_plans``): K is
  split by N, K and the card. cuBLAS is never called.
* *Attention* takes every token, of a prompt or not, for a sequence of its own whose length is its
  position plus one: ``paged_decode`` over partitions of a fixed number of tokens, counted from the
  sequence's first. Partitions are merged in their order, those behind a token's end never.
* What is left (embedding, norms, RoPE, the KV write, the choice of tokens) works row by row.

So there are no roles: KV that was computed for a prompt, in decode steps, after a preemption or by
a neighbour that left it in the prefix cache is the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels.attention import PARTITIONS_MAX, DecodeWorkspace, paged_decode, partitions
from deepinfer.kernels.linear import ROWS_MAX, AnyPlan, Plan, Weight, linear_logits, plan_for
from deepinfer.kernels.linear_launch import is_hopper, sm_count
from deepinfer.kernels.linear_plans import STREAM_ROWS_MAX
from deepinfer.kernels.pointwise import rms_norm
from deepinfer.workers.gpu.decoder import GpuDecoder
from deepinfer.workers.gpu.graphs import DecodeGraphs, buckets, context_bucket, recording
from deepinfer.workers.gpu.inputs import InputShape, InputViews
from deepinfer.workers.gpu.steps import GpuSteps
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.runner import SequenceSlice

PARTITION_MIN: Final = 256
"""Tokens of a partition, where contexts are short enough for that."""

WORKSPACE_BYTES: Final = 64 * 2**20
"""Of the partial results of one launch of attention; what needs more is launched in parts."""


def fixed_partition(context_max: int) -> int:
    """Tokens of a partition for a model of so many positions: nothing else decides it."""
    least = -(-context_max // PARTITIONS_MAX)
    return max(PARTITION_MIN, -(-least // 64) * 64)


def fixed_workspace(config: ModelConfig, rows: int, device: torch.device) -> DecodeWorkspace:
    """For steps of up to ``rows`` rows."""
    most = partitions(config.max_positions, fixed_partition(config.max_positions))
    slot_bytes = 4 * config.heads * (config.head_dim + 2)
    return DecodeWorkspace.allocate(
        rows,
        config.heads,
        config.head_dim,
        most,
        device,
        max_slots=max(most, WORKSPACE_BYTES // slot_bytes),
    )


def row_plan(weight: Weight, rows: int, *, fp8: bool) -> AnyPlan:
    """How ``rows`` rows are multiplied: in an order of sums that ``rows`` has no part in."""
    device = weight.device
    plan = plan_for(
        weight,
        min(rows, STREAM_ROWS_MAX),
        sm_count(device),
        fp8=fp8,
        hopper=is_hopper(device),
    )
    assert isinstance(plan, Plan), f"{plan} may split K by the number of rows"
    return plan


class DeterministicDecoder(GpuDecoder):
    """``GpuDecoder`` whose ``fused`` takes any number of rows; nothing else of it is to be used."""

    def plan(self, weight: Weight, rows: int, fp8: bool) -> AnyPlan | None:
        """See ``row_plan``."""
        return row_plan(weight, rows, fp8=fp8)

    def decode(
        self, index: int, inputs: InputViews, rows: int, columns: int, partition: int
    ) -> None:
        """Attention of the first ``rows`` rows, in as many launches as the workspace asks for."""
        config, b = self.weights.config, self.buffers
        parts = partitions(columns * self._views[index].block_size, partition)
        slots = b.decode.partial_ml.numel() // (2 * config.heads)
        step = max(1, slots // parts)
        queries = self._queries(b.qkv[:rows])
        for first in range(0, rows, step):
            last = min(first + step, rows)
            paged_decode(
                b.mixed[first:last],
                queries[first:last],
                self._views[index],
                inputs.block_tables[first:last, :columns],
                inputs.lens[first:last],
                scale=self._scale,
                partition=partition,
                workspace=b.decode,
            )

    def finish(self, rows: int) -> None:
        """After ``fused``: leave the final norm of every row in ``hidden``."""
        b = self.buffers
        rms_norm(b.hidden[:rows], b.residual[:rows], self.weights.norm, self.weights.config.rms_eps)

    def fused_logits(self, rows: int, level: int = 0) -> None:
        """After ``fused``: logits of every row."""
        self.finish(rows)
        self.logits(self.buffers.hidden[:rows], level)

    def logits(self, normed: Tensor, level: int = 0) -> Tensor:
        """Logits of rows that went through the final norm: a part of ``buffers.logits``."""
        out, head = self.buffers.logits[: normed.shape[0]], self.weights.head
        fp8 = self.head_fp8(level)
        parts = zip(torch.split(normed, ROWS_MAX), torch.split(out, ROWS_MAX), strict=True)
        for part, into in parts:
            linear_logits(
                into,
                part,
                head,
                fp8=fp8,
                workspace=self.buffers.linear,
                plan=row_plan(head, part.shape[0], fp8=fp8),
            )
        return out


class DeterministicSteps(GpuSteps):
    """``GpuSteps`` over a ``DeterministicDecoder``: graphs of decode steps, prompts eagerly."""

    decoder: DeterministicDecoder

    def capture(self, levels: range, captured: Callable[[str], None] | None = None) -> int:
        """Capture decode steps; steps with prompts have any number of rows, and no graphs."""
        told = captured or (lambda _kind: None)
        with recording() as recorder:
            decode = DecodeGraphs(recorder, self._decode)
            for bucket in buckets(self.limits.sequences, self.limits.context):
                self.inputs.write((), (), self.shape(bucket))
                for level in levels:
                    decode.capture(bucket, level)
            told("decode")
            told("prompts")
        self._decode_graphs = decode
        return len(decode)

    def wide(self, slices: Sequence[SequenceSlice], level: int) -> tuple[InputViews, list[int]]:
        """Launch a step with prompts in it; also returns each slice's first row."""
        firsts, rows, longest = [], 0, 0
        for part in slices:
            firsts.append(rows)
            rows += len(part.token_ids)
            longest = max(longest, part.start + len(part.token_ids))
        columns = self._columns(context_bucket(longest, self.limits.context))
        inputs = self.inputs.write(
            slices, range(len(slices)), InputShape(rows, len(slices), columns)
        )
        hidden, kept = self.decoder.buffers.hidden, self.decoder.buffers.branch
        for first in range(0, rows, ROWS_MAX):
            last = min(first + ROWS_MAX, rows)
            self._compute(inputs, first, last, level)
            if rows > ROWS_MAX:
                kept[first:last].copy_(hidden[: last - first])
        if rows > ROWS_MAX:
            hidden[:rows].copy_(kept[:rows])
        return inputs, firsts

    def _compute(self, inputs: InputViews, first: int, last: int, level: int) -> None:
        """Compute rows ``first`` to ``last``, those before them being done; leave their norm."""
        rows, sequences = last - first, inputs.sequences[first:last]
        positions = inputs.positions[first:last]
        by_row = InputViews(
            token_ids=inputs.token_ids[first:last],
            positions=positions,
            sequences=torch.arange(rows, dtype=torch.int32, device=positions.device),
            lens=positions + 1,
            last_rows=inputs.last_rows,
            block_tables=inputs.block_tables.index_select(0, sequences),
        )
        self.decoder.fused(by_row, rows, self._partition(rows, 0), level)
        self.decoder.finish(rows)

    def _partition(self, rows: int, context: int) -> int:
        """The same for all of them."""
        return fixed_partition(self._config.max_positions)
