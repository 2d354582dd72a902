"""The gateway actor, constructed as Ray would, with the Ray parts replaced: it serves by itself."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer.client import AsyncClient, Unavailable
from deepinfer.client.core.config import ClientConfig
from deepinfer.gateway.actor import ControllerAccess, GatewayActor
from support.byte_tokenizer import write_byte_tokenizer
from support.gateway_actor import gateway_settings, served_controller, serving_worker
from support.gateway_world import SECRET, TOKEN, eventually, settle

ANSWER = "hello there, " * 8


async def nobody() -> str:
    raise LookupError("no actor is named controller")


async def no_status() -> Mapping[str, object]:
    raise LookupError("the controller does not answer")


def test_it_serves_by_itself_and_again_on_its_port(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path / "tokenizer")

    async def test() -> None:
        asked = 0
        async with served_controller() as (controller, there):

            async def find() -> str:
                nonlocal asked
                asked += 1
                return await (there.find if asked > 2 else nobody)()

            access = replace(there, find=find)
            actor = GatewayActor(gateway_settings(folder), access)
            at = await actor.address()
            async with (
                serving_worker(controller, at, folder, ANSWER) as worker,
                AsyncClient(at, token=TOKEN, config=ClientConfig(give_up_ms=9_000)) as client,
            ):
                stream = client.stream("x", max_tokens=100)
                await eventually(lambda: any(len(r.tokens) > 10 for r in worker.runs.values()))
                before = await actor.incarnation()
                await actor.stop()
                port = int(at.rpartition(":")[2])
                actor = GatewayActor(gateway_settings(folder, port=port), access)
                assert await actor.address() == at
                assert await actor.incarnation() > before
                completion = await stream.completion()
                assert completion.text == ANSWER[:100]
                assert completion.timings.reconnects >= 1
                assert (await client.status())["swapped"] == 0
            await actor.stop()

    with asyncio.Runner() as runner:
        settle(runner, test())


def test_without_a_controller_there_is_no_status(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path / "tokenizer")

    async def test() -> None:
        actor = GatewayActor(
            gateway_settings(folder), ControllerAccess(find=nobody, status=no_status)
        )
        async with AsyncClient(await actor.address(), token=TOKEN) as client:
            with pytest.raises(Unavailable, match="the controller does not answer") as caught:
                await client.status()
            assert caught.value.code == "UNAVAILABLE"
        await actor.stop()

    with asyncio.Runner() as runner:
        settle(runner, test())


def test_the_status_of_very_many_sequences_fits_a_message(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path / "tokenizer")
    row = {"request": "gateway-0-" + "0" * 24, "state": "decode", "worker": "worker-0" * 8}

    async def test() -> None:
        async def status() -> Mapping[str, object]:
            return {"sequences": [row] * 40_000}

        actor = GatewayActor(gateway_settings(folder), ControllerAccess(find=nobody, status=status))
        async with AsyncClient(await actor.address(), token=TOKEN) as client:
            document = await client.status()
        assert (len(document["sequences"]), document["sequences_left_out"]) == (5_000, 35_000)
        await actor.stop()

    with asyncio.Runner() as runner:
        settle(runner, test())


def test_an_ipv6_host_is_served(tmp_path: Path) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    folder = write_byte_tokenizer(tmp_path / "tokenizer")

    async def test() -> None:
        access = ControllerAccess(find=nobody, status=no_status)
        actor = GatewayActor(gateway_settings(folder, host="::1"), access)
        address = await actor.address()
        assert address.startswith("[::1]:")
        async with AsyncClient(address, token=TOKEN) as client:
            assert [model.id for model in await client.models()] == ["bytes"]
        await actor.stop()

    with asyncio.Runner() as runner:
        settle(runner, test())


def test_a_model_without_a_tokenizer_fails_the_start(tmp_path: Path) -> None:
    async def test() -> None:
        access = ControllerAccess(find=nobody, status=no_status)
        actor = GatewayActor(gateway_settings(tmp_path / "nothing"), access)
        with pytest.raises(ValueError, match="no tokenizer to load"):
            await actor.address()

    asyncio.run(test())


def test_settings_keep_secrets_out_of_sight(tmp_path: Path) -> None:
    shown = repr(gateway_settings(tmp_path))
    assert TOKEN not in shown
    assert SECRET.decode() not in shown
    with pytest.raises(ValueError, match="token is empty"):
        gateway_settings(tmp_path, token="")


def test_a_gateway_may_have_as_many_connections_as_the_system_grants() -> None:
    script = """
import resource
from deepinfer.gateway.actor import raise_fd_limit
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
raise_fd_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
