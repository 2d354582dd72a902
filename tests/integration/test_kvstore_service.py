"""The store's gRPC service as a whole, and its reports to a controller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from deepinfer.kvstore import wire
from deepinfer.kvstore.actor import StoreSettings
from deepinfer.kvstore.client import Deadlines, StoreClient
from deepinfer.kvstore.core.config import StoreConfig, StoreConfigError
from deepinfer.kvstore.core.messages import StoreStatus as S
from deepinfer.kvstore.runtime import StoreRuntime
from deepinfer.proto import control_pb2, control_pb2_grpc, kvstore_pb2
from deepinfer.proto.bearer import bearer
from kvstore_kit import PAGE, TOKEN, buffers, draft, payload, running_store, ticket, until

METHODS = kvstore_pb2.DESCRIPTOR.services_by_name["KVStore"].methods


async def call(channel: grpc.aio.Channel, method: Any, token: str) -> grpc.StatusCode:
    """Call a method with an empty request; return the status code."""
    kind = f"{'stream' if method.client_streaming else 'unary'}_"
    kind += "stream" if method.server_streaming else "unary"
    callable_ = getattr(channel, kind)(f"/deepinfer.v1.KVStore/{method.name}")
    request: Any = iter([b""]) if method.client_streaming else b""
    rpc = callable_(request, metadata=bearer(token) if token else None, timeout=5)
    code: grpc.StatusCode = await rpc.code()
    return code


def test_every_method_is_served_and_wants_the_token() -> None:
    async def main() -> None:
        async with running_store() as store, grpc.aio.insecure_channel(store.address) as channel:
            for method in METHODS:
                for token in ("", "wrong", TOKEN + "x"):
                    code = await call(channel, method, token)
                    assert code is grpc.StatusCode.UNAUTHENTICATED, method.name
                code = await call(channel, method, TOKEN)
                # An empty request names no ticket; only these two need none.
                fine = method.name in ("List", "Stats")
                expected = grpc.StatusCode.OK if fine else grpc.StatusCode.INVALID_ARGUMENT
                assert code is expected, method.name

    asyncio.run(main())


def test_a_message_above_the_limit_is_refused() -> None:
    async def main() -> None:
        async with running_store() as store, grpc.aio.insecure_channel(store.address) as channel:
            put = channel.stream_unary("/deepinfer.v1.KVStore/Put", None, None)
            rpc: Any = put(iter([bytes(5 << 20)]), metadata=bearer(TOKEN), timeout=5)
            assert await rpc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    asyncio.run(main())


def test_list_and_stats_say_what_is_there() -> None:
    async def main() -> None:
        async with running_store() as store, grpc.aio.insecure_channel(store.address) as channel:
            client = store.client("grpc")
            await client.reserve(ticket(1), 3 * PAGE, epoch=1)
            await client.reserve(ticket(2), 3 * PAGE, epoch=1)
            await client.put(ticket(2), draft(ticket(2), 2), payload(2, 2))
            await client.commit(ticket(2))
            listed: Any = channel.unary_unary(
                "/deepinfer.v1.KVStore/List", None, kvstore_pb2.ListResponse.FromString
            )
            response = await listed(b"", metadata=bearer(TOKEN))
            assert [(t.state, t.payload_bytes, t.tokens, t.blocks) for t in response.tickets] == [
                ("reserved", 3 * PAGE, 0, 3),
                ("committed", 2 * PAGE, 32, 2),
            ]
            stats = await client.stats()
            assert stats is not None
            assert (
                stats.used_bytes,
                stats.tickets,
                stats.counters["deepinfer_store_committed_total"],
            ) == (
                5 * PAGE,
                2,
                1,
            )

    asyncio.run(main())


async def put_half(client: StoreClient, number: int) -> Any:
    """A put over gRPC that has sent its header and the first of two blocks."""
    t = ticket(number)
    manifest = draft(t, 2)
    header = kvstore_pb2.PutHeader(
        ticket=wire.ticket_to_proto(t),
        writer=wire.writer_to_proto(client.writer),
        manifest=wire.manifest_to_bytes(manifest),
        payload_bytes=manifest.payload_bytes,
    )
    rpc = client._remote._put_call(metadata=client._metadata)
    await rpc.write(kvstore_pb2.PutRequest(header=header).SerializeToString())
    await rpc.write(wire.chunk_to_bytes(payload(number, 1)))
    return rpc


def test_a_put_over_grpc_can_be_stopped() -> None:
    async def main() -> None:
        async with running_store() as store:
            client = store.client("grpc")
            await client.reserve(ticket(1), 3 * PAGE, epoch=1)
            rpc = await put_half(client, 1)
            await until(store, puts=1)
            assert (await client.abort_put(ticket(1))).status is S.OK
            reply = await rpc
            assert (reply.status, reply.detail) == ("bad_payload", "stopped")
            await until(store, puts=0, used_bytes=3 * PAGE)

    asyncio.run(main())


def test_a_put_that_still_waits_for_its_pages_can_be_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin_put = StoreRuntime.begin_put
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(self: StoreRuntime, *args: Any) -> Any:
        begun.set()
        await go_on.wait()
        return await begin_put(self, *args)

    monkeypatch.setattr(StoreRuntime, "begin_put", slow)

    async def main() -> None:
        async with running_store() as store:
            client = store.client("grpc")
            await client.reserve(ticket(1), 3 * PAGE, epoch=1)
            rpc = await put_half(client, 1)
            await begun.wait()
            aborting = asyncio.create_task(client.abort_put(ticket(1)))
            await asyncio.sleep(0.1)
            assert not aborting.done(), "the put is still there"
            go_on.set()
            assert (await aborting).status is S.OK
            reply = await rpc
            assert (reply.status, reply.detail) == ("bad_payload", "stopped")
            await until(store, puts=0, used_bytes=3 * PAGE)

    asyncio.run(main())


def test_a_put_over_grpc_ends_with_its_caller() -> None:
    async def main() -> None:
        async with running_store() as store:
            client = store.client("grpc")
            await client.reserve(ticket(1), 3 * PAGE, epoch=1)
            rpc = await put_half(client, 1)
            await until(store, puts=1)
            rpc.cancel()
            await until(store, puts=0, used_bytes=3 * PAGE)

    asyncio.run(main())


def test_a_put_over_grpc_ends_with_its_ticket() -> None:
    async def main() -> None:
        async with running_store() as store:
            client = store.client("grpc")
            await client.reserve(ticket(1), 3 * PAGE, epoch=1)
            rpc = await put_half(client, 1)
            await until(store, puts=1)
            await client.release(ticket(1), epoch=1)
            reply = await rpc
            assert (reply.status, reply.detail) == ("sealed", "stopped")
            await store.check_empty()

    asyncio.run(main())


def test_a_put_over_grpc_that_sends_nothing_is_given_up() -> None:
    async def main() -> None:
        async with running_store(put_idle_s=0.2) as store:
            client = store.client("grpc")
            await client.reserve(ticket(1), 3 * PAGE, epoch=1)
            rpc = await put_half(client, 1)
            reply = await rpc
            assert (reply.status, reply.detail) == ("bad_payload", "no chunk for 0.2 s")
            await until(store, puts=0, used_bytes=3 * PAGE)

    asyncio.run(main())


def test_where_the_same_node_path_is_off_the_other_one_serves() -> None:
    async def main() -> None:
        async with running_store(same_node=False) as store:
            client, stubborn = store.client("auto"), store.client("memfd")
            await client.reserve(ticket(1), 3 * PAGE, epoch=1)
            refused = await stubborn.put(ticket(1), draft(ticket(1), 2), payload(1, 2))
            assert (refused.status, refused.path) == (S.UNREACHABLE, "memfd")
            put = await client.put(ticket(1), draft(ticket(1), 2), payload(1, 2))
            assert (put.status, put.path) == (S.OK, "grpc")

    asyncio.run(main())


def test_a_store_that_is_not_there_is_unreachable() -> None:
    async def main() -> None:
        async with running_store() as store:
            deadlines = Deadlines(call_s=0.5, payload_s=0.5)
            clients = [store.client(path, deadlines=deadlines) for path in ("auto", "grpc")]
            await store.actor.stop()
            for client in clients:
                assert (await client.commit(ticket(1))).status is S.UNREACHABLE
                put = await client.put(ticket(1), draft(ticket(1), 2), payload(1, 2))
                assert put.status is S.UNREACHABLE
                got = await client.get(ticket(1), buffers)
                assert got.status is S.UNREACHABLE

    asyncio.run(main())


class Controller(control_pb2_grpc.ControlServicer):
    """Hears reports; answers them as told."""

    def __init__(self) -> None:
        self.heard: list[control_pb2.StoreReport] = []
        self.resync = False
        self.changed = asyncio.Event()

    async def StoreReports(
        self, reports: AsyncIterator[control_pb2.StoreReport], context: Any
    ) -> AsyncIterator[control_pb2.ReportReply]:
        assert dict(context.invocation_metadata())["authorization"] == f"Bearer {TOKEN}"
        async for report in reports:
            self.heard.append(report)
            self.changed.set()
            resync, self.resync = self.resync, False
            yield control_pb2.ReportReply(epoch=9, number=report.number, resync=resync)

    async def next(self) -> control_pb2.StoreReport:
        async with asyncio.timeout(10):
            while not self.heard:
                self.changed.clear()
                await self.changed.wait()
        return self.heard.pop(0)

    async def next_about(self, number: int) -> control_pb2.StoreReport:
        """The next report that has, or drops, the ticket."""
        while True:
            report = await self.next()
            counters = [level.ticket.run.counter for level in report.tickets]
            if number in [*counters, *(gone.run.counter for gone in report.gone)]:
                return report


async def serve(controller: Controller) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    control_pb2_grpc.add_ControlServicer_to_server(controller, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


def test_reports_are_levels_and_start_over_with_a_new_controller() -> None:
    async def main() -> None:
        first, second = Controller(), Controller()
        server, address = await serve(first)
        addresses = [address]

        async def find() -> str:
            return addresses[-1]

        async with running_store(find_controller=find) as store:
            hello = await first.next()
            assert hello.complete
            assert (hello.store, hello.node, hello.address) == ("store-n", "n", store.address)
            assert hello.budget_bytes == 64 * PAGE
            client = store.client("grpc")
            await client.reserve(ticket(1), 3 * PAGE, epoch=9)
            reserved = await first.next_about(1)
            assert not reserved.complete
            assert reserved.used_bytes == 3 * PAGE
            assert reserved.tickets[0].state == "reserved"
            await client.release(ticket(1), epoch=9)
            gone = await first.next_about(1)
            assert (len(gone.tickets), gone.used_bytes) == (0, 0)

            await client.reserve(ticket(2), 2 * PAGE, epoch=9)
            await first.next_about(2)
            first.resync = True
            again = await first.next_about(2)
            assert again.complete

            next_server, address = await serve(second)
            addresses.append(address)
            await server.stop(None)
            hello = await second.next()
            assert hello.complete
            assert [level.ticket.run.counter for level in hello.tickets] == [2]
            assert hello.epoch_seen == 9
        await next_server.stop(None)

    asyncio.run(main())


def test_settings_name_what_is_wrong() -> None:
    with pytest.raises(StoreConfigError, match="page_bytes = 0: must be an integer of 1 or more"):
        StoreSettings(store="s", node="n", budget_bytes=1, page_bytes=0, token="t")
    with pytest.raises(StoreConfigError, match="token = '': must be not empty"):
        StoreSettings(store="s", node="n", budget_bytes=1, page_bytes=1, token="")
    with pytest.raises(StoreConfigError, match="tickets_max = 0"):
        StoreConfig(tickets_max=0)
