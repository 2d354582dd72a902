"""The stream of reports to the controller, opened again whenever it breaks."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import grpc

from deepinfer.gateway import wire
from deepinfer.gateway.core.events import ReportAnswered
from deepinfer.gateway.shell import Shell
from deepinfer.kvstore.core.messages import GatewayReport
from deepinfer.proto import control_pb2, control_pb2_grpc
from deepinfer.proto.bearer import bearer

log = logging.getLogger(__name__)

ReportCall: TypeAlias = (
    "grpc.aio.StreamStreamCall[control_pb2.GatewayReport, control_pb2.ReportReply]"
)
RETRY_S = 0.2
REPORTS_MAX = 256
"""Reports that may wait; for a controller that falls further behind a new stream is opened, whose
first report is complete."""
COUNTED_S = 0.5
"""How old what the controller shows of a gateway's metrics may be, besides a report's interval."""
CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # or gRPC waits a minute for the answer
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
        cluster_token: the cluster's own bearer token.
    """

    def __init__(
        self,
        shell: Shell,
        find_controller: Callable[[], Awaitable[str]],
        *,
        address: str,
        cluster_token: str,
    ) -> None:
        self._shell = shell
        self._find_controller = find_controller
        self._address = address
        self._metadata = bearer(cluster_token)

    async def run(self) -> None:
        """Report until cancelled."""
        this = asyncio.current_task()
        # gRPC swallows a cancellation that meets the end of a call: the count remembers it.
        while this is None or not this.cancelling():
            try:
                await self._report_to(await self._find_controller())
            except (grpc.aio.AioRpcError, OSError, RuntimeError, LookupError) as error:
                log.info("no report stream to the controller: %s", _brief(error))
            except asyncio.CancelledError:
                if this is None or this.cancelling():
                    raise  # otherwise only the call was cancelled, by ``keep``
            await asyncio.sleep(RETRY_S)
        raise asyncio.CancelledError

    async def _report_to(self, controller: str) -> None:
        reports: asyncio.Queue[GatewayReport] = asyncio.Queue(REPORTS_MAX)
        async with grpc.aio.insecure_channel(controller, options=CHANNEL_OPTIONS) as channel:
            call = control_pb2_grpc.ControlStub(channel).GatewayReports(metadata=self._metadata)
            writer = asyncio.create_task(self._write(reports, call))

            def keep(report: GatewayReport) -> None:
                try:
                    reports.put_nowait(report)
                except asyncio.QueueFull:
                    log.warning("controller: %d reports behind; stream dropped", REPORTS_MAX)
                    self._shell.report_to(None)
                    call.cancel()

            try:
                self._shell.report_to(keep)
                async for reply in call:
                    self._shell.tell(ReportAnswered(wire.reply_from(reply)))
            finally:
                self._shell.report_to(None)
                writer.cancel()
                call.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, reports: asyncio.Queue[GatewayReport], call: ReportCall) -> None:
        counted = Counted(self._shell.metrics)
        while True:
            report = await reports.get()
            counters = counted.changes(time.monotonic())
            await call.write(wire.report_to(report, self._address, counters))


class Counted:
    """Which samples a stream's next report carries: those that have changed, and at first all.

    A sample that is not named is as it was. There are hundreds, and reports are frequent: so they
    are looked at every ``COUNTED_S`` only.
    """

    def __init__(self, samples: Callable[[], dict[str, float]]) -> None:
        self._samples = samples
        self._sent: dict[str, float] = {}
        self._due_s = -math.inf

    def changes(self, now_s: float) -> dict[str, float]:
        """What to send now, on a stream that loses nothing."""
        if now_s < self._due_s:
            return {}
        self._due_s = now_s + COUNTED_S
        sent, self._sent = self._sent, self._samples()
        return {name: value for name, value in self._sent.items() if sent.get(name) != value}


def _brief(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"
