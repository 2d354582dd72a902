"""The worker's end of the path over gRPC: payloads in chunks, from any node.

Chunks that come are copied and hashed in the event loop, in a few hundred microseconds each, as the
store does it: to hand one to a thread takes a fifth more processor time. What a caller's function
writes is written in a thread, for it may have to wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import Any

import grpc
import grpc.aio
import numpy as np

from deepinfer.kvstore import wire
from deepinfer.kvstore.copying import SpreadWriter, byte_views, chunks
from deepinfer.kvstore.core.ids import Incarnation, Ticket, WorkerRef
from deepinfer.kvstore.core.manifest import Manifest, ManifestError
from deepinfer.kvstore.core.messages import StoreStatus
from deepinfer.kvstore.hashing import GroupHasher
from deepinfer.kvstore.service import CHUNK_BYTES, SERVICE
from deepinfer.kvstore.transfers import (
    Fill,
    Into,
    Outcome,
    Source,
    Stopped,
    Take,
    give,
    in_thread,
    step_bytes,
)
from deepinfer.proto import kvstore_pb2 as pb
from deepinfer.proto.bearer import Metadata

KEPT_BYTES_MAX = 16 << 20
"""A payload up to here that a function writes is kept between hashing and sending it."""


class RemoteLink:
    """``Put`` and ``Get`` of one store over a channel that its owner closes.

    Raises ``grpc.aio.AioRpcError`` when a call fails.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        writer: WorkerRef,
        executor: Executor,
        metadata: Metadata,
    ) -> None:
        self._writer = writer
        self._executor = executor
        self._metadata = metadata
        self._put_call: Any = channel.stream_unary(
            f"/{SERVICE}/Put",
            request_serializer=lambda message: message,
            response_deserializer=pb.StoreReply.FromString,
        )
        self._get_call: Any = channel.unary_stream(
            f"/{SERVICE}/Get",
            request_serializer=pb.GetRequest.SerializeToString,
            response_deserializer=wire.get_response_from_bytes,
        )

    async def put(
        self,
        ticket: Ticket,
        draft: Manifest,
        source: Source,
        store: Incarnation | None,
        timeout_s: float,
    ) -> Outcome:
        """Send a payload; the store verifies it. ``store`` is its life, where that is known."""
        stop = threading.Event()
        source, manifest = await in_thread(
            self._executor, stop, lambda: _hashed(draft, source, stop)
        )
        messages = (wire.chunk_to_bytes(pieces) for pieces in _chunks(draft, source))

        async def following() -> bytes | None:
            if not callable(source):
                return next(messages, None)
            return await in_thread(self._executor, stop, lambda: next(messages, None))

        call = None
        coming = asyncio.create_task(following())
        try:
            await asyncio.wait([coming])  # the first chunk follows its header at once
            call = self._put_call(timeout=timeout_s, metadata=self._metadata)
            header = pb.PutHeader(
                ticket=wire.ticket_to_proto(ticket),
                writer=wire.writer_to_proto(self._writer),
                store_incarnation=store or 0,
                manifest=wire.manifest_to_bytes(manifest),
                payload_bytes=manifest.payload_bytes,
                payload_xxh3=manifest.payload_hash,
            )
            try:
                await call.write(pb.PutRequest(header=header).SerializeToString())
                while (message := await coming) is not None:
                    # The next is made while this one is on its way.
                    coming = asyncio.create_task(following())
                    await call.write(message)
                await call.done_writing()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass  # the store has answered already: with what, the next line says
            reply = await call
        finally:
            if call is not None:
                call.cancel()  # does nothing to one that ended
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        return Outcome(wire.status_from_proto(reply.status), manifest, reply.detail)

    async def get(self, ticket: Ticket, into: Into, timeout_s: float) -> Outcome:
        """Receive a payload into buffers, and check what was written there."""
        request = pb.GetRequest(
            ticket=wire.ticket_to_proto(ticket), reader=wire.writer_to_proto(self._writer)
        )
        call = self._get_call(request, timeout=timeout_s, metadata=self._metadata)
        try:
            messages = aiter(call)
            header = await anext(messages, None)
            if not isinstance(header, pb.GetHeader):
                return Outcome(StoreStatus.BAD_PAYLOAD, None, "no header came")
            status = wire.status_from_proto(header.reply.status)
            if status is not StoreStatus.OK:
                return Outcome(status, None, header.reply.detail)
            try:
                manifest = wire.manifest_from_bytes(header.manifest)
            except ManifestError as error:
                return Outcome(StoreStatus.BAD_PAYLOAD, None, str(error))
            buffers = into(manifest)
            if buffers is None:
                return Outcome(StoreStatus.BAD_PAYLOAD, manifest, "refused by its reader")
            if not callable(buffers):
                views = byte_views("into", buffers, manifest.payload_bytes)
                return await self._receive(messages, manifest, views)
            # Not a bytearray: to clear a long one would hold up every thread.
            take, staged = buffers, [np.empty(manifest.payload_bytes, np.uint8).data]
            outcome = await self._receive(messages, manifest, staged)
            if outcome.status is StoreStatus.OK:
                stop = threading.Event()
                await in_thread(
                    self._executor, stop, lambda: _give_all(take, manifest, staged, stop)
                )
            return outcome
        finally:
            call.cancel()

    async def _receive(
        self, messages: AsyncIterator[Any], manifest: Manifest, views: list[memoryview]
    ) -> Outcome:
        hasher = GroupHasher(manifest)
        writer = SpreadWriter(views)
        async for chunk in messages:
            if not isinstance(chunk, memoryview):
                return Outcome(StoreStatus.BAD_PAYLOAD, manifest, "a second header")
            if hasher.hashed_bytes + len(chunk) > manifest.payload_bytes:
                detail = f"more than the manifest's {manifest.payload_bytes} bytes"
                return Outcome(StoreStatus.BAD_PAYLOAD, manifest, detail)
            for part in writer.write(chunk):
                hasher.update(part)
        if not hasher.matches(manifest):
            detail = f"{hasher.hashed_bytes} of {manifest.payload_bytes} bytes, or another hash"
            return Outcome(StoreStatus.BAD_PAYLOAD, manifest, detail)
        return Outcome(StoreStatus.OK, manifest, "")


def _chunks(draft: Manifest, source: Source) -> Iterator[list[memoryview]]:
    """The payload in chunks; what they show changes with the next one if ``source`` writes it."""
    if not callable(source):
        yield from chunks(source, CHUNK_BYTES)
        return
    step = step_bytes(draft.payload_bytes, draft.block_bytes)
    buffer = memoryview(bytearray(min(step, draft.payload_bytes)))
    for begin in range(0, draft.payload_bytes, step):
        part = buffer[: draft.payload_bytes - begin]
        _fill(source, begin // draft.block_bytes, part)
        yield from chunks([part], CHUNK_BYTES)


def _hashed(draft: Manifest, source: Source, stop: threading.Event) -> tuple[Source, Manifest]:
    """What to send, and the manifest with its hashes, which go ahead of it.

    A ``source`` that writes is asked a second time when its payload is sent rather than that a long
    one is kept in between: the memory for it would have to be found just when there is none. Should
    it write other bytes then, the store finds the hash wrong.
    """
    if callable(source) and draft.payload_bytes <= KEPT_BYTES_MAX:
        kept = memoryview(bytearray(draft.payload_bytes))
        step = step_bytes(draft.payload_bytes, draft.block_bytes)
        for begin in range(0, len(kept), step):
            if stop.is_set():
                raise Stopped
            _fill(source, begin // draft.block_bytes, kept[begin : begin + step])
        source = [kept]
    hasher = GroupHasher(draft)
    for pieces in _chunks(draft, source):
        if stop.is_set():
            raise Stopped
        for piece in pieces:
            hasher.update(piece)
    return source, hasher.fill_in(draft)


def _give_all(
    take: Take, manifest: Manifest, staged: list[memoryview], stop: threading.Event
) -> None:
    with ExitStack() as waits:
        step = step_bytes(manifest.payload_bytes, manifest.block_bytes)
        give(take, 0, staged, manifest.block_bytes, stop, waits, step=step)


def _fill(source: Fill, block: int, buffer: memoryview) -> None:
    """Have the buffer written, and wait for it."""
    wait = source(block, buffer)
    if wait is not None:
        wait()
