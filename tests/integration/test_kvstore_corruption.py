"""Bits that flip, bytes that go missing, manifests that lie: over either path nothing of it is ever
committed, and nothing that changed later is ever taken for the payload."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from deepinfer.kvstore import wire
from deepinfer.kvstore.client import Path, StoreClient
from deepinfer.kvstore.core.ids import Ticket
from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.core.messages import StoreStatus as S
from deepinfer.kvstore.frames import FrameSocket
from deepinfer.kvstore.hashing import GroupHasher
from deepinfer.kvstore.host_pool import PageMap, Slab
from deepinfer.kvstore.local import VERSION
from deepinfer.kvstore.service import SERVICE
from deepinfer.proto import kvstore_pb2 as pb
from kvstore_kit import (
    TOKEN,
    WRITER,
    Store,
    buffers,
    draft,
    keeping,
    payload,
    running_store,
    ticket,
)

BLOCK = 4096
BLOCKS = 5
PATHS: tuple[Path, Path] = ("memfd", "grpc")


def whole(number: int) -> tuple[bytearray, bytearray]:
    """A payload and its manifest, as they are sent when all is well."""
    blocks = payload(number, BLOCKS, block_bytes=BLOCK)
    manifest = draft(ticket(number), BLOCKS, block_bytes=BLOCK)
    hasher = GroupHasher(manifest)
    for block in blocks:
        hasher.update(block)
    return bytearray(b"".join(blocks)), bytearray(wire.manifest_to_bytes(hasher.fill_in(manifest)))


def flip(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


Corruption = Callable[[bytearray, bytearray, random.Random], None]


def flip_payload(data: bytearray, manifest: bytearray, rng: random.Random) -> None:
    flip(data, rng)


def flip_manifest(data: bytearray, manifest: bytearray, rng: random.Random) -> None:
    flip(manifest, rng)


def cut_payload(data: bytearray, manifest: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def cut_manifest(data: bytearray, manifest: bytearray, rng: random.Random) -> None:
    del manifest[rng.randrange(len(manifest)) :]


def lengthen_payload(data: bytearray, manifest: bytearray, rng: random.Random) -> None:
    data += bytes(rng.randint(1, BLOCK))


def lengthen_manifest(data: bytearray, manifest: bytearray, rng: random.Random) -> None:
    manifest += bytes(rng.randint(1, 9))


def exchange_blocks(data: bytearray, manifest: bytearray, rng: random.Random) -> None:
    a, b = rng.sample(range(BLOCKS), 2)
    first, second = data[a * BLOCK : (a + 1) * BLOCK], data[b * BLOCK : (b + 1) * BLOCK]
    data[a * BLOCK : (a + 1) * BLOCK], data[b * BLOCK : (b + 1) * BLOCK] = second, first


def send_anothers_payload(data: bytearray, manifest: bytearray, rng: random.Random) -> None:
    data[:] = whole(rng.randint(10_000, 20_000))[0]


ON_EITHER = (
    flip_payload,
    flip_manifest,
    cut_payload,
    cut_manifest,
    lengthen_manifest,
    exchange_blocks,
    send_anothers_payload,
)
CORRUPTIONS: dict[Path, tuple[Corruption, ...]] = {
    "memfd": ON_EITHER,  # what is written behind the granted pages is no part of them
    "grpc": (*ON_EITHER, lengthen_payload),
}


class RawWriter:
    """A writer that sends what it is told to, right or wrong."""

    def __init__(self, client: StoreClient, frames: FrameSocket) -> None:
        self._client = client
        self._frames = frames
        self._map = PageMap(BLOCK, 0)
        self._slab_bytes = 0
        self._calls = 0

    @classmethod
    async def connect(cls, store: Store) -> RawWriter:
        client = store.client("grpc")
        stats = await client.stats()
        assert stats is not None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        frames = FrameSocket(sock)
        await asyncio.get_running_loop().sock_connect(sock, stats.local_socket)
        raw = cls(client, frames)
        worker, life = WRITER
        await frames.send(
            {"op": "hello", "version": VERSION, "worker": worker, "incarnation": life}
        )
        welcome = await raw._until("welcome")
        raw._map = PageMap(welcome["page_bytes"], welcome["slab_pages"])
        raw._slab_bytes = welcome["slab_bytes"]
        return raw

    def close(self) -> None:
        self._frames.close()
        self._map.close()

    async def _until(self, op: str) -> dict[str, Any]:
        while True:
            received = await self._frames.receive()
            assert received is not None
            frame, fds = received
            self._map.slabs.extend(Slab.adopt(fd, self._slab_bytes) for fd in fds)
            if frame["op"] == op:
                return frame

    async def put(self, path: Path, of: Ticket, data: bytes, manifest: bytes) -> str:
        return await (self._memfd if path == "memfd" else self._grpc)(of, data, manifest)

    async def _memfd(self, of: Ticket, data: bytes, manifest: bytes) -> str:
        self._calls += 1
        ask = {"op": "begin_put", "call": self._calls, "ticket": wire.ticket_to_list(of)}
        await self._frames.send({**ask, "payload_bytes": BLOCKS * BLOCK})
        granted = await self._until("granted")
        at = 0
        for run in self._map.runs(granted["pages"]):
            piece = data[at : at + len(run)]
            run[: len(piece)] = piece
            at += len(run)
        done = {"op": "finish_put", "call": self._calls, "put": granted["hold"]}
        await self._frames.send({**done, "manifest": manifest})
        status: str = (await self._until("finished"))["status"]
        return status

    async def _grpc(self, of: Ticket, data: bytes, manifest: bytes) -> str:
        try:
            decoded = wire.manifest_from_bytes(manifest)
            claimed = decoded.payload_bytes, decoded.payload_hash
        except ValueError:
            claimed = BLOCKS * BLOCK, 0
        header = pb.PutHeader(
            ticket=wire.ticket_to_proto(of),
            writer=wire.writer_to_proto(WRITER),
            manifest=manifest,
            payload_bytes=claimed[0],
            payload_xxh3=claimed[1],
        )

        async def requests() -> AsyncIterator[bytes]:
            yield pb.PutRequest(header=header).SerializeToString()
            for at in range(0, len(data), 3000):
                yield wire.chunk_to_bytes([memoryview(data)[at : at + 3000]])

        client = self._client
        reply = await client._remote._put_call(requests(), metadata=client._metadata)
        status: str = reply.status
        return status


@pytest.mark.parametrize("path", PATHS)
def test_nothing_corrupt_is_ever_committed(path: Path) -> None:
    async def main() -> None:
        rng = random.Random(11)
        async with running_store(budget_bytes=8 * BLOCK, page_bytes=BLOCK) as store:
            writer = await RawWriter.connect(store)
            client = store.client("grpc")
            for number in range(1, 401):
                corruption = rng.choice((None, *CORRUPTIONS[path]))
                data, manifest = whole(number)
                if corruption is not None:
                    corruption(data, manifest, rng)
                t = ticket(number)
                await client.reserve(t, BLOCKS * BLOCK, epoch=1)
                status = await writer.put(path, t, bytes(data), bytes(manifest))
                committed = (await client.commit(t)).status
                if corruption is None:
                    assert (status, committed) == ("ok", S.OK)
                else:
                    assert (status, committed) == ("bad_payload", S.BAD_PAYLOAD), corruption
                await client.release(t, epoch=1)
            writer.close()
            await store.check_empty()

    asyncio.run(main())


@pytest.mark.parametrize("path", PATHS)
def test_a_payload_that_changed_in_the_store_is_never_taken(path: Path) -> None:
    async def main() -> None:
        rng = random.Random(12)
        async with running_store(budget_bytes=8 * BLOCK, page_bytes=BLOCK) as store:
            runtime = store.actor._runtime
            assert runtime is not None
            client = store.client(path)
            t = ticket(1)
            blocks = payload(1, BLOCKS, block_bytes=BLOCK)
            await client.reserve(t, BLOCKS * BLOCK, epoch=1)
            await client.put(t, draft(t, BLOCKS, block_bytes=BLOCK), blocks)
            await client.commit(t)
            for _ in range(100):
                page = runtime.pool.page(rng.choice(runtime.core._entries[t].pages))
                at, bit = rng.randrange(BLOCK), 1 << rng.randrange(8)
                page[at] ^= bit
                got = await client.get(t, buffers)
                assert (got.status, got.payload_bytes) == (S.BAD_PAYLOAD, 0)
                page[at] ^= bit
            kept: list[memoryview] = []
            assert (await client.get(t, keeping(kept))).status is S.OK
            assert kept == blocks
            page.release()

    asyncio.run(main())


def test_a_client_takes_nothing_from_a_store_that_lies() -> None:
    data, manifest = whole(1)
    rng = random.Random(13)

    def header(raw: bytes) -> bytes:
        reply = pb.StoreReply(ticket=wire.ticket_to_proto(ticket(1)), status="ok")
        return pb.GetResponse(header=pb.GetHeader(reply=reply, manifest=raw)).SerializeToString()

    def chunk(raw: bytes | bytearray) -> bytes:
        return wire.chunk_to_bytes([memoryview(raw)])

    flipped, other_tokens = bytearray(data), bytearray(manifest)
    flip(flipped, rng)
    token_ids = manifest.index(b"token_ids") + len(b"token_ids") + 4
    other_tokens[token_ids] ^= 1
    good = header(bytes(manifest))
    answers = {
        "nothing": [],
        "no header": [chunk(data)],
        "no payload": [good],
        "too little": [good, chunk(data[:-1])],
        "too much": [good, chunk(data), chunk(b"x")],
        "another payload": [good, chunk(flipped)],
        "other tokens": [header(bytes(other_tokens)), chunk(data)],
        "two headers": [good, good, chunk(data)],
        "no manifest": [header(b""), chunk(data)],
        "half a manifest": [header(bytes(manifest[: len(manifest) // 2])), chunk(data)],
        "the truth": [good, chunk(data[:5000]), chunk(data[5000:])],
    }

    async def main() -> None:
        now: list[bytes] = []

        async def get(_request: bytes, _context: object) -> AsyncIterator[bytes]:
            for message in now:
                yield message

        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        method = grpc.unary_stream_rpc_method_handler(get)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Get": method}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        client = StoreClient(f"127.0.0.1:{port}", WRITER, token=TOKEN, path="grpc")
        for name, messages in answers.items():
            now[:] = messages
            got = await client.get(ticket(1), buffers)
            assert (got.status is S.OK) == (name == "the truth"), (name, got)
            if name != "the truth":
                assert got.status is S.BAD_PAYLOAD, (name, got)
        await client.close()
        await server.stop(None)

    asyncio.run(main())


def test_words_that_make_no_sense_end_the_connection_and_nothing_else() -> None:
    async def main() -> None:
        rng = random.Random(14)
        async with running_store(budget_bytes=8 * BLOCK, page_bytes=BLOCK) as store:
            stats = await store.client("grpc").stats()
            assert stats is not None
            hello = {"op": "hello", "version": VERSION, "worker": "w", "incarnation": 1}
            good = wire.pack(hello)
            begin = wire.pack(
                {"op": "begin_put", "call": 1, "ticket": ["r", 0, 1, 1, 1, 1], "payload_bytes": 1}
            )
            for round_number in range(120):
                body = bytearray(rng.choice((good, begin)))
                for _ in range(rng.randint(1, 4)):
                    flip(body, rng)
                if round_number % 3 == 0:
                    del body[rng.randrange(len(body)) :]
                greeting = len(good).to_bytes(4, "little") + good
                frame = len(body).to_bytes(4, "little") + body
                if round_number % 5 == 0:
                    frame = rng.randbytes(rng.randint(1, 40))
                reader, writer = await asyncio.open_unix_connection(stats.local_socket)
                writer.write(greeting + frame if round_number % 2 else frame)
                writer.write_eof()
                await asyncio.wait_for(reader.read(), 10)
                writer.close()
                await writer.wait_closed()
            client = store.client("memfd")
            t = ticket(1)
            await client.reserve(t, BLOCK, epoch=1)
            put = await client.put(
                t, draft(t, 1, block_bytes=BLOCK), payload(1, 1, block_bytes=BLOCK)
            )
            assert put.status is S.OK

    asyncio.run(main())


def test_a_manifest_names_what_is_wrong_with_a_put() -> None:
    async def main() -> None:
        async with running_store(page_bytes=BLOCK) as store:
            client = store.client("grpc")
            t = ticket(1)
            await client.reserve(t, BLOCK, epoch=1)
            wrong: Manifest = draft(t, 2, block_bytes=BLOCK)
            with pytest.raises(ValueError, match="must be 2 blocks of 4096 bytes"):
                await client.put(t, wrong, payload(1, 1, block_bytes=BLOCK))

    asyncio.run(main())
