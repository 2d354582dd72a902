"""The store over gRPC: ``deepinfer.v1.KVStore``.

Chunks are copied and hashed in the event loop, a few hundred microseconds each: a thread could not
be stopped where a revoked put has to stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio

from deepinfer.kvstore import wire
from deepinfer.kvstore.copying import SpreadWriter, chunks
from deepinfer.kvstore.core.events import BeginGet, BeginPut, Commit, GetGrant, PutGrant, Resolve
from deepinfer.kvstore.core.ids import Ticket, WorkerRef
from deepinfer.kvstore.core.manifest import Manifest, ManifestError
from deepinfer.kvstore.core.messages import Release, Reserve, StoreReply, StoreStatus
from deepinfer.kvstore.hashing import GroupHasher
from deepinfer.kvstore.runtime import StoreRuntime
from deepinfer.proto import kvstore_pb2 as pb

SERVICE = "deepinfer.v1.KVStore"
CHUNK_BYTES = 2 << 20
CHUNK_BYTES_MAX = 4 << 20
MESSAGE_BYTES_MAX = CHUNK_BYTES_MAX + 4096
"""A chunk with its tag, or a header with its manifest."""
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
)

_Context = grpc.aio.ServicerContext[Any, Any]
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


@dataclass(slots=True, eq=False)
class _RunningPut:
    """A Put handler at work."""

    writer: WorkerRef
    ended: asyncio.Event
    limit: asyncio.Timeout | None = None
    """While it waits for chunks."""
    stopped: bool = False

    def stop(self) -> None:
        """Make the handler end at its next step."""
        self.stopped = True
        self.wait_until(0.0)

    def wait_until(self, when: float) -> None:
        """Give up waiting for chunks at loop time ``when``."""
        if self.limit is not None:
            self.limit.reschedule(when)


class StoreService:
    """The handlers. ``idle_s`` bounds the wait for a put's next chunk, ``get_s`` a whole read."""

    def __init__(
        self,
        runtime: StoreRuntime,
        *,
        local_socket: str = "",
        idle_s: float,
        get_s: float,
    ) -> None:
        self._runtime = runtime
        self._local_socket = local_socket
        self._idle_s = idle_s
        self._get_s = get_s
        self._putting: dict[Ticket, list[_RunningPut]] = {}
        """Puts from their header on: one that still waits for its pages can be stopped, too."""

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """What a server registers; names every method of the service."""
        unary: dict[str, tuple[Callable[[Any, _Context], Awaitable[Any]], Any]] = {
            "Reserve": (self._reserve, pb.ReserveRequest),
            "Commit": (self._commit, pb.TicketRequest),
            "Resolve": (self._resolve, pb.TicketRequest),
            "AbortPut": (self._abort_put, pb.TicketRequest),
            "Release": (self._release, pb.ReleaseRequest),
            "List": (self._list, pb.ListRequest),
            "Stats": (self._stats, pb.StatsRequest),
        }
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(
                _refusing_nonsense(handler),
                request_deserializer=request.FromString,
                response_serializer=lambda response: response.SerializeToString(),
            )
            for name, (handler, request) in unary.items()
        }
        methods["Put"] = grpc.stream_unary_rpc_method_handler(
            _refusing_nonsense(self._put),
            request_deserializer=wire.put_request_from_bytes,
            response_serializer=pb.StoreReply.SerializeToString,
        )
        methods["Get"] = grpc.unary_stream_rpc_method_handler(
            _refusing_nonsense(self._get),
            request_deserializer=pb.GetRequest.FromString,
            response_serializer=lambda message: message,
        )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    # ---- small calls ----

    async def _reserve(self, request: pb.ReserveRequest, _context: _Context) -> pb.StoreReply:
        body = Reserve(
            request.epoch,
            wire.ticket_from_proto(request.ticket),
            request.bytes_max,
            wire.writer_from_proto(request.writer),
        )
        return wire.reply_to_proto(self._runtime.control(body))

    async def _release(self, request: pb.ReleaseRequest, _context: _Context) -> pb.StoreReply:
        body = Release(request.epoch, wire.ticket_from_proto(request.ticket))
        return wire.reply_to_proto(self._runtime.control(body))

    async def _commit(self, request: pb.TicketRequest, _context: _Context) -> pb.StoreReply:
        ticket = wire.ticket_from_proto(request.ticket)
        writer = wire.writer_from_proto(request.writer)
        incarnation = wire.incarnation_from_proto(request.store_incarnation)
        return wire.reply_to_proto(self._runtime.control(Commit(ticket, writer, incarnation)))

    async def _resolve(self, request: pb.TicketRequest, _context: _Context) -> pb.StoreReply:
        ticket = wire.ticket_from_proto(request.ticket)
        writer = wire.writer_from_proto(request.writer)
        incarnation = wire.incarnation_from_proto(request.store_incarnation)
        return wire.reply_to_proto(self._runtime.control(Resolve(ticket, writer, incarnation)))

    async def _abort_put(self, request: pb.TicketRequest, _context: _Context) -> pb.StoreReply:
        """Stop the writer's put of the ticket, if one is running; the reservation stands."""
        ticket = wire.ticket_from_proto(request.ticket)
        writer = wire.writer_from_proto(request.writer)
        running = self._putting.get(ticket, [])
        own = [put for put in running if put.writer == writer]
        if running and not own:
            return self._reply(ticket, StoreStatus.NOT_YOURS)
        for put in own:
            put.stop()
        for put in own:
            await put.ended.wait()
        return self._reply(ticket, StoreStatus.OK)

    async def _list(self, _request: pb.ListRequest, _context: _Context) -> pb.ListResponse:
        return pb.ListResponse(
            tickets=[
                pb.ListedTicket(
                    ticket=wire.ticket_to_proto(level.ticket),
                    state=level.state.value,
                    payload_bytes=level.payload_bytes,
                    tokens=level.tokens,
                    blocks=level.blocks,
                )
                for level in self._runtime.core.levels()
            ]
        )

    async def _stats(self, _request: pb.StatsRequest, _context: _Context) -> pb.StatsResponse:
        core = self._runtime.core
        numbers = core.snapshot()
        return pb.StatsResponse(
            store=core.store,
            incarnation=core.incarnation,
            budget_bytes=core.budget_bytes,
            used_bytes=core.used_bytes,
            quarantined_bytes=numbers["pages_quarantined"] * core.page_bytes,
            tickets=numbers["tickets_reserved"] + numbers["tickets_committed"],
            counters=self._runtime.counters(),
            local_socket=self._local_socket,
            node=core.node,
        )

    # ---- payloads ----

    async def _put(
        self, requests: AsyncIterator[pb.PutHeader | memoryview], _context: _Context
    ) -> pb.StoreReply:
        header = await anext(aiter(requests), None)
        if not isinstance(header, pb.PutHeader):
            raise wire.WireError("message", "a chunk or nothing", "a header, as the first message")
        ticket = wire.ticket_from_proto(header.ticket)
        writer = wire.writer_from_proto(header.writer)
        try:
            manifest = wire.manifest_from_bytes(header.manifest)
        except ManifestError as error:
            return self._reply(ticket, StoreStatus.BAD_PAYLOAD, str(error))
        if (header.payload_bytes, header.payload_xxh3) != (
            manifest.payload_bytes,
            manifest.payload_hash,
        ):
            return self._reply(ticket, StoreStatus.BAD_PAYLOAD, "header and manifest disagree")
        running = _RunningPut(writer, asyncio.Event())
        incarnation = wire.incarnation_from_proto(header.store_incarnation)
        begin = BeginPut(ticket, writer, manifest.payload_bytes, False, incarnation)
        puts = self._putting.setdefault(ticket, [])
        puts.append(running)
        try:
            return await self._put_payload(requests, begin, manifest, running)
        finally:
            puts.remove(running)
            if not puts and self._putting.get(ticket) is puts:
                del self._putting[ticket]
            running.ended.set()

    async def _put_payload(
        self,
        requests: AsyncIterator[pb.PutHeader | memoryview],
        begin: BeginPut,
        manifest: Manifest,
        running: _RunningPut,
    ) -> pb.StoreReply:
        grant = await self._runtime.begin_put(begin, running.stop)
        if grant.put is None:
            return self._reply(begin.ticket, grant.status)
        hasher = GroupHasher(manifest)
        ended = False
        try:
            detail = "stopped"  # perhaps while it waited for its pages
            if not running.stopped:
                detail = await self._receive(requests, manifest, grant, hasher, running)
            good = not detail and hasher.matches(manifest)
            ended = True
            reply = self._runtime.finish_put(grant, manifest, hasher.hashed_bytes, good)
            return wire.reply_to_proto(reply, detail)
        finally:
            if not ended:
                self._runtime.abort_put(grant.put)

    async def _receive(
        self,
        requests: AsyncIterator[pb.PutHeader | memoryview],
        manifest: Manifest,
        grant: PutGrant,
        hasher: GroupHasher,
        running: _RunningPut,
    ) -> str:
        """Fill the pages; return what is wrong with what came, or nothing."""
        pages = SpreadWriter(list(self._runtime.pool.runs(grant.pages)))
        now = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(self._idle_s) as limit:
                running.limit = limit
                async for chunk in requests:
                    if running.stopped:
                        break
                    running.wait_until(now() + self._idle_s)
                    if not isinstance(chunk, memoryview):
                        return "a second header"
                    if hasher.hashed_bytes + len(chunk) > manifest.payload_bytes:
                        return f"more than the manifest's {manifest.payload_bytes} bytes"
                    pages.write(chunk)
                    hasher.update(chunk)
                    if not hasher.agrees(manifest):
                        return f"wrong hash of group {len(hasher.hashes) - 1}"
        except TimeoutError:
            return "stopped" if running.stopped else f"no chunk for {self._idle_s} s"
        finally:
            running.limit = None
        if running.stopped:
            return "stopped"
        if hasher.hashed_bytes < manifest.payload_bytes:
            return f"{hasher.hashed_bytes} of {manifest.payload_bytes} bytes"
        return ""

    async def _get(self, request: pb.GetRequest, context: _Context) -> None:
        ticket = wire.ticket_from_proto(request.ticket)
        grant = self._runtime.begin_get(BeginGet(ticket))
        if grant.read is None:
            header = pb.GetHeader(reply=self._reply(ticket, grant.status))
            await context.write(pb.GetResponse(header=header).SerializeToString())
            return
        try:
            async with asyncio.timeout(self._get_s):
                await self._send(grant, context)
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"a read may take {self._get_s} s"
            )
        finally:
            self._runtime.end_get(grant.read)

    async def _send(self, grant: GetGrant, context: _Context) -> None:
        manifest = grant.manifest
        assert manifest is not None
        header = pb.GetHeader(
            reply=self._reply(grant.ticket, StoreStatus.OK),
            manifest=wire.manifest_to_bytes(manifest),
            payload_bytes=manifest.payload_bytes,
            payload_xxh3=manifest.payload_hash,
        )
        await context.write(pb.GetResponse(header=header).SerializeToString())
        hasher = GroupHasher(manifest)
        for pieces in chunks(self._runtime.pool.runs(grant.pages), CHUNK_BYTES):
            message = wire.chunk_to_bytes(pieces)
            # What is hashed is what was copied, not what the pages hold by now.
            size = sum(len(piece) for piece in pieces)
            hasher.update(memoryview(message)[len(message) - size :])
            if not hasher.agrees(manifest):
                await context.abort(
                    grpc.StatusCode.DATA_LOSS,
                    f"the stored payload no longer has its hash (group {len(hasher.hashes) - 1})",
                )
            await context.write(message)

    def _reply(self, ticket: Ticket, status: StoreStatus, detail: str = "") -> pb.StoreReply:
        core = self._runtime.core
        reply = StoreReply(ticket, status, core.used_bytes, core.budget_bytes)
        return wire.reply_to_proto(reply, detail)


def _refusing_nonsense(
    handler: Callable[[_Request, _Context], Awaitable[_Response]],
) -> Callable[[_Request, _Context], Awaitable[_Response]]:
    """INVALID_ARGUMENT for what no correct peer sends."""

    async def handle(request: _Request, context: _Context) -> _Response:
        try:
            return await handler(request, context)
        except wire.WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("abort returns never") from error

    return handle
