"""The controller as a process: a detached, restartable, asynchronous Ray actor.

``deploy/`` wraps ``ControllerActor`` with ``ray.remote`` and creates it by name (``max_restarts=-1,
max_task_retries=0``). It starts serving by itself, so that one that Ray has restarted serves again
although nobody calls it; peers find its new address by ``address()``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog

from deepinfer.controller import metrics
from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.core import ControllerCore
from deepinfer.controller.core.events import Drain
from deepinfer.controller.ports import Directory, Orders
from deepinfer.controller.scrape import ScrapeSettings
from deepinfer.controller.service import build_server
from deepinfer.controller.shell import Shell, wall_ms
from deepinfer.controller.stores import GrpcStores
from deepinfer.kvstore.core.ids import WorkerId
from deepinfer.proto.failpoints import Failpoints
from deepinfer.proto.redaction import hide, redacted

log = structlog.get_logger(__name__)

STOP_GRACE_S = 0.2
SCRAPE_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """All that the controller process is told; picklable.

    Raises:
        ValueError: a token or the namespace is empty.
    """

    namespace: str
    """Ray namespace of all of the cluster's actors."""
    token: str = field(repr=False)
    """The clients', which ``/metrics`` takes too."""
    cluster_token: str = field(repr=False)
    """The cluster's own."""
    operator_token: str | None = field(default=None, repr=False)
    """Who has it may drain and restart; None: nobody may."""
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
        for name in ("namespace", "token", "cluster_token"):
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
        hide(settings.token, settings.cluster_token, settings.operator_token)
        _redact_structlog()
        self._settings = settings
        # The epoch has to rise with every life: the wall clock does, and needs no storage.
        self._epoch = wall_ms()
        self._shell = Shell(
            ControllerCore(self._epoch, settings.config),
            orders=orders,
            stores=GrpcStores(settings.cluster_token),
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
        document = self._shell.status()
        if self._address.done() and not self._address.cancelled():
            document["addresses"]["controller"] = self._address.result()
        return document

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

    async def drain(self, names: Sequence[str]) -> list[tuple[str, bool, bool, int]]:
        """Have workers or gateways take nothing new, and let what they have finish there.

        To be said again and again: of those that are known, whether each still serves, whether it
        is drained, and how many requests it has left.
        """
        for name in names:
            self._shell.drain(Drain(WorkerId(name)))
        levels = [self._shell.core.drain_level(name) for name in names]
        return [(d.name, d.serving, d.drained, d.left) for d in levels if d is not None]

    async def stop(self) -> None:
        """End every stream and the server."""
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)

    async def _serve(self) -> None:
        settings = self._settings
        server: grpc.aio.Server = build_server(
            self._shell, settings.cluster_token, settings.operator_token
        )
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


def _redact_structlog() -> None:
    """See that no secret is in what structlog prints."""
    processors = structlog.get_config()["processors"]
    if _without_secrets not in processors:
        structlog.configure(processors=[*processors, _without_secrets])


def _without_secrets(_: object, __: str, line: Any) -> Any:
    return redacted(line) if isinstance(line, str) else line


def _die(_: int) -> None:
    """End the process at once: whatever it still did could only contradict its successor."""
    os._exit(1)
