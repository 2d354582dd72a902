"""The controller serves ``/metrics`` whenever it can, and requests never depend on it. No Ray."""

from __future__ import annotations

import asyncio
import socket
import urllib.request

import grpc
import pytest

from deepinfer.controller import actor as actor_module
from deepinfer.controller.actor import ControllerActor, ControllerSettings
from deepinfer.controller.scrape import ScrapeSettings
from deepinfer.proto import control_pb2, control_pb2_grpc
from support.no_peers import NoPeers

TOKEN = "a-token-for-these-tests"
METADATA = (("authorization", f"Bearer {TOKEN}"),)
CLUSTER_TOKEN = "the-token-of-the-cluster-itself"
CLUSTER_METADATA = (("authorization", f"Bearer {CLUSTER_TOKEN}"),)


def controller(metrics: ScrapeSettings | None) -> ControllerActor:
    settings = ControllerSettings(
        namespace="tests",
        token=TOKEN,
        cluster_token=CLUSTER_TOKEN,
        metrics=metrics,
        model="m",
        kv_cache_dtype="int8",
    )
    return ControllerActor(settings, orders=NoPeers(), directory=NoPeers())


def fetch(address: str) -> str:
    request = urllib.request.Request(f"http://{address}/metrics", headers=dict(METADATA))
    with urllib.request.urlopen(request, timeout=10) as response:
        body: bytes = response.read()
    return body.decode()


def report(number: int, **counters: float) -> control_pb2.GatewayReport:
    return control_pb2.GatewayReport(
        gateway="gateway-0",
        incarnation=3,
        number=number,
        complete=number == 1,
        counters={f"deepinfer_{name}": value for name, value in counters.items()},
    )


def test_what_a_gateway_reports_is_served_and_kept_until_it_reports_anew() -> None:
    async def test() -> None:
        actor = controller(ScrapeSettings())
        try:
            where = await actor.metrics_address()
            async with grpc.aio.insecure_channel(await actor.address()) as channel:
                stub = control_pb2_grpc.ControlStub(channel)
                call = stub.GatewayReports(metadata=CLUSTER_METADATA)
                await call.write(report(1, requests_accepted_total=3, generation_tokens_total=9))
                await call.read()
                await call.write(report(2, generation_tokens_total=10))
                await call.read()
                text = await asyncio.to_thread(fetch, where)
                assert await actor.metrics() == text
                call.cancel()
            assert '\ndeepinfer_requests_accepted_total{gateway="gateway-0"} 3.0\n' in text
            assert '\ndeepinfer_generation_tokens_total{gateway="gateway-0"} 10.0\n' in text
            assert '\ndeepinfer_gateway_up{gateway="gateway-0"} 1.0\n' in text
            assert '\ndeepinfer_model_info{kv_cache_dtype="int8",model="m"} 1.0\n' in text
        finally:
            await actor.stop()

    asyncio.run(test())


def test_a_taken_port_is_waited_for_and_the_controller_serves_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(actor_module, "SCRAPE_RETRY_S", 0.02)

    async def test() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            actor = controller(ScrapeSettings(port=port))
            await actor.address()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(actor.metrics_address(), 0.1)
            assert (await actor.status())["epoch"] == await actor.incarnation()
        try:
            assert await asyncio.wait_for(actor.metrics_address(), 5) == f"127.0.0.1:{port}"
            assert "deepinfer_controller_ready" in await asyncio.to_thread(
                fetch, f"127.0.0.1:{port}"
            )
        finally:
            await actor.stop()
        # A successor, as Ray starts it, has the same port.
        successor = controller(ScrapeSettings(port=port))
        try:
            assert await asyncio.wait_for(successor.metrics_address(), 5) == f"127.0.0.1:{port}"
        finally:
            await successor.stop()

    asyncio.run(test())


def test_without_settings_nothing_is_served() -> None:
    async def test() -> None:
        actor = controller(None)
        await actor.address()
        waiting = asyncio.create_task(actor.metrics_address())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await actor.stop()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(test())
