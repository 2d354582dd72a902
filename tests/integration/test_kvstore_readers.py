"""A reader on the store's own node that stops in the middle keeps its pages for a while only."""

from __future__ import annotations

import asyncio
import threading

from deepinfer.kvstore.core.ids import Incarnation, WorkerId, WorkerRef
from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.core.messages import StoreStatus
from deepinfer.kvstore.transfers import Take
from kvstore_kit import draft, keeping, payload, running_store, ticket, until

BLOCKS = 8
READER = WorkerRef(WorkerId("worker-1"), Incarnation(3))


def test_a_read_that_takes_too_long_is_ended_and_does_not_count() -> None:
    going_on = threading.Event()

    def stuck(_: Manifest) -> Take:
        def take(first: int, buffer: memoryview) -> None:
            going_on.wait(20)

        return take

    async def test() -> None:
        async with running_store(get_s=0.3) as store:
            one, data = ticket(1), payload(1, BLOCKS)
            writer, reader = store.client("memfd"), store.client("memfd", writer=READER)
            assert (await writer.reserve(one, 1 << 20, epoch=1)).status is StoreStatus.OK
            assert (await writer.put(one, draft(one, BLOCKS), data)).status is StoreStatus.OK
            assert (await writer.commit(one)).status is StoreStatus.OK
            reading = asyncio.create_task(reader.get(one, stuck))
            await until(store, reads=1)
            assert (await writer.release(one, epoch=1)).status is StoreStatus.OK
            await until(store, reads=0, used_bytes=0)
            assert not reading.done()
            going_on.set()
            assert (await reading).status is StoreStatus.UNREACHABLE
            # It was hung up on, and may come back.
            two, kept = ticket(2), list[memoryview]()
            assert (await writer.reserve(two, 1 << 20, epoch=1)).status is StoreStatus.OK
            assert (await writer.put(two, draft(two, BLOCKS), data)).status is StoreStatus.OK
            assert (await writer.commit(two)).status is StoreStatus.OK
            assert (await reader.get(two, keeping(kept))).status is StoreStatus.OK
            assert kept == data
            await asyncio.sleep(0.4)  # no timer of a read that has ended ends the connection
            assert (await reader.get(two, keeping(kept))).status is StoreStatus.OK

    asyncio.run(test())
