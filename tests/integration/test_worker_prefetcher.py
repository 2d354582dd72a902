"""Payloads fetched ahead from a real store over gRPC: used once, and verified once more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deepinfer.kvstore.core.ids import Run, StoreId, Ticket
from deepinfer.kvstore.core.messages import StoreStatus
from deepinfer.workers.core.events import (
    CancelFetch,
    CancelPrefetch,
    FetchDone,
    PrefetchPayload,
)
from deepinfer.workers.prefetch import HostBuffer
from kvstore_kit import Store
from support.swapper_bench import FETCH, IDENTITY, LAYOUT, PUT, STORE, TICKET, Bench, run

AHEAD = FETCH._replace(ahead=True)
PREFETCH = PrefetchPayload(TICKET, STORE, 3)


async def fetched(bench: Bench, fetch: Any = AHEAD) -> FetchDone:
    bench.swapper.fetch(fetch)
    done = await bench.answer()
    assert isinstance(done, FetchDone)
    return done


async def arrived(bench: Bench, ticket: Ticket = TICKET) -> memoryview:
    """The payload's bytes in memory, once they are there."""
    while True:  # the task has yet to take its turn
        found = await asyncio.wait_for(bench.swapper.prefetcher.payload(ticket), 10)
        if found is not None:
            return found.payload
        assert ticket in bench.swapper.prefetcher.tickets
        await asyncio.sleep(0.001)


def right(bench: Bench) -> bool:
    return [int(bench.pool.storage[b][0]) for b in range(8)] == [4, 2, 2, 4, 5, 5, 7, 8]


def test_what_was_fetched_ahead_needs_no_store_any_more() -> None:
    async def main(store: Store) -> None:
        bench = Bench(store)
        await bench.put()
        bench.swapper.prefetch(PREFETCH)
        await arrived(bench)
        client = store.client("grpc")
        assert (await client.release(TICKET, epoch=1)).status is StoreStatus.OK
        done = await fetched(bench)
        assert (done.status, done.ahead, done.blocks) == (StoreStatus.OK, True, 3)
        assert done.token_ids == PUT.token_ids
        assert done.payload_bytes == 3 * LAYOUT.block_bytes
        assert right(bench)
        assert bench.swapper.prefetcher.tickets == (), "it is used once"
        done = await fetched(bench, AHEAD._replace(run=Run(1, 10)))
        assert (done.status, done.ahead) == (StoreStatus.SEALED, False)
        await bench.swapper.close()

    run(main)


def test_a_fetch_waits_for_what_is_under_way() -> None:
    async def main(store: Store) -> None:
        bench = Bench(store)
        await bench.put()
        asked, gate = asyncio.Event(), asyncio.Event()
        client = bench.swapper._client(STORE)
        assert client is not None
        get, calls = client.get, []

        async def slow(*args: Any, **more: Any) -> Any:
            calls.append(args)
            asked.set()
            await gate.wait()
            return await get(*args, **more)

        client.get = slow  # type: ignore[method-assign]
        bench.swapper.prefetch(PREFETCH)
        await asked.wait()
        bench.swapper.fetch(AHEAD)
        await asyncio.sleep(0.02)
        assert bench.events.empty()
        gate.set()
        done = await bench.answer()
        assert isinstance(done, FetchDone)
        assert (done.status, done.ahead, len(calls)) == (StoreStatus.OK, True, 1)
        assert right(bench)
        await bench.swapper.close()

    run(main)


def test_bytes_that_change_in_memory_are_not_used() -> None:
    async def main(store: Store) -> None:
        bench = Bench(store)
        await bench.put()
        bench.swapper.prefetch(PREFETCH)
        payload = await arrived(bench)
        payload[-1] ^= 1
        done = await fetched(bench)
        assert (done.status, done.ahead) == (StoreStatus.OK, False), "from the store, then"
        assert right(bench)
        await bench.swapper.close()

    run(main)


@pytest.mark.parametrize(
    "change",
    [
        lambda bench: setattr(bench.swapper, "_identity", replace(IDENTITY, model="another")),
        lambda bench: setattr(bench.swapper, "_identity", replace(IDENTITY, key_scales="other")),
    ],
)
def test_a_payload_that_does_not_belong_here_is_refused(change: Callable[[Bench], None]) -> None:
    async def main(store: Store) -> None:
        bench = Bench(store)
        await bench.put()
        before = bench.pool.storage.clone()
        bench.swapper.prefetch(PREFETCH)
        await arrived(bench)
        change(bench)
        done = await fetched(bench)
        assert (done.status, done.ahead) == (StoreStatus.BAD_PAYLOAD, False)
        assert done.detail.startswith("manifest.")
        assert bool((bench.pool.storage == before).all())
        await bench.swapper.close()

    run(main)


def test_another_ticket_of_the_same_request_is_not_served() -> None:
    async def main(store: Store) -> None:
        bench = Bench(store)
        await bench.put()
        bench.swapper.prefetch(PREFETCH)
        await arrived(bench)
        other = TICKET._replace(order=Run(1, 3))
        done = await fetched(bench, AHEAD._replace(ticket=other))
        assert (done.status, done.ahead) == (StoreStatus.UNKNOWN_TICKET, False)
        assert bench.swapper.prefetcher.tickets == (TICKET,)
        await bench.swapper.close()

    run(main)


def test_one_that_does_not_come_is_fetched_as_always() -> None:
    async def main(store: Store) -> None:
        bench = Bench(store)
        await bench.put()
        bench.swapper.prefetch(PREFETCH._replace(blocks=2))  # told wrong: no room for all of it
        done = await fetched(bench)
        assert (done.status, done.ahead) == (StoreStatus.OK, False)
        assert right(bench)
        bench.swapper.prefetch(PREFETCH._replace(store=StoreId("nowhere")))
        done = await fetched(bench, AHEAD._replace(run=Run(1, 10)))
        assert (done.status, done.ahead) == (StoreStatus.OK, False)
        await bench.swapper.close()

    run(main)


def test_a_cancelled_fetch_and_a_cancelled_prefetch_leave_nothing() -> None:
    async def main(store: Store) -> None:
        bench = Bench(store)
        await bench.put()
        prefetcher = bench.swapper.prefetcher
        bench.swapper.prefetch(PREFETCH)
        await arrived(bench)
        bench.swapper.cancel_prefetch(CancelPrefetch(TICKET))
        assert prefetcher.tickets == ()
        bench.swapper.prefetch(PREFETCH)
        await arrived(bench)  # the buffer was given back
        bench.swapper.fetch(AHEAD)
        bench.swapper.cancel_fetch(CancelFetch(TICKET, AHEAD.run))
        done = await bench.answer()
        assert isinstance(done, FetchDone)
        assert (done.status, done.ahead) == (StoreStatus.UNREACHABLE, False)
        assert prefetcher.tickets == ()
        await bench.swapper.close()

    run(main)


def test_the_next_payload_waits_for_the_buffer_and_a_fetch_does_not_wait_for_that() -> None:
    async def main(store: Store) -> None:
        bench = Bench(store)
        await bench.put()
        later = TICKET._replace(order=Run(1, 3))
        bench.swapper.prefetch(PREFETCH)
        held = await arrived(bench)
        bench.swapper.prefetch(PREFETCH._replace(ticket=later))
        await asyncio.sleep(0.02)
        assert await asyncio.wait_for(bench.swapper.prefetcher.payload(later), 1) is None
        assert bytes(held[:1]) == b"\x04", "nobody has written over it"
        done = await fetched(bench)
        assert (done.status, done.ahead) == (StoreStatus.OK, True)
        assert right(bench)
        await bench.swapper.close()
        assert bench.swapper.prefetcher.tickets == ()

    run(main)


def test_the_buffer_is_pinned_once_and_grows() -> None:
    calls: list[tuple[str, int]] = []

    def register(address: int, size: int) -> Callable[[], None]:
        assert address % 4096 == 0
        calls.append(("pin", size))
        return lambda: calls.append(("unpin", size))

    buffer = HostBuffer(register)
    first = buffer.room(8192)
    first[:] = bytes(8192)
    assert np.shares_memory(np.frombuffer(buffer.room(100), np.uint8), first)
    assert len(buffer.room(100)) == 100
    assert calls == [("pin", 8192)]
    assert len(buffer.room(20_000)) == 20_000
    assert calls == [("pin", 8192), ("unpin", 8192), ("pin", 20_000)]
    buffer.close()
    buffer.close()
    assert calls[3:] == [("unpin", 20_000)]
