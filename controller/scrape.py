"""``GET /metrics`` over HTTP/1.1 for one scraper or a few, with the cluster's bearer token.

Small on purpose: one path, one answer a connection, everything bounded. It runs on the
controller's event loop, so that what it reads is of one moment.
"""

from __future__ import annotations

import asyncio
import hmac
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import NamedTuple

import structlog

log = structlog.get_logger(__name__)

PATH = "/metrics"
HEAD_BYTES_MAX = 8_192
"""Request line and headers."""
CONNECTIONS_MAX = 32
"""At a time; more are closed at once."""
DEADLINE_S = 10.0
"""From a connection's beginning to its end."""

Render = Callable[[str], tuple[bytes, str]]
"""Takes the Accept header; returns the body and its content type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrapeSettings:
    """Where ``/metrics`` is served; picklable. The files are PEM, on the controller's machine.

    Raises:
        ValueError: one of certificate and key without the other, or client roots without both.
    """

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one; a restarted controller has the same one only if it is named here."""
    cert_file: str | None = None
    """If named, scrapers must speak TLS."""
    key_file: str | None = None
    client_ca_file: str | None = None
    """If named, only scrapers are heard whose certificate one of these roots has signed."""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file: one is named without the other")
        if self.client_ca_file is not None and self.cert_file is None:
            raise ValueError("client_ca_file has no meaning without cert_file and key_file")

    def tls(self) -> ssl.SSLContext | None:
        """Read the files.

        Raises:
            OSError: one cannot be read, or is none of its kind.
        """
        if self.cert_file is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.client_ca_file)
        # No password: OpenSSL would ask for one at the terminal.
        context.load_cert_chain(self.cert_file, self.key_file, password="")
        if self.client_ca_file is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class Answer(NamedTuple):
    """A response."""

    status: HTTPStatus
    body: bytes
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "text/plain; charset=utf-8"),)


def answer(head: bytes, token: str, render: Render) -> Answer:
    """Answer a request's line and headers; without the token nothing is said of what is here."""
    lines = head.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if line and (not colon or not name or name != name.strip()):
            return _plain(HTTPStatus.BAD_REQUEST, "a header has no name")
        headers[name.lower()] = value.strip()
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        return _plain(HTTPStatus.BAD_REQUEST, "not an HTTP/1.x request")
    said = headers.get("authorization", "").encode("latin-1")
    if not hmac.compare_digest(said, f"Bearer {token}".encode()):
        refusal = _plain(HTTPStatus.UNAUTHORIZED, "needs authorization: Bearer <token>")
        challenge = (("WWW-Authenticate", 'Bearer realm="deepinfer"'),)
        return refusal._replace(headers=refusal.headers + challenge)
    method, path, _ = parts
    if path.partition("?")[0] != PATH:
        return _plain(HTTPStatus.NOT_FOUND, f"only {PATH} is here")
    if method not in ("GET", "HEAD"):
        refusal = _plain(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD")
        return refusal._replace(headers=(*refusal.headers, ("Allow", "GET, HEAD")))
    body, content_type = render(headers.get("accept", ""))
    return Answer(HTTPStatus.OK, body, (("Content-Type", content_type),))


def _plain(status: HTTPStatus, why: str) -> Answer:
    return Answer(status, f"{why}\n".encode())


class ScrapeServer:
    """Serves ``render`` to whoever has the token, until it is closed.

    Raises:
        ValueError: the token is empty.
    """

    def __init__(self, settings: ScrapeSettings, token: str, render: Render) -> None:
        if not token:
            raise ValueError("token = '': must not be empty")
        self._settings = settings
        self._token = token
        self._render = render
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> str:
        """Listen; return where, host:port.

        Raises:
            OSError: the address is taken or not this machine's, or a TLS file is of no use.
        """
        settings, tls = self._settings, self._settings.tls()
        self._server = await asyncio.start_server(
            self._serve,
            settings.host,
            settings.port,
            limit=HEAD_BYTES_MAX,
            ssl=tls,
            ssl_handshake_timeout=DEADLINE_S if tls else None,
        )
        port = self._server.sockets[0].getsockname()[1]
        return f"[{settings.host}]:{port}" if ":" in settings.host else f"{settings.host}:{port}"

    async def close(self) -> None:
        """End the listening and every connection."""
        if self._server is not None:
            self._server.close()
            for writer in list(self._open):
                writer.close()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= CONNECTIONS_MAX:
            writer.close()
            return
        self._open.add(writer)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._exchange(reader, writer)
        except (OSError, EOFError, TimeoutError) as error:
            log.debug("a scraper went away", error=repr(error))
        finally:
            self._open.discard(writer)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            says = f"more than {HEAD_BYTES_MAX} bytes before the body"
            reply, method = _plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, says), b""
        else:
            reply = answer(head.removesuffix(b"\r\n\r\n"), self._token, self._render)
            method = head.partition(b" ")[0]
        lines = [f"HTTP/1.1 {reply.status.value} {reply.status.phrase}"]
        lines += [f"{name}: {value}" for name, value in reply.headers]
        lines += [f"Content-Length: {len(reply.body)}", "Connection: close", "", ""]
        writer.write("\r\n".join(lines).encode("latin-1"))
        if method != b"HEAD":
            writer.write(reply.body)
        await writer.drain()
