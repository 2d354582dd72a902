"""Puts a worker together: model, pool, engine, core, links and swapper.

It imports torch. ``actor`` does not, for Ray imports that module in every process that looks a
worker up, the controller's among them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from deepinfer.kvstore.core.ids import Incarnation, NodeId, WorkerId, WorkerRef
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.proto.failpoints import Failpoints
from deepinfer.workers.actor import WorkerSettings
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.core.config import WorkerConfigError
from deepinfer.workers.core.core import WorkerCore
from deepinfer.workers.core.valve import note
from deepinfer.workers.engine import Engine
from deepinfer.workers.gpu.card import find_card
from deepinfer.workers.gpu.settings import NestedSettings
from deepinfer.workers.links import GatewayLinks, ReportLink
from deepinfer.workers.model.costs import measure_costs
from deepinfer.workers.model.decoder import Decoder, kv_layout
from deepinfer.workers.model.levels import W8A8_ROWS
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.runner import ModelRunner
from deepinfer.workers.model.weights import LoadedModel, Progress
from deepinfer.workers.planes import CpuPlanes, Planes, tail_blocks
from deepinfer.workers.pool import PagedPool
from deepinfer.workers.quality import CpuTrial, QualityGate, Verdict
from deepinfer.workers.shell import WorkerShell
from deepinfer.workers.swap import KvIdentity, StoreSwapper

UPPER_ONLY: Final = "nested weights without their lower planes: every step is computed in FP8"
"""What the start of a CPU worker says with ``start_shed``, as a card's does."""


class Device(NamedTuple):
    """A model on a device with its pool, ready to step."""

    engine: Engine
    pool: PagedPool
    blocks: int
    """Of the pool's, those that sequences may have."""
    identity: KvIdentity
    notes: tuple[str, ...] = ()
    """What there is to say of it at the start, a line each."""
    gauges: Mapping[str, float] = {}
    """Levels that never change, by exported name."""
    planes: Planes | None = None
    """Lower planes of the weights that may leave; None: there are none, or they stay."""


def open_device(
    settings: WorkerSettings, failpoints: Failpoints, progress: Progress | None = None
) -> Device:
    """Load the model and allocate the pool; takes seconds.

    ``progress(bytes_read, bytes_total)`` is told of each tensor that was read.

    Raises what ``load_model`` raises, WorkerConfigError for another model's ``block_bytes``, and
    KvQualityError for a KV dtype that ``settings.quality`` refuses;
    with ``settings.gpu`` also what ``find_card`` and ``open_gpu`` raise.
    """
    config = settings.config
    if settings.gpu is not None:
        find_card()  # what is missing is said before gigabytes are read
    path = Path(settings.model_path)
    loaded = load_model(path, progress=progress, weights=settings.weights)
    dtype = resolve_kv_dtype(settings.kv_cache_dtype)
    layout = kv_layout(loaded.config, dtype, config.block_size)
    if config.block_bytes != layout.block_bytes:
        raise WorkerConfigError("block_bytes", config.block_bytes, f"{layout.block_bytes} here")
    gate = verdict = None
    if settings.quality is not None:
        where = "cpu" if settings.gpu is None else find_card().name
        gate = QualityGate(settings.quality, loaded, dtype, config.block_size, where)
        verdict = gate.recall()  # what was refused before is refused before gigabytes are read
    # Without a verdict the device decides when it has the weights.
    settle = gate.settle if gate is not None and verdict is None else None
    model = loaded if verdict is None else verdict.model(loaded)
    if settings.gpu is not None:
        from deepinfer.workers.gpu.opening import StepSizes, open_gpu

        sizes = StepSizes(config.max_batch_tokens, config.max_batch_seqs)
        nested = None
        if model.nested:
            nested = NestedSettings(
                levels=settings.precision_levels,
                w8a8=settings.fp8_products == "w8a8",
                shed=settings.shed,
                shed_head=settings.shed_head,
                start_shed=settings.start_shed,
            )
        ready = open_gpu(
            find_card(),
            model,
            layout,
            settings.gpu,
            sizes,
            config.blocks_total,
            settle,
            nested=nested,
        )
        verdict = ready.verdict or verdict or Verdict()
        engine = Engine(ready.runner, failpoints)
        said = () if settings.start_shed else note(engine.levels, engine.costs)
        notes = (*ready.notes, *said, *verdict.notes)
        identity = _identity(loaded, verdict)
        return Device(
            engine, ready.pool, ready.blocks, identity, notes, verdict.gauges, ready.planes
        )
    backend = CpuBackend(threads=settings.threads, deterministic=settings.deterministic)
    upper_only = settings.start_shed and model.nested
    decoder = Decoder(
        model,
        backend,
        settings.precision_levels,
        upper_only=upper_only,
        w8a8_rows=W8A8_ROWS if settings.fp8_products == "w8a8" else 0,
    )
    if settle is not None:
        verdict = settle(CpuTrial(decoder, backend, config.block_size))
    verdict = verdict or Verdict()
    blocks, head = config.blocks_total, settings.shed_head
    sheds = settings.shed and decoder.levels.count > 1 and not upper_only
    tail = tail_blocks(decoder, layout.block_bytes, head=head) if sheds else 0
    pool = PagedPool(layout, blocks + tail, backend.device)
    runner = ModelRunner(decoder, pool, backend)
    if runner.levels > 1:
        runner.costs = measure_costs(runner)
    runner.level_min = runner.levels - 1 if upper_only else 0
    planes = None
    if tail:
        weights = verdict.model(loaded).weights
        planes = CpuPlanes(
            decoder,
            weights,
            runner,
            pool,
            blocks,
            head=head,
            threads=settings.threads,
            failpoints=failpoints,
        )
    engine = Engine(runner, failpoints)
    identity = _identity(loaded, verdict)
    said = (UPPER_ONLY,) if upper_only else note(engine.levels, engine.costs)
    notes = (*said, *verdict.notes)
    if settings.deterministic:
        notes += (
            f"deterministic: {backend.compared} shapes of products compared bit by bit, rows "
            f"padded to {backend.row_multiple}",
        )
    return Device(engine, pool, blocks, identity, notes, verdict.gauges, planes)


def _identity(model: LoadedModel, verdict: Verdict) -> KvIdentity:
    scales = verdict.scales
    return KvIdentity(model=model.fingerprint, key_scales="" if scales is None else scales.digest)


def assemble(
    settings: WorkerSettings,
    incarnation: Incarnation,
    device: Device,
    failpoints: Failpoints,
    *,
    find_controller: Callable[[], Awaitable[str]],
    die: Callable[[BaseException], None],
) -> WorkerShell:
    """Connect the core to the world and start it; call it on the running event loop.

    ``die`` ends the process when the device has failed.
    """
    ref = WorkerRef(WorkerId(settings.worker), incarnation)
    identity = device.identity
    salt = f"{identity.model}/{identity.layout(device.pool.layout)}"
    config = replace(
        settings.config,
        cache_salt=salt.encode(),
        blocks_total=device.blocks,
        levels=device.engine.levels,
        costs=device.engine.costs,
        w8a8_rows=device.engine.w8a8_rows,
        tail_blocks=0 if device.planes is None else device.planes.tail_blocks,
        return_ms=0 if device.planes is None else device.planes.return_ms,
        start_shed=settings.start_shed and device.engine.levels > 1,
    )
    core = WorkerCore(ref, NodeId(settings.node), config)
    shell = WorkerShell(core, device.engine, die=die, gauges=device.gauges, planes=device.planes)
    shell.connect(
        GatewayLinks(ref, settings.token, shell.feed),
        ReportLink(settings.token, shell.feed, find_controller, shell.counters),
        StoreSwapper(
            ref,
            device.pool,
            identity,
            shell.feed,
            token=settings.token,
            path=settings.store_path,
            node=settings.node,
            failpoints=failpoints,
        ),
    )
    shell.start()
    return shell
