"""The gateway's core: who may speak for a request, and what its client has been told.

Tokens come in through ``Choice.take``, the exactly-once filter, and leave through ``_pump``;
between the two there is only the record. For the controller a sequence ends in one of two ways: it
is gone from the reports (finished, rejected, disowned), or it is listed as cancelled until a report
that says so was answered (aborted, past its deadline, or left by its client).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from deepinfer.gateway.core.arrivals import Arrivals
from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.gateway.core.draining import Drain
from deepinfer.gateway.core.events import (
    AbortRequest,
    Code,
    Effect,
    Event,
    Forget,
    FromWorker,
    Generate,
    Report,
    ReportAnswered,
    ReportLinkUp,
    Resume,
    Scanned,
    StopMatched,
    StreamClosed,
    StreamReady,
    Tick,
    WorkerLinkDown,
)
from deepinfer.gateway.core.levels import Levels
from deepinfer.gateway.core.measures import Measures, by_reason
from deepinfer.gateway.core.record import Choice, Entry
from deepinfer.gateway.core.runs import Runs
from deepinfer.gateway.core.scores import Taken
from deepinfer.gateway.core.streams import Streams
from deepinfer.gateway.core.table import RequestTable
from deepinfer.kvstore.core.ids import (
    GatewayId,
    Incarnation,
    RequestId,
    Seq,
    StreamId,
    WorkerRef,
)
from deepinfer.kvstore.core.messages import (
    Attach,
    Disown,
    Notice,
    Reject,
    RejectReason,
    ReportReply,
    Scores,
    Tokens,
)
from deepinfer.kvstore.core.requests import FinishReason

_NO_FP16 = {
    RejectReason.PLANES_AWAY: "the request is exact, and its KV cannot be computed in FP16: the"
    " weights' lower planes did not return to any card in time (shed_exact_wait_ms)",
    RejectReason.NO_PLANES: "the request is exact, and no card has the weights' lower planes, which"
    " FP16 needs (start_shed)",
}


class GatewayCore:
    """Keeps the record of each live request and lets one run at a time speak for it."""

    def __init__(
        self, gateway: GatewayId, incarnation: Incarnation, config: GatewayConfig, *, now_ms: int
    ) -> None:
        self.gateway = gateway
        self.incarnation = incarnation
        self.config = config
        self.counters: Counter[str] = Counter()
        """Totals by name; where a total is kept by reason, as ``name{reason="..."}``."""
        self.measures = Measures()
        self._table = RequestTable(config)
        self._levels = Levels(self._table, gateway, incarnation, config, now_ms=now_ms)
        self._effects: list[Effect] = []
        self._streams = Streams(config, self._effects.append)
        self._drain = Drain()
        self._runs = Runs(
            config, self._table, self._levels, self.counters, self._effects.append, now_ms=now_ms
        )
        self._arrivals = Arrivals(
            gateway,
            config,
            self._table,
            self._levels,
            self._streams,
            self._drain,
            self.counters,
            self.measures,
            self._effects.append,
        )

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Take one event and return what has to be done, in order."""
        match event:
            case FromWorker(worker, Tokens() as message):
                self._tokens(worker, message, now_ms)
            case StreamReady(stream):
                self._ready(stream, now_ms)
            case FromWorker(worker, Attach() as message):
                self._runs.attach(worker, message, now_ms)
            case FromWorker(worker, Scores() as message):
                self._scores(worker, message, now_ms)
            case FromWorker(_, Notice() as message):
                self._notice(message, now_ms)
            case Scanned(seq, tokens):
                self._scanned(seq, tokens, now_ms)
            case StopMatched(seq, tokens):
                self._stop_matched(seq, tokens, now_ms)
            case Generate():
                self._arrivals.generate(event, now_ms)
            case Resume():
                self._arrivals.resume(event, now_ms)
            case StreamClosed(stream):
                self._closed(stream, now_ms)
            case AbortRequest():
                self._abort(event, now_ms)
            case ReportAnswered(reply):
                self._report_answered(reply, now_ms)
            case ReportLinkUp():
                self._levels.restart()
            case WorkerLinkDown():
                self.counters["worker_links_lost_total"] += 1
            case Tick():
                self._tick(now_ms)
        report = self._levels.next_report(now_ms)
        if report is not None:
            if self._drain.begun:
                report = replace(report, draining=True, drained=self._drained(now_ms))
            self._effects.append(Report(report))
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    # ---- requests end early ---------------------------------------------------------------

    def _abort(self, event: AbortRequest, now_ms: int) -> None:
        entry = self._table.get(event.request)
        if entry is None:
            self.counters["aborts_total"] += 1
            self._levels.cancel_unknown(event.request, event.choices, event.claim)
        elif event.claim >= entry.claim and not entry.ended:
            self.counters["aborts_total"] += 1
            entry.claim = event.claim
            self._cancel_entry(entry, FinishReason.ABORT, "", now_ms)

    # ---- streams --------------------------------------------------------------------------

    def _ready(self, stream: StreamId, now_ms: int) -> None:
        entry = self._streams.written(stream)
        if entry is not None:
            self._pump(entry, now_ms)

    def _closed(self, stream: StreamId, now_ms: int) -> None:
        entry = self._streams.lost(stream)
        if entry is not None:
            self._forget_all(self._table.stream_lost(entry, now_ms))

    def _pump(self, entry: Entry, now_ms: int) -> None:
        if self._streams.pump(entry):
            self._forget_all(self._table.stream_lost(entry, now_ms))

    # ---- workers --------------------------------------------------------------------------

    def _scores(self, worker: WorkerRef, said: Scores, now_ms: int) -> None:
        found = self._runs.speaks(worker, said, now_ms)
        if found is None:
            return
        entry, choice = found
        running = choice.finish is None
        taken = choice.scores.take(said, entry.record.prompt_ids) if running else Taken.ENDED
        if taken is Taken.CONTRADICTING:
            self.counters[taken.value] += len(said.tokens)
            self._runs.contradicted(choice)
            return
        self._runs.acknowledge(worker, choice, said.run)
        if taken is Taken.ACCEPTED:
            self._pump(entry, now_ms)

    def _tokens(self, worker: WorkerRef, said: Tokens, now_ms: int) -> None:
        found = self._runs.speaks(worker, said, now_ms)
        if found is None:
            return
        entry, choice = found
        held = len(choice.tokens)
        taken = choice.take(said, entry.record.sampling.max_tokens, now_ms)
        new = len(choice.tokens) - held
        self.counters["tokens_total"] += new
        self.counters[taken.value] += len(said.tokens) - new
        if taken is Taken.CONTRADICTING:
            self._runs.contradicted(choice)
            return
        self._runs.acknowledge(worker, choice, said.run)
        if taken is Taken.ACCEPTED:
            self._arrivals.scan(choice)
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
        if choice.meter.notice_arrived(notice, now_ms):
            self._streams.notice(entry, notice)
            self._pump(entry, now_ms)

    # ---- stop strings ---------------------------------------------------------------------

    def _scanned(self, seq: Seq, tokens: int, now_ms: int) -> None:
        found = self._table.choice(seq)
        if found is not None:
            entry, choice = found
            choice.scanned = max(choice.scanned, min(tokens, choice.scan_asked))
            self._count_end(choice, now_ms)
            self._pump(entry, now_ms)

    def _stop_matched(self, seq: Seq, tokens: int, now_ms: int) -> None:
        found = self._table.choice(seq)
        if found is None or found[1].complete:
            return
        entry, choice = found
        was_running = choice.finish is None
        choice.stop_at(tokens)
        if was_running:
            self._runs.drop(choice)
            self._choice_ended(entry, choice, now_ms)
        else:
            self._count_end(choice, now_ms)
        self._pump(entry, now_ms)

    # ---- requests end ---------------------------------------------------------------------

    def _choice_ended(self, entry: Entry, choice: Choice, now_ms: int) -> None:
        self._count_end(choice, now_ms)
        self._levels.touch(choice.seq)
        self._forget_all(self._table.choice_ended(entry, now_ms))

    def _count_end(self, choice: Choice, now_ms: int) -> None:
        """Count a choice that has ended, once it is known where: a stop string may cut it."""
        if choice.finish is not None and choice.complete and not choice.meter.over:
            self.counters[by_reason("requests_finished_total", choice.finish.value)] += 1
            choice.meter.ended(len(choice.tokens), now_ms)

    def _cancel_entry(self, entry: Entry, reason: FinishReason, message: str, now_ms: int) -> None:
        for choice in entry.choices:
            if choice.finish is None:
                self._levels.cancel(entry.level(choice, cancelled=True))
                self._runs.drop(choice)
                choice.end(reason, message)
                self._choice_ended(entry, choice, now_ms)
        self._pump(entry, now_ms)

    def _forget(self, entry: Entry) -> None:
        """Drop the record of a request without a stream."""
        self._table.remove(entry)
        for choice in entry.choices:
            self._levels.touch(choice.seq)
        self._effects.append(Forget(entry.record.request))

    def _forget_all(self, entries: list[Entry]) -> None:
        for entry in entries:
            self._forget(entry)

    def _tick(self, now_ms: int) -> None:
        for entry in self._table.take_past_deadline(now_ms):
            self.counters["deadlines_total"] += 1
            self._cancel_entry(entry, FinishReason.DEADLINE, self._late(entry), now_ms)
        for entry in self._streams.unread(now_ms):
            self.counters["streams_unread_total"] += 1
            message = f"no message was read for {self.config.unread_ms / 1000:g} s: resume"
            self._streams.close(entry, Code.UNAVAILABLE, message)
            self._forget_all(self._table.stream_lost(entry, now_ms))
        for entry in self._table.expired_orphans(now_ms):
            self.counters["orphans_total"] += 1
            for choice in entry.choices:
                if choice.finish is None:
                    self.counters[by_reason("requests_finished_total", "orphan")] += 1
                    self._levels.cancel(entry.level(choice, cancelled=True))
                    self._runs.drop(choice)
            self._forget(entry)  # a client that comes back after all takes its request over anew
        self._forget_all(self._table.expired_finished(now_ms))
        if self._drain.over(now_ms):
            self._send_away(now_ms)

    def _late(self, entry: Entry) -> str:
        """Whose deadline has passed."""
        record, lifetime_ms = entry.record, self.config.lifetime_ms
        assert record.deadline_ms is not None, "it has passed"
        if record.deadline_ms - record.arrival_ms < lifetime_ms:
            return "the deadline has passed"
        return f"it has not ended within {lifetime_ms / 1000:g} s (request_timeout)"

    def _send_away(self, now_ms: int) -> None:
        """End every stream that is left: its client goes on at another gateway."""
        for entry in self._streams.entries():
            self.counters["streams_sent_away_total"] += 1
            message = f"gateway {self.gateway} is being stopped: resume at another one"
            self._streams.close(entry, Code.UNAVAILABLE, message)
            self._forget_all(self._table.stream_lost(entry, now_ms))

    def _drained(self, now_ms: int) -> bool:
        """Whether this life may end: no client waits here, nor will one come back here."""
        nobody_waits = not self._table.live or self._drain.over(now_ms)
        return self._drain.begun and nobody_waits and not len(self._streams)

    # ---- the controller -------------------------------------------------------------------

    def _report_answered(self, reply: ReportReply, now_ms: int) -> None:
        if not self._levels.answered(reply):
            return
        if reply.drain is not None:
            self._drain.ordered(reply.drain, now_ms)
        for disown in reply.disown:
            self._disown(disown, now_ms)
        for reject in reply.reject:
            self._reject(reject, now_ms)

    def _disown(self, disown: Disown, now_ms: int) -> None:
        self._levels.disown(disown.seq, disown.claim)
        entry = self._table.get(disown.seq.request)
        if entry is None or entry.claim >= disown.claim:
            return
        self.counters["disowned_total"] += 1
        self._streams.close(entry, Code.ABORTED, "another gateway serves a newer attempt")
        self._forget(entry)
        self._table.disown(disown.seq.request, now_ms)

    def _reject(self, reject: Reject, now_ms: int) -> None:
        found = self._table.choice(reject.seq)
        if found is None or found[1].finish is not None:
            return
        self.counters[by_reason("requests_refused_total", "no_pool")] += 1
        entry = found[0]
        entry.code = Code.RESOURCE_EXHAUSTED
        if reject.why is RejectReason.TOO_LARGE:
            entry.message = (
                f"the request needs {reject.blocks_needed} KV blocks, "
                f"the largest pool has {reject.blocks_total}"
            )
        else:
            entry.message = _NO_FP16[reject.why]
        for choice in entry.choices:
            if choice.finish is None:
                self._runs.drop(choice)
                choice.end(FinishReason.ERROR, entry.message, entry.code.value)
                self._choice_ended(entry, choice, now_ms)
        self._pump(entry, now_ms)

    # ---- looking in -----------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """Whether new requests are refused because this gateway is to be stopped."""
        return self._drain.begun

    @property
    def takes_over(self) -> bool:
        """Whether requests that other gateways have accepted may come here: also while it drains,
        if clients have nowhere else to go."""
        return self._drain.takes_over()

    def bound_reached(self) -> tuple[str, str] | None:
        """The bound that keeps new requests out now, if one does, and a sentence about it."""
        return self._arrivals.bound_reached()

    @property
    def live_requests(self) -> int:
        """Requests that have not ended."""
        return self._table.live

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
            "draining": self._drain.begun,
        }

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        assert not self._effects, "effects are handed out with the event that caused them"
        self._table.check()
        self._levels.check()
        self._streams.check()
