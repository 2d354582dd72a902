"""A pool and a swapper on a real store over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from deepinfer.kvstore.core.ids import RequestId, Run, Seq, StoreId, Ticket
from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.kvstore.core.messages import StoreStatus
from deepinfer.kvstore.core.states import State
from deepinfer.workers.core.events import (
    Commit,
    CommitReply,
    FetchDone,
    FetchPayload,
    PutDone,
    PutPayload,
    WorkerEvent,
)
from deepinfer.workers.pool import PagedPool
from deepinfer.workers.swap import KvIdentity, StoreSwapper
from kvstore_kit import TOKEN, WRITER, Store, running_store

STORE = StoreId("store-n")
LAYOUT = KvLayout(resolve_kv_dtype("int8"), 2, 2, 8, 4)
SEQ = Seq(RequestId("r"), 0)
TICKET = Ticket(SEQ, Run(1, 1), Run(1, 2))
IDENTITY = KvIdentity(model="a model")
PUT = PutPayload(TICKET, STORE, SEQ, Run(1, 1), (3, 4, 1), tuple(range(10, 20)), State.DECODE)
FETCH = FetchPayload(TICKET, STORE, SEQ, Run(1, 9), (0, 5, 2, 6))


class Bench:
    """A pool of numbered bytes, a swapper, and what it has answered."""

    def __init__(self, store: Store, *, identity: KvIdentity = IDENTITY) -> None:
        self.store = store
        self.pool = PagedPool(LAYOUT, 8)
        for block in range(8):
            self.pool.storage[block] = block + 1
        self.events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        self.swapper = StoreSwapper(
            WRITER, self.pool, identity, self.events.put_nowait, token=TOKEN, path="grpc"
        )
        self.swapper.learn({STORE: store.address})

    async def reserve(self) -> None:
        client = self.store.client("grpc")
        reply = await client.reserve(TICKET, 8 * LAYOUT.block_bytes, epoch=1)
        assert reply.status is StoreStatus.OK

    async def answer(self) -> WorkerEvent:
        return await asyncio.wait_for(self.events.get(), 10)

    async def put(self) -> None:
        await self.reserve()
        self.swapper.put(PUT)
        done = await self.answer()
        assert isinstance(done, PutDone)
        assert (done.ok, done.payload_bytes) == (True, 3 * LAYOUT.block_bytes)
        self.swapper.commit(Commit(TICKET, STORE))
        assert await self.answer() == CommitReply(TICKET, StoreStatus.OK)

    async def fetch(self) -> FetchDone:
        self.swapper.fetch(FETCH)
        done = await self.answer()
        assert isinstance(done, FetchDone)
        return done


def run(main: Callable[[Store], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with running_store(
            budget_bytes=16 * LAYOUT.block_bytes,
            page_bytes=LAYOUT.block_bytes,
            slab_bytes=16 * LAYOUT.block_bytes,
        ) as store:
            await main(store)

    asyncio.run(whole())
