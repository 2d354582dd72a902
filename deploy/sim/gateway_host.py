"""A gateway's process: its core, its clients' streams, and the search for stop strings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepinfer.client.core.events import OpenGenerate, OpenResume, SendAbort
from deepinfer.deploy.sim.host import Reporter
from deepinfer.deploy.sim.network import Stream
from deepinfer.gateway.core.events import (
    AbortRequest,
    EndStream,
    Forget,
    FromWorker,
    Generate,
    Report,
    ReportAnswered,
    ReportLinkUp,
    Resume,
    Scan,
    Scanned,
    SendToWorker,
    StopMatched,
    StreamClosed,
    StreamReady,
    Tick,
    ToStream,
    WorkerLinkDown,
)
from deepinfer.gateway.core.gateway import GatewayCore
from deepinfer.kvstore.core.ids import GatewayId, Incarnation, RequestId, Seq, StreamId, WorkerRef
from deepinfer.kvstore.core.messages import Finished, ReportReply
from deepinfer.kvstore.core.requests import RequestRecord

if TYPE_CHECKING:
    from deepinfer.deploy.sim.client_host import ClientHost
    from deepinfer.deploy.sim.world import World


def resume_key(request: RequestId) -> str:
    """The key that a gateway mints with a request id; any gateway can verify it."""
    return f"key of {request}"


class GatewayHost(Reporter):
    """One gateway."""

    __slots__ = (
        "_links",
        "_minted",
        "_names",
        "_opened",
        "_scan_due_ms",
        "_scanned",
        "_stopped",
        "_streams",
    )

    kind = "gateway"

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name, Tick())
        self._minted = 0
        self._opened = 0
        self._streams: dict[StreamId, tuple[Stream, ClientHost]] = {}
        self._names: dict[Stream, StreamId] = {}
        self._links: dict[WorkerRef, Stream] = {}
        self._scanned: dict[Seq, list[int]] = {}
        self._stopped: dict[Seq, int] = {}
        self._scan_due_ms = 0
        self._performers = {
            ToStream: self._to_stream,
            EndStream: self._end_stream,
            SendToWorker: self._send_to_worker,
            Scan: self._scan,
            Forget: self._forget,
            Report: self._report,
        }

    def start(self) -> None:
        """A new life, without any records."""
        super().start()
        self._streams = {}
        self._names = {}
        self._links = {}
        self._scanned = {}
        self._stopped = {}
        self._scan_due_ms = 0
        self.core = GatewayCore(
            GatewayId(self.name),
            Incarnation(self.life),
            self.world.gateway_config(),
            now_ms=self.now_ms,
        )
        self.begin_ticking()
        self.begin_reporting()

    def leftovers(self) -> list[str]:
        """What the gateway has not finished."""
        if not self.up:
            return [f"{self.name} is down"]
        live = self.core.snapshot()["live_requests"]
        return [f"{self.name} has {live} live requests"] if live else []

    def held(self) -> int:
        """Clients' streams that may not come any more: what a drain has waited for."""
        return 0 if self.core.takes_over else len(self._streams)

    # ---- clients ----

    def from_client(self, stream: Stream, asked: OpenGenerate | OpenResume) -> None:
        """A client has opened a stream: its first and only message."""
        self._opened += 1
        name = StreamId(self._opened)
        client = self.world.clients[stream.peer(self).name]
        self._streams[name] = (stream, client)
        self._names[stream] = name
        if isinstance(asked, OpenResume):
            # The client sends the whole request again; the key says that it is this one.
            first = self.world.history.record(asked.request)
            record = dataclasses.replace(first, arrival_ms=min(first.arrival_ms, self.now_ms))
            self.drive(
                Resume(
                    name,
                    record,
                    asked.resume_key,
                    asked.claim,
                    asked.received,
                    client.wants_notices,
                    asked.scored,
                    asked.precisions,
                )
            )
        else:
            record = self._mint(client)
            key = resume_key(record.request)
            self.drive(Generate(name, record, key, client.wants_notices))

    def _mint(self, client: ClientHost) -> RequestRecord:
        plan = client.plan
        self._minted += 1
        deadline = plan.deadline_after_ms
        record = RequestRecord(
            request=RequestId(f"{self.name}.{self.life}-{self._minted}"),
            prompt_ids=plan.prompt_ids,
            sampling=client.sampling,
            arrival_ms=self.now_ms,
            seed=plan.seed,
            priority=plan.priority,
            deadline_ms=None if deadline is None else self.now_ms + deadline,
            exact=plan.exact,
            stop_token_ids=plan.stop_ids,
        )
        self.world.history.minted(client.name, record, plan.stop_pair)
        return record

    def client_gone(self, stream: Stream) -> None:
        """A client's stream has broken, or its client has closed it."""
        name = self._names.pop(stream, None)
        if name is not None and self._streams.pop(name, None) is not None:
            self.drive(StreamClosed(name))

    def serve_abort(self, asked: SendAbort, reply: Callable[[object], None]) -> None:
        """Abort, as a call."""
        self.drive(AbortRequest(asked.request, asked.claim, self.world.choices(asked.request)))
        reply(None)

    def _to_stream(self, effect: ToStream) -> None:
        held = self._streams.get(effect.stream)
        if held is None:
            return
        stream, client = held
        if effect.usage is not None and isinstance(effect.message, Finished):
            self.world.history.accounted(client.name, effect.message.choice, effect.usage)
        stream.send(self, effect.message)
        read_ms = 0 if self.world.fair else client.plan.read_ms
        self.after(1 + read_ms, self._written, effect.stream)

    def _written(self, name: StreamId) -> None:
        if name in self._streams:
            self.drive(StreamReady(name))

    def _end_stream(self, effect: EndStream) -> None:
        held = self._streams.pop(effect.stream, None)
        if held is not None:
            stream, _ = held
            self._names.pop(stream, None)
            stream.send(self, effect)

    # ---- workers ----

    def linked(self, worker: WorkerRef, stream: Stream) -> None:
        """A worker has connected."""
        self._links[worker] = stream

    def unlinked(self, worker: WorkerRef, stream: Stream) -> None:
        """A worker's link has broken."""
        if self._links.get(worker) is stream:
            del self._links[worker]
            self.drive(WorkerLinkDown(worker))

    def from_worker(self, worker: WorkerRef, message: Any) -> None:
        """A message has come on a worker's link."""
        self.drive(FromWorker(worker, message))

    def _send_to_worker(self, effect: SendToWorker) -> None:
        link = self._links.get(effect.worker)
        if link is not None:
            link.send(self, effect.message)

    # ---- text ----

    def _scan(self, effect: Scan) -> None:
        """Look for the stop string; answers come a little later, in the order of the questions."""
        if effect.start == 0:
            self._scanned[effect.seq] = []
            self._stopped.pop(effect.seq, None)
        seen = self._scanned[effect.seq]
        assert effect.start == len(seen), (effect, seen)
        pair = self.world.history.stop_pair(effect.seq.request)
        for token in effect.token_ids:
            seen.append(token)
            if tuple(seen[-2:]) == pair:
                self._stopped.setdefault(effect.seq, len(seen))
        stopped = self._stopped.get(effect.seq)
        answer = (
            Scanned(effect.seq, len(seen)) if stopped is None else StopMatched(effect.seq, stopped)
        )
        due_ms = max(self.engine.now_ms + self.within(3), self._scan_due_ms)
        self._scan_due_ms = due_ms
        self.after(due_ms - self.engine.now_ms, self.drive, answer)

    def _forget(self, effect: Forget) -> None:
        for choice in range(self.world.choices(effect.request)):
            self._scanned.pop(Seq(effect.request, choice), None)
            self._stopped.pop(Seq(effect.request, choice), None)

    # ---- controller ----

    def _report(self, effect: Report) -> None:
        self.send_report(effect.report)

    def on_report_link(self) -> None:
        """A new stream to a controller is open."""
        self.drive(ReportLinkUp())

    def on_report_reply(self, reply: ReportReply) -> None:
        """The controller answered a report."""
        self.drive(ReportAnswered(reply))
