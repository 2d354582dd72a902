"""The gateway's core: who may speak for a request, and what its client has been told.

Tokens come in through ``Choice.take``, the exactly-once filter, and leave through ``_pump``;
between the two there is only the record. For the controller a sequence ends in one of two ways: it
is gone from the reports (finished, rejected, disowned), or it is listed as cancelled until a report
that says so was answered (aborted, past its deadline, or left by its client).
"""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Iterator

from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.gateway.core.events import (
    AbortRequest,
    Code,
    Effect,
    EndStream,
    Event,
    Forget,
    FromWorker,
    Generate,
    Report,
    ReportAnswered,
    ReportLinkUp,
    Resume,
    Scanned,
    SendToWorker,
    StopMatched,
    StreamClosed,
    StreamReady,
    Tick,
    WorkerLinkDown,
)
from deepinfer.gateway.core.record import Choice, Entry, Taken
from deepinfer.gateway.core.reports import ReportSheet
from deepinfer.gateway.core.streams import Stream
from deepinfer.gateway.core.table import Cancels, RequestTable
from deepinfer.kvstore.core.ids import (
    GatewayId,
    Incarnation,
    RequestId,
    Run,
    Seq,
    StreamId,
    WorkerRef,
)
from deepinfer.kvstore.core.messages import (
    Ack,
    Attach,
    Attached,
    AttachRefused,
    Disown,
    Drop,
    Notice,
    Reject,
    ReportReply,
    RequestLevel,
    Tokens,
    ToWorker,
)
from deepinfer.kvstore.core.requests import FinishReason, RequestRecord


class GatewayCore:
    """Keeps the record of each live request and lets one run at a time speak for it."""

    def __init__(
        self, gateway: GatewayId, incarnation: Incarnation, config: GatewayConfig, *, now_ms: int
    ) -> None:
        self.gateway = gateway
        self.incarnation = incarnation
        self.config = config
        self.counters: Counter[str] = Counter()
        self._started_ms = self._refreshed_ms = now_ms
        self._table = RequestTable(config)
        self._streams: dict[StreamId, Stream] = {}
        self._cancels = Cancels(config.max_cancels)
        self._sheet = ReportSheet(gateway, incarnation, config)
        self._effects: list[Effect] = []

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Take one event and return what has to be done, in order."""
        match event:
            case FromWorker(worker, Tokens() as message):
                self._tokens(worker, message, now_ms)
            case StreamReady(stream):
                self._ready(stream, now_ms)
            case FromWorker(worker, Attach() as message):
                self._attach(worker, message, now_ms)
            case FromWorker(_, Notice() as message):
                self._notice(message, now_ms)
            case Scanned(seq, tokens):
                self._scanned(seq, tokens, now_ms)
            case StopMatched(seq, tokens):
                self._stop_matched(seq, tokens, now_ms)
            case Generate():
                self._generate(event, now_ms)
            case Resume():
                self._resume(event, now_ms)
            case StreamClosed(stream):
                self._closed(stream, now_ms)
            case AbortRequest():
                self._abort(event, now_ms)
            case ReportAnswered(reply):
                self._report_answered(reply, now_ms)
            case ReportLinkUp():
                self._sheet.restart()
            case WorkerLinkDown():
                self.counters["worker_links_lost_total"] += 1
            case Tick():
                self._tick(now_ms)
        self._report(now_ms)
        effects, self._effects = self._effects, []
        return effects

    # ---- requests come --------------------------------------------------------------------

    def _generate(self, event: Generate, now_ms: int) -> None:
        record = event.record
        full = self._full(new_request=True, new_stream=True)
        if full is not None:
            self.counters["requests_refused_total"] += 1
            self._end_stream(event.stream, Code.RESOURCE_EXHAUSTED, full)
        elif self._table.get(record.request) is not None:
            self._end_stream(event.stream, Code.ABORTED, f"request id {record.request} is in use")
        else:
            self.counters["requests_total"] += 1
            entry = Entry(record, event.resume_key, 0, now_ms)
            self._add(entry)
            self._open(event.stream, entry, [0] * len(entry.choices), event.include_events)

    def _full(self, *, new_request: bool, new_stream: bool) -> str | None:
        live, streams = self._table.live, len(self._streams)
        if new_request and live >= self.config.max_live_requests:
            return f"{live} live requests, max_live_requests = {self.config.max_live_requests}"
        if new_stream and streams >= self.config.max_streams:
            return f"{streams} streams, max_streams = {self.config.max_streams}"
        return None

    def _resume(self, event: Resume, now_ms: int) -> None:
        entry = self._table.get(event.record.request)
        agrees = entry is not None and all(
            choice.agrees_with(received)
            for choice, received in zip(entry.choices, event.received, strict=False)
        )
        full = self._full(
            new_request=entry is None or (entry.ended and not agrees),
            new_stream=entry is None or entry.stream is None,
        )
        refusal = _resume_refusal(event, entry)
        if refusal is None and full is not None:
            refusal = (Code.UNAVAILABLE, f"gateway {self.gateway} is full: {full}")
        if refusal is not None:
            self._end_stream(event.stream, *refusal)
            return
        if entry is not None and entry.stream is not None:
            self._close(entry, Code.ABORTED, f"attempt {event.claim} has taken over")
        if entry is None or not agrees:
            entry = self._take_over(event, entry)
        else:
            self.counters["resumes_total"] += 1
            self._set_claim(entry, event.claim)
        for choice, received in zip(entry.choices, event.received, strict=True):
            choice.sent = max(choice.sent, len(received))
        cursors = [len(received) for received in event.received]
        self._open(event.stream, entry, cursors, event.include_events)

    def _take_over(self, event: Resume, old: Entry | None) -> Entry:
        """Start a record from what the client has: another gateway was, or is, ahead of this one.

        A run that attached here before does not know what the client knows: it may not go on.
        """
        self.counters["takeovers_total"] += 1
        entry = Entry(event.record, event.resume_key, event.claim, None)
        for choice, received in zip(entry.choices, event.received, strict=True):
            choice.hold(received, event.record)
        if old is not None:
            for choice, before in zip(entry.choices, old.choices, strict=True):
                choice.attached = before.attached
            self._table.remove(old)
        self._add(entry)
        return entry

    def _add(self, entry: Entry) -> None:
        self._table.add(entry)
        for choice in entry.choices:
            self._cancels.drop(choice.seq)
            self._sheet.touch(choice.seq)
            self._scan(choice)

    def _set_claim(self, entry: Entry, claim: int) -> None:
        if claim != entry.claim:
            entry.claim = claim
            for choice in entry.choices:
                if choice.finish is None:
                    self._sheet.touch(choice.seq)

    def _abort(self, event: AbortRequest, now_ms: int) -> None:
        entry = self._table.get(event.request)
        if entry is None:
            self.counters["aborts_total"] += 1
            for choice in range(event.choices):
                self._cancel(_unknown_level(Seq(event.request, choice), event.claim))
        elif event.claim >= entry.claim and not entry.ended:
            self.counters["aborts_total"] += 1
            entry.claim = event.claim
            self._cancel_entry(entry, FinishReason.ABORT, "", now_ms)

    # ---- streams --------------------------------------------------------------------------

    def _open(
        self, stream: StreamId, entry: Entry, cursors: list[int], include_events: bool
    ) -> None:
        self._table.stream_opened(entry)
        entry.stream = stream
        self._streams[stream] = Stream(
            stream,
            entry,
            cursors,
            include_events=include_events,
            max_notices=self.config.max_notices,
        )
        # Accepted is always there to send, so this cannot reach the end of the stream.
        self._pump_stream(self._streams[stream])

    def _ready(self, stream_id: StreamId, now_ms: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.busy = False
            self._pump(stream.entry, now_ms)

    def _closed(self, stream_id: StreamId, now_ms: int) -> None:
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            stream.entry.stream = None
            self._forget_all(self._table.stream_lost(stream.entry, now_ms))

    def _pump(self, entry: Entry, now_ms: int) -> None:
        """Hand the stream its next message, or its end, if it can take one."""
        stream = None if entry.stream is None else self._streams[entry.stream]
        if stream is not None and self._pump_stream(stream):
            self._close(entry, entry.code, entry.message)
            self._forget_all(self._table.stream_lost(entry, now_ms))

    def _pump_stream(self, stream: Stream) -> bool:
        """Hand over the next message, if there is one; return whether all was sent."""
        if stream.busy:
            return False
        message = stream.next_message(self.config.max_delta_tokens)
        if message is None:
            return all(stream.done)
        stream.busy = True
        self._effects.append(message)
        return False

    def _close(self, entry: Entry, code: Code, message: str) -> None:
        """End the entry's stream. What becomes of the entry without one is the caller's to say."""
        if entry.stream is not None:
            del self._streams[entry.stream]
            self._end_stream(entry.stream, code, message)
            entry.stream = None

    def _end_stream(self, stream: StreamId, code: Code, message: str) -> None:
        self._effects.append(EndStream(stream, code, message))

    # ---- workers --------------------------------------------------------------------------

    def _send(self, worker: WorkerRef, message: ToWorker) -> None:
        self._effects.append(SendToWorker(worker, message))

    def _quiet(self, seq: Seq, now_ms: int) -> bool:
        """Whether to leave a run of an unknown sequence unanswered: it may be wanted elsewhere."""
        young = now_ms - self._started_ms < self.config.startup_grace_ms
        return self._cancels.get(seq) is None and (young or self._table.disowned(seq.request))

    def _attach(self, worker: WorkerRef, attach: Attach, now_ms: int) -> None:
        found = self._table.choice(attach.seq)
        if found is None:
            if not self._quiet(attach.seq, now_ms):
                self._refuse(worker, attach, None)
            return
        entry, choice = found
        highest = choice.attached
        if choice.finish is not None:
            self._refuse(worker, attach, None)
            return
        if highest is None or attach.run > highest:
            if choice.worker != worker:  # in place, the newer run has the older one's KV
                self._drop_run(choice)
            choice.attached, choice.worker = attach.run, worker
            self._sheet.touch(choice.seq)
        elif attach.run < highest or choice.worker != worker:
            self._refuse(worker, attach, highest)
            return
        self.counters["attaches_total"] += 1
        self._send(worker, Attached(choice.seq, attach.run, entry.record, choice.token_ids()))

    def _refuse(self, worker: WorkerRef, attach: Attach, highest: Run | None) -> None:
        self.counters["attaches_refused_total"] += 1
        self._send(worker, AttachRefused(attach.seq, attach.run, highest))

    def _tokens(self, worker: WorkerRef, said: Tokens, now_ms: int) -> None:
        found = self._table.choice(said.seq)
        if found is None:
            if not self._quiet(said.seq, now_ms):
                self._send(worker, Drop(said.seq, said.run))
            return
        entry, choice = found
        if choice.attached is None or said.run > choice.attached:
            # It has not attached here (or this gateway has restarted since): it will.
            self.counters["tokens_unattached_total"] += len(said.tokens)
            return
        if said.run < choice.attached or worker != choice.worker:
            self.counters["tokens_outdated_total"] += len(said.tokens)
            self._send(worker, Drop(said.seq, said.run))
            return
        held = len(choice.tokens)
        taken = choice.take(said, entry.record.sampling.max_tokens, now_ms)
        new = len(choice.tokens) - held
        self.counters["tokens_total"] += new
        self.counters[f"tokens_{taken.value}_dropped_total"] += len(said.tokens) - new
        self._send(worker, Ack(said.seq, said.run, len(choice.tokens), choice.finish is not None))
        if taken is Taken.ACCEPTED:
            self._scan(choice)
            if choice.finish is not None:
                self._choice_ended(entry, choice, now_ms)
            self._pump(entry, now_ms)

    def _notice(self, notice: Notice, now_ms: int) -> None:
        found = self._table.choice(notice.seq)
        if found is None:
            return
        entry, choice = found
        if choice.attached is None or notice.run > choice.attached:
            return
        if choice.meter.notice_arrived(notice, now_ms) and entry.stream is not None:
            stream = self._streams[entry.stream]
            if stream.notices is not None:
                stream.notices.append(notice)
                self._pump(entry, now_ms)

    def _drop_run(self, choice: Choice) -> None:
        if choice.worker is not None and choice.attached is not None:
            self._send(choice.worker, Drop(choice.seq, choice.attached))

    # ---- stop strings ---------------------------------------------------------------------

    def _scan(self, choice: Choice) -> None:
        scan = choice.next_scan()
        if scan is not None:
            self._effects.append(scan)

    def _scanned(self, seq: Seq, tokens: int, now_ms: int) -> None:
        found = self._table.choice(seq)
        if found is not None:
            entry, choice = found
            choice.scanned = max(choice.scanned, min(tokens, choice.scan_asked))
            self._pump(entry, now_ms)

    def _stop_matched(self, seq: Seq, tokens: int, now_ms: int) -> None:
        found = self._table.choice(seq)
        if found is None or found[1].complete:
            return
        entry, choice = found
        was_running = choice.finish is None
        choice.stop_at(tokens)
        if was_running:
            self._drop_run(choice)
            self._choice_ended(entry, choice, now_ms)
        self._pump(entry, now_ms)

    # ---- requests end ---------------------------------------------------------------------

    def _choice_ended(self, entry: Entry, choice: Choice, now_ms: int) -> None:
        self._sheet.touch(choice.seq)
        self._forget_all(self._table.choice_ended(entry, now_ms))

    def _cancel_entry(self, entry: Entry, reason: FinishReason, message: str, now_ms: int) -> None:
        for choice in entry.choices:
            if choice.finish is None:
                self._cancel(entry.level(choice, cancelled=True))
                self._drop_run(choice)
                choice.end(reason, message)
                self._choice_ended(entry, choice, now_ms)
        self._pump(entry, now_ms)

    def _cancel(self, level: RequestLevel) -> None:
        self._sheet.touch(level.seq)
        for seq in self._cancels.add(level):
            self._sheet.touch(seq)

    def _forget(self, entry: Entry) -> None:
        """Drop the record of a request without a stream."""
        self._table.remove(entry)
        for choice in entry.choices:
            self._sheet.touch(choice.seq)
        self._effects.append(Forget(entry.record.request))

    def _forget_all(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._forget(entry)

    def _tick(self, now_ms: int) -> None:
        for entry in self._table.take_past_deadline(now_ms):
            self.counters["deadlines_total"] += 1
            self._cancel_entry(entry, FinishReason.DEADLINE, "the deadline has passed", now_ms)
        for entry in self._table.expired_orphans(now_ms):
            self.counters["orphans_total"] += 1
            for choice in entry.choices:
                if choice.finish is None:
                    self._cancel(entry.level(choice, cancelled=True))
                    self._drop_run(choice)
            self._forget(entry)  # a client that comes back after all takes its request over anew
        self._forget_all(self._table.expired_finished(now_ms))

    # ---- the controller -------------------------------------------------------------------

    def _report_answered(self, reply: ReportReply, now_ms: int) -> None:
        if not self._sheet.answered(reply):
            return
        if not reply.resync:
            for seq in self._cancels.take_acknowledged(reply.number):
                self._sheet.touch(seq)
        for disown in reply.disown:
            self._disown(disown, now_ms)
        for reject in reply.reject:
            self._reject(reject, now_ms)

    def _disown(self, disown: Disown, now_ms: int) -> None:
        cancelled = self._cancels.get(disown.seq)
        if cancelled is not None and cancelled.claim < disown.claim:
            self._cancels.drop(disown.seq)
            self._sheet.touch(disown.seq)
        entry = self._table.get(disown.seq.request)
        if entry is None or entry.claim >= disown.claim:
            return
        self.counters["disowned_total"] += 1
        self._close(entry, Code.ABORTED, "another gateway serves a newer attempt")
        self._forget(entry)
        self._table.disown(disown.seq.request, now_ms)

    def _reject(self, reject: Reject, now_ms: int) -> None:
        found = self._table.choice(reject.seq)
        if found is None or found[1].finish is not None:
            return
        self.counters["rejects_total"] += 1
        entry = found[0]
        entry.code = Code.RESOURCE_EXHAUSTED
        entry.message = (
            f"the request needs {reject.blocks_needed} KV blocks, "
            f"the largest pool has {reject.blocks_total}"
        )
        for choice in entry.choices:
            if choice.finish is None:
                self._drop_run(choice)
                choice.end(FinishReason.ERROR, entry.message)
                self._choice_ended(entry, choice, now_ms)
        self._pump(entry, now_ms)

    def _level(self, seq: Seq) -> RequestLevel | None:
        found = self._table.choice(seq)
        if found is not None and found[1].finish is None:
            return found[0].level(found[1])
        return self._cancels.get(seq)

    def _levels(self) -> Iterator[RequestLevel]:
        for entry, choice in self._table.live_choices():
            yield entry.level(choice)
        yield from self._cancels.levels()

    def _report(self, now_ms: int) -> None:
        if now_ms - self._refreshed_ms >= self.config.held_refresh_ms:
            self._refreshed_ms = now_ms
            for _, choice in self._table.live_choices():
                if len(choice.tokens) != choice.reported_tokens:
                    self._sheet.touch(choice.seq)
        report = self._sheet.next_report(now_ms, self._level, self._levels)
        if report is None:
            return
        for level in report.requests:
            if level.cancelled:
                self._cancels.reported(level.seq, report.number, anew=report.complete)
            else:
                found = self._table.choice(level.seq)
                assert found is not None, f"{level.seq} is listed but not held"
                found[1].reported_tokens = level.held_tokens
        self._effects.append(Report(report))

    # ---- looking in -----------------------------------------------------------------------

    def holds(self, request: RequestId) -> bool:
        """Whether there is a record of the request here."""
        return self._table.get(request) is not None

    def snapshot(self) -> dict[str, object]:
        """Return counts for the status document."""
        return {
            "live_requests": self._table.live,
            "max_live_requests": self.config.max_live_requests,
            "kept_requests": len(self._table),
            "streams": len(self._streams),
            "max_streams": self.config.max_streams,
            "counters": dict(sorted(self.counters.items())),
        }

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        assert not self._effects, "effects are handed out with the event that caused them"
        self._table.check()
        self._sheet.check(self._level)
        assert len(self._streams) <= self.config.max_streams
        for stream_id, stream in self._streams.items():
            assert stream.entry.stream == stream_id, f"stream {stream_id} was replaced"
            assert self._table.get(stream.entry.record.request) is stream.entry
            stream.check()
        for level in self._cancels.levels():
            found = self._table.choice(level.seq)
            assert found is None or found[1].finish is not None, f"{level.seq} lives, cancelled"


def _resume_refusal(event: Resume, entry: Entry | None) -> tuple[Code, str] | None:
    """Why a Resume is refused for what it says; None if it may be served."""
    sampling = event.record.sampling
    if len(event.received) != sampling.n:
        return Code.INVALID_ARGUMENT, f"progress of {len(event.received)} choices, n = {sampling.n}"
    longest = max(len(received) for received in event.received)
    if longest > sampling.max_tokens:
        return (
            Code.INVALID_ARGUMENT,
            f"progress of {longest} tokens, max_tokens = {sampling.max_tokens}",
        )
    if entry is None:
        return None
    if not hmac.compare_digest(entry.resume_key.encode(), event.resume_key.encode()):
        return Code.PERMISSION_DENIED, "the resume key is not this request's"
    if event.claim < entry.claim:
        return Code.ABORTED, f"attempt {event.claim} is older than attempt {entry.claim}"
    if not _same_request(entry.record, event.record):
        return Code.INVALID_ARGUMENT, "the request is not the one that was accepted under this id"
    return None


def _same_request(held: RequestRecord, said: RequestRecord) -> bool:
    return held.prompt_ids == said.prompt_ids and held.sampling == said.sampling


def _unknown_level(seq: Seq, claim: int) -> RequestLevel:
    """The level of a sequence of which only its name is known: that it is cancelled."""
    return RequestLevel(
        seq=seq,
        claim=claim,
        cancelled=True,
        prompt_tokens=0,
        max_tokens=0,
        held_tokens=0,
        arrival_ms=0,
        priority=0,
        deadline_ms=None,
        exact=False,
        attached=None,
    )
