"""Health, reflection, and who needs the token: each call of a gateway, named by its descriptors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from deepinfer.proto import inference_pb2, link_pb2
from deepinfer.proto.access import RULES, Access
from support.byte_tokenizer import write_byte_tokenizer
from support.gateway_world import METADATA, TOKEN, World, run_in_world
from support.local_cluster import local_cluster, run_on
from support.tiny_model import write_tiny_llama

Test: TypeAlias = Callable[[World], Awaitable[None]]
open_methods = {method for method, access in RULES.items() if access is Access.OPEN}
Live: TypeAlias = Callable[[Test], None]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
INFERENCE = "deepinfer.v1.Inference"
READY: dict[str, Any] = {
    "ready": True,
    "workers": {"worker-0": {"state": "gone"}, "worker-1": {"state": "serving"}},
    "gateways": {"gateway-0": {"alive": True}},
}
UNREADY: tuple[dict[str, Any], ...] = (
    {},
    READY | {"ready": False},
    READY | {"workers": {}},
    READY | {"workers": {"worker-0": {"state": "gone"}, "worker-1": {"state": "draining"}}},
    READY | {"gateways": {}},
    READY | {"gateways": {"gateway-0": {"alive": False}, "gateway-1": {"alive": True}}},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    """Runs an asynchronous test in a world of its own."""
    with asyncio.Runner() as runner:
        yield lambda test: run_in_world(runner, folder, test, answer="hello")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.gateway.health.FRESH_S", 0.02)


def test_it_serves_if_the_controller_has_all_it_needs(live: Live) -> None:
    async def test(world: World) -> None:
        async with grpc.aio.insecure_channel(world.gateway.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def said(service: str) -> int:
                await asyncio.sleep(0.03)  # an answer counts for a while
                response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
                return int(response.status)

            for document in UNREADY:
                world.gateway.document = dict(document)
                assert await said(INFERENCE) == NOT_SERVING, document
            world.gateway.document = dict(READY)
            await asyncio.sleep(0.03)
            listed = await stub.List(health_pb2.HealthListRequest(), metadata=METADATA)
            assert {n: s.status for n, s in listed.statuses.items()} == {"": 1, INFERENCE: 1}
            assert [await said(name) for name in ("", INFERENCE)] == [SERVING, SERVING]
            controller, world.gateway.controller = world.gateway.controller, ""
            assert await said("") == NOT_SERVING  # it does not answer
            world.gateway.controller = controller
            with pytest.raises(grpc.aio.AioRpcError, match="'nothing' is not served") as caught:
                await said("nothing")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    live(test)


def test_a_controller_that_hangs_is_not_waited_for(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepinfer.gateway.health.ASK_TIMEOUT_S", 0.1)
    asked = 0

    async def hang() -> dict[str, object]:
        nonlocal asked
        asked += 1
        await asyncio.sleep(3600)
        return dict(READY)

    async def test(world: World) -> None:
        monkeypatch.setattr(world.gateway.health, "_status", hang)
        async with grpc.aio.insecure_channel(world.gateway.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            answers = await asyncio.gather(*(stub.Check(request, timeout=5) for _ in range(20)))
        assert {a.status for a in answers} == {NOT_SERVING}
        assert asked == 1  # however many want to know

    live(test)


def test_who_watches_is_told_of_every_change_and_of_the_end(live: Live) -> None:
    async def test(world: World) -> None:
        world.gateway.document = dict(READY)
        async with grpc.aio.insecure_channel(world.gateway.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=INFERENCE)
            call = stub.Watch(request, metadata=METADATA)
            assert (await call.read()).status == SERVING
            world.gateway.document = dict(UNREADY[2])
            assert (await call.read()).status == NOT_SERVING
            world.gateway.document = dict(READY)
            assert (await call.read()).status == SERVING
            world.gateway.health.drain()
            assert (await call.read()).status == NOT_SERVING
            assert (await stub.Check(request)).status == NOT_SERVING
            call.cancel()
            request = health_pb2.HealthCheckRequest(service="nothing")
            unknown = stub.Watch(request, metadata=METADATA)
            said = (await unknown.read()).status
            assert said == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            unknown.cancel()

    live(test)


def test_a_cluster_serves_until_its_worker_or_its_controller_goes(tmp_path: Path) -> None:
    """What the gateway reads is what the controller says."""
    model = write_tiny_llama(tmp_path / "tiny")

    async def test() -> None:
        for kill in ("worker", "controller"):
            async with (
                local_cluster(model, blocks=16) as cluster,
                grpc.aio.insecure_channel(cluster.addresses["gateway-0"]) as channel,
            ):
                stub = health_pb2_grpc.HealthStub(channel)
                call = stub.Watch(health_pb2.HealthCheckRequest(), metadata=METADATA)
                status = (await call.read()).status
                if status == NOT_SERVING:  # not everyone has reported yet
                    status = (await call.read()).status
                assert status == SERVING
                if kill == "worker":
                    await cluster.workers["worker-0"].stop()
                else:
                    assert cluster.controller is not None
                    await cluster.controller.stop()
                    cluster.controller = None
                assert (await call.read()).status == NOT_SERVING
                call.cancel()

    with asyncio.Runner() as runner:
        run_on(runner, test)


async def reflect(
    channel: grpc.aio.Channel, *requests: reflection_pb2.ServerReflectionRequest
) -> list[reflection_pb2.ServerReflectionResponse]:
    async def ask() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        for request in requests:
            yield request

    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    return [r async for r in stub.ServerReflectionInfo(ask(), metadata=METADATA)]


def test_reflection_tells_services_and_their_files(live: Live) -> None:
    async def test(world: World) -> None:
        async with grpc.aio.insecure_channel(world.gateway.address) as channel:
            listed, file = await reflect(
                channel,
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=INFERENCE),
            )
        assert {s.name for s in listed.list_services_response.service} == {
            INFERENCE,
            "deepinfer.v1.WorkerLink",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        found = file.file_descriptor_response.file_descriptor_proto
        assert inference_pb2.DESCRIPTOR.serialized_pb in found

    live(test)


def test_every_call_needs_a_token_but_those_of_the_list(live: Live) -> None:
    assert open_methods == {"/grpc.health.v1.Health/Check"}
    files = (inference_pb2, link_pb2, health_pb2, reflection_pb2)
    services = [s for f in files for s in f.DESCRIPTOR.services_by_name.values()]
    methods = [f"/{s.full_name}/{m.name}" for s in services for m in s.methods]
    assert len(methods) == len(set(methods)) == 6 + 3 + 1
    assert open_methods < set(methods)

    async def test(world: World) -> None:
        async with grpc.aio.insecure_channel(world.gateway.address) as channel:
            (listed,) = await reflect(
                channel, reflection_pb2.ServerReflectionRequest(list_services="")
            )
            # The descriptors above are all that is served.
            served = {s.name for s in listed.list_services_response.service}
            assert served == {s.full_name for s in services}
            refused = 0
            for path in [*methods, f"/{INFERENCE}/Nothing", "/grpc.health.v1.Health/check"]:
                for metadata in (
                    (),
                    (("authorization", "Bearer wrong"),),
                    (("authorization", TOKEN),),
                    (("authorization", f"Bearer {TOKEN} "),),
                ):
                    call = channel.stream_stream(path, None, None)(None, metadata=metadata)
                    if path in open_methods:
                        await call.write(b"")
                        assert isinstance(await call.read(), bytes)
                        call.cancel()
                    else:
                        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED, path
                        refused += 1
            assert refused == 4 * (len(methods) - len(open_methods) + 2)

    live(test)
