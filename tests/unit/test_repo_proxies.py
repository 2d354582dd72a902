"""No channel of ours goes through a proxy of the environment: peers are reached directly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc.aio
import pytest

from deepinfer.client import channels
from deepinfer.controller import stores
from deepinfer.gateway import reporting as gateway_reporting
from deepinfer.kvstore import client as store_client
from deepinfer.kvstore import reporting as store_reporting
from deepinfer.workers import links

OPTIONS: dict[str, Sequence[tuple[str, int]]] = {
    "client": channels.CHANNEL_OPTIONS,
    "controller": stores._OPTIONS,
    "gateway": gateway_reporting.CHANNEL_OPTIONS,
    "store": store_reporting._CHANNEL_OPTIONS,
    "store's client": store_client._RECONNECT_OPTIONS,
    "worker": links.CHANNEL_OPTIONS,
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_proxy_is_not_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for variable in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(variable, raising=False)

    async def test() -> None:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", OPTIONS[name]) as channel:
            await asyncio.wait_for(channel.channel_ready(), 5)
        await server.stop(None)

    asyncio.run(test())
