"""``written``: the store hashes behind a writer, and believes nothing of what it is told."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from deepinfer.kvstore import copier, link, local, transfers, wire
from deepinfer.kvstore.core import manifest as manifests
from deepinfer.kvstore.core.config import StoreConfig
from deepinfer.kvstore.core.ids import Incarnation, WorkerId, WorkerRef
from deepinfer.kvstore.core.messages import StoreStatus as S
from deepinfer.kvstore.frames import FrameSocket
from deepinfer.kvstore.hashing import Follower, GroupHasher
from deepinfer.kvstore.host_pool import PageMap, Slab
from kvstore_kit import Store, draft, keeping, payload, running_store, ticket, until

BLOCK = 4096
BLOCKS = 5
LIAR = WorkerRef(WorkerId("worker-9"), Incarnation(1))


class HandWriter:
    """A same-node writer whose every word is the test's."""

    def __init__(self, frames: FrameSocket, welcome: dict[str, Any]) -> None:
        self.frames = frames
        self.map = PageMap(welcome["page_bytes"], welcome["slab_pages"])
        self._slab_bytes = welcome["slab_bytes"]

    @classmethod
    async def connect(cls, store: Store) -> HandWriter:
        stats = await store.client("grpc").stats()
        assert stats is not None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        frames = FrameSocket(sock)
        await asyncio.get_running_loop().sock_connect(sock, stats.local_socket)
        hello = {"op": "hello", "version": local.VERSION}
        await frames.send({**hello, "worker": LIAR.worker, "incarnation": LIAR.incarnation})
        received = await frames.receive()
        assert received is not None
        return cls(frames, received[0])

    async def ask(self, op: str, answer: str, **fields: object) -> dict[str, Any]:
        await self.frames.send({"op": op, "call": 1, **fields})
        while True:
            received = await self.frames.receive()
            assert received is not None, "the store hung up"
            frame, fds = received
            self.map.slabs.extend(Slab.adopt(fd, self._slab_bytes) for fd in fds)
            if frame["op"] == answer:
                return frame

    async def begin(self, number: int) -> dict[str, Any]:
        raw = wire.ticket_to_list(ticket(number))
        granted = await self.ask("begin_put", "granted", ticket=raw, payload_bytes=BLOCKS * BLOCK)
        assert granted["status"] == "ok"
        return granted

    async def say(self, granted: dict[str, Any], count: int, group_bytes: int) -> None:
        said = {"op": "written", "put": granted["hold"], "bytes": count}
        await self.frames.send({**said, "group_bytes": group_bytes})

    def write(self, granted: dict[str, Any], blocks: Sequence[memoryview], at: int) -> None:
        self.map.page(granted["pages"][at])[:] = blocks[at]

    async def finish(self, granted: dict[str, Any], manifest: bytes) -> str:
        done = await self.ask("finish_put", "finished", put=granted["hold"], manifest=manifest)
        status: str = done["status"]
        return status

    def close(self) -> None:
        self.frames.close()
        self.map.close()


def whole(number: int) -> tuple[list[memoryview], bytes, int]:
    """A payload, its manifest, and how long its groups are."""
    blocks = payload(number, BLOCKS, block_bytes=BLOCK)
    manifest = draft(ticket(number), BLOCKS, block_bytes=BLOCK)
    hasher = GroupHasher(manifest)
    for block in blocks:
        hasher.update(block)
    return blocks, wire.manifest_to_bytes(hasher.fill_in(manifest)), manifest.group_bytes


def test_only_what_was_written_when_it_was_said_is_ever_committed() -> None:
    async def main() -> None:
        async with running_store(budget_bytes=8 * BLOCK, page_bytes=BLOCK) as store:
            client = store.client("grpc", writer=LIAR)
            writer = await HandWriter.connect(store)
            for number, early, group_factor, status in (
                (1, 0, 1, "ok"),  # the truth, block after block
                (2, 1, 1, "bad_payload"),  # a block too much
                (3, BLOCKS, 1, "bad_payload"),
                (4, 0, 2, "bad_payload"),  # other groups than the manifest's
            ):
                blocks, manifest, group_bytes = whole(number)
                await client.reserve(ticket(number), BLOCKS * BLOCK, epoch=1)
                granted = await writer.begin(number)
                for block in range(BLOCKS + 1):
                    count = min(BLOCKS, block + early) * BLOCK
                    await writer.say(granted, count, group_factor * group_bytes)
                    await client.stats()  # by then it has heard
                    await until(store, puts=1)
                    if block < BLOCKS:
                        writer.write(granted, blocks, block)
                assert await writer.finish(granted, manifest) == status, number
                committed = (await client.commit(ticket(number))).status
                assert committed is (S.OK if status == "ok" else S.BAD_PAYLOAD), number
                await client.release(ticket(number), epoch=1)
            writer.close()
            await until(store, used_bytes=0)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("count", "group_bytes"), [(BLOCKS * BLOCK + 1, BLOCK), (BLOCK, 0), (BLOCK, -1), (-1, BLOCK)]
)
def test_an_impossible_watermark_ends_the_connection(count: int, group_bytes: int) -> None:
    async def main() -> None:
        async with running_store(budget_bytes=8 * BLOCK, page_bytes=BLOCK) as store:
            client = store.client("grpc", writer=LIAR)
            await client.reserve(ticket(1), BLOCKS * BLOCK, epoch=1)
            writer = await HandWriter.connect(store)
            granted = await writer.begin(1)
            await writer.say(granted, count, group_bytes)
            assert await asyncio.wait_for(writer.frames.receive(), 5) is None
            assert (await client.commit(ticket(1))).status is S.BAD_PAYLOAD
            writer.close()

    asyncio.run(main())


def test_groups_that_change_on_the_way_end_the_connection() -> None:
    async def main() -> None:
        async with running_store(budget_bytes=8 * BLOCK, page_bytes=BLOCK) as store:
            client = store.client("grpc", writer=LIAR)
            await client.reserve(ticket(1), BLOCKS * BLOCK, epoch=1)
            writer = await HandWriter.connect(store)
            granted = await writer.begin(1)
            await writer.say(granted, BLOCK, BLOCK)
            await writer.say(granted, 2 * BLOCK, 2 * BLOCK)
            assert await asyncio.wait_for(writer.frames.receive(), 5) is None
            writer.close()

    asyncio.run(main())


def test_a_writer_that_says_it_has_written_all_and_never_finishes_commits_nothing() -> None:
    async def main() -> None:
        config = StoreConfig(reservation_ms=300)
        async with running_store(budget_bytes=8 * BLOCK, page_bytes=BLOCK, config=config) as store:
            client = store.client("grpc", writer=LIAR)
            blocks, _, group_bytes = whole(1)
            await client.reserve(ticket(1), BLOCKS * BLOCK, epoch=1)
            writer = await HandWriter.connect(store)
            granted = await writer.begin(1)
            for block in range(BLOCKS):
                writer.write(granted, blocks, block)
            await writer.say(granted, BLOCKS * BLOCK, group_bytes)
            assert (await client.commit(ticket(1))).status is S.BAD_PAYLOAD
            await until(store, tickets_reserved=0, pages_quarantined=BLOCKS)
            await writer.say(granted, BLOCKS * BLOCK, group_bytes)  # late words do no harm
            await writer.frames.send({"op": "abort_put", "put": granted["hold"]})
            await until(store, pages_quarantined=0, used_bytes=0)
            assert (await client.commit(ticket(1))).status is S.SEALED
            writer.close()

    asyncio.run(main())


def test_the_store_hashes_behind_a_client_that_still_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its copy waits at the last block until the store has hashed all those before it."""
    monkeypatch.setattr(copier, "WRITTEN_BYTES", BLOCK)
    monkeypatch.setattr(transfers, "STEP_BYTES", BLOCK)
    monkeypatch.setattr(manifests, "GROUP_BYTES", BLOCK)  # a step is whole groups
    hashed, enough, left_at_finish = 0, threading.Event(), []
    follow, matches = Follower.follow, Follower.matches

    def counting(self: Follower, bytes_max: int) -> None:
        nonlocal hashed
        follow(self, bytes_max)
        hashed += bytes_max
        if hashed >= (BLOCKS - 1) * BLOCK:
            enough.set()

    def finishing(self: Follower, manifest: Any) -> bool:
        left_at_finish.append(self.left_bytes)
        return matches(self, manifest)

    monkeypatch.setattr(Follower, "follow", counting)
    monkeypatch.setattr(Follower, "matches", finishing)
    blocks, _, _ = whole(1)

    def fill(first: int, buffer: memoryview) -> None:
        if first == BLOCKS - 1:
            assert enough.wait(20)
        buffer[:] = b"".join(blocks[first : first + len(buffer) // BLOCK])

    async def main() -> None:
        async with running_store(budget_bytes=8 * BLOCK, page_bytes=BLOCK) as store:
            client = store.client("memfd")
            await client.reserve(ticket(1), BLOCKS * BLOCK, epoch=1)
            put = await client.put(ticket(1), draft(ticket(1), BLOCKS, block_bytes=BLOCK), fill)
            assert (put.status, put.path) == (S.OK, "memfd")
            assert left_at_finish == [BLOCK]
            assert (await client.commit(ticket(1))).status is S.OK
            kept: list[memoryview] = []
            assert (await client.get(ticket(1), keeping(kept))).status is S.OK
            assert kept == blocks

    asyncio.run(main())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("wrong_block", [None, 0, BLOCKS - 1])
def test_a_payload_that_two_threads_copy_out_is_checked_to_its_last_block(
    threads: int, wrong_block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "INLINE_BYTES", 0)
    monkeypatch.setattr(copier, "SHARE_BYTES", BLOCK)
    monkeypatch.setattr(copier, "STEP_BYTES", BLOCK)
    monkeypatch.setattr(manifests, "GROUP_BYTES", BLOCK)  # a part is whole groups

    async def main() -> None:
        async with running_store(budget_bytes=8 * BLOCK, page_bytes=BLOCK) as store:
            runtime = store.actor._runtime
            assert runtime is not None
            blocks, _, _ = whole(1)
            with ThreadPoolExecutor(threads) as executor:
                client = store.client("memfd", executor=executor)
                await client.reserve(ticket(1), BLOCKS * BLOCK, epoch=1)
                wanted = draft(ticket(1), BLOCKS, block_bytes=BLOCK)
                assert (await client.put(ticket(1), wanted, blocks)).status is S.OK
                assert (await client.commit(ticket(1))).status is S.OK
                if wrong_block is not None:
                    page = runtime.core._entries[ticket(1)].pages[wrong_block]
                    runtime.pool.page(page)[BLOCK - 1] ^= 1
                kept: list[memoryview] = []
                got = await asyncio.wait_for(client.get(ticket(1), keeping(kept)), 10)
            if wrong_block is None:
                assert (got.status, kept) == (S.OK, blocks)
            else:
                assert got.status is S.BAD_PAYLOAD

    asyncio.run(main())
