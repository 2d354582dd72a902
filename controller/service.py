"""The ``Control`` service: streams of reports in, their answers out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

import grpc
import structlog

from deepinfer.controller import wire
from deepinfer.controller.core.events import Peer, PeerKind, Report
from deepinfer.controller.shell import Shell
from deepinfer.proto import control_pb2, control_pb2_grpc
from deepinfer.proto.bearer import RequireToken

log = structlog.get_logger(__name__)

SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    # A report states everything when it is complete.
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # Peers ping a quiet stream every 20 s; the default would end the connection for it.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


class _Said(Protocol):
    """What the three report messages have in common."""

    @property
    def address(self) -> str: ...
    @property
    def counters(self) -> Any: ...


_M = TypeVar("_M", bound=_Said)


class ControlService(control_pb2_grpc.ControlServicer):
    """Gives reports to the shell, and tells it when a stream ends."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    async def WorkerReports(
        self,
        requests: AsyncIterator[control_pb2.WorkerReport],
        context: grpc.aio.ServicerContext[control_pb2.WorkerReport, control_pb2.ReportReply],
    ) -> AsyncIterator[control_pb2.ReportReply]:
        """A worker's reports."""

        def read(said: control_pb2.WorkerReport) -> tuple[Peer, Report]:
            report = wire.worker_report_from(said)
            return Peer(PeerKind.WORKER, report.worker, report.incarnation), report

        async for reply in self._serve(requests, context, read):
            yield reply

    async def StoreReports(
        self,
        requests: AsyncIterator[control_pb2.StoreReport],
        context: grpc.aio.ServicerContext[control_pb2.StoreReport, control_pb2.ReportReply],
    ) -> AsyncIterator[control_pb2.ReportReply]:
        """A store's reports."""

        def read(said: control_pb2.StoreReport) -> tuple[Peer, Report]:
            report = wire.store_report_from(said)
            return Peer(PeerKind.STORE, report.store, report.incarnation), report

        async for reply in self._serve(requests, context, read):
            yield reply

    async def GatewayReports(
        self,
        requests: AsyncIterator[control_pb2.GatewayReport],
        context: grpc.aio.ServicerContext[control_pb2.GatewayReport, control_pb2.ReportReply],
    ) -> AsyncIterator[control_pb2.ReportReply]:
        """A gateway's reports."""

        def read(said: control_pb2.GatewayReport) -> tuple[Peer, Report]:
            report = wire.gateway_report_from(said)
            return Peer(PeerKind.GATEWAY, report.gateway, report.incarnation), report

        async for reply in self._serve(requests, context, read):
            yield reply

    async def _serve(
        self,
        requests: AsyncIterator[_M],
        context: grpc.aio.ServicerContext[Any, Any],
        read: Callable[[_M], tuple[Peer, Report]],
    ) -> AsyncIterator[control_pb2.ReportReply]:
        speaker: Peer | None = None
        try:
            async for said in requests:
                try:
                    peer, report = read(said)
                    if speaker is None:
                        speaker = peer
                        self._shell.stream_opened(peer)
                        log.info("stream opened", kind=peer.kind.value, id=peer.id)
                    elif peer != speaker:
                        raise wire.WireError("sender", peer.id, f"{speaker.id}, as at first")
                except wire.WireError as error:
                    log.warning("illegal report", error=str(error))
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                reply = self._shell.report(peer, report, said.address, said.counters)
                if reply is not None:
                    yield wire.reply_to(reply)
        finally:
            if speaker is not None:
                self._shell.stream_broken(speaker)


def build_server(shell: Shell, token: str) -> grpc.aio.Server:
    """A server of ``Control`` that refuses whoever lacks the token; not yet bound or started."""
    server = grpc.aio.server(interceptors=(RequireToken(token),), options=SERVER_OPTIONS)
    control_pb2_grpc.add_ControlServicer_to_server(ControlService(shell), server)
    return server
