"""No one gets in: every RPC of every server, and /metrics, with each token that is not theirs.

The servers are those of the processes, on sockets, without Ray; an RPC that some server does not
serve is tried there too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import aiohttp
import grpc
import pytest

from deepinfer.controller.actor import ControllerActor, ControllerSettings
from deepinfer.controller.scrape import ScrapeSettings
from deepinfer.gateway.actor import GatewayActor
from deepinfer.proto.access import RULES, Access
from deepinfer.proto.bearer import MISSING, NO_RULE, OTHER_ROLE, WRONG, bearer
from kvstore_kit import TOKEN as STORE_TOKEN
from kvstore_kit import running_store
from support.byte_tokenizer import write_byte_tokenizer
from support.gateway_actor import gateway_settings, served_controller
from support.gateway_world import CLUSTER_TOKEN, TOKEN
from support.no_peers import NoPeers

METHODS = (*RULES, "/deepinfer.v1.Inference/Added", "/deepinfer.v1.Debug/Dump")
TOKENS: dict[str, str | None] = {
    "none": None,
    "wrong": "not-a-token-of-this-cluster",
    "client": TOKEN,
    "cluster": CLUSTER_TOKEN,
    "operator": "of-whoever-runs-this-cluster",
}
UNAUTHENTICATED, PERMISSION_DENIED = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
)
REFUSALS = {(UNAUTHENTICATED, MISSING), (UNAUTHENTICATED, WRONG), (PERMISSION_DENIED, NO_RULE)} | {
    (PERMISSION_DENIED, words) for words in OTHER_ROLE.values()
}


class Server(NamedTuple):
    """Where it is, and whose tokens it knows."""

    address: str
    roles: frozenset[Access]


def lets_in(server: Server, method: str, who: str) -> bool:
    """What the table says."""
    rule = RULES.get(method)
    return rule is Access.OPEN or (rule is not None and rule in server.roles and rule.value == who)


async def refused_by_guard(
    channel: grpc.aio.Channel, method: str, token: str | None, wait_s: float
) -> bool:
    """Whether a call with an empty request ends as the guard ends calls; it may also go on."""
    metadata = None if token is None else bearer(token)
    call = channel.stream_stream(method, None, None)(iter([b""]), metadata=metadata)
    try:
        code: grpc.StatusCode = await asyncio.wait_for(call.code(), wait_s)
    except TimeoutError:
        call.cancel()
        return False
    return (code, await call.details()) in REFUSALS


async def check(server: Server) -> None:
    """Try everything."""
    refused = 0
    async with grpc.aio.insecure_channel(server.address) as channel:
        for method in METHODS:
            for who, token in TOKENS.items():
                let_in = lets_in(server, method, who)
                # A refusal is waited for: it comes late where the machine is busy.
                found = await refused_by_guard(channel, method, token, 0.2 if let_in else 20)
                assert found is not let_in, (method, who)
                refused += found
    granted = sum(access in server.roles for access in RULES.values())
    assert refused == len(TOKENS) * (len(METHODS) - 1) - granted  # one is open


@contextlib.asynccontextmanager
async def controller() -> AsyncIterator[tuple[Server, str]]:
    """A controller with ``/metrics``."""
    settings = ControllerSettings(
        namespace="n",
        token=TOKEN,
        cluster_token=CLUSTER_TOKEN,
        operator_token=TOKENS["operator"],
        metrics=ScrapeSettings(),
    )
    actor = ControllerActor(settings, orders=NoPeers(), directory=NoPeers())
    try:
        roles = frozenset({Access.CLUSTER, Access.OPERATOR})
        served = Server(await actor.address(), roles)
        yield served, await actor.metrics_address()
    finally:
        await actor.stop()


@contextlib.asynccontextmanager
async def gateway(folder: Path) -> AsyncIterator[Server]:
    """A gateway at whose port clients and workers connect."""
    async with served_controller() as (_, access):
        actor = GatewayActor(gateway_settings(folder), access)
        try:
            yield Server(await actor.address(), frozenset({Access.CLIENT, Access.CLUSTER}))
        finally:
            await actor.stop()


def test_no_one_gets_into_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with running_store() as store:
            monkeypatch.setitem(TOKENS, "cluster", STORE_TOKEN)
            served = Server(store.address, frozenset({Access.CLUSTER}))
            await check(served)

    asyncio.run(main())


def test_no_one_gets_into_the_controller_or_its_metrics() -> None:
    async def main() -> None:
        async with controller() as (served, metrics), aiohttp.ClientSession() as session:
            await check(served)
            statuses = {}
            for who, token in TOKENS.items():
                headers = {} if token is None else dict(bearer(token))
                for method in ("GET", "HEAD", "POST"):
                    url = f"http://{metrics}/metrics"
                    async with session.request(method, url, headers=headers) as response:
                        statuses[who, method] = response.status
            allowed = {("client", "GET"): 200, ("client", "HEAD"): 200, ("client", "POST"): 405}
            assert statuses == dict.fromkeys(statuses, 401) | allowed

    asyncio.run(main())


def test_no_one_gets_into_a_gateway(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)

    async def main() -> None:
        async with gateway(tmp_path) as served:
            await check(served)

    asyncio.run(main())
