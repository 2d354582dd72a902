"""Every RPC of a node's store, and its same-node connections, frame by frame."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from deepinfer.deploy.fuzz.calls import END, TICK, Calls, Service, numbered
from deepinfer.deploy.fuzz.messages import BLOCK_BYTES, RUN, SEQ, TICKET, manifest
from deepinfer.deploy.fuzz.shapes import Bytes, Msgpack, Proto, Records, recorded, records
from deepinfer.deploy.fuzz.target import Case, Shape, Target
from deepinfer.kvstore import wire
from deepinfer.kvstore.core.config import StoreConfig
from deepinfer.kvstore.core.events import Tick
from deepinfer.kvstore.core.ids import Incarnation, NodeId, StoreId
from deepinfer.kvstore.core.messages import Reserve
from deepinfer.kvstore.local import VERSION, LocalServer
from deepinfer.kvstore.runtime import StoreRuntime
from deepinfer.kvstore.service import SERVICE, StoreService
from deepinfer.proto import ids_pb2, kvstore_pb2

LIFE: Final = 5
PAGES: Final = 64
CODES: Final = frozenset(
    {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.DEADLINE_EXCEEDED}
)
MESSAGES: Final[Mapping[str, type[Message]]] = {
    "Reserve": kvstore_pb2.ReserveRequest,
    "Put": kvstore_pb2.PutRequest,
    "Commit": kvstore_pb2.TicketRequest,
    "Resolve": kvstore_pb2.TicketRequest,
    "AbortPut": kvstore_pb2.TicketRequest,
    "Get": kvstore_pb2.GetRequest,
    "Release": kvstore_pb2.ReleaseRequest,
    "List": kvstore_pb2.ListRequest,
    "Stats": kvstore_pb2.StatsRequest,
}
WRITER: Final[dict[str, Any]] = {"worker": "worker-0", "incarnation": 3}


class _Clock:
    """Milliseconds that pass when a case says so."""

    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now


def _runtime(clock: _Clock) -> StoreRuntime:
    runtime = StoreRuntime(
        store=StoreId("store-n"),
        incarnation=Incarnation(LIFE),
        node=NodeId("n"),
        budget_bytes=PAGES * BLOCK_BYTES,
        page_bytes=BLOCK_BYTES,
        config=StoreConfig(tickets_max=8, sealed_max=8, writers_max=4),
        clock_ms=clock,
    )
    runtime.pool.grow_to(PAGES)  # or every put would wait for a thread that maps its pages
    return runtime


def _service() -> Service:
    clock = _Clock()
    runtime = _runtime(clock)
    handlers = StoreService(runtime, idle_s=30, get_s=30).handlers()

    def handler(name: str) -> Any:
        details: Any = SimpleNamespace(method=f"/{SERVICE}/{name}")
        return handlers.service(details)

    methods = {name: handler(name) for name in MESSAGES}

    def tick() -> None:
        clock.now += 40_000
        runtime.send(Tick())

    def check() -> None:
        core = runtime.core
        core.check()
        assert core.used_bytes <= core.budget_bytes
        numbers = core.snapshot()
        assert numbers["puts"] == numbers["reads"] == 0, numbers

    async def close() -> None:
        runtime.close()

    return Service(methods, CODES, tick, check, close)


@contextmanager
def _opened(_: Path) -> Iterator[Case]:
    loop = asyncio.new_event_loop()

    async def case(data: bytes) -> None:
        service = _service()
        try:
            await Calls(service).make(data)
        finally:
            await service.close()

    try:
        yield lambda data: loop.run_until_complete(case(data))
    finally:
        loop.close()


def _seeds() -> list[bytes]:
    made = manifest()
    reserve = kvstore_pb2.ReserveRequest(epoch=1, ticket=TICKET, bytes_max=512, writer=WRITER)
    header = kvstore_pb2.PutHeader(
        ticket=TICKET,
        writer=WRITER,
        store_incarnation=LIFE,
        manifest=wire.manifest_to_bytes(made),
        payload_bytes=made.payload_bytes,
        payload_xxh3=made.payload_hash,
    )
    put: list[tuple[str, Message | bytes]] = [
        ("Reserve", reserve),
        ("Put", kvstore_pb2.PutRequest(header=header)),
        ("Put", kvstore_pb2.PutRequest(chunk=bytes(100))),
        ("Put", kvstore_pb2.PutRequest(chunk=bytes(made.payload_bytes - 100))),
        (END, b""),
    ]
    own = kvstore_pb2.TicketRequest(ticket=TICKET, writer=WRITER, store_incarnation=LIFE)
    get = kvstore_pb2.GetRequest(ticket=TICKET, reader=WRITER)
    release = kvstore_pb2.ReleaseRequest(epoch=1, ticket=TICKET)
    other = dict(TICKET) | {"run": {"epoch": 9, "counter": 9}}
    next_one = kvstore_pb2.ReserveRequest(epoch=2, ticket=other, bytes_max=64, writer=WRITER)
    stories: list[list[tuple[str, Message | bytes]]] = [
        [*put, ("Commit", own), ("Get", get), ("List", b""), ("Release", release), ("Stats", b"")],
        [*put[:3], ("AbortPut", own), ("Resolve", own), (END, b""), ("Commit", own)],
        [*put, (TICK, b""), ("Commit", own), ("Reserve", next_one), (TICK, b""), ("List", b"")],
        [("Reserve", reserve), ("Reserve", next_one), ("Release", release), ("Get", get)],
    ]
    return [recorded(numbered(tuple(MESSAGES), story)) for story in stories]


_SHAPES: Final[list[Shape]] = [*(Proto(kind) for kind in MESSAGES.values()), Bytes(), Bytes()]


# ---- the same node -------------------------------------------------------------------------


@contextmanager
def _same_node(folder: Path) -> Iterator[Case]:
    """A connection to a store's Unix socket, which has one ticket reserved for the peer."""
    loop = asyncio.new_event_loop()
    ticket = wire.ticket_from_proto(ids_pb2.Ticket(**TICKET))
    writer = wire.writer_from_proto(ids_pb2.WorkerRef(**WRITER))

    async def case(data: bytes) -> None:
        clock = _Clock()
        runtime = _runtime(clock)
        runtime.control(Reserve(1, ticket, 512, writer))
        server = LocalServer(runtime, str(folder / "socket"))
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.setblocking(False)
                await loop.sock_connect(peer, str(folder / "socket"))
                for kind, frame in records(data):
                    # Others than even kinds say a length that is not theirs.
                    size = len(frame) if kind % 8 else len(frame) + kind // 8
                    await loop.sock_sendall(peer, struct.pack("<I", size) + frame)
                peer.shutdown(socket.SHUT_WR)
                while await loop.sock_recv(peer, 1 << 16):
                    pass
        finally:
            await server.close()
            runtime.core.check()
            runtime.close()

    try:
        yield lambda data: loop.run_until_complete(case(data))
    finally:
        loop.close()


def _same_node_seeds() -> list[bytes]:
    ticket = [SEQ["request"], 0, *RUN.values(), 1, 2]
    made = manifest()
    size = made.payload_bytes
    hello = {"op": "hello", "version": VERSION, **WRITER}
    begin = {"op": "begin_put", "call": 1, "ticket": ticket, "payload_bytes": size}
    written = {"op": "written", "put": [LIFE, 1], "bytes": 64, "group_bytes": made.group_bytes}
    finish = {
        "op": "finish_put", "call": 2, "put": [LIFE, 1], "manifest": wire.manifest_to_bytes(made),
    }  # fmt: skip
    stories: list[list[dict[str, object]]] = [
        [
            hello, begin, written, finish, {"op": "commit", "call": 3, "ticket": ticket},
            {"op": "begin_get", "call": 4, "ticket": ticket}, {"op": "end_get", "read": [LIFE, 1]},
        ],
        [hello, begin, {"op": "abort_put", "put": [LIFE, 1]}, begin, finish],
        [hello, begin, written, written | {"bytes": size}],
    ]  # fmt: skip
    return [recorded([(1, wire.pack(frame)) for frame in story]) for story in stories]


TARGETS: Final = (
    Target(
        name="rpc_store",
        about="every RPC of a store",
        seeds=_seeds,
        shape=Records(_SHAPES),
        open=_opened,
        errors=(),
    ),
    Target(
        name="same_node",
        about="frames of a same-node connection, and what the store does with them",
        seeds=_same_node_seeds,
        shape=Records([Msgpack()]),
        open=_same_node,
        errors=(OSError,),
    ),
)
"""Those of this module."""
