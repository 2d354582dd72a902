"""Long payloads through a store: filled, hashed on both sides and taken by several threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager

import pytest

from deepinfer.kvstore import copier, link, runtime, transfers
from deepinfer.kvstore.core import manifest as manifests
from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.core.messages import StoreStatus as S
from deepinfer.kvstore.hashing import LongFollower, with_hashes
from kvstore_kit import Store, draft, payload, running_store, ticket, until

BLOCK = 4096
BLOCKS = 37
Wait = Callable[[], None]


@pytest.fixture(params=[1, 4])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Everything is long: groups of a block, parts of two."""
    count: int = request.param
    monkeypatch.setattr(manifests, "GROUP_BYTES", BLOCK)
    monkeypatch.setattr(transfers, "STEP_BYTES", 2 * BLOCK)
    monkeypatch.setattr(link, "INLINE_BYTES", 0)
    for module, name, value in (
        (copier, "SHARE_BYTES", BLOCK),
        (copier, "FILL_SHARE_BYTES", BLOCK),
        (copier, "WRITTEN_BYTES", BLOCK),
        (copier, "FILL_THREADS", count),
        (link, "THREADS", count),
        (runtime, "LONG_BYTES", BLOCK),
        (runtime, "FOLLOW_THREADS", count),
    ):
        monkeypatch.setattr(module, name, value)
    return count


class Card:
    """Blocks that come and go only when their copy is waited for."""

    def __init__(self) -> None:
        self.blocks = payload(1, BLOCKS, block_bytes=BLOCK)
        self.taken = [b""] * BLOCKS
        self.asked: list[int] = []
        self.under_way = 0
        self._lock = threading.Lock()
        self.fails_at: int | None = None
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def fill(self, first: int, buffer: memoryview) -> Wait:
        if first == self.fails_at:
            raise RuntimeError("the bus is broken")
        self.asked.append(first)
        with self._lock:
            self.under_way += 1

        def wait() -> None:
            self.reached.set()
            assert self.go_on.wait(10)
            time.sleep(0.001 * (first % 3))  # parts end in another order
            for at in range(len(buffer) // BLOCK):
                buffer[at * BLOCK : (at + 1) * BLOCK] = self.blocks[first + at]
            with self._lock:
                self.under_way -= 1

        return wait

    def take(self, first: int, buffer: memoryview) -> Wait:
        with self._lock:
            self.under_way += 1

        def wait() -> None:
            for at in range(len(buffer) // BLOCK):
                self.taken[first + at] = bytes(buffer[at * BLOCK : (at + 1) * BLOCK])
            with self._lock:
                self.under_way -= 1

        return wait


def store() -> AbstractAsyncContextManager[Store]:
    """With slabs that end inside a part."""
    return running_store(budget_bytes=2 * BLOCKS * BLOCK, page_bytes=BLOCK, slab_bytes=15 * BLOCK)


@pytest.mark.parametrize("room", [1, 4])
def test_a_long_payload_comes_back_as_it_went(
    threads: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = []
    written = LongFollower.written

    def hearing(self: LongFollower, count: int) -> bool:
        followed.append(count)
        return written(self, count)

    monkeypatch.setattr(LongFollower, "written", hearing)
    card = Card()

    async def main() -> None:
        async with store() as held:
            with ThreadPoolExecutor(room) as executor:
                client = held.client("memfd", executor=executor)
                await client.reserve(ticket(1), BLOCKS * BLOCK, epoch=1)
                wanted = draft(ticket(1), BLOCKS, block_bytes=BLOCK)
                put = await asyncio.wait_for(client.put(ticket(1), wanted, card.fill), 10)
                assert (put.status, card.under_way) == (S.OK, 0)
                assert (await client.commit(ticket(1))).status is S.OK
                got = await asyncio.wait_for(client.get(ticket(1), lambda _: card.take), 10)
                assert (got.status, card.under_way) == (S.OK, 0)
            assert [bytes(block) for block in card.blocks] == card.taken
            assert card.asked == sorted(card.asked)
            assert followed == sorted(followed)
            assert followed[-1] == BLOCKS * BLOCK
            assert len(followed) >= 2

    asyncio.run(main())


def test_a_fill_that_fails_leaves_nothing_under_way_and_nothing_in_the_store(threads: int) -> None:
    card = Card()
    card.fails_at = 12

    async def main() -> None:
        async with store() as held:
            client = held.client("memfd")
            await client.reserve(ticket(1), BLOCKS * BLOCK, epoch=1)
            wanted = draft(ticket(1), BLOCKS, block_bytes=BLOCK)
            with pytest.raises(RuntimeError, match="the bus is broken"):
                await asyncio.wait_for(client.put(ticket(1), wanted, card.fill), 10)
            assert card.under_way == 0
            await until(held, puts=0)
            assert (await client.commit(ticket(1))).status is not S.OK

    asyncio.run(main())


def test_a_cancelled_put_ends_when_nothing_is_under_way(threads: int) -> None:
    card = Card()
    card.go_on.clear()

    async def main() -> None:
        async with store() as held:
            client = held.client("memfd")
            await client.reserve(ticket(1), BLOCKS * BLOCK, epoch=1)
            wanted = draft(ticket(1), BLOCKS, block_bytes=BLOCK)
            put = asyncio.create_task(client.put(ticket(1), wanted, card.fill))
            assert await asyncio.to_thread(card.reached.wait, 10)
            put.cancel()
            for _ in range(20):
                await asyncio.sleep(0)
            assert not put.done(), "its threads still write"
            card.go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(put, 10)
            assert card.under_way == 0
            assert len(card.asked) < BLOCKS / 2, "no part is begun after it"
            await until(held, puts=0)

    asyncio.run(main())


@pytest.mark.parametrize("group", [0, -1])
def test_a_put_whose_hashes_are_not_what_the_store_finds_is_refused(
    threads: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card()

    def lying(manifest: Manifest, hashes: Sequence[int]) -> Manifest:
        wrong = list(hashes)
        wrong[group] ^= 1
        return with_hashes(manifest, wrong)

    monkeypatch.setattr(copier, "with_hashes", lying)

    async def main() -> None:
        async with store() as held:
            client = held.client("memfd")
            await client.reserve(ticket(1), BLOCKS * BLOCK, epoch=1)
            wanted = draft(ticket(1), BLOCKS, block_bytes=BLOCK)
            put = await asyncio.wait_for(client.put(ticket(1), wanted, card.fill), 10)
            assert put.status is S.BAD_PAYLOAD
            assert (await client.commit(ticket(1))).status is S.BAD_PAYLOAD

    asyncio.run(main())
