"""What the KV store's tests share: tickets, payloads, and a store with clients in one loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager

from deepinfer.kvstore.actor import StoreActor, StoreSettings
from deepinfer.kvstore.client import Deadlines, Into, OnMap, Path, StoreClient
from deepinfer.kvstore.core.config import StoreConfig
from deepinfer.kvstore.core.ids import Incarnation, RequestId, Run, Seq, Ticket, WorkerId, WorkerRef
from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.core.states import State
from deepinfer.kvstore.reporting import FindController

TOKEN = "a token for tests"
PAGE = 48 * 1024
WRITER = WorkerRef(WorkerId("worker-0"), Incarnation(7))


def ticket(number: int, *, epoch: int = 1) -> Ticket:
    return Ticket(Seq(RequestId(f"req-{number}"), 0), Run(epoch, number), Run(epoch, number + 1))


def draft(of: Ticket, blocks: int, *, block_bytes: int = PAGE) -> Manifest:
    return Manifest.draft(
        dtype="int8",
        encoding="offset-binary",
        layout="a layout",
        block_bytes=block_bytes,
        blocks=blocks,
        token_ids=tuple(range(7, 7 + 16 * blocks)),
        state=State.DECODE,
        precision="fp16",
        model="a model",
        run=of.run,
    )


def payload(seed: int, blocks: int, *, block_bytes: int = PAGE) -> list[memoryview]:
    rng = random.Random(seed)
    return [memoryview(rng.randbytes(block_bytes)) for _ in range(blocks)]


def buffers(manifest: Manifest) -> list[memoryview]:
    return [memoryview(bytearray(manifest.block_bytes)) for _ in range(manifest.blocks)]


def keeping(kept: list[memoryview]) -> Into:
    """An ``into`` that makes buffers and leaves them in ``kept``."""

    def into(manifest: Manifest) -> Sequence[memoryview]:
        kept[:] = buffers(manifest)
        return kept

    return into


async def no_controller() -> str:
    raise LookupError("no controller in this test")


class Store:
    """A running store; ``client`` makes clients that are closed with it."""

    def __init__(self, actor: StoreActor, address: str) -> None:
        self.actor = actor
        self.address = address
        self.clients: list[StoreClient] = []

    def client(
        self,
        path: Path,
        *,
        writer: WorkerRef = WRITER,
        token: str = TOKEN,
        executor: Executor | None = None,
        on_map: OnMap | None = None,
        deadlines: Deadlines | None = None,
    ) -> StoreClient:
        client = StoreClient(
            self.address,
            writer,
            token=token,
            path=path,
            executor=executor,
            on_map=on_map,
            deadlines=deadlines,
        )
        self.clients.append(client)
        return client

    async def numbers(self) -> dict[str, int]:
        return await self.actor.status()

    async def check_empty(self) -> None:
        numbers = await self.numbers()
        assert numbers["used_bytes"] == 0, numbers
        assert numbers["pages_free"] == numbers["pages_total"], numbers
        assert numbers["puts"] == numbers["reads"] == 0, numbers


async def until(store: Store, *, within_s: float = 5.0, **numbers: int) -> None:
    """Wait until the store's numbers are these."""
    async with asyncio.timeout(within_s):
        while True:
            now = await store.numbers()
            if all(now[name] == value for name, value in numbers.items()):
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running_store(
    *,
    budget_bytes: int = 64 * PAGE,
    page_bytes: int = PAGE,
    slab_bytes: int = 10 * PAGE,
    config: StoreConfig | None = None,
    port: int = 0,
    same_node: bool = True,
    put_idle_s: float = 30.0,
    get_s: float = 120.0,
    find_controller: FindController = no_controller,
) -> AsyncIterator[Store]:
    settings = StoreSettings(
        store="store-n",
        node="n",
        budget_bytes=budget_bytes,
        page_bytes=page_bytes,
        slab_bytes=slab_bytes,
        port=port,
        same_node=same_node,
        put_idle_s=put_idle_s,
        get_s=get_s,
        token=TOKEN,
        config=config or StoreConfig(),
    )
    actor = StoreActor(settings, find_controller)
    store = Store(actor, await actor.address())
    try:
        yield store
    finally:
        for client in store.clients:
            await client.close()
        await actor.stop()
