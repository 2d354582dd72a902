"""The stream of reports to the controller, opened again whenever it breaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc

from deepinfer.gateway import wire
from deepinfer.gateway.core.events import ReportAnswered
from deepinfer.gateway.shell import Shell
from deepinfer.kvstore.core.messages import GatewayReport
from deepinfer.proto import control_pb2, control_pb2_grpc

log = logging.getLogger(__name__)

RETRY_S = 0.2
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A report states every live request when it is complete.
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)


class Reporter:
    """Keeps a report stream open.

    Args:
        shell: whose reports they are.
        find_controller: asks where the controller's Control service is (host:port); may raise
            OSError, RuntimeError or LookupError while there is none.
        address: where this gateway is, for the workers.
        token: the bearer token.
    """

    def __init__(
        self,
        shell: Shell,
        find_controller: Callable[[], Awaitable[str]],
        *,
        address: str,
        token: str,
    ) -> None:
        self._shell = shell
        self._find_controller = find_controller
        self._address = address
        self._metadata = (("authorization", f"Bearer {token}"),)

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            try:
                controller = await self._find_controller()
                await self._report_to(controller)
            except (grpc.aio.AioRpcError, OSError, RuntimeError, LookupError) as error:
                log.info("no report stream to the controller: %s", _brief(error))
            await asyncio.sleep(RETRY_S)

    async def _report_to(self, controller: str) -> None:
        reports: asyncio.Queue[GatewayReport] = asyncio.Queue()

        async def written() -> AsyncIterator[control_pb2.GatewayReport]:
            while True:
                report = await reports.get()
                yield wire.report_to(report, self._address, self._shell.core.counters)

        async with grpc.aio.insecure_channel(controller, options=CHANNEL_OPTIONS) as channel:
            stub = control_pb2_grpc.ControlStub(channel)
            try:
                call = stub.GatewayReports(written(), metadata=self._metadata)
                self._shell.report_to(reports.put_nowait)
                async for reply in call:
                    self._shell.tell(ReportAnswered(wire.reply_from(reply)))
            finally:
                self._shell.report_to(None)


def _brief(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"
