"""Where a payload is handed to and fetched from in `bench handoff`: our store, and its peers.

A peer takes the payload of ``source`` (``put``), gives it back into ``target`` (``get``), where the
reader owns it and may write, and forgets it (``free``). All but the plain copy keep it in another
process meanwhile.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from deepinfer.deploy import interrupts
from deepinfer.deploy.config import ConfigError
from deepinfer.kvstore.actor import StoreActor, StoreSettings
from deepinfer.kvstore.client import StoreClient
from deepinfer.kvstore.core.ids import Incarnation, RequestId, Run, Seq, Ticket, WorkerId, WorkerRef
from deepinfer.kvstore.core.layout import KvLayout
from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.core.messages import StoreStatus
from deepinfer.kvstore.core.states import State

Bytes = npt.NDArray[np.uint8]

STORE_START_S: Final = 30.0
REDIS_START_S: Final = 10.0
REDIS_STOP_S: Final = 10.0
REDIS_VALUE_BYTES_MAX: Final = 512 << 20
"""Redis takes no longer value (``proto-max-bulk-len``)."""
RAY_SPARE_BYTES: Final = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """KV of ``blocks`` blocks: uint8 ``[blocks * block_bytes]``, twice."""

    layout: KvLayout
    blocks: int
    source: Bytes
    target: Bytes

    @classmethod
    def make(cls, layout: KvLayout, blocks: int) -> Payload:
        """Random bytes as the source; both arrays are touched, so that no page is missing."""
        count = blocks * layout.block_bytes
        source = np.random.default_rng(blocks).integers(0, 256, count, dtype=np.uint8)
        return cls(layout=layout, blocks=blocks, source=source, target=np.ones_like(source))


class Peer(Protocol):
    """One way of handing a payload over. The calls come in this order, round after round."""

    async def ready(self, payload: Payload) -> None:
        """Prepare what is not part of the hand-off."""
        ...

    async def put(self, payload: Payload) -> None:
        """Take the payload from ``source``. Timed."""
        ...

    async def get(self, payload: Payload) -> None:
        """Write the payload into ``target``. Timed."""
        ...

    async def free(self) -> None:
        """Forget the payload."""
        ...


# ---- a plain copy -------------------------------------------------------------------------------


class MemcpyPeer:
    """Into a buffer of this process and out again: what no hand-off can beat."""

    def __init__(self) -> None:
        self._buffer: Bytes = np.empty(0, np.uint8)

    async def ready(self, payload: Payload) -> None:
        if self._buffer.size != payload.source.size:
            self._buffer = np.ones_like(payload.source)

    async def put(self, payload: Payload) -> None:
        np.copyto(self._buffer, payload.source)

    async def get(self, payload: Payload) -> None:
        np.copyto(payload.target, self._buffer)

    async def free(self) -> None:
        """The buffer stays, as a store's memory does."""


# ---- our store ----------------------------------------------------------------------------------


class StorePeer:
    """A KV store in a process of its own, through one of its paths, as a worker uses it.

    ``put`` is Put and Commit, from a function that copies blocks out of a pool; ``get`` verifies
    what it copied. Reserve and Release, which the controller sends, are not timed.
    """

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._count = 0
        self._ticket = self._next()

    async def ready(self, payload: Payload) -> None:
        self._ticket = self._next()
        reply = await self._client.reserve(self._ticket, payload.source.nbytes, epoch=1)
        _need(reply.status, "reserve", reply.detail)

    async def put(self, payload: Payload) -> None:
        source, block_bytes = payload.source, payload.layout.block_bytes

        def fill(first: int, buffer: memoryview) -> None:
            begin = first * block_bytes
            np.copyto(np.frombuffer(buffer, np.uint8), source[begin : begin + len(buffer)])

        put = await self._client.put(self._ticket, self._draft(payload), fill)
        _need(put.status, "put", put.detail)
        reply = await self._client.commit(self._ticket)
        _need(reply.status, "commit", reply.detail)

    async def get(self, payload: Payload) -> None:
        got = await self._client.get(self._ticket, lambda manifest: [payload.target.data])
        _need(got.status, "get", got.detail)

    async def free(self) -> None:
        reply = await self._client.release(self._ticket, epoch=1)
        _need(reply.status, "release", reply.detail)

    def _next(self) -> Ticket:
        self._count += 1
        writer = self._client.writer.worker
        return Ticket(Seq(RequestId(f"bench-{writer}"), 0), Run(1, self._count), Run(1, 0))

    def _draft(self, payload: Payload) -> Manifest:
        return Manifest.draft(
            dtype=payload.layout.dtype.name,
            layout=payload.layout.fingerprint(),
            block_bytes=payload.layout.block_bytes,
            blocks=payload.blocks,
            token_ids=tuple(range(payload.blocks * payload.layout.block_size)),
            state=State.DECODE,
            precision="fp16",
            model="none: random bytes",
            run=self._ticket.run,
        )


@asynccontextmanager
async def store_process(layout: KvLayout, budget_bytes: int) -> AsyncIterator[tuple[str, str]]:
    """A store in a process of its own; yields its address and token."""
    token = secrets.token_hex(16)
    settings = StoreSettings(
        store="store-bench",
        node="bench",
        budget_bytes=budget_bytes,
        page_bytes=layout.block_bytes,
        token=token,
    )
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve_store, args=(settings, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not await asyncio.to_thread(ours.poll, STORE_START_S):
            raise TimeoutError(f"the store did not start within {STORE_START_S:g} s")
        yield ours.recv(), token
    finally:
        ours.close()  # which the store's process takes as its end
        await asyncio.to_thread(process.join, STORE_START_S)
        process.kill()  # does nothing to one that ended
        process.join()


@asynccontextmanager
async def running_store(
    layout: KvLayout, budget_bytes: int
) -> AsyncIterator[tuple[StorePeer, StorePeer]]:
    """A store in a process of its own; yields its gRPC and its same-node path."""
    clients: list[StoreClient] = []
    async with store_process(layout, budget_bytes) as (address, token):
        try:
            paths: tuple[Literal["grpc", "memfd"], ...] = ("grpc", "memfd")
            for path in paths:
                writer = WorkerRef(WorkerId(path), Incarnation(os.getpid()))
                clients.append(StoreClient(address, writer, token=token, path=path))
            grpc, memfd = clients
            yield StorePeer(grpc), StorePeer(memfd)
        finally:
            for client in clients:
                await client.close()


def _serve_store(settings: StoreSettings, parent: Connection) -> None:
    """Serve until the parent closes its end of the pipe, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes it

    async def main() -> None:
        actor = StoreActor(settings, _no_controller)
        try:
            parent.send(await actor.address())
            await asyncio.to_thread(parent.poll, None)
        finally:
            await actor.stop()

    asyncio.run(main())


async def _no_controller() -> str:
    raise LookupError("a store that is measured reports to nobody")


def _need(status: StoreStatus, call: str, detail: str) -> None:
    if status is not StoreStatus.OK:
        raise RuntimeError(f"the store's answer to {call}: {status.value} {detail}")


# ---- Ray's object store -------------------------------------------------------------------------


class RayPeer:
    """``ray.put`` and ``ray.get``, then a copy out of the object store's read-only memory."""

    def __init__(self) -> None:
        self._ref: Any = None
        self.views_s: list[float] = []
        """How long each ``ray.get`` took without the copy."""

    async def ready(self, payload: Payload) -> None:
        """Nothing: Ray makes room as it goes."""

    async def put(self, payload: Payload) -> None:
        import ray

        self._ref = ray.put(payload.source)

    async def get(self, payload: Payload) -> None:
        import ray

        begun = time.perf_counter()
        view = ray.get(self._ref)
        self.views_s.append(time.perf_counter() - begun)
        np.copyto(payload.target, view)

    async def free(self) -> None:
        self._ref = None


@asynccontextmanager
async def running_ray(payload_bytes_max: int) -> AsyncIterator[RayPeer]:
    """A Ray of our own with an object store that holds two payloads and more.

    Raises:
        ConfigError: this process uses Ray already.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # as `deepinfer up` does, and Ray by itself
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # or it listens on every interface
    context: Any = None
    try:
        with interrupts.held():  # a Ray that is half started leaves processes behind
            import ray

            if ray.is_initialized():
                raise ConfigError("this process already uses Ray: stop that first (ray.shutdown())")
            context = ray.init(
                address="local",
                num_cpus=1,
                include_dashboard=False,
                object_store_memory=2 * payload_bytes_max + RAY_SPARE_BYTES,
                _node_ip_address="127.0.0.1",
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
        yield RayPeer()
    finally:  # also for a signal that was held back
        if context is not None:
            ray.shutdown()
            if folder := context.address_info.get("session_dir"):
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


# ---- Redis --------------------------------------------------------------------------------------


class RedisPeer:
    """``SET`` and ``GET`` of one value over loopback TCP, then a copy into the reader's memory."""

    def __init__(self, client: Any, port: int) -> None:
        self._client = client
        self.port = port

    def version(self) -> str:
        """The server's."""
        return str(self._client.info("server")["redis_version"])

    async def ready(self, payload: Payload) -> None:
        """Nothing: Redis makes room as it goes."""

    async def put(self, payload: Payload) -> None:
        self._client.set("payload", payload.source.data)

    async def get(self, payload: Payload) -> None:
        np.copyto(payload.target, np.frombuffer(self._client.get("payload"), np.uint8))

    async def free(self) -> None:
        self._client.delete("payload")


def find_redis(named: Path | None) -> Path | str:
    """The server's program; or, as text, why Redis is not measured.

    Raises:
        ConfigError: a program was named that is none.
    """
    if named is not None:
        found = shutil.which(named)
        if found is None:
            raise ConfigError(f"redis_server = {str(named)!r}: must be a program")
        return Path(found)
    if importlib.util.find_spec("redis") is None:
        return "the redis package is not installed: pip install 'deepinfer-cluster[bench]'"
    found = shutil.which("redis-server")
    return Path(found) if found else "no redis-server on PATH, and --redis-server names none"


@asynccontextmanager
async def running_redis(program: Path) -> AsyncIterator[RedisPeer]:
    """A Redis of our own on a free loopback port: no persistence, no Unix socket.

    Raises:
        ConfigError: it does not start; says what it printed last.
    """
    import redis

    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="deepinfer-redis-"))
    log = folder / "log"
    port = _free_port()
    command = [str(program), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)]
    command += ["--save", "", "--appendonly", "no", "--unixsocket", "", "--daemonize", "no"]
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220 - a fork, and nothing else runs meanwhile
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process, which then ends it
        )
    client = redis.Redis(host="127.0.0.1", port=port)
    try:
        deadline = time.monotonic() + REDIS_START_S
        while not _answers(client):
            if process.poll() is not None or time.monotonic() > deadline:
                last = log.read_text(errors="replace").strip().rpartition("\n")[2]
                raise ConfigError(f"redis_server = {str(program)!r}: does not start: {last}")
            await asyncio.sleep(0.05)
        yield RedisPeer(client, port)
    finally:
        client.close()
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, REDIS_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _answers(client: Any) -> bool:
    import redis

    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
