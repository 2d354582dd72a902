"""The store as a process: a detached, restartable, asynchronous Ray actor, one a node.

``deploy/`` wraps ``StoreActor`` with ``ray.remote`` and creates it by name (``store-<node>``,
``max_restarts=-1``). It starts serving by itself, so that one that Ray has restarted serves again
although nobody calls it. Nothing in this module imports Ray: how to find the controller is a
function it is given.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from deepinfer.kvstore.core.config import StoreConfig, StoreConfigError
from deepinfer.kvstore.core.ids import Incarnation, NodeId, StoreId
from deepinfer.kvstore.heap import keep_freed_buffers
from deepinfer.kvstore.host_pool import SLAB_BYTES
from deepinfer.kvstore.local import LocalServer
from deepinfer.kvstore.reporting import FindController, Reporter
from deepinfer.kvstore.runtime import StoreRuntime
from deepinfer.kvstore.service import CHANNEL_OPTIONS, StoreService
from deepinfer.proto.bearer import Guard
from deepinfer.proto.crowd import BoundedCalls
from deepinfer.proto.failpoints import Failpoints
from deepinfer.proto.redaction import hide

_log = logging.getLogger(__name__)

STOP_GRACE_S = 0.2
CALLS_MAX = 4_096
"""Under way at a time: every worker has a few."""
_CALLS = {"name": "a store's calls", "advice": "the writer goes on without a swap, and tries again"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """All that one store process is told; picklable. Checked on construction."""

    store: str
    """Its id, and its actor's name."""
    node: str
    budget_bytes: int
    """Payload bytes that it may hold; 0 refuses every swap."""
    page_bytes: int
    """Bytes of one KV block (``KvLayout.block_bytes``)."""
    slab_bytes: int = SLAB_BYTES
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    same_node: bool = True
    """Offer the same-node path."""
    put_idle_s: float = 30.0
    """A put over gRPC that sends nothing for this long is given up."""
    get_s: float = 120.0
    """A read may take this long, its reader's pauses included."""
    failed_start_exit_s: float | None = None
    """A process that could not start says why for so long and then exits, for Ray to start anew;
    None: it stays, as tests in one process want."""
    token: str = field(repr=False)
    """The cluster's own."""
    config: StoreConfig = field(default_factory=StoreConfig)

    def __post_init__(self) -> None:
        for name in ("store", "node", "host", "token"):
            if not getattr(self, name):
                raise StoreConfigError(name, "", "not empty")
        for name, low in (("budget_bytes", 0), ("page_bytes", 1), ("slab_bytes", 1), ("port", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise StoreConfigError(name, value, f"an integer of {low} or more")
        for name in ("put_idle_s", "get_s"):
            if not getattr(self, name) > 0:
                raise StoreConfigError(name, getattr(self, name), "above 0")


class StoreActor:
    """One store. Construct it inside a running event loop, as Ray does for async actors."""

    def __init__(self, settings: StoreSettings, find_controller: FindController) -> None:
        hide(settings.token)
        self._settings = settings
        self._find_controller = find_controller
        self._incarnation = Incarnation(time.time_ns() // 1_000)
        self._runtime: StoreRuntime | None = None
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve())
        self._serving.add_done_callback(self._stopped)

    async def address(self) -> str:
        """Where it serves, host:port, once it does."""
        return await asyncio.shield(self._address)

    async def incarnation(self) -> int:
        """Microseconds since 1970 when this life began: higher in every later one."""
        return self._incarnation

    async def pid(self) -> int:
        """The process's id."""
        return os.getpid()

    async def ping(self) -> int:
        """The incarnation, as a sign of life."""
        return self._incarnation

    async def status(self) -> dict[str, int]:
        """The core's numbers; empty while it starts."""
        return {} if self._runtime is None else self._runtime.core.snapshot()

    async def stop(self) -> None:
        """End the server; what it holds is gone."""
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)

    async def _serve(self) -> None:
        settings = self._settings
        keep_freed_buffers()
        # Private to this user: who can connect can map the slabs.
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="deepinfer-store-"))
        runtime = StoreRuntime(
            store=StoreId(settings.store),
            incarnation=self._incarnation,
            node=NodeId(settings.node),
            budget_bytes=settings.budget_bytes,
            page_bytes=settings.page_bytes,
            slab_bytes=settings.slab_bytes,
            config=settings.config,
            failpoints=Failpoints.from_environment(),
        )
        local: LocalServer | None = None
        server: grpc.aio.Server | None = None
        try:
            if settings.same_node:
                socket_path = str(folder / "socket")
                local = LocalServer(runtime, socket_path, read_s=settings.get_s)
            server = grpc.aio.server(
                interceptors=[Guard(cluster=settings.token), BoundedCalls(CALLS_MAX, **_CALLS)],
                options=[*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)],
            )
            service = StoreService(
                runtime,
                local_socket="" if local is None else local.path,
                idle_s=settings.put_idle_s,
                get_s=settings.get_s,
            )
            server.add_generic_rpc_handlers((service.handlers(),))
            port = server.add_insecure_port(f"{settings.host}:{settings.port}")
            await server.start()
            address = f"{settings.host}:{port}"
            self._runtime = runtime
            self._address.set_result(address)
            _log.info("store %s serves at %s", settings.store, address)
            reporter = Reporter(
                runtime, self._find_controller, address=address, token=settings.token
            )
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(runtime.tick())
                tasks.create_task(reporter.run())
        finally:
            if server is not None:
                await server.stop(STOP_GRACE_S)
            if local is not None:
                await local.close()
            self._runtime = None
            runtime.close()
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _stopped(self, serving: asyncio.Task[None]) -> None:
        if serving.cancelled():
            self._address.cancel()
            return
        error = serving.exception()
        if error is not None:
            _log.error("store %s fails", self._settings.store, exc_info=error)
            if not self._address.done():
                self._address.set_exception(error)
                if self._settings.failed_start_exit_s is not None:
                    delay_s = self._settings.failed_start_exit_s
                    asyncio.get_running_loop().call_later(delay_s, os._exit, 1)
                return
            # Half a store is worse than none: workers would wait on it. Ray starts it anew.
            os._exit(1)
