"""The HTTP server of ``/metrics``: who is let in, what is refused, and that nobody holds it up."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer.controller import scrape_server
from deepinfer.controller.scrape import ScrapeSettings
from deepinfer.controller.scrape_server import Render, ScrapeServer
from support.certificates import Authority

TOKEN = "a-token-for-these-tests"
BEARER = f"Authorization: Bearer {TOKEN}"
BODY = b"up 1\n"


def render(accept: str) -> tuple[bytes, str]:
    return BODY, f"text/plain; for={accept}"


def head(first: str, *lines: str) -> bytes:
    """A request without a body."""
    return "\r\n".join([first, "Host: here", *lines, "", ""]).encode("latin-1")


def serving(
    test: Callable[[str, int], Awaitable[None]],
    settings: ScrapeSettings | None = None,
    render: Render = render,
) -> None:
    """Run a test against a server."""

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


def much(_: str) -> tuple[bytes, str]:
    """More than two sockets hold: whoever does not read it keeps it from being sent."""
    return bytes(64 << 20), "text/plain"


async def keep_writing(writer: asyncio.StreamWriter) -> None:
    """Without reading: until the peer has ended the connection."""
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


def test_the_token_opens_the_one_path() -> None:
    async def test(host: str, port: int) -> None:
        request = head("GET /metrics HTTP/1.1", BEARER, "Accept: x/y")
        lines, body = await exchange(host, port, request)
        assert (lines[0], body) == ("HTTP/1.1 200 OK", BODY)
        assert {"Content-Type: text/plain; for=x/y", f"Content-Length: {len(BODY)}"} <= set(lines)
        lower = BEARER.replace("Authorization", "authorization")
        lines, body = await exchange(host, port, head("HEAD /metrics?a=b HTTP/1.0", lower))
        assert (lines[0], body) == ("HTTP/1.0 200 OK", b"")
        assert f"Content-Length: {len(BODY)}" in lines

    serving(test)


@pytest.mark.parametrize("first", ["GET /metrics HTTP/1.1", "GET / HTTP/1.1", "PUT /x HTTP/1.1"])
def test_without_the_token_every_request_gets_the_same_401(first: str) -> None:
    async def test(host: str, port: int) -> None:
        said = set()
        for credentials in (
            (),
            ("Authorization:",),
            ("Authorization: Bearer",),
            ("Authorization: Bearer ",),
            (f"Authorization: Bearer {TOKEN}x",),
            (f"Authorization: Bearer {TOKEN[:-1]}",),
            (f"Authorization: Basic {TOKEN}",),
            (f"Authorization: {TOKEN}",),
            (f"Authorization: BEARER {TOKEN.upper()}",),
            ("Authorization: Bearer \xe9\xff",),
            (f"X-Authorization: Bearer {TOKEN}",),
            ("Authorization: Bearer another", BEARER),
            (BEARER, "Authorization: Bearer another"),
        ):
            lines, body = await exchange(host, port, head(first, *credentials))
            assert lines[0] == "HTTP/1.1 401 Unauthorized", credentials
            assert 'WWW-Authenticate: Bearer realm="deepinfer"' in lines
            said.add((*(line for line in lines if not line.startswith("Date: ")), body))
        assert len(said) == 1

    def never(_: str) -> tuple[bytes, str]:
        raise AssertionError("rendered for whoever has no token")

    serving(test, render=never)


def test_what_is_not_served_says_so() -> None:
    async def test(host: str, port: int) -> None:
        for first, status in (
            ("GET / HTTP/1.1", 404),
            ("GET /metrics/ HTTP/1.1", 404),
            ("POST /metrics HTTP/1.1", 405),
            ("get /metrics HTTP/1.1", 400),
            ("GET /metrics HTTP/2", 400),
            ("G\xe9T /metrics HTTP/1.1", 400),
            ("", 400),
        ):
            lines, body = await exchange(host, port, head(first, BEARER))
            assert lines[0].split()[1] == str(status), first
            assert BODY not in body
            assert ("Allow: GET, HEAD" in lines) == (status == 405)

    serving(test)


@pytest.mark.parametrize("line", ["no colon", ": no name", " folded: line", "space : before"])
def test_a_malformed_header_is_a_bad_request(
    line: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def test(host: str, port: int) -> None:
        lines, _ = await exchange(host, port, head("GET /metrics HTTP/1.1", line, BEARER))
        assert lines[0] == "HTTP/1.0 400 Bad Request"

    serving(test)
    assert (*capfd.readouterr(), caplog.text) == ("", "", ""), "strangers could fill the log"


def test_what_cannot_be_rendered_is_an_error_and_logged(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(_: str) -> tuple[bytes, str]:
        raise RuntimeError("no such peer")

    async def test(host: str, port: int) -> None:
        lines, body = await exchange(host, port, head("GET /metrics HTTP/1.1", BEARER))
        assert lines[0] == "HTTP/1.1 500 Internal Server Error"
        assert b"peer" not in body

    serving(test, render=broken)
    assert "RuntimeError: no such peer" in "".join(capsys.readouterr())


def test_one_answer_a_connection() -> None:
    async def test(host: str, port: int) -> None:
        request = head("GET /metrics HTTP/1.1", BEARER)
        lines, body = await exchange(host, port, request * 2)
        assert (lines[0], body) == ("HTTP/1.1 200 OK", BODY)
        assert "Connection: close" in lines

    serving(test)


def test_a_body_is_not_waited_for() -> None:
    async def test(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(head("GET /metrics HTTP/1.1", BEARER, f"Content-Length: {2**40}"))
        assert (await reader.readuntil(BODY)).startswith(b"HTTP/1.1 200 OK")
        writer.close()

    serving(test)


@pytest.mark.parametrize(
    "lines",
    [
        ["X: " + "a" * (scrape_server.LINE_BYTES_MAX + 1)],
        [f"X-{i}: a" for i in range(scrape_server.HEADERS_MAX)],
    ],
    ids=["long", "many"],
)
@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["open", "whole"])
def test_more_headers_than_anyone_needs_are_refused(lines: list[str], end: bytes) -> None:
    async def test(host: str, port: int) -> None:
        request = head("GET /metrics HTTP/1.1", BEARER, *lines).removesuffix(b"\r\n\r\n")
        answered, body = await exchange(host, port, request + end)
        assert answered[0] == "HTTP/1.0 400 Bad Request"
        assert BODY not in body

    serving(test)


def test_whoever_says_nothing_is_left_alone_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape_server, "DEADLINE_S", 0.2)

    async def test(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /metrics HTT")
        assert await reader.read() == b""
        writer.close()

    serving(test)


def test_whoever_does_not_take_the_answer_is_left_alone_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scrape_server, "DEADLINE_S", 0.2)

    async def test(host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(head("GET /metrics HTTP/1.1", BEARER))
        await reader.readexactly(1)
        with pytest.raises(ConnectionError):
            await keep_writing(writer)

    serving(test, render=much)


def test_closing_ends_every_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape_server, "DEADLINE_S", 3600.0)

    async def test() -> None:
        server = ScrapeServer(ScrapeSettings(), TOKEN, much)
        host, _, port = (await server.start()).rpartition(":")
        silent, silent_writer = await asyncio.open_connection(host, port)
        slow, slow_writer = await asyncio.open_connection(host, port)
        slow_writer.write(head("GET /metrics HTTP/1.1", BEARER))
        await slow.readexactly(1)
        await server.close()
        assert await silent.read() == b""
        silent_writer.close()
        with pytest.raises(ConnectionError):
            await keep_writing(slow_writer)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, port)

    asyncio.run(asyncio.wait_for(test(), 20))


def test_connections_have_a_bound_and_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape_server, "CONNECTIONS_MAX", 2)
    monkeypatch.setattr(scrape_server, "DEADLINE_S", 3600.0)
    request = head("GET /metrics HTTP/1.1", BEARER)

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


def test_an_empty_token_is_no_token() -> None:
    with pytest.raises(ValueError, match="token"):
        ScrapeServer(ScrapeSettings(), "", render)


@pytest.mark.parametrize("named", ["cert_file", "key_file", "client_ca_file"])
def test_half_a_certificate_is_refused(named: str) -> None:
    files: dict[str, Any] = {named: "a.pem"}
    with pytest.raises(ValueError, match=named):
        ScrapeSettings(**files)


def test_tls_and_client_certificates(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    pair, scraper, stranger = ours.issue("server"), ours.issue("us"), theirs.issue("them")
    settings = ScrapeSettings(
        cert_file=str(pair.cert), key_file=str(pair.key), client_ca_file=str(ours.root)
    )
    request = head("GET /metrics HTTP/1.1", BEARER)

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
