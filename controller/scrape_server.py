"""``GET /metrics`` over HTTP/1.1 for one scraper or a few, with the cluster's bearer token.

One path, one answer a connection, everything bounded. It runs on the controller's event loop, so
that what it reads is of one moment.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from deepinfer.controller.scrape import ScrapeSettings

log = structlog.get_logger(__name__)
# aiohttp logs whoever does not speak HTTP, with a traceback: strangers could fill the disk.
_strangers = logging.getLogger(f"{__name__}.strangers")
_strangers.setLevel(logging.CRITICAL)

PATH = "/metrics"
LINE_BYTES_MAX = 2_048
"""Request line, and every header."""
HEADERS_MAX = 64
CONNECTIONS_MAX = 32
"""At a time; more are closed at once."""
DEADLINE_S = 10.0
"""From a connection's beginning to its end."""

Render = Callable[[str], tuple[bytes, str]]
"""Takes the Accept header; returns the body and its content type."""


class ScrapeServer:
    """Serves ``render`` to whoever has the token, until it is closed.

    Raises:
        ValueError: the token is empty.
    """

    def __init__(self, settings: ScrapeSettings, token: str, render: Render) -> None:
        if not token:
            raise ValueError("token = '': must not be empty")
        self._settings = settings
        self._bearer = f"Bearer {token}".encode()
        self._render = render
        self._http: _BoundedServer | None = None
        self._listener: asyncio.Server | None = None

    async def start(self) -> str:
        """Listen; return where, host:port.

        Raises:
            OSError: the address is taken or not this machine's, or a TLS file is of no use.
        """
        settings, tls = self._settings, self._settings.tls()
        http = _BoundedServer(self._answer)
        self._listener = await asyncio.get_running_loop().create_server(
            http,
            settings.host,
            settings.port,
            ssl=tls,
            ssl_handshake_timeout=DEADLINE_S if tls else None,
        )
        self._http = http
        port = self._listener.sockets[0].getsockname()[1]
        return f"[{settings.host}]:{port}" if ":" in settings.host else f"{settings.host}:{port}"

    async def close(self) -> None:
        """End the listening and every connection."""
        if self._listener is not None and self._http is not None:
            self._listener.close()
            self._http.abort()
            await self._listener.wait_closed()
            self._listener = self._http = None

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Without the token nothing is said of what is here."""
        said = ", ".join(request.headers.getall("Authorization", []))
        if not hmac.compare_digest(said.encode(errors="surrogateescape"), self._bearer):
            response = _plain(401, "needs authorization: Bearer <token>")
            response.headers["WWW-Authenticate"] = 'Bearer realm="deepinfer"'
        elif request.path != PATH:
            response = _plain(404, f"only {PATH} is here")
        elif request.method not in ("GET", "HEAD"):
            response = _plain(405, "only GET and HEAD")
            response.headers["Allow"] = "GET, HEAD"
        else:
            response = self._rendered(request.headers.get("Accept", ""))
        response.force_close()
        return response

    def _rendered(self, accept: str) -> web.Response:
        try:
            body, content_type = self._render(accept)
        except Exception:
            log.exception("metrics cannot be rendered")
            return _plain(500, "the controller's log says why")
        return web.Response(body=body, headers={"Content-Type": content_type})


def _plain(status: int, why: str) -> web.Response:
    return web.Response(status=status, text=f"{why}\n")


class _BoundedServer(web.Server):
    """Bounds what aiohttp leaves open: how many connections there are, and how long each lasts."""

    def __init__(self, answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        super().__init__(
            answer,
            access_log=None,
            logger=_strangers,
            max_line_size=LINE_BYTES_MAX,
            max_field_size=LINE_BYTES_MAX,
            max_headers=HEADERS_MAX,
            auto_decompress=False,
        )
        self._open: dict[web.RequestHandler, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        delay_s = DEADLINE_S if len(self._open) < CONNECTIONS_MAX else 0
        # Closing would wait for the peer to take what is written and to end TLS in order.
        timer = asyncio.get_running_loop().call_later(delay_s, transport.abort)
        self._open[handler] = transport, timer

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        _, timer = self._open.pop(handler)
        timer.cancel()
        super().connection_lost(handler, exc)

    def abort(self) -> None:
        """End every connection, whatever its peer has not taken yet."""
        for transport, _ in self._open.values():
            transport.abort()
