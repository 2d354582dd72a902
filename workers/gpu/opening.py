"""Opens a model on a card: weights, buffers, pool and graphs, within a budget that is told."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import torch

from deepinfer.kernels import linear
from deepinfer.kernels.attention import DecodeWorkspace, partition_for, partitions
from deepinfer.kernels.compiler import precompile
from deepinfer.kernels.linear_w8a8 import Scratch
from deepinfer.kvstore.core.layout import KvLayout
from deepinfer.workers.gpu.budget import (
    CONTEXT_BYTES,
    GRAPH_BYTES,
    MIB,
    PIECE_BYTES,
    SLACK_BYTES,
    MemoryBudget,
    blocks_that_fit,
    check_fits,
)
from deepinfer.workers.gpu.buffers import Buffers
from deepinfer.workers.gpu.bus import available_bytes, probe_bus
from deepinfer.workers.gpu.card import Card, GpuMemoryError
from deepinfer.workers.gpu.copy_device import CudaCopyDevice
from deepinfer.workers.gpu.copying import CardCopies
from deepinfer.workers.gpu.costs import measure_costs
from deepinfer.workers.gpu.decoder import GpuDecoder, piece_modes
from deepinfer.workers.gpu.deterministic import DeterministicDecoder, fixed_workspace
from deepinfer.workers.gpu.graphs import buckets, row_bucket, wide_buckets
from deepinfer.workers.gpu.limits import StepLimits
from deepinfer.workers.gpu.planes import GpuPlanes, ShelvedPlanes, lower_bytes, tail_bytes
from deepinfer.workers.gpu.reader import WeightForm
from deepinfer.workers.gpu.runner import GpuRunner
from deepinfer.workers.gpu.sampler import GpuSampler
from deepinfer.workers.gpu.settings import GpuSettings, NestedSettings
from deepinfer.workers.gpu.shapes import check_kernels, check_w8a8, kv_views, model_specs
from deepinfer.workers.gpu.trial import GpuTrial
from deepinfer.workers.gpu.weights import GpuWeights, linears, load_weights
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.levels import W8A8_ROWS, PrecisionLevels
from deepinfer.workers.model.weights import LoadedModel
from deepinfer.workers.pool import PagedPool
from deepinfer.workers.quality import Settle, Verdict

log = logging.getLogger(__name__)

HOST_LEFT_BYTES: Final = 1 << 30
"""Of the host's memory a copy of the lower planes leaves at least so much to everybody else."""


class OpenedGpu(NamedTuple):
    """A model on a card, ready to step."""

    runner: GpuRunner
    pool: PagedPool
    blocks: int
    """Of the pool's, those that sequences may always have."""
    budget: MemoryBudget
    notes: tuple[str, ...]
    """What there is to say of it, a line each."""
    verdict: Verdict | None = None
    """What ``settle`` decided; None: it was not asked."""
    planes: GpuPlanes | None = None
    """Lower planes that may leave; None: there are none, or they stay."""


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
    nested: NestedSettings | None = None,
) -> OpenedGpu:
    """Load a model, allocate its pool and capture its graphs; takes seconds.

    The pool has exactly ``blocks`` blocks, or, with ``settings.fill_card``, at least so many; then
    come those that the lower planes of a nested model are in, and the runner's own. ``settle``
    decides, with the weights on the card, whether and how K of ``layout`` is scaled. ``nested`` is
    for a nested model.

    Raises:
        KvQualityError: ``settle`` refuses the layout's dtype.
        GpuMemoryError: the card has no room for them; says both numbers.
        CheckpointError: the weights are damaged, or none for half precision.
        ValueError: the kernels know no such head_dim, block size or number of heads; planes are to
            be shed of a model that is not nested, or FP8 to be multiplied by FP8 on a card that
            does not; either with ``settings.deterministic``.
    """
    check_kernels(model.config, layout)
    nested = nested or NestedSettings()
    if settings.deterministic:
        for name in ("shed", "w8a8"):
            if getattr(nested, name):
                raise ValueError(f"{name} = True with deterministic = True: must be False")
    if nested.w8a8:
        check_w8a8(card)
    if not model.nested and (nested.shed or nested.start_shed):
        raise ValueError(
            f"{'shed' if nested.shed else 'start_shed'}: the model's weights are not nested: take "
            "weights = nested, or a checkpoint of deepinfer convert --weights nested"
        )
    levels = PrecisionLevels(
        model.config.layers,
        nested.levels if model.nested else 1,
        model.layer_order,
        W8A8_ROWS if model.nested and nested.w8a8 else 0,
    )
    sheds_head = nested.shed_head and (nested.shed or nested.start_shed)
    form = WeightForm(
        upper_only=nested.start_shed, upper_head=nested.start_shed and nested.shed_head
    )
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
        weights = load_weights(model, card.device, model.config.max_positions, form)
    began = time.monotonic()
    precompile(model_specs(weights, layout, w8a8=levels.w8a8_rows > 0))
    compiled_s = time.monotonic() - began
    torch.cuda.empty_cache()
    used = _used() - torch.cuda.memory_reserved()
    context = min(used, CONTEXT_BYTES) if settings.shared else used
    lower = lower_bytes(weights)
    budget = replace(
        budget,
        weights=torch.cuda.memory_reserved() - before - lower,
        lower=lower,
        context=context,
        others=used - context,
    )

    before = torch.cuda.memory_reserved()
    sequences = row_bucket(sizes.sequences) or sizes.sequences
    rows = max(sizes.rows, sequences)
    fused_rows = min(sequences, *map(linear.max_rows, linears(weights)))
    if settings.deterministic:
        fused_rows = rows
    level_min = levels.last if nested.start_shed else 0
    decode = len(list(buckets(sequences, model.config.max_positions)))
    decode *= levels.count - level_min
    pieces = len(list(wide_buckets(rows))) * len(piece_modes(levels, level_min))
    if settings.deterministic:
        pieces = 0
    if levels.w8a8_rows:
        large = sum(each >= levels.w8a8_rows for each in wide_buckets(rows))
        pieces += large * (model.config.layers + 1)
    with _fitting("scratch", budget):
        buffers = Buffers.allocate(
            model.config,
            rows,
            fused_rows,
            sequences,
            fixed_workspace(model.config, rows, card.device)
            if settings.deterministic
            else _workspace(model.config, card, sequences),
            card.device,
        )
        activations = None
        if levels.w8a8_rows:
            columns = max(each.columns for each in linears(weights))
            activations = Scratch.allocate(rows, columns, card.device)
    copies = CardCopies(CudaCopyDevice(card.device))
    budget = replace(
        budget,
        swaps=layout.payload_bytes(copies.ring_rows(layout.block_bytes)),
        # Besides the buffers: a block of the runner's for each sequence that is a step ahead.
        scratch=torch.cuda.memory_reserved()
        - before
        + layout.payload_bytes(sequences)
        + SLACK_BYTES,
        graphs=decode * GRAPH_BYTES,
        pieces=pieces * PIECE_BYTES,
    )
    verdict = None
    if settle is not None:
        with _fitting("measurement of KV quality", budget):
            weights, verdict = _settled(
                settle,
                weights,
                buffers,
                layout,
                card,
                rows,
                fused_rows,
                deterministic=settings.deterministic,
            )
    shelved = None
    remark: tuple[str, ...] = ()
    if nested.shed:
        with torch.inference_mode():
            shelved, remark = _shelve(weights, layout, copies, head=sheds_head)
    if shelved is not None:
        whole = torch.cuda.memory_reserved()
        weights = shelved.taken_from(weights)
        gc.collect()
        torch.cuda.empty_cache()
        freed = whole - torch.cuda.memory_reserved()
        budget = replace(
            budget,
            weights=budget.weights + budget.lower - freed,
            lower=layout.payload_bytes(shelved.blocks),
        )
    tail = 0 if shelved is None else shelved.blocks
    if settings.fill_card:
        blocks = blocks_that_fit(budget, layout, blocks)
    else:
        check_fits(budget, layout, blocks)
    pool = PagedPool(layout, blocks + tail + sequences, card.device, copies)
    if shelved is not None:
        weights = shelved.placed(weights, pool.storage[blocks : blocks + tail])
    runner = make_runner(
        weights,
        pool,
        buffers,
        StepLimits(
            rows=rows,
            sequences=sequences,
            context=min(model.config.max_positions, (blocks + tail) * layout.block_size),
        ),
        fused_rows=fused_rows,
        multiprocessors=card.multiprocessors,
        spares=range(blocks + tail, pool.num_blocks),
        deterministic=settings.deterministic,
        levels=levels,
        upper_head=sheds_head,
        activations=activations,
        level_min=level_min,
    )
    planes = None
    if shelved is not None:
        planes = GpuPlanes(shelved, pool, blocks, runner, copies.settle)
    marks = [_used()]
    began = time.monotonic()
    captured = runner.capture(lambda _kind: marks.append(_used()))
    runner.warm_up()
    torch.cuda.synchronize()
    captured_s = time.monotonic() - began
    start, decoding, _ = marks
    budget = replace(
        budget,
        graphs=decoding - start,
        pieces=_used() - decoding,
        kv=layout.payload_bytes(blocks),
    )
    runner.costs = measure_costs(runner)
    buffers.saturations.zero_()  # so far nobody's K or V
    notes = [
        f"{card.name} (SM{card.capability[0]}{card.capability[1]}): {blocks:,} KV blocks of "
        f"{layout.block_size} tokens, {captured} graphs in {captured_s:.1f} s, kernels compiled "
        f"in {compiled_s:.1f} s",
        *_nested_notes(runner, planes, layout, remark),
        *budget.lines(),
    ]
    if settings.probe:
        notes.append(probe_bus(card.device).line())
    for note in notes:
        log.info("%s", note)
    return OpenedGpu(runner, pool, blocks, budget, tuple(notes), verdict, planes)


def _shelve(
    weights: GpuWeights, layout: KvLayout, copies: CardCopies, *, head: bool
) -> tuple[ShelvedPlanes | None, tuple[str, ...]]:
    """Copy the lower planes that may leave to the host; None, and why, if it has no room."""
    needed, there = tail_bytes(weights, head=head) + layout.block_bytes, available_bytes()
    if needed + HOST_LEFT_BYTES > there:
        return None, (
            f"shedding is off: the host has {there / MIB:,.0f} MiB, a copy of the lower planes "
            f"takes {needed / MIB:,.0f} and {HOST_LEFT_BYTES / MIB:,.0f} stay free",
        )
    shelved = ShelvedPlanes(weights, layout, head=head, pin=copies.register)
    return shelved, () if shelved.pinned else ("lower planes come back slowly: nothing is pinned",)


def _nested_notes(
    runner: GpuRunner, planes: GpuPlanes | None, layout: KvLayout, remark: tuple[str, ...]
) -> Iterator[str]:
    """What there is to say of a nested model."""
    if runner.levels == 1:
        return
    if runner.level_min:
        yield "nested weights without their lower planes: every step is computed in FP8"
    else:
        times = " and ".join(
            f"{cost.predict(8, 0) / 1e3:.2f} ms" for cost in (runner.costs[:1] + runner.costs[-1:])
        )
        measured = f", 8 rows take {times} at the first and the last" if times else ""
        yield f"nested weights, {runner.levels} levels of precision{measured}"
    if runner.w8a8_rows:
        yield f"FP8 steps of {runner.w8a8_rows} rows or more are W8A8"
    if planes is not None:
        size = layout.payload_bytes(planes.tail_blocks)
        yield (
            f"shedding frees {planes.tail_blocks:,} blocks more ({size / MIB:,.0f} MiB), which "
            f"takes {planes.return_ms} ms to undo"
        )
    yield from remark


def _settled(
    settle: Settle,
    weights: GpuWeights,
    buffers: Buffers,
    layout: KvLayout,
    card: Card,
    rows: int,
    fused_rows: int,
    *,
    deterministic: bool,
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
            deterministic=deterministic,
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
    deterministic: bool = False,
    levels: PrecisionLevels | None = None,
    upper_head: bool = False,
    activations: Scratch | None = None,
    level_min: int = 0,
) -> GpuRunner:
    """Bind weights, pool and buffers to each other; no graph is captured yet.

    ``deterministic`` wants ``fused_rows`` to be all rows of a step.
    """
    kind = DeterministicDecoder if deterministic else GpuDecoder
    return GpuRunner(
        kind(
            weights,
            kv_views(pool),
            buffers,
            levels,
            upper_head=upper_head,
            activations=activations,
        ),
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
