"""The gateway around its core: streams, links, the clock, and performing what the core asks for.

Everything runs on one event loop; ``Shell.tell`` is synchronous and performs every effect before
it returns, so the core sees the world in one order.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable

from deepinfer.gateway import metrics
from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.gateway.core.events import (
    Code,
    EndStream,
    Event,
    Forget,
    FromWorker,
    Generate,
    Report,
    ReportLinkUp,
    Resume,
    Scan,
    SendToWorker,
    StreamClosed,
    Tick,
    ToStream,
    WorkerLinkDown,
)
from deepinfer.gateway.core.gateway import GatewayCore
from deepinfer.gateway.core.measures import by_reason
from deepinfer.gateway.intake import ModelCard
from deepinfer.gateway.text import ChoiceText, Scanner, text_of
from deepinfer.kvstore.core.ids import GatewayId, Incarnation, StreamId, WorkerRef
from deepinfer.kvstore.core.messages import GatewayReport, ToGateway, ToWorker
from deepinfer.kvstore.core.precision import Precision
from deepinfer.kvstore.core.requests import RequestRecord
from deepinfer.proto.failpoints import Failpoints

TICK_S = 0.05
END_PATIENCE_S = 1.0
"""How long the end of a stream waits for the message before it to be taken."""
LINK_QUEUE_MAX = 65_536
"""Messages that wait for one worker's link; a link with more is broken, and the worker attaches
anew."""


def wall_clock() -> Callable[[], int]:
    """A clock in milliseconds since 1970 that only goes forward, at the pace of the monotonic one.

    Arrival times and deadlines are compared between machines, so it starts at the wall's time.
    """
    start_ms, start_ns = time.time_ns() // 1_000_000, time.monotonic_ns()
    return lambda: start_ms + (time.monotonic_ns() - start_ns) // 1_000_000


class ClientStream:
    """One client's stream, as its handler sees it: what to write next, and in what words."""

    def __init__(self, stream: StreamId, record: RequestRecord, texts: list[ChoiceText]) -> None:
        self.stream = stream
        self.record = record
        self.texts = texts
        self._waiting: asyncio.Queue[ToStream | EndStream] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None

    def put(self, effect: ToStream | EndStream) -> None:
        """The core's next message, or the end."""
        self._waiting.put_nowait(effect)
        if isinstance(effect, EndStream) and self._writer is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(END_PATIENCE_S, self._give_up, self._writer)

    async def write(self, writing: Awaitable[None]) -> None:
        """Wait until a message is taken; cancelled a while after the stream was to end."""
        self._writer = asyncio.current_task()
        try:
            await writing
        finally:
            self._writer = None

    def _give_up(self, writer: asyncio.Task[None]) -> None:
        if self._writer is writer:  # its reader reads nothing, the end neither
            writer.cancel()

    async def next(self) -> ToStream | EndStream:
        """Wait for what to write."""
        return await self._waiting.get()


class WorkerLink:
    """One worker's link: what waits to be written to it."""

    def __init__(self, worker: WorkerRef) -> None:
        self.worker = worker
        self._waiting: asyncio.Queue[ToWorker | None] = asyncio.Queue(LINK_QUEUE_MAX)
        self.broken = False

    def put(self, message: ToWorker) -> None:
        """Send a message; on a link that does not take them any more, break it."""
        try:
            self._waiting.put_nowait(message)
        except asyncio.QueueFull:
            self.close()

    def close(self) -> None:
        """End the link from this side."""
        self.broken = True
        while not self._waiting.empty():
            self._waiting.get_nowait()
        self._waiting.put_nowait(None)

    async def next(self) -> list[ToWorker] | None:
        """Wait for a message; return all that wait by then, or None when the link is to end."""
        messages = [await self._waiting.get()]
        while not self._waiting.empty():
            messages.append(self._waiting.get_nowait())
        told = [message for message in messages if message is not None]
        return told if len(told) == len(messages) else None


class Shell:
    """Owns the core; everything else goes through ``tell``."""

    def __init__(
        self,
        gateway: GatewayId,
        incarnation: Incarnation,
        config: GatewayConfig,
        card: ModelCard,
        *,
        now_ms: Callable[[], int] | None = None,
        failpoints: Failpoints | None = None,
    ) -> None:
        self.gateway = gateway
        self.failpoints = failpoints or Failpoints()
        self.card = card
        self.now_ms = now_ms or wall_clock()
        self.core = GatewayCore(gateway, incarnation, config, now_ms=self.now_ms())
        self._scanner = Scanner(card.tokenizer)
        self._events: deque[Event] = deque()
        self._telling = False
        self._bug: Exception | None = None
        self._closed: str | None = None
        """Why every stream ends, once the cluster is being stopped."""
        self._streams: dict[StreamId, ClientStream] = {}
        self._no_stream = asyncio.Event()
        self._last_stream = 0
        self._counters: Counter[str] = Counter()
        """What never gets to the core, by the same names."""
        self._links: dict[WorkerRef, WorkerLink] = {}
        self._send_report: Callable[[GatewayReport], None] | None = None
        self._on_drain: Callable[[], None] | None = None

    # ---- the core --------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """Give the core an event, and whatever follows from it."""
        self._events.append(event)
        if self._telling:
            return
        self._telling = True
        try:
            while self._events:
                for effect in self.core.handle(self._events.popleft(), self.now_ms()):
                    match effect:
                        case ToStream() | EndStream():
                            stream = self._streams.get(effect.stream)
                            if stream is not None:
                                stream.put(effect)
                        case SendToWorker(worker, message):
                            link = self._links.get(worker)
                            if link is not None:
                                link.put(message)
                        case Scan():
                            self._events.append(self._scanner.scan(effect))
                        case Report(report):
                            if self._send_report is not None:
                                self._send_report(report)
                        case Forget(request):
                            self._scanner.forget(request)
        except Exception as error:
            # A core raises on bugs alone, and has then done half of something: see ``tick``.
            self._bug = self._bug or error
            raise
        finally:
            self._telling = False
        if self._on_drain is not None and self.core.draining:
            act, self._on_drain = self._on_drain, None
            act()

    async def tick(self) -> None:
        """Let time pass for the core, until cancelled; raises what the core has raised anywhere."""
        while self._bug is None:
            await asyncio.sleep(TICK_S)
            self.tell(Tick())
            if not self.core.live_requests:
                self.core.check()
        raise self._bug

    # ---- clients ---------------------------------------------------------------------------

    def generate(
        self, record: RequestRecord, resume_key: str, *, continues_text: bool, include_events: bool
    ) -> ClientStream:
        """Open the first stream of a request."""
        received = ((),) * record.sampling.n
        stream = self._open(record, received, continues_text=continues_text)
        self.tell(Generate(stream.stream, record, resume_key, include_events))
        return self._opened(stream)

    def resume(
        self,
        record: RequestRecord,
        resume_key: str,
        *,
        claim: int,
        received: tuple[tuple[int, ...], ...],
        precisions: tuple[tuple[Precision, ...], ...],
        scored: int,
        continues_text: bool,
        include_events: bool,
    ) -> ClientStream:
        """Open a further stream of a request, behind what its client has."""
        stream = self._open(record, received, continues_text=continues_text)
        self.tell(
            Resume(
                stream.stream,
                record,
                resume_key,
                claim,
                received,
                include_events,
                scored,
                precisions,
            )
        )
        return self._opened(stream)

    def _open(
        self,
        record: RequestRecord,
        received: tuple[tuple[int, ...], ...],
        *,
        continues_text: bool,
    ) -> ClientStream:
        self._last_stream += 1
        stream_id = StreamId(self._last_stream)
        texts = [
            ChoiceText(
                text_of(self.card.tokenizer, record, continues_text=continues_text), record, tokens
            )
            for tokens in received
        ]
        self._scanner.add(record, continues_text=continues_text)
        stream = self._streams[stream_id] = ClientStream(stream_id, record, texts)
        if self._closed is not None:
            stream.put(EndStream(stream_id, Code.FAILED_PRECONDITION, self._closed))
        return stream

    def _opened(self, stream: ClientStream) -> ClientStream:
        if not self.core.holds(stream.record.request):  # it was refused
            self._scanner.forget(stream.record.request)
        return stream

    def close_stream(self, stream: ClientStream) -> None:
        """The stream's handler is done with it, however it came to that."""
        if self._streams.pop(stream.stream, None) is not None:
            self.tell(StreamClosed(stream.stream))
        if not self._streams:
            self._no_stream.set()

    async def close(self, message: str) -> None:
        """End every stream for good, and every one that is opened later; wait until they have.

        For a cluster that is being stopped: clients would otherwise come back until they give up.
        """
        self._closed = message
        for stream in self._streams.values():
            stream.put(EndStream(stream.stream, Code.FAILED_PRECONDITION, message))
        while self._streams:
            self._no_stream.clear()
            await self._no_stream.wait()

    # ---- workers ---------------------------------------------------------------------------

    def open_link(self, worker: WorkerRef) -> WorkerLink:
        """A worker has connected; an older link of the same life ends."""
        old = self._links.get(worker)
        if old is not None:
            old.close()
        link = self._links[worker] = WorkerLink(worker)
        return link

    def from_worker(self, link: WorkerLink, message: ToGateway) -> None:
        """A message has come on a link."""
        if self._links.get(link.worker) is link:
            self.tell(FromWorker(link.worker, message))

    def close_link(self, link: WorkerLink) -> None:
        """The link's handler is done with it."""
        if self._links.get(link.worker) is link:
            del self._links[link.worker]
            self.tell(WorkerLinkDown(link.worker))

    # ---- the controller --------------------------------------------------------------------

    def on_drain(self, act: Callable[[], None]) -> None:
        """What to do, once, when the core begins to take nothing new."""
        self._on_drain = act

    def report_to(self, send: Callable[[GatewayReport], None] | None) -> None:
        """Where reports go from now on; None: nowhere."""
        self._send_report = send
        if send is not None:
            self.tell(ReportLinkUp())

    def full(self) -> str | None:
        """Why a request that has come is refused unread (and counted); None: it is not."""
        reached = self.core.bound_reached()
        if reached is None:
            return None
        self.refused(reached[0])
        return reached[1]

    def refused(self, reason: str) -> None:
        """Count a request that was refused before it was one."""
        self._counters[by_reason("requests_refused_total", reason)] += 1

    def metrics(self) -> dict[str, float]:
        """Totals since this life began, gauges and histograms, by their exported names."""
        return metrics.samples(self._counted(), self.core.measures, self.snapshot())

    def snapshot(self) -> dict[str, object]:
        """Counts for the status document; totals by their exported names."""
        return self.core.snapshot() | {
            "worker_links": len(self._links),
            "counters": metrics.totals(self._counted()),
        }

    def _counted(self) -> Counter[str]:
        return self.core.counters | self._counters
