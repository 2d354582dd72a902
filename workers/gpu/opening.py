"""Opens a model on a card: weights, buffers, pool and graphs, within a budget that is told."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from deepinfer.kernels import linear
from deepinfer.kernels.attention import DecodeWorkspace, partition_for, partitions
from deepinfer.kernels.compiler import precompile
from deepinfer.kvstore.core.layout import KvLayout
from deepinfer.workers.gpu.budget import (
    CONTEXT_BYTES,
    GRAPH_BYTES,
    MIB,
    PIECES_BYTES,
    SLACK_BYTES,
    MemoryBudget,
    blocks_that_fit,
    check_fits,
)
from deepinfer.workers.gpu.buffers import Buffers
from deepinfer.workers.gpu.bus import probe_bus
from deepinfer.workers.gpu.card import Card, GpuMemoryError
from deepinfer.workers.gpu.copy_device import CudaCopyDevice
from deepinfer.workers.gpu.copying import CardCopies
from deepinfer.workers.gpu.decoder import GpuDecoder
from deepinfer.workers.gpu.graphs import buckets, row_bucket, wide_buckets
from deepinfer.workers.gpu.limits import StepLimits
from deepinfer.workers.gpu.runner import GpuRunner
from deepinfer.workers.gpu.sampler import GpuSampler
from deepinfer.workers.gpu.settings import GpuSettings
from deepinfer.workers.gpu.shapes import check_kernels, kv_views, model_specs
from deepinfer.workers.gpu.trial import GpuTrial
from deepinfer.workers.gpu.weights import GpuWeights, layer_weights, load_weights
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.levels import PrecisionLevels
from deepinfer.workers.model.weights import LoadedModel
from deepinfer.workers.pool import PagedPool
from deepinfer.workers.quality import Settle, Verdict

log = logging.getLogger(__name__)


class OpenedGpu(NamedTuple):
    """A model on a card, ready to step."""

    runner: GpuRunner
    pool: PagedPool
    blocks: int
    """Of the pool's, those that sequences may have: the others are the runner's."""
    budget: MemoryBudget
    notes: tuple[str, ...]
    """What there is to say of it, a line each."""
    verdict: Verdict | None = None
    """What ``settle`` decided; None: it was not asked."""


class StepSizes(NamedTuple):
    """What one step may hold: tokens, and the sequences that they belong to."""

    rows: int
    sequences: int


def open_gpu(
    card: Card,
    model: LoadedModel,
    layout: KvLayout,
    settings: GpuSettings,
    sizes: StepSizes,
    blocks: int,
    settle: Settle | None = None,
) -> OpenedGpu:
    """Load a model, allocate its pool and capture its graphs; takes seconds.

    The pool has exactly ``blocks`` blocks, or, with ``settings.fill_card``, at least so many.
    ``settle`` decides, with the weights on the card, whether and how K of ``layout`` is scaled.

    Raises:
        KvQualityError: ``settle`` refuses the layout's dtype.
        GpuMemoryError: the card has no room for them; says both numbers.
        CheckpointError: the weights are damaged, or none for half precision.
        ValueError: the kernels know no such head_dim, block size or number of heads.
    """
    check_kernels(model.config, layout)
    torch.cuda.set_device(card.index)
    # Halves are summed in float32 from end to end, also where cuBLAS splits a sum.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    budget = MemoryBudget(
        card=card.bytes_total,
        utilization=settings.memory_utilization,
        context=_used(),
        weights=0,
        scratch=0,
        graphs=0,
    )
    before = torch.cuda.memory_reserved()
    with torch.inference_mode(), _fitting("weights", budget):
        weights = load_weights(model, card.device, model.config.max_positions)
    began = time.monotonic()
    precompile(model_specs(weights, layout))
    compiled_s = time.monotonic() - began
    torch.cuda.empty_cache()
    used = _used() - torch.cuda.memory_reserved()
    context = min(used, CONTEXT_BYTES) if settings.shared else used
    budget = replace(
        budget,
        weights=torch.cuda.memory_reserved() - before,
        context=context,
        others=used - context,
    )

    before = torch.cuda.memory_reserved()
    sequences = row_bucket(sizes.sequences) or sizes.sequences
    rows = max(sizes.rows, sequences)
    fused_rows = min(
        sequences, *(linear.max_rows(w) for each in weights.layers for w in layer_weights(each))
    )
    decode = len(list(buckets(sequences, model.config.max_positions)))
    wide = len(list(wide_buckets(rows)))
    with _fitting("scratch", budget):
        buffers = Buffers.allocate(
            model.config,
            rows,
            fused_rows,
            sequences,
            _workspace(model.config, card, sequences),
            card.device,
        )
    copies = CardCopies(CudaCopyDevice(card.device))
    budget = replace(
        budget,
        swaps=layout.payload_bytes(copies.ring_rows(layout.block_bytes)),
        # Besides the buffers: a block of the runner's for each sequence that is a step ahead.
        scratch=torch.cuda.memory_reserved()
        - before
        + layout.payload_bytes(sequences)
        + SLACK_BYTES,
        graphs=decode * GRAPH_BYTES + wide * PIECES_BYTES,
    )
    verdict = None
    if settle is not None:
        with _fitting("measurement of KV quality", budget):
            weights, verdict = _settled(settle, weights, buffers, layout, card, rows, fused_rows)
    if settings.fill_card:
        blocks = blocks_that_fit(budget, layout, blocks)
    else:
        check_fits(budget, layout, blocks)
    pool = PagedPool(layout, blocks + sequences, card.device, copies)
    runner = make_runner(
        weights,
        pool,
        buffers,
        StepLimits(
            rows=rows,
            sequences=sequences,
            context=min(model.config.max_positions, blocks * layout.block_size),
        ),
        fused_rows=fused_rows,
        multiprocessors=card.multiprocessors,
        spares=range(blocks, pool.num_blocks),
    )
    before = _used()
    began = time.monotonic()
    captured = runner.capture()
    runner.warm_up()
    torch.cuda.synchronize()
    captured_s = time.monotonic() - began
    budget = replace(budget, graphs=_used() - before, kv=layout.payload_bytes(blocks))
    notes = [
        f"{card.name} (SM{card.capability[0]}{card.capability[1]}): {blocks:,} KV blocks of "
        f"{layout.block_size} tokens, {captured} graphs in {captured_s:.1f} s, kernels compiled "
        f"in {compiled_s:.1f} s",
        *budget.lines(),
    ]
    if settings.probe:
        notes.append(probe_bus(card.device).line())
    for note in notes:
        log.info("%s", note)
    return OpenedGpu(runner, pool, blocks, budget, tuple(notes), verdict)


def _settled(
    settle: Settle,
    weights: GpuWeights,
    buffers: Buffers,
    layout: KvLayout,
    card: Card,
    rows: int,
    fused_rows: int,
) -> tuple[GpuWeights, Verdict]:
    """The verdict on ``layout``, and the weights that belong to it; takes no memory that stays."""

    def bind(bound: GpuWeights, pool: PagedPool) -> GpuRunner:
        context = min(bound.config.max_positions, pool.num_blocks * layout.block_size)
        return make_runner(
            bound,
            pool,
            buffers,
            StepLimits(rows=rows, sequences=1, context=context),
            fused_rows=fused_rows,
            multiprocessors=card.multiprocessors,
        )

    trial = GpuTrial(weights, layout.block_size, rows, buffers.saturations, bind)
    verdict = settle(trial)
    torch.cuda.empty_cache()
    return trial.weights, verdict


def make_runner(
    weights: GpuWeights,
    pool: PagedPool,
    buffers: Buffers,
    limits: StepLimits,
    *,
    fused_rows: int,
    multiprocessors: int,
    spares: Sequence[int] = (),
    levels: PrecisionLevels | None = None,
    upper_head: bool = False,
    level_min: int = 0,
) -> GpuRunner:
    """Bind weights, pool and buffers to each other; no graph is captured yet."""
    return GpuRunner(
        GpuDecoder(weights, kv_views(pool), buffers, levels, upper_head=upper_head),
        pool,
        GpuSampler(buffers.logits, buffers.saturations),
        limits,
        fused_rows=fused_rows,
        multiprocessors=multiprocessors,
        spares=spares,
        level_min=level_min,
    )


def _workspace(config: ModelConfig, card: Card, sequences: int) -> DecodeWorkspace:
    """Room for the partitions of every bucket."""
    most = slots = 1
    for bucket in buckets(sequences, config.max_positions):
        partition = partition_for(
            bucket.rows, config.kv_heads, bucket.context, card.multiprocessors
        )
        parts = partitions(bucket.context, partition)
        most, slots = max(most, parts), max(slots, parts * bucket.rows)
    return DecodeWorkspace.allocate(
        sequences, config.heads, config.head_dim, most, card.device, max_slots=slots
    )


@contextlib.contextmanager
def _fitting(what: str, budget: MemoryBudget) -> Iterator[None]:
    """Say in one sentence that the card is too small for ``what``, if it is."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        have = max(0, budget.left)
        raise GpuMemoryError(
            f"the card has no room for the {what}: of {budget.card / MIB:,.0f} MiB it had "
            f"{have / MIB:,.0f} MiB left, of which {torch.cuda.memory_reserved() / MIB:,.0f} MiB "
            f"were taken when it wanted more: take a larger card, fewer --max-batch-tokens, or "
            "a model with smaller weights (W4A16)"
        ) from error


def _used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free
