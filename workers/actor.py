"""The worker as a process: a detached, restartable, asynchronous Ray actor.

``deploy/`` wraps ``WorkerActor`` with ``ray.remote`` and creates it by name (``max_restarts=-1,
max_task_retries=0``). It loads its model and begins to report by itself, so that one that Ray has
restarted serves again although nobody calls it. Nothing in this module imports Ray: how to find
the controller is a function it is given.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from deepinfer.kvstore.client import Path as StorePath
from deepinfer.kvstore.core.ids import Incarnation, NodeId, WorkerId, WorkerRef
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.kvstore.core.messages import Order
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.core.config import WorkerConfig, WorkerConfigError
from deepinfer.workers.core.core import WorkerCore
from deepinfer.workers.engine import Engine
from deepinfer.workers.failpoints import Failpoints
from deepinfer.workers.links import GatewayLinks, ReportLink
from deepinfer.workers.model.decoder import kv_layout
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.runner import ModelRunner
from deepinfer.workers.pool import PagedPool
from deepinfer.workers.shell import WorkerShell
from deepinfer.workers.swap import KvIdentity, StoreSwapper

log = logging.getLogger(__name__)

EXIT_DEVICE_FAILED = 70
"""The process's exit status when its device has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """All that one worker process is told; picklable.

    Raises:
        ValueError: worker, node or token is empty, or threads is below 1.
    """

    worker: str
    node: str
    model_path: str
    """A Hugging Face folder or a GGUF file."""
    kv_cache_dtype: str = "auto"
    threads: int = 1
    """Compute threads, set explicitly: Ray would leave one."""
    store_path: StorePath = "auto"
    token: str = field(repr=False)
    config: WorkerConfig
    """``block_bytes`` must be what the model's layout says; ``cache_salt`` is set here."""

    def __post_init__(self) -> None:
        for name in ("worker", "node", "token"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: must not be")
        if self.threads < 1:
            raise ValueError(f"threads = {self.threads}: must be 1 or more")


class Device(NamedTuple):
    """A model on a device with its pool, ready to step."""

    engine: Engine
    pool: PagedPool
    identity: KvIdentity


def open_device(settings: WorkerSettings, failpoints: Failpoints) -> Device:
    """Load the model and allocate the pool; takes seconds.

    Raises what ``load_model`` raises, and WorkerConfigError for another model's ``block_bytes``.
    """
    config = settings.config
    loaded = load_model(Path(settings.model_path))
    dtype = resolve_kv_dtype(settings.kv_cache_dtype)
    layout = kv_layout(loaded.config, dtype, config.block_size)
    if config.block_bytes != layout.block_bytes:
        raise WorkerConfigError("block_bytes", config.block_bytes, f"{layout.block_bytes} here")
    backend = CpuBackend(threads=settings.threads)
    pool = PagedPool(layout, config.blocks_total, backend.device)
    engine = Engine(ModelRunner(loaded, pool, backend), failpoints)
    return Device(engine, pool, KvIdentity(model=loaded.fingerprint))


class WorkerActor:
    """One worker. Construct it inside a running event loop, as Ray does for async actors.

    ``find_controller`` returns the address of the controller's ``Control`` service; it raises
    LookupError while there is none.
    """

    def __init__(
        self, settings: WorkerSettings, find_controller: Callable[[], Awaitable[str]]
    ) -> None:
        self._settings = settings
        self._find_controller = find_controller
        # The wall clock rises with every life, and needs no storage.
        self._incarnation = Incarnation(time.time_ns() // 1000)
        self._shell: asyncio.Future[WorkerShell] = asyncio.get_running_loop().create_future()
        self._starting = asyncio.create_task(self._start())

    async def order(self, order: Order, directory: Mapping[str, str]) -> None:
        """Carry out a controller's order; its outcome shows in the reports.

        ``directory`` maps the ids of the gateway and the store in the order to host:port.
        """
        (await self._ready()).order(order, directory)

    async def drain(self) -> None:
        """Take nobody new from here on; the controller moves the residents away."""
        (await self._ready()).drain()

    async def status(self) -> dict[str, object]:
        """Levels and counters as plain values."""
        return (await self._ready()).status()

    async def ping(self) -> str:
        """The worker's name: its event loop is alive, and its model is loaded."""
        await self._ready()
        return self._settings.worker

    async def incarnation(self) -> int:
        """Microseconds since 1970 when this life began: higher in every later one."""
        return self._incarnation

    async def pid(self) -> int:
        """The process's id, once the model is loaded."""
        await self._ready()
        return os.getpid()

    async def stop(self) -> None:
        """End the engine's thread and hang up on everyone."""
        self._starting.cancel()
        await asyncio.gather(self._starting, return_exceptions=True)
        if self._shell.done() and not self._shell.cancelled() and not self._shell.exception():
            await self._shell.result().stop()

    async def _ready(self) -> WorkerShell:
        return await asyncio.shield(self._shell)

    async def _start(self) -> None:
        try:
            failpoints = Failpoints.from_environment()
            device = await asyncio.to_thread(open_device, self._settings, failpoints)
            self._shell.set_result(self._assemble(device, failpoints))
        except asyncio.CancelledError:
            self._shell.cancel()
            raise
        except Exception as error:
            log.exception("worker %s cannot start", self._settings.worker)
            self._shell.set_exception(error)

    def _assemble(self, device: Device, failpoints: Failpoints) -> WorkerShell:
        settings = self._settings
        ref = WorkerRef(WorkerId(settings.worker), self._incarnation)
        identity = device.identity
        salt = f"{identity.model}/{identity.precision}/{device.pool.layout.fingerprint()}"
        config = replace(settings.config, cache_salt=salt.encode())
        core = WorkerCore(ref, NodeId(settings.node), config)
        shell = WorkerShell(core, device.engine, die=_die)
        shell.connect(
            GatewayLinks(ref, settings.token, shell.feed),
            ReportLink(settings.token, shell.feed, self._find_controller, shell.counters),
            StoreSwapper(
                ref,
                device.pool,
                identity,
                shell.feed,
                token=settings.token,
                path=settings.store_path,
                failpoints=failpoints,
            ),
        )
        shell.start()
        log.info("worker %s serves (incarnation %d)", settings.worker, self._incarnation)
        return shell


def _die(_: BaseException) -> None:
    """End the process: after a device error a retry would land on the same broken state."""
    logging.shutdown()
    os._exit(EXIT_DEVICE_FAILED)
