"""The gateway as a process: a detached, restartable, asynchronous Ray actor.

``deploy/`` wraps ``GatewayActor`` with ``ray.remote`` and creates it by name. It starts serving by
itself, so that one that Ray has restarted serves again on the same port although nobody calls it.
Nothing in this module imports Ray: how to find the controller is a function it is given.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.gateway.health import Health
from deepinfer.gateway.intake import ModelCard
from deepinfer.gateway.reporting import Reporter
from deepinfer.gateway.service import build_link_server, build_server
from deepinfer.gateway.shell import Shell
from deepinfer.gateway.tls import ServerTls
from deepinfer.kvstore.core.ids import GatewayId, Incarnation
from deepinfer.proto.failpoints import Failpoints
from deepinfer.proto.redaction import hide
from deepinfer.text.load import load_tokenizer

log = logging.getLogger(__name__)

BIND_ATTEMPTS = 50
BIND_RETRY_S = 0.2
STOP_GRACE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """All that one gateway process is told; picklable.

    Raises:
        ValueError: a token or the secret is empty.
    """

    gateway: str
    model: str
    """The name that clients use."""
    model_path: str
    """Where its tokenizer is: a Hugging Face folder or a GGUF file."""
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_cache_dtype: str
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one; a restarted gateway has the same one only if it is named here."""
    advertised_host: str = ""
    """What others are told instead of ``host``, where that is every interface."""
    tls: ServerTls | None = None
    """If given, clients must speak TLS with ``host:port``, and workers connect elsewhere."""
    link_host: str = "127.0.0.1"
    link_port: int = 0
    """Where workers connect, without TLS like everything between the cluster's processes, if
    clients use TLS."""
    failed_start_exit_s: float | None = None
    """A process that could not start says why for so long and then exits, for Ray to start anew;
    None: it stays, as tests in one process want."""
    token: str = field(repr=False)
    """The clients'."""
    cluster_token: str = field(repr=False)
    """The cluster's own."""
    secret: bytes = field(repr=False)
    """The cluster's secret: the same at every gateway."""
    config: GatewayConfig = field(default_factory=GatewayConfig)

    def __post_init__(self) -> None:
        for name in ("gateway", "token", "cluster_token", "secret"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: must not be")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerAccess:
    """How a gateway reaches the controller; picklable, for Ray carries it.

    Both raise OSError, RuntimeError or LookupError while there is none.
    """

    find: Callable[[], Awaitable[str]]
    """Where its ``Control`` service is, host:port."""
    status: Callable[[], Awaitable[Mapping[str, object]]]
    """Its status document."""


class GatewayActor:
    """One gateway. Construct it inside a running event loop, as Ray does for async actors."""

    def __init__(self, settings: GatewaySettings, controller: ControllerAccess) -> None:
        hide(settings.token, settings.cluster_token, settings.secret.hex())
        self._settings = settings
        self._controller = controller
        self._incarnation = Incarnation(time.time_ns() // 1_000)
        self._shell: Shell | None = None
        self._health: Health | None = None
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

    async def close(self, message: str) -> None:
        """End every stream for good, saying why: the cluster is being stopped.

        Returns when every client has been told; nobody can tell one that reads nothing.
        """
        if self._health is not None:
            self._health.drain()
        if self._shell is not None:
            await self._shell.close(message)

    async def stop(self) -> None:
        """End every stream and the server; clients go to another gateway, or come back later."""
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)

    async def _serve(self) -> None:
        settings = self._settings
        raise_fd_limit()
        tokenizer = await asyncio.to_thread(load_tokenizer, Path(settings.model_path))
        card = ModelCard(
            model=settings.model,
            tokenizer=tokenizer,
            max_context_tokens=settings.max_context_tokens,
            vocab_size=settings.vocab_size,
            kv_cache_dtype=settings.kv_cache_dtype,
            eos_token_ids=settings.eos_token_ids,
        )
        shell = Shell(
            GatewayId(settings.gateway),
            self._incarnation,
            settings.config,
            card,
            failpoints=Failpoints.from_environment(),
        )
        self._shell = shell
        health = self._health = Health(shell.gateway, self._controller.status)
        shell.on_drain(health.drain)
        server = build_server(
            shell,
            token=settings.token,
            cluster_token=settings.cluster_token if settings.tls is None else None,
            secret=settings.secret,
            status=self._controller.status,
            health=health,
        )
        port = await _bind(server, settings.host, settings.port, settings.tls)
        address = endpoint(settings.advertised_host or settings.host, port)
        servers, link_address = [server], address
        if settings.tls is not None:
            servers.append(build_link_server(shell, cluster_token=settings.cluster_token))
            port = await _bind(servers[1], settings.link_host, settings.link_port, None)
            link_address = endpoint(settings.link_host, port)
        for each in servers:
            await each.start()
        find = self._controller.find
        reporter = Reporter(shell, find, address=link_address, cluster_token=settings.cluster_token)
        self._address.set_result(address)
        log.info("gateway %s serves at %s", settings.gateway, address)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(shell.tick())
                tasks.create_task(reporter.run())
        finally:
            health.drain()
            await asyncio.gather(*(each.stop(STOP_GRACE_S) for each in servers))

    def _stopped(self, serving: asyncio.Task[None]) -> None:
        if serving.cancelled():
            self._address.cancel()
            return
        error = serving.exception()
        if error is not None:
            log.error("gateway %s fails", self._settings.gateway, exc_info=error)
            if not self._address.done():
                self._address.set_exception(error)
                if self._settings.failed_start_exit_s is not None:
                    delay_s = self._settings.failed_start_exit_s
                    asyncio.get_running_loop().call_later(delay_s, os._exit, 1)
                return
            # Half a gateway is worse than none: clients would wait on it. Ray starts it anew.
            os._exit(1)


def raise_fd_limit() -> None:
    """Let this process open as many files as the system grants: each client's connection is one.

    The usual limit, 1,024, is there for ``select``, which nothing here uses.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def endpoint(host: str, port: int) -> str:
    """Host and port as gRPC takes them: an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _bind(server: grpc.aio.Server, host: str, port: int, tls: ServerTls | None) -> int:
    """Bind, waiting for a predecessor's sockets to go if the port is a fixed one.

    Returns:
        The port.

    Raises:
        RuntimeError: the port stays taken.
        OSError: a certificate file cannot be read.
    """
    credentials = None if tls is None else tls.credentials()
    wanted = endpoint(host, port)
    for attempt in range(BIND_ATTEMPTS):
        try:
            if credentials is None:
                return server.add_insecure_port(wanted)
            return server.add_secure_port(wanted, credentials)
        except RuntimeError:
            if port == 0 or attempt == BIND_ATTEMPTS - 1:
                raise
            await asyncio.sleep(BIND_RETRY_S)
    raise AssertionError("the last attempt returns or raises")
