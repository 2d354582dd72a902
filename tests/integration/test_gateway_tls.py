"""TLS between the SDK and a gateway: certificates both ways, and every way to get them wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest

from deepinfer.client import AsyncClient, TlsOptions, Unauthenticated, Unavailable, Untrusted
from deepinfer.client.core.config import ClientConfig
from deepinfer.gateway.actor import GatewayActor
from deepinfer.gateway.tls import ServerTls
from deepinfer.proto import inference_pb2, link_pb2_grpc
from support.byte_tokenizer import write_byte_tokenizer
from support.certificates import Authority
from support.gateway_actor import gateway_settings, served_controller, serving_worker
from support.gateway_world import (
    CLUSTER_METADATA,
    METADATA,
    TOKEN,
    MinimalController,
    eventually,
    settle,
)

ANSWER = "hello there, " * 8
PATIENT = ClientConfig(connect_give_up_ms=3_600_000)
"""Longer than any test: who gives up with it has not waited for that."""


@dataclass(slots=True)
class Served:
    """A gateway that speaks TLS, and what it takes to speak with it."""

    address: str
    root: Path
    authority: Authority
    controller: MinimalController
    restart: Callable[[], Awaitable[None]]

    @property
    def tls(self) -> TlsOptions:
        return TlsOptions(ca=self.root)


Test: TypeAlias = Callable[[Served], Awaitable[None]]
Live: TypeAlias = Callable[..., None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def live(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Runs an asynchronous test beside a gateway of its own, a worker and a controller."""
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    with asyncio.Runner() as runner:

        def run(test: Test, *, mutual: bool = False, hosts: tuple[str, ...] = ()) -> None:
            pair = authority.issue("gateway", hosts or ("127.0.0.1",))
            tls = ServerTls(
                cert_file=str(pair.cert),
                key_file=str(pair.key),
                client_ca_file=str(authority.root) if mutual else None,
            )
            settle(runner, _serve(folder, authority, tls, test))

        yield run


async def _serve(folder: Path, authority: Authority, tls: ServerTls, test: Test) -> None:
    settings = gateway_settings(folder, tls=tls)
    async with served_controller() as (controller, access):
        actor = GatewayActor(settings, access)
        address = await actor.address()
        await eventually(lambda: bool(controller.reports))
        # Workers are told of another port, without TLS.
        link = controller.reports[0].address
        assert link != address

        async def restart() -> None:
            nonlocal actor
            await actor.stop()
            port, link_port = (int(at.rpartition(":")[2]) for at in (address, link))
            actor = GatewayActor(replace(settings, port=port, link_port=link_port), access)
            assert await actor.address() == address

        try:
            async with serving_worker(controller, link, folder, ANSWER), asyncio.timeout(60):
                await test(Served(address, authority.root, authority, controller, restart))
        finally:
            await actor.stop()


async def refused(client: AsyncClient, words: str) -> None:
    """A request ends in ``Untrusted`` at once, and a call says the words in ``Unavailable``."""
    with pytest.raises(Untrusted, match=words) as caught:
        await client.generate("x")
    assert caught.value.code == "UNAVAILABLE"
    with pytest.raises(Unavailable, match=words):
        await client.status()


def test_it_is_served_by_tls_across_a_restart(live: Live) -> None:
    async def test(served: Served) -> None:
        async with AsyncClient(served.address, token=TOKEN, tls=served.tls) as client:
            stream = client.stream("x", max_tokens=90)
            await anext(stream)
            await anext(stream)
            await served.restart()
            completion = await stream.completion()
            assert completion.text == ANSWER[:90]
            assert completion.timings.reconnects >= 1
            assert (await client.status())["swapped"] == 0
        spelled = f"grpcs://{served.address}"
        async with AsyncClient(spelled, token="wrong", tls=served.tls) as client:
            with pytest.raises(Unauthenticated):
                await client.models()

    live(test)


def test_workers_do_not_connect_where_clients_do(live: Live) -> None:
    async def test(served: Served) -> None:
        credentials = TlsOptions(ca=served.root).credentials()
        async with grpc.aio.secure_channel(served.address, credentials) as channel:
            stub = link_pb2_grpc.WorkerLinkStub(channel)
            for metadata, code in (
                (METADATA, grpc.StatusCode.PERMISSION_DENIED),
                (CLUSTER_METADATA, grpc.StatusCode.UNAUTHENTICATED),
            ):
                assert await stub.Connect(metadata=metadata).code() is code
        async with grpc.aio.insecure_channel(served.controller.reports[0].address) as channel:
            path = f"/{inference_pb2.DESCRIPTOR.services_by_name['Inference'].full_name}/GetStatus"
            for metadata, code in (
                (METADATA, grpc.StatusCode.UNAUTHENTICATED),
                (CLUSTER_METADATA, grpc.StatusCode.PERMISSION_DENIED),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await channel.unary_unary(path, None, None)(b"", metadata=metadata)
                assert caught.value.code() is code
            check = channel.unary_unary("/grpc.health.v1.Health/Check", None, None)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await check(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED  # open, and not here

    live(test)


def test_a_client_without_tls_is_told_so(live: Live) -> None:
    async def test(served: Served) -> None:
        async with AsyncClient(served.address, token=TOKEN, config=PATIENT) as client:
            await refused(client, "may want TLS: grpcs://")

    live(test)


def test_another_root_is_not_trusted(live: Live, tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        other = Authority(tmp_path, "another")
        for tls in (TlsOptions(ca=other.root), True):
            async with AsyncClient(served.address, token=TOKEN, tls=tls, config=PATIENT) as client:
                await refused(client, "CERTIFICATE_VERIFY_FAILED.*is not trusted")

    live(test)


def test_another_name_is_not_trusted_unless_it_is_asked_for(live: Live) -> None:
    async def test(served: Served) -> None:
        async with AsyncClient(
            served.address, token=TOKEN, tls=served.tls, config=PATIENT
        ) as client:
            await refused(client, "Hostname Verification Check failed.*is not trusted")
        named = TlsOptions(ca=served.root, server_name="gateway.example")
        async with AsyncClient(served.address, token=TOKEN, tls=named) as client:
            assert (await client.generate("x", max_tokens=3)).text == ANSWER[:3]

    live(test, hosts=("gateway.example",))


def test_the_certificate_itself_may_be_the_root(live: Live) -> None:
    async def test(served: Served) -> None:
        pinned = TlsOptions(ca=served.root.parent / "gateway.pem")
        async with AsyncClient(served.address, token=TOKEN, tls=pinned) as client:
            assert [model.id for model in await client.models()] == ["bytes"]

    live(test)


def test_a_client_certificate_is_needed_where_it_is_asked_for(live: Live, tmp_path: Path) -> None:
    async def test(served: Served) -> None:
        mine = served.authority.issue("client", ())
        stranger = Authority(tmp_path).issue("client", ())
        root = served.root
        for tls in (
            TlsOptions(ca=root),
            TlsOptions(ca=root, cert=stranger.cert, key=stranger.key),
        ):
            async with AsyncClient(served.address, token=TOKEN, tls=tls, config=PATIENT) as client:
                await refused(client, "may want a client certificate")
        tls = TlsOptions(ca=root, cert=mine.cert, key=mine.key)
        async with AsyncClient(served.address, token=TOKEN, tls=tls) as client:
            assert (await client.generate("x", max_tokens=3)).text == ANSWER[:3]

    live(test, mutual=True)


def test_tls_to_a_server_without_it(live: Live) -> None:
    async def test(served: Served) -> None:
        plain = f"grpcs://{served.controller.reports[0].address}"
        async with AsyncClient(plain, token=TOKEN, config=PATIENT) as client:
            await refused(client, "WRONG_VERSION_NUMBER.*speaks no TLS")

    live(test)


def test_an_endpoint_that_is_trusted_is_found_behind_one_that_is_not(live: Live) -> None:
    async def test(served: Served) -> None:
        link = f"grpcs://{served.controller.reports[0].address}"
        endpoints = [link, f"grpcs://{served.address}"]
        for _ in range(4):  # the SDK begins at either
            async with AsyncClient(endpoints, token=TOKEN, tls=served.tls) as client:
                assert (await client.generate("x", max_tokens=3)).text == ANSWER[:3]

    live(test)


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    pair = Authority(tmp_path / "a").issue("x")
    nothing, noise = tmp_path / "nothing.pem", tmp_path / "noise.pem"
    noise.write_text("hello")
    for make, words in (
        (lambda: TlsOptions(cert=pair.cert), "tls.cert is given without tls.key"),
        (lambda: TlsOptions(key=pair.key), "tls.key is given without tls.cert"),
        (lambda: TlsOptions(server_name=""), "tls.server_name = ''"),
        (lambda: AsyncClient("h:1", token="t", tls=TlsOptions(ca=nothing)), "nothing.pem.*read"),
        (lambda: AsyncClient("h:1", token="t", tls=TlsOptions(ca=noise)), "with a CERTIFICATE"),
        (
            lambda: AsyncClient("h:1", token="t", tls=TlsOptions(cert=pair.cert, key=noise)),
            "with a PRIVATE KEY",
        ),
        (lambda: AsyncClient("grpc://h:1", token="t", tls=True), "without TLS, and tls was asked"),
        (lambda: AsyncClient("https://h:1", token="t"), "must be host:port, grpc://"),
        (lambda: AsyncClient("grpcs://", token="t"), "must be host:port, grpc://"),
        (lambda: AsyncClient("h:1", token="read from a file\n"), r"token: .* needs \.strip"),
        (lambda: AsyncClient("localhost", token="t"), "must be host:port, grpc://"),
        (lambda: AsyncClient("grpcs://h:port", token="t"), "must be host:port, grpc://"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
