"""The stream of reports to the controller, opened again whenever it breaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio

from deepinfer.kvstore import wire
from deepinfer.kvstore.core.events import ReportAnswered, ReportLinkUp
from deepinfer.kvstore.core.messages import StoreReport
from deepinfer.kvstore.runtime import StoreRuntime
from deepinfer.proto import control_pb2, control_pb2_grpc
from deepinfer.proto.bearer import bearer

_log = logging.getLogger(__name__)

RETRY_S = 0.2
_BACKLOG_MAX = 256
_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # or gRPC waits a minute for the answer
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

FindController = Callable[[], Awaitable[str]]
"""Where the controller's ``Control`` service is, host:port. Raises OSError, RuntimeError or
LookupError while there is none."""


class Reporter:
    """Keeps a report stream open, and sends whatever the runtime reports while it is."""

    def __init__(
        self, runtime: StoreRuntime, find_controller: FindController, *, address: str, token: str
    ) -> None:
        self._runtime = runtime
        self._find_controller = find_controller
        self._address = address
        self._metadata = bearer(token)

    async def run(self) -> None:
        """Report until cancelled."""
        this = asyncio.current_task()
        # gRPC swallows a cancellation that meets the end of a call: the count remembers it.
        while this is None or not this.cancelling():
            try:
                await self._report_to(await self._find_controller())
            except (grpc.aio.AioRpcError, OSError, RuntimeError, LookupError) as error:
                _log.info("no report stream to the controller: %r", error)
            await asyncio.sleep(RETRY_S)

    async def _report_to(self, controller: str) -> None:
        backlog: asyncio.Queue[StoreReport] = asyncio.Queue(_BACKLOG_MAX)

        def keep(report: StoreReport) -> None:
            if backlog.full():
                # The controller does not read: what it missed comes in one complete report.
                while not backlog.empty():
                    backlog.get_nowait()
                asyncio.get_running_loop().call_soon(self._runtime.send, ReportLinkUp())
            backlog.put_nowait(report)

        async def written() -> AsyncIterator[control_pb2.StoreReport]:
            while True:
                report = await backlog.get()
                yield wire.report_to_proto(report, self._address, self._runtime.counters())

        async with grpc.aio.insecure_channel(controller, options=_CHANNEL_OPTIONS) as channel:
            call = control_pb2_grpc.ControlStub(channel).StoreReports(
                written(), metadata=self._metadata
            )
            self._runtime.on_report = keep
            try:
                self._runtime.send(ReportLinkUp())
                async for reply in call:
                    self._runtime.send(ReportAnswered(wire.report_reply_from_proto(reply)))
            finally:
                self._runtime.on_report = None
