"""The controller as a process: a detached, restartable, asynchronous Ray actor.

``deploy/`` wraps ``ControllerActor`` with ``ray.remote`` and creates it by name (``max_restarts=-1,
max_task_retries=0``). It starts serving by itself, so that one that Ray has restarted serves again
although nobody calls it; peers find its new address by ``address()``.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog

from deepinfer.controller import metrics
from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.core import ControllerCore
from deepinfer.controller.ports import Directory, Orders
from deepinfer.controller.scrape import ScrapeSettings
from deepinfer.controller.service import build_server
from deepinfer.controller.shell import Shell, wall_ms
from deepinfer.controller.stores import GrpcStores
from deepinfer.proto.failpoints import Failpoints

log = structlog.get_logger(__name__)

STOP_GRACE_S = 0.2
SCRAPE_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """All that the controller process is told; picklable.

    Raises:
        ValueError: the token or the namespace is empty.
    """

    namespace: str
    """Ray namespace of all of the cluster's actors."""
    token: str = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    metrics: ScrapeSettings | None = None
    """Where ``/metrics`` is served; None: nowhere."""
    model: str = ""
    """With ``kv_cache_dtype``: what the metrics call what is served."""
    kv_cache_dtype: str = ""
    failed_start_exit_s: float | None = None
    """A process that could not start says why for so long and then exits, for Ray to start anew;
    None: it stays, as tests in one process want."""
    config: ControllerConfig = field(default_factory=ControllerConfig)

    def __post_init__(self) -> None:
        for name in ("namespace", "token"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: must not be")


class ControllerActor:
    """The controller. Construct it inside a running event loop, as Ray does for async actors.

    ``orders`` and ``directory`` default to Ray's; tests give their own.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        *,
        orders: Orders | None = None,
        directory: Directory | None = None,
    ) -> None:
        if orders is None or directory is None:
            from deepinfer.controller.surroundings import ActorNames, RayDirectory, RayOrders

            ray_orders = RayOrders(settings.namespace)
            orders = orders or ray_orders
            directory = directory or RayDirectory(
                settings.namespace, ActorNames(), greet=ray_orders.greet
            )
        self._settings = settings
        # The epoch has to rise with every life: the wall clock does, and needs no storage.
        self._epoch = wall_ms()
        self._shell = Shell(
            ControllerCore(self._epoch, settings.config),
            orders=orders,
            stores=GrpcStores(settings.token),
            directory=directory,
            step_down=_die,
            failpoints=Failpoints.from_environment(),
        )
        self._address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._scraped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve())
        self._serving.add_done_callback(self._stopped)

    async def address(self) -> str:
        """Where ``Control`` is served, host:port, once it is."""
        return await asyncio.shield(self._address)

    async def incarnation(self) -> int:
        """This life's epoch: milliseconds since 1970 when it began."""
        return self._epoch

    async def pid(self) -> int:
        """The process's id."""
        return os.getpid()

    async def status(self) -> dict[str, Any]:
        """Pools, stores, requests, ``swapped``, ``cpu_offload`` and counters as plain values."""
        return self._shell.status()

    async def metrics(self) -> str:
        """All metrics as Prometheus text."""
        return self._render("")[0].decode()

    async def metrics_address(self) -> str:
        """Where ``/metrics`` is served, host:port, once it is; for ever pending if it never is."""
        return await asyncio.shield(self._scraped)

    def _render(self, accept: str) -> tuple[bytes, str]:
        return metrics.render(
            self._shell.core.summary(),
            self._shell.tally.peers(),
            model=self._settings.model,
            kv_cache_dtype=self._settings.kv_cache_dtype,
            accept=accept,
        )

    async def drain(self, worker: str) -> None:
        """Move everything off a worker and place nothing there until it restarts."""
        self._shell.drain(worker)

    async def stop(self) -> None:
        """End every stream and the server."""
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)

    async def _serve(self) -> None:
        settings = self._settings
        server: grpc.aio.Server = build_server(self._shell, settings.token)
        port = server.add_insecure_port(f"{settings.host}:{settings.port}")
        await server.start()
        self._address.set_result(f"{settings.host}:{port}")
        log.info("controller serves", address=f"{settings.host}:{port}", epoch=self._epoch)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._shell.run())
                if settings.metrics is not None:
                    tasks.create_task(self._scrape(settings.metrics))
        finally:
            await server.stop(STOP_GRACE_S)

    async def _scrape(self, settings: ScrapeSettings) -> None:
        """Serve ``/metrics`` until cancelled. Requests do not depend on it: it may come late."""
        # Memory that a controller without /metrics does not need.
        from deepinfer.controller.scrape_server import ScrapeServer

        server = ScrapeServer(settings, self._settings.token, self._render)
        try:
            while not self._scraped.done():
                try:
                    address = await server.start()
                except OSError as error:
                    log.warning("metrics are not served yet", error=str(error))
                    await asyncio.sleep(SCRAPE_RETRY_S)
                else:
                    self._scraped.set_result(address)
                    log.info("metrics are served", address=address)
            await asyncio.get_running_loop().create_future()
        finally:
            await server.close()

    def _stopped(self, serving: asyncio.Task[None]) -> None:
        if serving.cancelled():
            self._address.cancel()
            self._scraped.cancel()
            return
        error = serving.exception()
        if error is not None:
            log.error("controller fails", exc_info=error)
            if not self._address.done():
                self._address.set_exception(error)
                if self._settings.failed_start_exit_s is not None:
                    delay_s = self._settings.failed_start_exit_s
                    asyncio.get_running_loop().call_later(delay_s, os._exit, 1)
                return
            _die(self._epoch)  # half a controller is worse than none; Ray starts it anew


def _die(_: int) -> None:
    """End the process at once: whatever it still did could only contradict its successor."""
    os._exit(1)
