"""The HTTP server of ``/metrics``: who is let in, what is refused, and that nobody holds it up."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer.controller import scrape
from deepinfer.controller.scrape import ScrapeServer, ScrapeSettings, answer
from support.certificates import Authority

TOKEN = "a-token-for-these-tests"
BEARER = f"Authorization: Bearer {TOKEN}"
BODY = b"up 1\n"


def render(accept: str) -> tuple[bytes, str]:
    return BODY, f"text/plain; for={accept}"


def head(first: str, *lines: str) -> bytes:
    return "\r\n".join([first, *lines]).encode("latin-1")


def test_the_token_opens_the_one_path() -> None:
    got = answer(head("GET /metrics HTTP/1.1", "Host: here", BEARER, "Accept: x/y"), TOKEN, render)
    assert (got.status, got.body) == (200, BODY)
    assert dict(got.headers) == {"Content-Type": "text/plain; for=x/y"}
    assert answer(head("HEAD /metrics?a=b HTTP/1.0", BEARER.upper()), TOKEN, render).status == 401
    lower = BEARER.replace("Authorization", "authorization")
    assert answer(head("HEAD /metrics?a=b HTTP/1.0", lower), TOKEN, render).status == 200


@pytest.mark.parametrize(
    "credentials",
    [
        (),
        ("Authorization:",),
        ("Authorization: Bearer",),
        ("Authorization: Bearer ",),
        (f"Authorization: Bearer {TOKEN}x",),
        (f"Authorization: Bearer {TOKEN[:-1]}",),
        (f"Authorization: Basic {TOKEN}",),
        (f"Authorization: {TOKEN}",),
        ("Authorization: Bearer \xe9\xff",),
        (f"X-Authorization: Bearer {TOKEN}",),
        (BEARER, "Authorization: Bearer another"),
    ],
)
@pytest.mark.parametrize("first", ["GET /metrics HTTP/1.1", "GET / HTTP/1.1", "PUT /x HTTP/1.1"])
def test_without_the_token_every_request_gets_the_same_401(
    first: str, credentials: tuple[str, ...]
) -> None:
    def never(_: str) -> tuple[bytes, str]:
        raise AssertionError("rendered for whoever has no token")

    got = answer(head(first, *credentials), TOKEN, never)
    assert got.status == 401
    assert dict(got.headers)["WWW-Authenticate"] == 'Bearer realm="deepinfer"'
    assert got == answer(head("GET /metrics HTTP/1.1"), TOKEN, never)


@pytest.mark.parametrize(
    ("first", "status"),
    [
        ("GET / HTTP/1.1", 404),
        ("GET /metrics/ HTTP/1.1", 404),
        ("POST /metrics HTTP/1.1", 405),
        ("get /metrics HTTP/1.1", 405),
        ("GET /metrics HTTP/2", 400),
        ("GET /metrics", 400),
        ("GET  /metrics HTTP/1.1", 400),
        ("", 400),
    ],
)
def test_what_is_not_served_says_so(first: str, status: int) -> None:
    assert answer(head(first, BEARER), TOKEN, render).status == status


@pytest.mark.parametrize("line", ["no colon", ": no name", " folded: line", "space : before"])
def test_a_malformed_header_is_a_bad_request(line: str) -> None:
    assert answer(head("GET /metrics HTTP/1.1", line, BEARER), TOKEN, render).status == 400


def test_an_empty_token_is_no_token() -> None:
    with pytest.raises(ValueError, match="token"):
        ScrapeServer(ScrapeSettings(), "", render)


@pytest.mark.parametrize("named", ["cert_file", "key_file", "client_ca_file"])
def test_half_a_certificate_is_refused(named: str) -> None:
    files: dict[str, Any] = {named: "a.pem"}
    with pytest.raises(ValueError, match=named):
        ScrapeSettings(**files)


# ---- over sockets --------------------------------------------------------------------------


def serving(
    test: Callable[[str, int], Awaitable[None]], settings: ScrapeSettings | None = None
) -> None:
    async def main() -> None:
        server = ScrapeServer(settings or ScrapeSettings(), TOKEN, render)
        host, _, port = (await server.start()).rpartition(":")
        try:
            await asyncio.wait_for(test(host, int(port)), 20)
        finally:
            await server.close()

    asyncio.run(main())


async def exchange(
    host: str, port: int, said: bytes, tls: ssl.SSLContext | None = None
) -> tuple[list[str], bytes]:
    """Send bytes and read to the end: the lines before the body, and the body."""
    reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    writer.write(said)
    answered, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return answered.decode().split("\r\n"), body


def test_one_answer_a_connection_with_its_length() -> None:
    async def test(host: str, port: int) -> None:
        request = head("GET /metrics HTTP/1.1", BEARER) + b"\r\n\r\n"
        lines, body = await exchange(host, port, request * 2)
        assert (lines[0], body) == ("HTTP/1.1 200 OK", BODY)
        assert {f"Content-Length: {len(BODY)}", "Connection: close"} <= set(lines)
        lines, body = await exchange(host, port, request.replace(b"GET", b"HEAD"))
        assert (lines[0], body) == ("HTTP/1.1 200 OK", b"")
        assert f"Content-Length: {len(BODY)}" in lines
        lines, body = await exchange(host, port, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert lines[0] == "HTTP/1.1 401 Unauthorized"
        assert BODY not in body

    serving(test)


def test_a_head_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "HEAD_BYTES_MAX", 200)

    async def test(host: str, port: int) -> None:
        lines, _ = await exchange(host, port, b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 300)
        assert lines[0].startswith("HTTP/1.1 431 ")

    serving(test)


def test_whoever_says_nothing_is_left_alone_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "DEADLINE_S", 0.2)

    async def test(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /metrics HTT")
        assert await reader.read() == b""
        writer.close()

    serving(test)


def test_connections_have_a_bound_and_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "CONNECTIONS_MAX", 2)
    request = head("GET /metrics HTTP/1.1", BEARER) + b"\r\n\r\n"

    async def test(host: str, port: int) -> None:
        silent = [await asyncio.open_connection(host, port) for _ in range(2)]
        reader, writer = await asyncio.open_connection(host, port)
        assert await reader.read() == b"", "the third is turned away"
        for _, mute in [*silent, (reader, writer)]:
            mute.close()
            await mute.wait_closed()
        for _ in range(200):  # its end of them closes a little later
            lines, _ = await exchange(host, port, request)
            if lines[0] == "HTTP/1.1 200 OK":
                return
            await asyncio.sleep(0.01)
        raise AssertionError("two connections have ended and made no room")

    serving(test)


def test_tls_and_client_certificates(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    pair, scraper, stranger = ours.issue("server"), ours.issue("us"), theirs.issue("them")
    settings = ScrapeSettings(
        cert_file=str(pair.cert), key_file=str(pair.key), client_ca_file=str(ours.root)
    )
    request = head("GET /metrics HTTP/1.1", BEARER) + b"\r\n\r\n"

    async def test(host: str, port: int) -> None:
        for who, served in ((scraper, True), (stranger, False), (None, False)):
            client = ssl.create_default_context(cafile=str(ours.root))
            if who is not None:
                client.load_cert_chain(who.cert, who.key)
            try:
                lines, body = await exchange(host, port, request, client)
            except (ssl.SSLError, ConnectionError):
                assert not served
            else:
                assert (lines[0] == "HTTP/1.1 200 OK") == (body == BODY) == served
        lines, body = await exchange(host, port, request)
        assert (lines, body) == ([""], b""), "without TLS nothing is heard"

    serving(test, settings)


def test_a_locked_key_is_refused_and_nobody_asked(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("server", password=b"secret")
    settings = ScrapeSettings(cert_file=str(pair.cert), key_file=str(pair.key))
    with pytest.raises(ssl.SSLError):
        settings.tls()


def test_a_taken_address_is_an_error() -> None:
    async def test(host: str, port: int) -> None:
        second = ScrapeServer(ScrapeSettings(port=port), TOKEN, render)
        with pytest.raises(OSError, match="in use"):
            await second.start()
        await second.close()

    serving(test)
