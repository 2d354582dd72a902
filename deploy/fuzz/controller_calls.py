"""Every RPC of the controller: reports of all kinds, and what its operator may ask."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import grpc
from google.protobuf.message import Message

from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.core import ControllerCore
from deepinfer.controller.core.events import Members, Peer, Tick
from deepinfer.controller.ports import OrderError
from deepinfer.controller.service import ControlService
from deepinfer.controller.shell import Shell
from deepinfer.deploy.fuzz.calls import END, TICK, Calls, Service, handlers_of, numbered
from deepinfer.deploy.fuzz.messages import report_messages
from deepinfer.deploy.fuzz.shapes import Bytes, Proto, Records, recorded
from deepinfer.deploy.fuzz.target import Case, Shape, Target
from deepinfer.kvstore.core.ids import GatewayId, Incarnation, StoreId, WorkerId, WorkerRef
from deepinfer.kvstore.core.messages import Order, Release, Reserve, StoreReply, StoreStatus
from deepinfer.proto import control_pb2, control_pb2_grpc

EPOCH: Final = 7
CODES: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
MESSAGES: Final[Mapping[str, type[Message]]] = {
    "WorkerReports": control_pb2.WorkerReport,
    "StoreReports": control_pb2.StoreReport,
    "GatewayReports": control_pb2.GatewayReport,
    "Drain": control_pb2.DrainRequest,
    "GetDrain": control_pb2.DrainRequest,
    "Restart": control_pb2.RestartRequest,
}


class _Around:
    """Orders that some workers take, stores that grant everything, members that are there."""

    def send(
        self, worker: WorkerRef, order: Order, directory: Mapping[str, str]
    ) -> Awaitable[None]:
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if worker.incarnation % 2 == 0:
            sent.set_exception(OrderError("nobody is there"))
            sent.exception()  # nobody may be left to ask
        else:
            sent.set_result(None)
        return sent

    async def call(self, address: str, call: Reserve | Release) -> StoreReply:
        return StoreReply(call.ticket, StoreStatus.OK, 0, 4096)

    async def close(self) -> None:
        """Nothing is held."""

    async def members(self) -> Members:
        return Members(
            workers={WorkerId("worker-0"): None},
            stores={StoreId("store-n"): None},
            gateways={GatewayId("gateway-0"): None},
        )

    async def life(self, peer: Peer) -> Incarnation | None:
        return None

    async def restart(self, name: str, life: Incarnation) -> None:
        """Nothing is ended."""


async def _service() -> Service:
    now = 1_000

    def clock() -> int:
        return now

    around = _Around()
    core = ControllerCore(EPOCH, ControllerConfig())
    shell = Shell(
        core,
        orders=around,
        stores=around,
        directory=around,
        step_down=lambda epoch: None,
        clock_ms=clock,
    )
    shell.tell(await around.members())

    def tick() -> None:
        nonlocal now
        for _ in range(3):
            now += 4_000
            shell.tell(Tick())

    def check() -> None:
        core.check()
        tick()
        core.check()
        shell.status()

    async def close() -> None:
        for task in list(shell._tasks):
            task.cancel()
        await asyncio.gather(*shell._tasks, return_exceptions=True)

    found = handlers_of(control_pb2_grpc.add_ControlServicer_to_server, ControlService(shell))
    assert found.keys() == MESSAGES.keys(), "an RPC is not fuzzed"
    return Service({name: found[name] for name in MESSAGES}, CODES, tick, check, close)


@contextmanager
def _opened(_: Path) -> Iterator[Case]:
    loop = asyncio.new_event_loop()

    async def case(data: bytes) -> None:
        service = await _service()
        try:
            await Calls(service).make(data)
        finally:
            await service.close()

    try:
        yield lambda data: loop.run_until_complete(case(data))
    finally:
        loop.close()


def _seeds() -> list[bytes]:
    names = tuple(MESSAGES)
    said: list[tuple[str, Message | bytes]] = [(names[k], m) for k, m in report_messages()]
    drain = control_pb2.DrainRequest(name="worker-0", grace_ms=500)
    restart = control_pb2.RestartRequest(name="worker-0", incarnation=3)
    waiting = control_pb2.GatewayReport(gateway="gateway-0", incarnation=5, number=2)
    for number in range(3):
        level = waiting.requests.add(prompt_tokens=200, max_tokens=100, arrival_ms=number)
        level.seq.request = f"gateway-0-{number}"
    first = said[0], said[2], said[4]
    stories: list[list[tuple[str, Message | bytes]]] = [
        [*first, (TICK, b""), *said[1:6:2], (TICK, b"")],
        [*first, ("GatewayReports", waiting), (TICK, b""), said[1], (END, b""), *first],
        [*first, ("Drain", drain), (TICK, b""), ("GetDrain", drain), ("Restart", restart)],
        [*said, (END, b""), (TICK, b""), *said],
    ]
    return [recorded(numbered(names, story)) for story in stories]


_SHAPES: Final[list[Shape]] = [*(Proto(kind) for kind in MESSAGES.values()), Bytes(), Bytes()]

TARGETS: Final = (
    Target(
        name="rpc_controller",
        about="every RPC of the controller",
        seeds=_seeds,
        shape=Records(_SHAPES),
        open=_opened,
        errors=(),
    ),
)
"""Those of this module."""
