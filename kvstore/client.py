"""What a worker uses of a store: put, commit, resolve, get, over whichever path there is.

What the world does is a status in the result, never an exception: a store that does not answer in
time is UNREACHABLE, and then nothing is known about the call. Exceptions are for a caller's own
mistakes (ValueError) and for what its own callbacks raise.

The same-node path (``memfd``) copies straight into and out of the store's memory; the other
(``grpc``) works from anywhere and is what the first is tested against.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import grpc
import grpc.aio

from deepinfer.kvstore import wire
from deepinfer.kvstore.copier import THREADS
from deepinfer.kvstore.copying import byte_views
from deepinfer.kvstore.core.events import PutId
from deepinfer.kvstore.core.ids import Incarnation, Ticket, WorkerRef
from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.core.messages import StoreStatus
from deepinfer.kvstore.heap import keep_freed_buffers
from deepinfer.kvstore.held import take_held
from deepinfer.kvstore.link import LocalLink
from deepinfer.kvstore.remote import RemoteLink
from deepinfer.kvstore.service import CHANNEL_OPTIONS
from deepinfer.kvstore.transfers import Fill, Into, OnMap, Outcome, Source, Take, Wait
from deepinfer.proto import kvstore_pb2 as pb
from deepinfer.proto import kvstore_pb2_grpc
from deepinfer.proto.bearer import bearer

Path = Literal["auto", "memfd", "grpc"]

_RECONNECT_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # or a proxy of the environment is asked, for loopback too
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_RETRY_LOCAL_S = 5.0
"""How long a store without a same-node path here is not asked for one again."""
_T = TypeVar("_T")

__all__ = [
    "CallResult", "Deadlines", "Fill", "GetResult", "Into", "OnMap", "Path", "PutResult", "Source",
    "StoreClient", "Take", "Wait",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds that a call may take before its outcome is UNREACHABLE."""

    call_s: float = 2.0
    payload_s: float = 30.0


class CallResult(NamedTuple):
    """The outcome of a call without a payload. The bytes are 0 when the store did not answer."""

    status: StoreStatus
    used_bytes: int
    budget_bytes: int
    detail: str


class PutResult(NamedTuple):
    """The outcome of a put. With OK the payload is in the store, verified and yet invisible."""

    status: StoreStatus
    manifest: Manifest | None
    """With OK: the draft with its hashes."""
    payload_bytes: int
    copy_us: int
    path: Path
    detail: str


class GetResult(NamedTuple):
    """The outcome of a get. With OK the buffers hold what the manifest says."""

    status: StoreStatus
    manifest: Manifest | None
    payload_bytes: int
    copy_us: int
    path: Path
    detail: str


class StoreClient:
    """One worker life's client of one store's address. Make and use it in one event loop.

    ``node`` is where the caller runs: only a store there is tried over shared memory; None tries
    every one that offers it. ``executor`` runs copies and hashes (by default ``copier.THREADS``
    threads of the client's own).
    """

    def __init__(
        self,
        address: str,
        writer: WorkerRef,
        *,
        token: str,
        path: Path = "auto",
        node: str | None = None,
        executor: Executor | None = None,
        on_map: OnMap | None = None,
        deadlines: Deadlines | None = None,
    ) -> None:
        if path not in ("auto", "memfd", "grpc"):
            raise ValueError(f"path = {path!r}: must be auto, memfd or grpc")
        self.address = address
        self.writer = writer
        self._metadata = bearer(token)
        self._path: Path = path
        self._node = node
        self._own_executor = (
            ThreadPoolExecutor(THREADS, thread_name_prefix="kvclient") if executor is None else None
        )
        self._executor: Executor = executor or self._own_executor  # type: ignore[assignment]
        self._on_map = on_map
        self._deadlines = deadlines or Deadlines()
        keep_freed_buffers()
        options = [*CHANNEL_OPTIONS, *_RECONNECT_OPTIONS]
        self._channel = grpc.aio.insecure_channel(address, options)
        self._stub: Any = kvstore_pb2_grpc.KVStoreStub(self._channel)
        self._remote = RemoteLink(self._channel, writer, self._executor, self._metadata)
        self._link: LocalLink | None = None
        self._linking = asyncio.Lock()
        self._no_local_until = 0.0

    async def close(self) -> None:
        """Hang up; whatever is under way fails or is stopped."""
        if self._link is not None:
            await self._link.close()
        await self._channel.close(None)
        if self._own_executor is not None:
            self._own_executor.shutdown()

    # ---- calls without a payload ----

    async def commit(self, ticket: Ticket) -> CallResult:
        """Make the put payload visible: OK, however often it is asked."""
        if self._link is not None and self._link.alive:
            try:
                async with asyncio.timeout(self._deadlines.call_s):
                    reply = await self._link.commit(ticket)
                return CallResult(reply.status, reply.used_bytes, reply.budget_bytes, "")
            except TimeoutError:
                detail = f"no answer within {self._deadlines.call_s} s"
                return CallResult(StoreStatus.UNREACHABLE, 0, 0, detail)
            except ConnectionError:
                pass  # over gRPC, then: to ask a second time does no harm
        return await self._call(self._stub.Commit, self._ticket_request(ticket))

    async def resolve(self, ticket: Ticket) -> CallResult:
        """COMMITTED; or SEALED, and then it never will be."""
        return await self._call(self._stub.Resolve, self._ticket_request(ticket))

    async def abort_put(self, ticket: Ticket) -> CallResult:
        """Stop a put of the ticket that runs over gRPC. (One over memfd ends with its task.)"""
        return await self._call(self._stub.AbortPut, self._ticket_request(ticket))

    async def reserve(
        self, ticket: Ticket, bytes_max: int, *, epoch: int, writer: WorkerRef | None = None
    ) -> CallResult:
        """The controller's call, for tools and tests."""
        request = pb.ReserveRequest(
            epoch=epoch,
            ticket=wire.ticket_to_proto(ticket),
            bytes_max=bytes_max,
            writer=wire.writer_to_proto(writer or self.writer),
        )
        return await self._call(self._stub.Reserve, request)

    async def release(self, ticket: Ticket, *, epoch: int) -> CallResult:
        """The controller's call, for tools and tests."""
        request = pb.ReleaseRequest(epoch=epoch, ticket=wire.ticket_to_proto(ticket))
        return await self._call(self._stub.Release, request)

    async def stats(self) -> pb.StatsResponse | None:
        """The store's numbers; None when it does not answer."""
        try:
            response: pb.StatsResponse = await self._stub.Stats(
                pb.StatsRequest(), timeout=self._deadlines.call_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError:
            return None
        return response

    # ---- payloads ----

    async def put(
        self, ticket: Ticket, draft: Manifest, source: Source, *, timeout_s: float | None = None
    ) -> PutResult:
        """Copy a payload into the store. ``commit`` makes it visible.

        ``draft`` is a ``Manifest.draft``; ``source`` gives its blocks, each ``block_bytes`` long,
        or writes them (in a thread). Raises ValueError when they do not fit the draft.
        """
        if not callable(source):
            if len(source) != draft.blocks or any(v.nbytes != draft.block_bytes for v in source):
                raise ValueError(
                    f"source: must be {draft.blocks} blocks of {draft.block_bytes} bytes"
                )
            source = byte_views("source", source, draft.payload_bytes)
        started = time.perf_counter_ns()
        outcome, path = await self._over(
            timeout_s,
            lambda link: link.put(ticket, draft, source),
            lambda left: self._remote.put(ticket, draft, source, self._incarnation(), left),
        )
        copy_us = (time.perf_counter_ns() - started) // 1000
        sent = draft.payload_bytes if outcome.status is StoreStatus.OK else 0
        return PutResult(outcome.status, outcome.manifest, sent, copy_us, path, outcome.detail)

    async def get(self, ticket: Ticket, into: Into, *, timeout_s: float | None = None) -> GetResult:
        """Copy a committed payload into buffers and verify the copy.

        ``into`` is asked for the buffers once the manifest is known, or for what takes the payload
        from the store's memory; what that began has ended when this returns. BAD_PAYLOAD: the bytes
        in the buffers, or taken, are not to be used. Raises ValueError when the buffers do not fit
        the manifest.
        """
        started = time.perf_counter_ns()
        outcome, path = await self._over(
            timeout_s,
            lambda link: link.get(ticket, into),
            lambda left: self._remote.get(ticket, into, left),
        )
        copy_us = (time.perf_counter_ns() - started) // 1000
        got = 0
        if outcome.status is StoreStatus.OK and outcome.manifest is not None:
            got = outcome.manifest.payload_bytes
        return GetResult(outcome.status, outcome.manifest, got, copy_us, path, outcome.detail)

    async def take(self, manifest: Manifest, payload: memoryview, take: Take) -> GetResult:
        """Have a payload taken that a ``get`` has brought to memory before; it is verified again.

        ``payload`` is ``payload_bytes`` long, and nobody writes it meanwhile. The store is not
        asked. BAD_PAYLOAD: it is not what the manifest says any more; what was taken of it is not
        to be used.
        """
        started = time.perf_counter_ns()
        outcome = await take_held(self._executor, manifest, payload, take)
        copy_us = (time.perf_counter_ns() - started) // 1000
        got = manifest.payload_bytes if outcome.status is StoreStatus.OK else 0
        return GetResult(outcome.status, manifest, got, copy_us, self._path, outcome.detail)

    async def _over(
        self,
        timeout_s: float | None,
        local: Callable[[LocalLink], Awaitable[Outcome]],
        remote: Callable[[float], Awaitable[Outcome]],
    ) -> tuple[Outcome, Path]:
        """Choose the path and hold the deadline."""
        path: Path = "grpc" if self._path == "grpc" else "memfd"
        limit_s = self._deadlines.payload_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                link = None if path == "grpc" else await self._local()
                if link is not None:
                    return await local(link), "memfd"
                if self._path == "memfd":
                    detail = "the store has no same-node path here"
                    return Outcome(StoreStatus.UNREACHABLE, None, detail), path
                path = "grpc"
                return await remote(limit_s), path
        except TimeoutError:
            detail = f"no answer within {limit_s} s"
        except ConnectionError as error:
            detail = str(error)
        except grpc.aio.AioRpcError as error:
            return Outcome(_status_of(error), None, _detail_of(error)), path
        return Outcome(StoreStatus.UNREACHABLE, None, detail), path

    # ---- the same-node path ----

    async def _local(self) -> LocalLink | None:
        """The link, made anew if need be; None where there is none to be had."""
        async with self._linking:
            old = self._link
            if old is not None and old.alive:
                return old
            if time.monotonic() < self._no_local_until:
                return None
            owed: list[PutId] = []
            if old is not None:
                # The old slabs go before the new come: two of each could be too much memory.
                await old.close()
                owed, self._link = old.unacknowledged, None
            stats = await self.stats()
            socket_path = "" if stats is None else stats.local_socket
            link = None
            if socket_path and stats is not None and self._node in (None, stats.node):
                link = await self._connect(socket_path)
            if link is None or stats is None or link.incarnation != stats.incarnation:
                self._no_local_until = time.monotonic() + _RETRY_LOCAL_S
                if link is not None:
                    await link.close()
                return None
            self._link = link
            for put in owed:
                if put.incarnation == link.incarnation:
                    await link.acknowledge(put)
            return link

    async def _connect(self, socket_path: str) -> LocalLink | None:
        try:
            return await LocalLink.connect(
                socket_path,
                self.writer,
                self._executor,
                self._on_map,
                timeout_s=self._deadlines.call_s,
            )
        except OSError:
            return None

    async def _call(self, method: Any, request: Any) -> CallResult:
        try:
            reply: pb.StoreReply = await method(
                request, timeout=self._deadlines.call_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            return CallResult(_status_of(error), 0, 0, _detail_of(error))
        status = wire.status_from_proto(reply.status)
        return CallResult(status, reply.used_bytes, reply.budget_bytes, reply.detail)

    def _ticket_request(self, ticket: Ticket) -> pb.TicketRequest:
        return pb.TicketRequest(
            ticket=wire.ticket_to_proto(ticket),
            writer=wire.writer_to_proto(self.writer),
            store_incarnation=self._incarnation() or 0,
        )

    def _incarnation(self) -> Incarnation | None:
        """The store's life, as far as the same-node path told it."""
        return None if self._link is None else self._link.incarnation


def _status_of(error: grpc.aio.AioRpcError) -> StoreStatus:
    """What a failed call says about the payload: that it is bad, or nothing at all."""
    bad = (
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )
    return StoreStatus.BAD_PAYLOAD if error.code() in bad else StoreStatus.UNREACHABLE


def _detail_of(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"
