"""The controller's shell over real gRPC, with fake peers and without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
import pytest

from deepinfer.controller import wire
from deepinfer.controller.actor import ControllerActor, ControllerSettings
from deepinfer.controller.core.events import Members, Peer, PeerKind
from deepinfer.controller.ports import OrderError
from deepinfer.kvstore.core.ids import (
    GatewayId,
    Incarnation,
    RequestId,
    Run,
    Seq,
    StoreId,
    Ticket,
    WorkerId,
    WorkerRef,
)
from deepinfer.kvstore.core.messages import Admit, Cancel, Order, SwapOut
from deepinfer.proto import control_pb2, control_pb2_grpc, ids_pb2, kvstore_pb2, kvstore_pb2_grpc
from deepinfer.proto.bearer import bearer

TOKEN = "a-token-for-these-tests"
METADATA = (("authorization", f"Bearer {TOKEN}"),)
OPERATOR = "a-token-for-whoever-runs-it"
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
NOT_FOUND = grpc.StatusCode.NOT_FOUND
FAILED_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
INVALID_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT
NAME = Seq(RequestId("r1"), 0)
WORKER = WorkerRef(WorkerId("worker-0"), Incarnation(5))


class FakeOrders:
    """Keeps the orders; fails as many calls as it is told to."""

    def __init__(self) -> None:
        self.sent: list[tuple[WorkerRef, Order, dict[str, str]]] = []
        self.failures = 0

    def send(
        self, worker: WorkerRef, order: Order, directory: Mapping[str, str]
    ) -> Awaitable[None]:
        self.sent.append((worker, order, dict(directory)))
        return self._finish()

    async def _finish(self) -> None:
        if self.failures:
            self.failures -= 1
            raise OrderError("the worker does not answer")


class FakeDirectory:
    """Knows one worker, store and gateway."""

    def __init__(self) -> None:
        self.lives: dict[str, int] = {"worker-0": 5, "store-0": 6, "gateway-0": 7}
        self.restarted: list[tuple[str, int]] = []

    async def members(self) -> Members:
        return Members(
            workers={WorkerId("worker-0"): None},
            stores={StoreId("store-0"): None},
            gateways={GatewayId("gateway-0"): None},
        )

    async def life(self, peer: Peer) -> Incarnation | None:
        life = self.lives.get(peer.id)
        return None if life is None else Incarnation(life)

    async def restart(self, name: str, life: Incarnation) -> None:
        self.restarted.append((name, life))


class FakeStore(kvstore_pb2_grpc.KVStoreServicer):
    """Agrees to every reservation."""

    def __init__(self) -> None:
        self.reserved: list[kvstore_pb2.ReserveRequest] = []

    async def Reserve(
        self, request: kvstore_pb2.ReserveRequest, context: Any
    ) -> kvstore_pb2.StoreReply:
        assert METADATA[0] in context.invocation_metadata()
        self.reserved.append(request)
        return kvstore_pb2.StoreReply(ticket=request.ticket, status="ok", budget_bytes=1 << 30)


class Stream:
    """One peer's stream of reports."""

    def __init__(self, call: Callable[[AsyncIterator[Any]], Any]) -> None:
        self._reports: asyncio.Queue[Any] = asyncio.Queue()
        self.call = call(self._written())

    async def _written(self) -> AsyncIterator[Any]:
        while (report := await self._reports.get()) is not None:
            yield report

    async def say(self, report: Any) -> control_pb2.ReportReply:
        self._reports.put_nowait(report)
        reply = await asyncio.wait_for(self.call.read(), 5)
        assert isinstance(reply, control_pb2.ReportReply), reply
        return reply

    def end(self) -> None:
        self._reports.put_nowait(None)


class Peers:
    """A controller and the fakes around it."""

    def __init__(self) -> None:
        self.orders = FakeOrders()
        self.directory = FakeDirectory()
        self.store = FakeStore()
        self.numbers: dict[str, int] = {}

    async def __aenter__(self) -> Peers:
        settings = ControllerSettings(
            namespace="tests",
            token="the-clients-token",
            cluster_token=TOKEN,
            operator_token=OPERATOR,
        )
        self.actor = ControllerActor(settings, orders=self.orders, directory=self.directory)
        self.address = await self.actor.address()
        self.channel = grpc.aio.insecure_channel(self.address)
        self.stub = control_pb2_grpc.ControlStub(self.channel)
        self.server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        kvstore_pb2_grpc.add_KVStoreServicer_to_server(self.store, self.server)
        self.store_address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()
        self.worker = Stream(lambda said: self.stub.WorkerReports(said, metadata=METADATA))
        self.stores = Stream(lambda said: self.stub.StoreReports(said, metadata=METADATA))
        self.gateway = Stream(lambda said: self.stub.GatewayReports(said, metadata=METADATA))
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in (self.worker, self.stores, self.gateway):
            stream.end()
        await self.channel.close(None)
        await self.actor.stop()
        await self.server.stop(None)

    def _number(self, peer: str) -> int:
        self.numbers[peer] = self.numbers.get(peer, 0) + 1
        return self.numbers[peer]

    async def operate(self, method: str, request: Any) -> control_pb2.DrainLevel:
        """Call as the operator."""
        call = getattr(self.stub, method)(request, metadata=bearer(OPERATOR), timeout=5)
        level = await call
        assert isinstance(level, control_pb2.DrainLevel), level
        return level

    async def level(self, method: str, name: str, **request: Any) -> control_pb2.DrainLevel:
        return await self.operate(method, control_pb2.DrainRequest(name=name, **request))

    async def refused(self, method: str, request: Any) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.operate(method, request)
        code: grpc.StatusCode = caught.value.code()
        return code

    async def report_worker(self, **levels: Any) -> control_pb2.ReportReply:
        defaults: dict[str, Any] = {"blocks_free": 3}
        return await self.worker.say(
            control_pb2.WorkerReport(
                worker="worker-0",
                incarnation=5,
                node="node-0",
                number=self._number("worker"),
                complete=True,
                block_bytes=1000,
                block_size=16,
                blocks_total=3,
                counters={"cpu_offload_seconds": 0.25, "deepinfer_worker_steps_total": 4},
                **(defaults | levels),
            )
        )

    async def report_store(self) -> control_pb2.ReportReply:
        return await self.stores.say(
            control_pb2.StoreReport(
                store="store-0",
                incarnation=6,
                node="node-0",
                number=self._number("store"),
                complete=True,
                budget_bytes=1 << 30,
                address=self.store_address,
            )
        )

    async def report_gateway(self, *names: str) -> control_pb2.ReportReply:
        return await self.gateway.say(
            control_pb2.GatewayReport(
                gateway="gateway-0",
                incarnation=7,
                number=self._number("gateway"),
                complete=True,
                address="127.0.0.1:7000",
                requests=[
                    control_pb2.RequestLevel(
                        seq=ids_pb2.Seq(request=name), claim=1, prompt_tokens=20, max_tokens=28
                    )
                    for name in names
                ],
            )
        )

    async def everyone(self, *names: str) -> None:
        await self.report_worker()
        await self.report_store()
        await self.report_gateway(*names)

    async def order(self, kind: type[Order], count: int = 1) -> Any:
        """The latest order of a kind, once that many were sent."""
        async with asyncio.timeout(5):
            while True:
                found = [order for _, order, _ in self.orders.sent if isinstance(order, kind)]
                if len(found) >= count:
                    return found[-1]
                await asyncio.sleep(0.01)

    def resident(self, name: str, run: Run, state: str = "decode") -> control_pb2.ResidentLevel:
        return control_pb2.ResidentLevel(
            seq=ids_pb2.Seq(request=name),
            run=wire.run_to(run),
            state=state,
            gateway="gateway-0",
        )


def run(story: Callable[[Peers], Awaitable[None]]) -> None:
    async def tell() -> None:
        async with Peers() as peers:
            await story(peers)

    asyncio.run(tell())


def test_a_request_is_placed_with_its_gateways_address() -> None:
    async def story(peers: Peers) -> None:
        await peers.everyone("r1")
        order = await peers.order(Admit)
        ref, _, directory = peers.orders.sent[0]
        assert ref == WORKER
        assert (order.seq, order.gateway, order.tokens, order.max_total_tokens) == (
            NAME,
            GatewayId("gateway-0"),
            20,
            48,
        )
        assert directory == {"gateway-0": "127.0.0.1:7000"}

    run(story)


def test_a_failed_call_is_sent_again() -> None:
    async def story(peers: Peers) -> None:
        peers.orders.failures = 1
        await peers.everyone("r1")
        again = await peers.order(Admit, count=2)
        assert again == peers.orders.sent[0][1]

    run(story)


def test_room_is_made_through_the_stores_service() -> None:
    async def story(peers: Peers) -> None:
        await peers.everyone("r1")
        admitted = await peers.order(Admit)
        usage = control_pb2.Usage(
            seq=ids_pb2.Seq(request="r1"), private_blocks=2, tokens=22, last_step=3, advanced=2
        )
        running = [peers.resident("r1", admitted.run)]
        await peers.report_worker(residents=running, usage=[usage], blocks_free=1)
        await peers.report_gateway("r1", "r2")
        order = await peers.order(SwapOut)
        assert (order.seq, order.run, order.store) == (NAME, admitted.run, "store-0")
        (reserved,) = peers.store.reserved
        assert wire.ticket_from(reserved.ticket) == order.ticket
        assert reserved.bytes_max == 3000
        assert peers.orders.sent[-1][2] == {"store-0": peers.store_address}

    run(story)


def test_a_broken_stream_is_a_death_only_if_nobody_answers() -> None:
    async def story(peers: Peers) -> None:
        await peers.everyone()
        peers.worker.end()
        await asyncio.sleep(0.4)
        status = await peers.actor.status()
        assert status["workers"]["worker-0"]["state"] == "serving"
        peers.worker = Stream(lambda said: peers.stub.WorkerReports(said, metadata=METADATA))
        await peers.report_worker()
        del peers.directory.lives["worker-0"]
        peers.worker.end()
        async with asyncio.timeout(2):
            while status["workers"]["worker-0"]["state"] != "gone":
                await asyncio.sleep(0.02)
                status = await peers.actor.status()

    run(story)


def test_status_and_metrics_add_what_peers_have_counted() -> None:
    async def story(peers: Peers) -> None:
        await peers.everyone()
        status = await peers.actor.status()
        assert status["ready"] is True
        assert status["counters"]["cpu_offload_seconds"] == 0.25
        assert status["counters"]["deepinfer_worker_steps_total"] == 4
        assert status["addresses"]["store-0"] == peers.store_address
        text = await peers.actor.metrics()
        assert '\ncpu_offload_seconds{worker="worker-0"} 0.25\n' in text
        assert "\ncpu_offload_budget_bytes 1.073741824e+09\n" in text

    run(story)


def test_without_the_token_nobody_is_heard() -> None:
    async def story(peers: Peers) -> None:
        wrong = (("authorization", "Bearer another-token"),)
        for metadata in (None, wrong):
            for method in (
                peers.stub.WorkerReports,
                peers.stub.StoreReports,
                peers.stub.GatewayReports,
            ):
                call = method(metadata=metadata)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    run(story)


def test_nonsense_is_refused_by_name() -> None:
    async def story(peers: Peers) -> None:
        call = peers.stub.WorkerReports(metadata=METADATA)
        await call.write(control_pb2.WorkerReport(worker="worker-0", block_size=0))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "block_size = 0: must be at least 1"

    run(story)


def test_an_abort_is_passed_on() -> None:
    async def story(peers: Peers) -> None:
        await peers.everyone("r1")
        admitted = await peers.order(Admit)
        await peers.report_worker(residents=[peers.resident("r1", admitted.run)], blocks_free=1)
        await peers.gateway.say(
            control_pb2.GatewayReport(
                gateway="gateway-0",
                incarnation=7,
                number=peers.numbers["gateway"] + 1,
                requests=[
                    control_pb2.RequestLevel(
                        seq=ids_pb2.Seq(request="r1"),
                        claim=1,
                        cancelled=True,
                        prompt_tokens=20,
                        max_tokens=28,
                    )
                ],
            )
        )
        cancelled = await peers.order(Cancel)
        assert (cancelled.seq, cancelled.run) == (NAME, admitted.run)

    run(story)


def test_refusals_reach_the_gateway() -> None:
    async def story(peers: Peers) -> None:
        await peers.report_worker()
        await peers.report_store()
        reply = await peers.gateway.say(
            control_pb2.GatewayReport(
                gateway="gateway-0",
                incarnation=7,
                number=1,
                complete=True,
                requests=[
                    control_pb2.RequestLevel(
                        seq=ids_pb2.Seq(request="r1"), claim=1, prompt_tokens=40, max_tokens=28
                    )
                ],
            )
        )
        (reject,) = reply.reject
        assert (reject.seq.request, reject.blocks_needed, reject.blocks_total) == ("r1", 5, 3)

    run(story)


def test_tickets_survive_the_wire() -> None:
    ticket = Ticket(NAME, Run(3, 9), Run(3, 11))
    assert wire.ticket_from(wire.ticket_to(ticket)) == ticket


def test_peer_kinds_are_told_apart() -> None:
    assert Peer(PeerKind.WORKER, "a", Incarnation(1)) != Peer(PeerKind.STORE, "a", Incarnation(1))


def test_the_operator_empties_a_worker_and_restarts_it() -> None:
    async def run() -> None:
        async with Peers() as peers:
            level, refused = peers.level, peers.refused
            stranger = control_pb2.DrainRequest(name="worker-7")
            assert await refused("Drain", stranger) == UNAVAILABLE  # nobody has reported yet
            await peers.report_worker()
            reply = await peers.report_gateway()
            await peers.report_store()
            assert await refused("Drain", stranger) == NOT_FOUND
            assert not reply.HasField("drain")
            assert (await level("GetDrain", "worker-0")).serving
            restart = control_pb2.RestartRequest(name="worker-0", incarnation=5)
            assert await refused("Restart", restart) == FAILED_PRECONDITION
            said = await level("Drain", "worker-0", grace_ms=60_000)
            assert (said.serving, said.draining, said.drained) == (False, True, False)
            assert (await peers.report_worker()).HasField("drain")
            await peers.report_worker(draining=True)
            assert (await level("GetDrain", "worker-0")).drained
            assert peers.directory.restarted == []
            other = control_pb2.RestartRequest(name="worker-0", incarnation=4)
            await peers.operate("Restart", other)
            assert peers.directory.restarted == []
            await peers.operate("Restart", restart)
            assert peers.directory.restarted == [("worker-0", 5)]
            assert await refused("Drain", control_pb2.DrainRequest()) == INVALID_ARGUMENT
            await level("Drain", "gateway-0", grace_ms=60_000)
            left_ms = (await peers.report_gateway()).drain.left_ms
            assert 55_000 < left_ms <= 60_000

    asyncio.run(run())
