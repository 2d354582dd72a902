"""A whole worker in this process, with a real store and a scripted gateway and controller.

Everything speaks real gRPC over loopback; only Ray is left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import grpc.aio

from deepinfer.gateway import wire as gateway_wire
from deepinfer.kvstore.client import Path as StorePath
from deepinfer.kvstore.core.ids import GatewayId, Run, Seq, StoreId, Ticket, WorkerRef
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.kvstore.core.messages import (
    Ack,
    Admit,
    Attach,
    Attached,
    AttachRefused,
    Departure,
    Notice,
    Scores,
    SwapIn,
    SwapOut,
    ToGateway,
    ToWorker,
)
from deepinfer.kvstore.core.requests import FinishReason, RequestRecord, Token
from deepinfer.proto import control_pb2, control_pb2_grpc, link_pb2, link_pb2_grpc
from deepinfer.proto.bundle import unbundled
from deepinfer.workers.actor import WorkerActor, WorkerSettings
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.core.events import StepDone, StepPlan
from deepinfer.workers.engine import Engine
from deepinfer.workers.model.decoder import kv_layout
from deepinfer.workers.model.load import load_model
from kvstore_kit import TOKEN, Store, running_store

GATEWAY = GatewayId("gateway-0")
STORE = StoreId("store-n")
BEARER = f"Bearer {TOKEN}"


@dataclass
class Held:
    """What the gateway holds of one sequence."""

    record: RequestRecord
    tokens: list[Token] = field(default_factory=list)
    finish: FinishReason | None = None
    attached: Run | None = None
    notices: list[Notice] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]


class ScriptedGateway(link_pb2_grpc.WorkerLinkServicer):
    """Holds requests and answers as a gateway does; counts its links."""

    def __init__(self) -> None:
        self.held: dict[Seq, Held] = {}
        self.links = 0
        self.worker: WorkerRef | None = None
        self.changed = asyncio.Event()
        self._outboxes: list[asyncio.Queue[ToWorker | None]] = []

    def say(self, message: ToWorker) -> None:
        self._outboxes[-1].put_nowait(message)

    def hang_up(self) -> None:
        """Break every link."""
        for outbox in self._outboxes:
            outbox.put_nowait(None)

    async def Connect(
        self, request_iterator: AsyncIterator[link_pb2.FromWorker], context: Any
    ) -> AsyncIterator[link_pb2.ToWorker]:
        assert ("authorization", BEARER) in tuple(context.invocation_metadata())
        outbox: asyncio.Queue[ToWorker | None] = asyncio.Queue()
        self._outboxes.append(outbox)
        self.links += 1
        reading = asyncio.create_task(self._read(request_iterator, outbox))
        try:
            while (message := await outbox.get()) is not None:
                yield gateway_wire.to_worker(message)
        finally:
            reading.cancel()

    async def _read(
        self, messages: AsyncIterator[link_pb2.FromWorker], outbox: asyncio.Queue[ToWorker | None]
    ) -> None:
        hello = await anext(messages)
        self.worker = gateway_wire.worker_ref_from(hello.hello.worker)
        async for bundle in messages:
            for said in unbundled(bundle):
                for answer in self._hear(gateway_wire.from_worker(said, self.worker)):
                    outbox.put_nowait(answer)
            self.changed.set()

    def _hear(self, message: ToGateway) -> list[ToWorker]:
        held = self.held.get(message.seq)
        if held is None:
            return [AttachRefused(message.seq, message.run, None)]
        if isinstance(message, Notice):
            held.notices.append(message)
            return []
        assert not isinstance(message, Scores), "nobody here asks for log-probabilities"
        if isinstance(message, Attach):
            if held.attached is not None and message.run < held.attached:
                return [AttachRefused(message.seq, message.run, held.attached)]
            held.attached = message.run
            tokens = tuple(held.token_ids)
            return [Attached(message.seq, message.run, held.record, tokens)]
        if message.run == held.attached and message.index <= len(held.tokens):
            known = len(held.tokens) - message.index
            assert list(message.tokens[:known]) == held.tokens[message.index :][:known]
            held.tokens += message.tokens[known:]
            held.finish = held.finish or message.finish
        return [Ack(message.seq, message.run, len(held.tokens), held.finish is not None)]


class ScriptedController(control_pb2_grpc.ControlServicer):
    """Takes reports, answers each, and remembers what they say."""

    def __init__(self) -> None:
        self.epoch = 1
        self.residents: dict[str, control_pb2.ResidentLevel] = {}
        self.departed: list[tuple[str, Run, Departure]] = []
        self.last: control_pb2.WorkerReport | None = None
        self.streams = 0
        self.changed = asyncio.Event()

    async def WorkerReports(
        self, request_iterator: AsyncIterator[control_pb2.WorkerReport], context: Any
    ) -> AsyncIterator[control_pb2.ReportReply]:
        assert ("authorization", BEARER) in tuple(context.invocation_metadata())
        self.streams += 1
        first = True
        async for report in request_iterator:
            assert report.complete or not first, "the first report of a stream is complete"
            first = False
            self._take(report)
            yield control_pb2.ReportReply(epoch=self.epoch, number=report.number)

    def _take(self, report: control_pb2.WorkerReport) -> None:
        if report.complete:
            self.residents.clear()
        for level in report.residents:
            self.residents[level.seq.request] = level
        for departed in report.departed:
            run = Run(departed.run.epoch, departed.run.counter)
            entry = (departed.seq.request, run, Departure(departed.why))
            self.residents.pop(departed.seq.request, None)
            if entry not in self.departed:
                self.departed.append(entry)
        self.last = report
        self.changed.set()


@dataclass
class Cluster:
    """One worker and what is around it."""

    worker: WorkerActor
    store: Store
    gateway: ScriptedGateway
    controller: ScriptedController
    directory: dict[str, str]
    block_bytes: int
    counter: int = 0

    def mint(self) -> Run:
        self.counter += 1
        return Run(self.controller.epoch, self.counter)

    async def admit(self, record: RequestRecord) -> Run:
        seq = Seq(record.request, 0)
        self.gateway.held.setdefault(seq, Held(record))
        run = self.mint()
        prompt = len(record.prompt_ids)
        total = prompt + record.sampling.max_tokens
        tokens = prompt + len(self.gateway.held[seq].tokens)
        await self.worker.order(Admit(run, seq, run, GATEWAY, tokens, total), self.directory)
        return run

    async def swap_out(self, seq: Seq, run: Run, *, blocks: int = 64) -> Ticket:
        """Reserve as the controller does, then order."""
        order = self.mint()
        ticket = Ticket(seq, run, order)
        worker = self.gateway.worker
        assert worker is not None
        client = self.store.client("grpc", writer=worker)
        await client.reserve(ticket, blocks * self.block_bytes, epoch=1, writer=worker)
        await self.worker.order(SwapOut(order, seq, run, ticket, STORE), self.directory)
        return ticket

    async def swap_in(self, ticket: Ticket) -> Run:
        run = self.mint()
        record = self.gateway.held[ticket.seq].record
        total = len(record.prompt_ids) + record.sampling.max_tokens
        (level,) = [
            level
            for level in self.store.actor._runtime.core.levels()  # type: ignore[union-attr]
            if level.ticket == ticket
        ]
        order = SwapIn(
            run, ticket.seq, run, GATEWAY, ticket, STORE, level.tokens, level.blocks, total
        )
        await self.worker.order(order, self.directory)
        return run

    async def until(self, condition: Callable[[], bool], *, timeout_s: float = 20.0) -> None:
        """Wait for something to be heard."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                waits = [
                    asyncio.ensure_future(event.wait())
                    for event in (self.gateway.changed, self.controller.changed)
                ]
                await asyncio.wait(waits, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
                self.gateway.changed.clear()
                self.controller.changed.clear()

    async def holds(self, seq: Seq, tokens: int) -> None:
        await self.until(lambda: len(self.gateway.held[seq].tokens) >= tokens)

    async def finished(self, seq: Seq) -> list[int]:
        await self.until(lambda: self.gateway.held[seq].finish is not None)
        return self.gateway.held[seq].token_ids

    async def departs(self, request: str, run: Run, why: Departure) -> None:
        await self.until(lambda: (request, run, why) in self.controller.departed)


async def _serve(
    add: Callable[[grpc.aio.Server], None],
) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


def layout_bytes(model: Path, dtype: str, block_size: int) -> int:
    layout = kv_layout(load_model(model).config, resolve_kv_dtype(dtype), block_size)
    return layout.block_bytes


@asynccontextmanager
async def running_worker(
    model: Path,
    *,
    dtype: str = "auto",
    store_path: StorePath = "auto",
    blocks: int = 96,
    block_size: int = 4,
    step_s: float = 0.0,
    **limits: Any,
) -> AsyncIterator[Cluster]:
    """Start store, gateway, controller and worker; stop them all afterwards.

    A step takes ``step_s`` longer than it must: the tiny model would be done before a test can
    interfere.
    """
    block_bytes = layout_bytes(model, dtype, block_size)
    gateway, controller = ScriptedGateway(), ScriptedController()
    gateway_server, gateway_address = await _serve(
        lambda server: link_pb2_grpc.add_WorkerLinkServicer_to_server(gateway, server)
    )
    control_server, control_address = await _serve(
        lambda server: control_pb2_grpc.add_ControlServicer_to_server(controller, server)
    )

    async def find() -> str:
        return control_address

    settings = WorkerSettings(
        worker="worker-0",
        node="n",
        model_path=str(model),
        kv_cache_dtype=dtype,
        store_path=store_path,
        token=TOKEN,
        config=WorkerConfig(
            blocks_total=blocks,
            block_size=block_size,
            block_bytes=block_bytes,
            **{"prefill_chunk_tokens": 8, **limits},
        ),
    )
    budget = 128 * block_bytes
    async with running_store(
        budget_bytes=budget, page_bytes=block_bytes, slab_bytes=16 * block_bytes
    ) as store:
        worker = WorkerActor(settings, find)
        run = Engine.run

        def slowly(engine: Engine, plan: StepPlan) -> StepDone:
            time.sleep(step_s)
            return run(engine, plan)

        patch = mock.patch.object(Engine, "run", slowly)
        patch.start()
        try:
            await worker.ping()
            directory = {GATEWAY: gateway_address, STORE: store.address}
            yield Cluster(worker, store, gateway, controller, directory, block_bytes)
        finally:
            patch.stop()
            await worker.stop()
            await gateway_server.stop(None)
            await control_server.stop(None)


__all__ = [
    "GATEWAY", "STORE", "Cluster", "Held", "ScriptedController", "ScriptedGateway",
    "running_worker",
]  # fmt: skip
