"""A store with somebody between it and its workers who damages what passes: for `bench corruption`.

The store, its servers, the worker's swapper and its pool are those of a cluster, in one process.
What is damaged: bytes on their way in, after they were hashed; bytes that lie in the store; which
payload, pages or manifest a reader is given; messages of a gRPC read.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import grpc
import grpc.aio
import torch

from deepinfer.deploy.bench.damages import Damage, Message, Misgive, Page
from deepinfer.kvstore import hashing
from deepinfer.kvstore.client import Path as StorePath
from deepinfer.kvstore.core.config import StoreConfig
from deepinfer.kvstore.core.events import BeginGet, GetGrant, PutGrant
from deepinfer.kvstore.core.ids import (
    Incarnation,
    NodeId,
    RequestId,
    Run,
    Seq,
    StoreId,
    Ticket,
    WorkerId,
    WorkerRef,
)
from deepinfer.kvstore.core.layout import KvLayout
from deepinfer.kvstore.core.messages import Release, Reserve, StoreStatus
from deepinfer.kvstore.core.states import State
from deepinfer.kvstore.local import LocalServer
from deepinfer.kvstore.runtime import StoreRuntime
from deepinfer.kvstore.service import CHANNEL_OPTIONS, StoreService
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

STORE: Final = StoreId("store-bench")
WRITER: Final = WorkerRef(WorkerId("worker-bench"), Incarnation(1))
MODEL: Final = "the model that serves"
READ_S: Final = 30.0
ANSWER_S: Final = 30.0
EPOCH: Final = 1


@dataclass(slots=True)
class Armed:
    """What happens to the next payload; each thing once."""

    chance: Random
    on_write: Damage | None = None
    at_rest: Damage | None = None
    on_grant: Misgive | None = None
    on_message: Message | None = None
    """Of a read, from the store."""
    on_request: Message | None = None
    """Of a put, from the worker."""
    messages: int = 0
    done: bool = False
    """It has happened."""


class CorruptRuntime(StoreRuntime):
    """A ``StoreRuntime`` in front of which ``armed`` does its work."""

    armed: Armed | None = None

    def follow(self, grant: PutGrant, group_bytes: int) -> hashing.Follower | hashing.LongFollower:
        """Damage the pages that a writer has hashed and the store has not."""
        if (armed := self.armed) is not None and armed.on_write is not None and not armed.done:
            armed.on_write(self._pages(grant.pages), armed.chance)
            armed.done = True
        return super().follow(grant, group_bytes)

    def begin_get(self, body: BeginGet) -> GetGrant:
        """Damage what lies there, or give something else."""
        grant = super().begin_get(body)
        armed = self.armed
        if armed is None or grant.read is None:
            return grant
        if armed.at_rest is not None:
            armed.at_rest(self._pages(grant.pages), armed.chance)
            armed.done = True
        if armed.on_grant is not None:
            changed = armed.on_grant(grant, armed.chance)
            armed.done = changed != grant
            return changed
        return grant

    def bytes_of(self, ticket: Ticket) -> list[bytes]:
        """What lies in the pages of a payload."""
        grant = super().begin_get(BeginGet(ticket))
        assert grant.read is not None, grant.status
        found = [bytes(page) for page in self._pages(grant.pages)]
        self.end_get(grant.read)
        return found

    def restore(self, ticket: Ticket, pages: list[bytes]) -> None:
        """Put back what lay there."""
        grant = super().begin_get(BeginGet(ticket))
        assert grant.read is not None, grant.status
        for page, right in zip(self._pages(grant.pages), pages, strict=True):
            page[:] = right
        self.end_get(grant.read)

    def grant_of(self, ticket: Ticket) -> GetGrant:
        """The pages and the manifest of a payload; nobody is held up by it."""
        grant = super().begin_get(BeginGet(ticket))
        assert grant.read is not None, grant.status
        self.end_get(grant.read)
        return grant

    def _pages(self, pages: tuple[int, ...]) -> list[Page]:
        return [self.pool.page(page) for page in pages]


if TYPE_CHECKING:
    _Handlers = grpc.GenericRpcHandler[Any, Any]
else:
    _Handlers = grpc.GenericRpcHandler


class _Wire(_Handlers):
    """The store's handlers, with ``armed`` between them and the channel."""

    def __init__(self, inner: _Handlers, runtime: CorruptRuntime) -> None:
        self._inner = inner
        self._runtime = runtime

    def service(self, call: grpc.HandlerCallDetails) -> Any:
        """The handler of a call, its messages damaged where they pass."""
        handler: Any = self._inner.service(call)
        if handler is None:
            return None
        if call.method.endswith("/Get"):
            return handler._replace(response_serializer=self._response)
        if call.method.endswith("/Put"):
            decode = handler.request_deserializer
            return handler._replace(request_deserializer=lambda raw: decode(self._request(raw)))
        return handler

    def _response(self, message: bytes) -> bytes:
        armed = self._runtime.armed
        return self._damaged(message, None if armed is None else armed.on_message)

    def _request(self, message: bytes) -> bytes:
        armed = self._runtime.armed
        return self._damaged(message, None if armed is None else armed.on_request)

    def _damaged(self, message: bytes, damage: Message | None) -> bytes:
        armed = self._runtime.armed
        if armed is None or damage is None:
            return message
        changed = damage(armed.messages, message, armed.chance)
        armed.messages += 1
        armed.done = armed.done or changed != message
        return changed


class Placed(NamedTuple):
    """A payload in the store."""

    ticket: Ticket
    put: PutPayload
    pages: list[bytes]
    """What was written."""


@dataclass(slots=True)
class Bench:
    """A store, and a worker's swapper for each path; ``armed`` is set by the trials."""

    layout: KvLayout
    blocks: int
    runtime: CorruptRuntime
    address: str
    chance: Random
    pool: PagedPool
    swappers: dict[StorePath, StoreSwapper]
    events: asyncio.Queue[WorkerEvent] = field(default_factory=asyncio.Queue)
    _requests: int = 0

    def ticket(self, run: Run | None = None) -> Ticket:
        """One of a request of its own; of another run than any before it, unless one is named."""
        self._requests += 1
        seq = Seq(RequestId(f"request-{self._requests}"), 0)
        run = run or Run(EPOCH, self._requests)
        return Ticket(seq, run, Run(EPOCH, self._requests + 1))

    def effect(self, ticket: Ticket, first: int = 0) -> PutPayload:
        """The put of a payload that lies in the pool's first half."""
        tokens = range(first, first + self.blocks * self.layout.block_size)
        blocks = tuple(range(self.blocks))
        return PutPayload(
            ticket, STORE, ticket.seq, ticket.run, blocks, tuple(tokens), State.DECODE
        )

    def fill(self) -> None:
        """New bytes for the payloads that are put from now on."""
        whole = self.pool.storage[: self.blocks]
        seed = self.chance.randrange(1 << 62)
        generator = torch.Generator().manual_seed(seed)
        whole.random_(0, 256, generator=generator)

    async def put(
        self, path: StorePath, ticket: Ticket, *, swapper: StoreSwapper | None = None
    ) -> tuple[PutDone, StoreStatus]:
        """Reserve, put and commit; what the put and the commit came to."""
        size = self.blocks * self.layout.block_bytes
        reserved = self.runtime.control(Reserve(EPOCH, ticket, size, WRITER))
        assert reserved.status is StoreStatus.OK, reserved
        used = swapper or self.swappers[path]
        used.put(self.effect(ticket))
        done = await self.answer()
        assert isinstance(done, PutDone), done
        used.commit(Commit(ticket, STORE))
        reply = await self.answer()
        assert isinstance(reply, CommitReply), reply
        return done, reply.status

    async def place(
        self, ticket: Ticket, *, swapper: StoreSwapper | None = None, fill: bool = True
    ) -> Placed:
        """Put a payload that is as it should be."""
        if fill:
            self.fill()
        done, status = await self.put("memfd", ticket, swapper=swapper)
        assert (done.ok, status) == (True, StoreStatus.OK), (done, status)
        return Placed(ticket, self.effect(ticket), self.runtime.bytes_of(ticket))

    async def fetch(self, path: StorePath, ticket: Ticket) -> FetchDone:
        """Fetch into the pool's second half, all poison before."""
        into = tuple(range(self.blocks, 2 * self.blocks))
        self.pool.storage[self.blocks :].fill_(0xA5)
        run = Run(EPOCH + 1, self._requests)
        self.swappers[path].fetch(FetchPayload(ticket, STORE, ticket.seq, run, into))
        done = await self.answer()
        assert isinstance(done, FetchDone), done
        return done

    def arrived(self, placed: Placed, done: FetchDone) -> bool:
        """Whether the second half holds exactly what was placed, and the event says so."""
        found = self.pool.storage[self.blocks :].numpy().tobytes()
        return found == b"".join(placed.pages) and done.token_ids == placed.put.token_ids

    def release(self, ticket: Ticket) -> None:
        """Forget a payload, or a reservation."""
        self.runtime.control(Release(EPOCH, ticket))

    async def answer(self) -> WorkerEvent:
        """What the swapper says next."""
        return await asyncio.wait_for(self.events.get(), ANSWER_S)


@asynccontextmanager
async def running(layout: KvLayout, blocks: int, payloads: int, seed: int) -> AsyncIterator[Bench]:
    """A bench whose payloads have ``blocks`` blocks of ``layout``, room for some of them."""
    budget = payloads * blocks * layout.block_bytes
    runtime = CorruptRuntime(
        store=STORE,
        incarnation=Incarnation(1),
        node=NodeId("bench"),
        budget_bytes=budget,
        page_bytes=layout.block_bytes,
        slab_bytes=budget,
        config=StoreConfig(),
    )
    with tempfile.TemporaryDirectory(prefix="deepinfer-corruption-") as folder:
        local = LocalServer(runtime, str(Path(folder) / "socket"), read_s=READ_S)
        server = grpc.aio.server(options=[*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)])
        service = StoreService(runtime, local_socket=local.path, idle_s=READ_S, get_s=READ_S)
        server.add_generic_rpc_handlers((_Wire(service.handlers(), runtime),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ticking = asyncio.create_task(runtime.tick())
        events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        pool = PagedPool(layout, 2 * blocks)
        bench = Bench(
            layout=layout,
            blocks=blocks,
            runtime=runtime,
            address=f"127.0.0.1:{port}",
            chance=Random(seed),
            pool=pool,
            swappers={},
            events=events,
        )
        paths: tuple[StorePath, StorePath] = ("memfd", "grpc")
        for path in paths:
            bench.swappers[path] = swapper_of(bench, pool, KvIdentity(model=MODEL), path)
        try:
            yield bench
        finally:
            for swapper in bench.swappers.values():
                await swapper.close()
            ticking.cancel()
            await server.stop(None)
            await local.close()
            runtime.close()


def swapper_of(
    bench: Bench, pool: PagedPool, identity: KvIdentity, path: StorePath = "memfd"
) -> StoreSwapper:
    """A worker's swapper on the bench's store; its answers are the bench's events."""
    swapper = StoreSwapper(
        WRITER, pool, identity, bench.events.put_nowait, token="of nobody", path=path
    )
    swapper.learn({STORE: bench.address})
    return swapper
