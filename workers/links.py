"""The worker's streams: one to each gateway it serves, and one to the controller.

A stream that breaks is opened again for ever, with growing pauses; the core hears of each end and
each beginning and makes good what was lost in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

import grpc
import grpc.aio

from deepinfer.kvstore.core.ids import GatewayId, WorkerRef
from deepinfer.kvstore.core.messages import ToGateway, WorkerReport
from deepinfer.proto import control_pb2, control_pb2_grpc, link_pb2, link_pb2_grpc
from deepinfer.proto.bearer import Metadata, bearer
from deepinfer.proto.bundle import bundles
from deepinfer.workers import wire
from deepinfer.workers.core.events import (
    FromGateway,
    GatewayDown,
    GatewayUp,
    ReportAnswered,
    ReportsUp,
    WorkerEvent,
)

log = logging.getLogger(__name__)

_T = TypeVar("_T")

Feed = Callable[[WorkerEvent], None]

RETRY_FIRST_S = 0.05
RETRY_MAX_S = 1.0
CONNECT_TIMEOUT_S = 5.0
OUTBOX_MAX = 4096
"""Messages that may wait for one gateway; a gateway that falls further behind loses its link."""
REPORTS_MAX = 256
"""Reports that may wait; for a controller that falls further behind a new stream is opened."""
MESSAGE_BYTES_MAX = 64 * 2**20
CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # or a proxy of the environment is asked, for loopback too
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # A peer that restarts is back within a second; gRPC's own backoff would wait up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class Backoff:
    """Pauses between attempts: they double up to a limit, and start anew after a success."""

    def __init__(self) -> None:
        self._next_s = RETRY_FIRST_S

    def reset(self) -> None:
        self._next_s = RETRY_FIRST_S

    async def pause(self) -> None:
        await asyncio.sleep(self._next_s)
        self._next_s = min(2 * self._next_s, RETRY_MAX_S)


class GatewayLinks:
    """Streams to gateways, opened when there is something to say. Belongs to one event loop."""

    def __init__(self, ref: WorkerRef, token: str, feed: Feed) -> None:
        self._ref = ref
        self._metadata = bearer(token)
        self._feed = feed
        self._addresses: dict[GatewayId, str] = {}
        self._links: dict[GatewayId, _GatewayLink] = {}

    def learn(self, addresses: Mapping[GatewayId, str]) -> None:
        """Take addresses from an order; a gateway that has moved is reached at the new one."""
        for gateway, address in addresses.items():
            if self._addresses.get(gateway) != address:
                self._addresses[gateway] = address
                link = self._links.get(gateway)
                if link is not None:
                    link.move(address)

    def send(self, gateway: GatewayId, message: ToGateway) -> None:
        """Send if the link is up; otherwise drop the message and see to it that it comes up."""
        link = self._links.get(gateway)
        if link is None:
            address = self._addresses.get(gateway)
            if address is None:
                log.warning("gateway %s: no order has told its address", gateway)
                return
            link = _GatewayLink(gateway, address, self._ref, self._metadata, self._feed)
            self._links[gateway] = link
        link.send(message)

    async def close(self) -> None:
        for link in self._links.values():
            await link.close()
        self._links.clear()


class _GatewayLink:
    """One stream that is kept open."""

    def __init__(
        self, gateway: GatewayId, address: str, ref: WorkerRef, metadata: Metadata, feed: Feed
    ) -> None:
        self._gateway = gateway
        self._address = address
        self._ref = ref
        self._metadata = metadata
        self._feed = feed
        self._outbox: asyncio.Queue[link_pb2.FromWorker] | None = None
        self._call: grpc.aio.StreamStreamCall[link_pb2.FromWorker, link_pb2.ToWorker] | None = None
        self._task = asyncio.get_running_loop().create_task(self._keep())

    def send(self, message: ToGateway) -> None:
        if self._outbox is None:
            return
        try:
            self._outbox.put_nowait(wire.to_gateway(message))
        except asyncio.QueueFull:
            log.warning("gateway %s: %d messages behind; link dropped", self._gateway, OUTBOX_MAX)
            self._break()

    def move(self, address: str) -> None:
        self._address = address
        self._break()

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def _break(self) -> None:
        if self._call is not None:
            self._call.cancel()

    async def _keep(self) -> None:
        backoff = Backoff()
        # gRPC swallows a cancellation that meets the end of a call: the count remembers it.
        while not _closing():
            address = self._address
            try:
                async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
                    await asyncio.wait_for(channel.channel_ready(), CONNECT_TIMEOUT_S)
                    await self._talk(channel, backoff)
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                log.info("gateway %s at %s: %s", self._gateway, address, _brief(error))
            except Exception:
                # Also what breaks the protocol (LinkError, InvalidRequestError).
                log.exception("gateway %s at %s", self._gateway, address)
            except asyncio.CancelledError:
                if _closing():
                    raise  # Otherwise only the call was cancelled, by ``_break``.
            await backoff.pause()

    async def _talk(self, channel: grpc.aio.Channel, backoff: Backoff) -> None:
        outbox: asyncio.Queue[link_pb2.FromWorker] = asyncio.Queue(OUTBOX_MAX)
        outbox.put_nowait(wire.hello_to(self._ref))
        stub = link_pb2_grpc.WorkerLinkStub(channel)
        call = stub.Connect(_bundled(outbox), metadata=self._metadata)
        self._call, self._outbox = call, outbox
        self._feed(GatewayUp(self._gateway))
        try:
            async for bundle in call:
                backoff.reset()
                for said in wire.link_messages(bundle):
                    self._feed(FromGateway(self._gateway, wire.from_gateway(said)))
        finally:
            self._call = self._outbox = None
            call.cancel()
            self._feed(GatewayDown(self._gateway))


class ReportLink:
    """The stream of reports to whichever controller is there. Belongs to one event loop.

    ``find`` returns the controller's address, or raises LookupError while there is none.
    """

    def __init__(
        self,
        token: str,
        feed: Feed,
        find: Callable[[], Awaitable[str]],
        counters: Callable[[], Mapping[str, float]],
    ) -> None:
        self._metadata = bearer(token)
        self._feed = feed
        self._find = find
        self._counters = counters
        self._outbox: asyncio.Queue[control_pb2.WorkerReport] | None = None
        self._call: (
            grpc.aio.StreamStreamCall[control_pb2.WorkerReport, control_pb2.ReportReply] | None
        ) = None
        self._task = asyncio.get_running_loop().create_task(self._keep())

    def send(self, report: WorkerReport) -> None:
        """Send if the stream is up; the first report on a new stream is complete anyway."""
        if self._outbox is None:
            return
        try:
            self._outbox.put_nowait(wire.report_to(report, self._counters()))
        except asyncio.QueueFull:
            log.warning("controller: %d reports behind; stream dropped", REPORTS_MAX)
            if self._call is not None:
                self._call.cancel()

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _keep(self) -> None:
        backoff = Backoff()
        while not _closing():
            try:
                address = await self._find()
                async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
                    await asyncio.wait_for(channel.channel_ready(), CONNECT_TIMEOUT_S)
                    await self._talk(channel, backoff)
            except (grpc.aio.AioRpcError, TimeoutError, LookupError, OSError) as error:
                log.info("controller: %s", _brief(error))
            except Exception:
                log.exception("controller")  # Never the end: without reports nobody comes here.
            except asyncio.CancelledError:
                if _closing():
                    raise  # Otherwise only the call was cancelled, by ``send``.
            await backoff.pause()

    async def _talk(self, channel: grpc.aio.Channel, backoff: Backoff) -> None:
        outbox: asyncio.Queue[control_pb2.WorkerReport] = asyncio.Queue(REPORTS_MAX)
        stub = control_pb2_grpc.ControlStub(channel)
        call = stub.WorkerReports(_drain(outbox), metadata=self._metadata)
        self._call, self._outbox = call, outbox
        self._feed(ReportsUp())
        try:
            async for said in call:
                backoff.reset()
                self._feed(ReportAnswered(wire.reply_from(said)))
        finally:
            self._call = self._outbox = None
            call.cancel()


async def _drain(outbox: asyncio.Queue[_T]) -> AsyncIterator[_T]:
    while True:
        yield await outbox.get()


async def _bundled(
    outbox: asyncio.Queue[link_pb2.FromWorker],
) -> AsyncIterator[link_pb2.FromWorker]:
    """All that waits goes out in one message, or in as few as may be."""
    yield await outbox.get()  # Hello stands alone.
    while True:
        messages = [await outbox.get()]
        while not outbox.empty():
            messages.append(outbox.get_nowait())
        for bundle in bundles(messages):
            yield bundle


def _closing() -> bool:
    """Whether the task that runs this was told to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _brief(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
