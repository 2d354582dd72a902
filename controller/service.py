"""The ``Control`` service: streams of reports in, their answers out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import grpc
import structlog

from deepinfer.controller import wire
from deepinfer.controller.core import events
from deepinfer.controller.core.events import Peer, PeerKind, Report
from deepinfer.controller.shell import Shell
from deepinfer.kvstore.core.ids import Incarnation
from deepinfer.proto import control_pb2, control_pb2_grpc
from deepinfer.proto.bearer import Guard
from deepinfer.proto.crowd import BoundedCalls

log = structlog.get_logger(__name__)

SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    # A report states everything when it is complete.
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # A gateway or store that is there and does nothing (SIGSTOP) is gone after half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # or gRPC waits a minute for the answer
    # Peers ping a quiet stream every 20 s; the default would end the connection for it.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
CALLS_MAX = 4_096
"""Under way at a time: every worker, store and gateway has one stream, and opens another before
the one before has ended."""

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


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

    async def Drain(
        self, request: control_pb2.DrainRequest, context: Context
    ) -> control_pb2.DrainLevel:
        """Empty a worker or gateway; the operator's."""
        wanted = await self._wanted(request, context)
        await self._level(wanted.peer, context)
        self._shell.drain(wanted)
        return await self._level(wanted.peer, context)

    async def GetDrain(
        self, request: control_pb2.DrainRequest, context: Context
    ) -> control_pb2.DrainLevel:
        """How far that is."""
        return await self._level((await self._wanted(request, context)).peer, context)

    async def Restart(
        self, request: control_pb2.RestartRequest, context: Context
    ) -> control_pb2.DrainLevel:
        """End the process of a drained life; the operator's."""
        try:
            ended = await self._shell.restart(request.name, Incarnation(request.incarnation))
        except (OSError, RuntimeError) as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        level = await self._level(request.name, context)
        if not ended and level.incarnation == request.incarnation:
            state = "is being drained" if level.draining else "is not drained"
            says = f"{request.name} {state} and has {level.left} requests"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, says)
        return level

    async def _wanted(self, request: control_pb2.DrainRequest, context: Context) -> events.Drain:
        try:
            return wire.drain_from(request)
        except wire.WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def _level(self, name: str, context: Context) -> control_pb2.DrainLevel:
        level = self._shell.core.drain_level(name)
        if level is None and not self._shell.core.ready:
            says = "the controller has just started and has not heard from everyone yet"
            await context.abort(grpc.StatusCode.UNAVAILABLE, says)
        if level is None:
            says = f"there is no worker or gateway {name[:80]!r}"
            await context.abort(grpc.StatusCode.NOT_FOUND, says)
        return wire.drain_level_to(level)


def build_server(
    shell: Shell, cluster_token: str, operator_token: str | None = None
) -> grpc.aio.Server:
    """A server of ``Control``; not yet bound or started.

    It is for the cluster's own processes, and for whoever has the operator's token if there is one.
    """
    guard = Guard(cluster=cluster_token, operator=operator_token)
    calls = BoundedCalls(CALLS_MAX, name="the controller's streams", advice="try again later")
    server = grpc.aio.server(interceptors=(guard, calls), options=SERVER_OPTIONS)
    control_pb2_grpc.add_ControlServicer_to_server(ControlService(shell), server)
    return server
