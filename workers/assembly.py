"""Puts a worker together: model, pool, engine, core, links and swapper.

It imports torch. ``actor`` does not, for Ray imports that module in every process that looks a
worker up, the controller's among them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from deepinfer.kvstore.core.ids import Incarnation, NodeId, WorkerId, WorkerRef
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.workers.actor import WorkerSettings
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.core.config import WorkerConfigError
from deepinfer.workers.core.core import WorkerCore
from deepinfer.workers.engine import Engine
from deepinfer.workers.failpoints import Failpoints
from deepinfer.workers.gpu.card import find_card
from deepinfer.workers.links import GatewayLinks, ReportLink
from deepinfer.workers.model.decoder import kv_layout
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.runner import ModelRunner
from deepinfer.workers.model.weights import Progress
from deepinfer.workers.pool import PagedPool
from deepinfer.workers.shell import WorkerShell
from deepinfer.workers.swap import KvIdentity, StoreSwapper


class Device(NamedTuple):
    """A model on a device with its pool, ready to step."""

    engine: Engine
    pool: PagedPool
    blocks: int
    """Of the pool's, those that sequences may have."""
    identity: KvIdentity
    notes: tuple[str, ...] = ()
    """What there is to say of it at the start, a line each."""


def open_device(
    settings: WorkerSettings, failpoints: Failpoints, progress: Progress | None = None
) -> Device:
    """Load the model and allocate the pool; takes seconds.

    ``progress(bytes_read, bytes_total)`` is told of each tensor that was read.

    Raises what ``load_model`` raises, and WorkerConfigError for another model's ``block_bytes``;
    with ``settings.gpu`` also what ``find_card`` and ``open_gpu`` raise.
    """
    config = settings.config
    if settings.gpu is not None:
        find_card()  # what is missing is said before gigabytes are read
    loaded = load_model(Path(settings.model_path), progress=progress)
    dtype = resolve_kv_dtype(settings.kv_cache_dtype)
    layout = kv_layout(loaded.config, dtype, config.block_size)
    if config.block_bytes != layout.block_bytes:
        raise WorkerConfigError("block_bytes", config.block_bytes, f"{layout.block_bytes} here")
    identity = KvIdentity(model=loaded.fingerprint)
    if settings.gpu is not None:
        from deepinfer.workers.gpu.opening import StepSizes, open_gpu

        sizes = StepSizes(config.max_batch_tokens, config.max_batch_seqs)
        ready = open_gpu(find_card(), loaded, layout, settings.gpu, sizes, config.blocks_total)
        engine = Engine(ready.runner, failpoints)
        return Device(engine, ready.pool, ready.blocks, identity, ready.notes)
    backend = CpuBackend(threads=settings.threads)
    pool = PagedPool(layout, config.blocks_total, backend.device)
    engine = Engine(ModelRunner(loaded, pool, backend), failpoints)
    return Device(engine, pool, pool.num_blocks, identity)


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
    salt = f"{identity.model}/{identity.precision}/{device.pool.layout.fingerprint()}"
    config = replace(settings.config, cache_salt=salt.encode(), blocks_total=device.blocks)
    core = WorkerCore(ref, NodeId(settings.node), config)
    shell = WorkerShell(core, device.engine, die=die)
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
