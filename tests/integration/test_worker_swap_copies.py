"""Swaps of a pool on a card, through a real store: steps go on, and nothing comes too early."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Awaitable, Callable

import pytest

from deepinfer.kvstore.client import Path
from deepinfer.kvstore.core.ids import RequestId, Run, Seq, StoreId, Ticket
from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.kvstore.core.messages import StoreStatus
from deepinfer.kvstore.core.states import State
from deepinfer.workers.core.events import (
    AbortPut,
    CancelFetch,
    Commit,
    CommitReply,
    FetchDone,
    FetchPayload,
    PutDone,
    PutPayload,
    WorkerEvent,
)
from deepinfer.workers.gpu.copying import CardCopies, Event, Way
from deepinfer.workers.pool import PagedPool
from deepinfer.workers.swap import KvIdentity, StoreSwapper
from kvstore_kit import TOKEN, WRITER, Store, running_store, until
from support.copy_device import LazyDevice

STORE = StoreId("store-n")
LAYOUT = KvLayout(resolve_kv_dtype("fp16"), 4, 4, 32, 16)  # 64 KiB a block
SEQ = Seq(RequestId("r"), 0)
TICKET = Ticket(SEQ, Run(1, 1), Run(1, 2))
BLOCKS = 100
USED = (*range(3, 40), *range(60, 40, -1))
"""More than a step of the copy, adjacent ones and others."""
TOKENS = tuple(range(16 * len(USED)))
PUT = PutPayload(TICKET, STORE, SEQ, Run(1, 1), USED, TOKENS, State.DECODE)
FETCH = FetchPayload(TICKET, STORE, SEQ, Run(1, 9), tuple(range(99, 99 - len(USED), -1)))


class GatedDevice(LazyDevice):
    """Copies of one way stop at a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gated: Way | None = None
        self.reached = threading.Event()
        self.gate = threading.Event()

    def copies_event(self, way: Way, stream: int) -> Event:
        if way is self.gated:
            self.reached.set()
            assert self.gate.wait(10)
        return super().copies_event(way, stream)


class Bench:
    """A pool of numbered blocks on a lazy card, its swapper, and what came of it."""

    def __init__(self, store: Store, path: Path) -> None:
        self.store = store
        self.device = GatedDevice()
        self.pool = PagedPool(LAYOUT, BLOCKS, copies=CardCopies(self.device))
        for block in range(BLOCKS):
            self.pool.storage[block] = block + 1
        self.events: asyncio.Queue[tuple[WorkerEvent, int]] = asyncio.Queue()
        self.swapper = StoreSwapper(
            WRITER, self.pool, KvIdentity(model="a model"), self.feed, token=TOKEN, path=path
        )
        self.swapper.learn({STORE: store.address})

    def feed(self, event: WorkerEvent) -> None:
        """Note what is still under way at this very moment."""
        self.events.put_nowait((event, self.device.in_flight()))

    async def answer(self) -> WorkerEvent:
        event, in_flight = await asyncio.wait_for(self.events.get(), 10)
        assert in_flight == 0, event
        return event

    async def reserve(self) -> None:
        reply = await self.store.client("grpc").reserve(TICKET, 64 * LAYOUT.block_bytes, epoch=1)
        assert reply.status is StoreStatus.OK

    async def put(self) -> PutDone:
        await self.reserve()
        self.swapper.put(PUT)
        done = await self.answer()
        assert isinstance(done, PutDone)
        return done

    async def commit(self) -> None:
        self.swapper.commit(Commit(TICKET, STORE))
        assert await self.answer() == CommitReply(TICKET, StoreStatus.OK)

    def held(self, block: int) -> int:
        row = self.pool.storage[block]
        assert bool((row == row[0]).all())
        return int(row[0])

    def step(self, block: int, value: int) -> None:
        def write() -> None:
            self.pool.storage[block] = value

        self.device.launch(write)


def run(path: Path, main: Callable[[Bench], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with running_store(
            budget_bytes=64 * LAYOUT.block_bytes,
            page_bytes=LAYOUT.block_bytes,
            slab_bytes=40 * LAYOUT.block_bytes,
        ) as store:
            bench = Bench(store, path)
            await main(bench)
            await bench.swapper.close()
            assert bench.device.registered == {}

    asyncio.run(whole())


@pytest.mark.parametrize("path", ["memfd", "grpc"])
def test_steps_go_on_beside_a_swap_out_and_a_swap_in(path: Path) -> None:
    async def main(bench: Bench) -> None:
        bench.step(USED[0], 201)  # the victim's last step is still running
        await bench.reserve()
        bench.swapper.put(PUT)
        bench.step(0, 202)  # and then the others'
        done = await bench.answer()
        assert isinstance(done, PutDone)
        assert (done.ok, done.payload_bytes) == (True, len(USED) * LAYOUT.block_bytes)
        assert bench.device.steps_done() == 1, "the others' step holds nothing up"
        await bench.commit()
        for block in USED:  # freed, and somebody else's
            bench.step(block, 203)
        bench.step(FETCH.block_ids[1], 204)  # its last owner's last step
        bench.swapper.fetch(FETCH)
        fetched = await bench.answer()
        assert isinstance(fetched, FetchDone)
        assert (fetched.status, fetched.blocks) == (StoreStatus.OK, len(USED))
        bench.device.finish()
        expected = [201, *(block + 1 for block in USED[1:])]
        assert [bench.held(block) for block in FETCH.block_ids] == expected
        slab = 40 * LAYOUT.block_bytes
        registered = {"memfd": [slab, slab], "grpc": []}[path]
        assert list(bench.device.registered.values()) == registered

    run(path, main)


@pytest.mark.parametrize("path", ["memfd", "grpc"])
def test_a_cancelled_copy_is_waited_for(path: Path) -> None:
    async def main(bench: Bench) -> None:
        assert (await bench.put()).ok
        await bench.commit()
        bench.device.gated = Way.IN
        bench.swapper.fetch(FETCH)
        assert await asyncio.to_thread(bench.device.reached.wait, 10)
        bench.swapper.cancel_fetch(CancelFetch(TICKET, FETCH.run))
        for _ in range(20):
            await asyncio.sleep(0)
        assert bench.events.empty(), "the blocks are not free yet"
        bench.device.gate.set()
        done = await bench.answer()
        assert isinstance(done, FetchDone)
        assert (done.status, done.detail) == (StoreStatus.UNREACHABLE, "cancelled")

    run(path, main)


@pytest.mark.parametrize("path", ["memfd", "grpc"])
def test_an_aborted_put_is_waited_for(path: Path) -> None:
    async def main(bench: Bench) -> None:
        await bench.reserve()
        bench.device.gated = Way.OUT
        bench.swapper.put(PUT)
        assert await asyncio.to_thread(bench.device.reached.wait, 10)
        bench.swapper.abort_put(AbortPut(TICKET, STORE))
        for _ in range(20):
            await asyncio.sleep(0)
        assert bench.events.empty(), "the blocks are not free yet"
        bench.device.gate.set()
        assert await bench.answer() == PutDone(TICKET, False, 0, 0, "aborted")

    run(path, main)


def test_what_was_taken_after_the_store_hung_up_is_not_used() -> None:
    """The store lends the pages to others then, and what was verified may not be what is taken."""

    async def main(bench: Bench) -> None:
        assert (await bench.put()).ok
        await bench.commit()
        bench.device.gated = Way.IN
        bench.swapper.fetch(FETCH)
        assert await asyncio.to_thread(bench.device.reached.wait, 10)
        (client,) = bench.swapper._clients.values()
        assert client._link is not None
        await client._link._frames.send({"op": "nonsense"})
        await until(bench.store, reads=0)
        bench.device.gate.set()
        done = await bench.answer()
        assert isinstance(done, FetchDone)
        assert (done.status, done.detail) == (StoreStatus.UNREACHABLE, "the store hung up")

    run("memfd", main)


def test_a_payload_that_is_wrong_further_on_is_not_used() -> None:
    async def main(bench: Bench) -> None:
        assert (await bench.put()).ok
        await bench.commit()
        _, second = bench.device.registered  # the store's slabs, as this process sees them
        ctypes.memset(second + 5, 0xEE, 1)
        bench.swapper.fetch(FETCH)
        done = await bench.answer()
        assert isinstance(done, FetchDone)
        assert (done.status, done.token_ids) == (StoreStatus.BAD_PAYLOAD, ())

    run("memfd", main)
