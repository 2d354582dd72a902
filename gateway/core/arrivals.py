"""Requests come, come back, and are taken over from what their clients know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.gateway.core.draining import Drain
from deepinfer.gateway.core.events import Code, Effect, Generate, Resume
from deepinfer.gateway.core.levels import Levels
from deepinfer.gateway.core.measures import Measures, by_reason
from deepinfer.gateway.core.record import Choice, Entry, resume_refusal
from deepinfer.gateway.core.streams import Streams
from deepinfer.gateway.core.table import RequestTable
from deepinfer.kvstore.core.ids import GatewayId


class Arrivals:
    """Decides what becomes of a Generate or a Resume; works on the core's own parts."""

    def __init__(
        self,
        gateway: GatewayId,
        config: GatewayConfig,
        table: RequestTable,
        levels: Levels,
        streams: Streams,
        drain: Drain,
        counters: Counter[str],
        measures: Measures,
        emit: Callable[[Effect], None],
    ) -> None:
        self._gateway = gateway
        self._config = config
        self._drain = drain
        self._table = table
        self._levels = levels
        self._streams = streams
        self._counters = counters
        self._measures = measures
        self._emit = emit

    def generate(self, event: Generate, now_ms: int) -> None:
        """A new request: keep it, or refuse it."""
        record = event.record
        full = self._full(new_request=True, new_stream=True)
        if self._drain.begun:
            self._counters[by_reason("requests_refused_total", "draining")] += 1
            self._streams.refuse(event.stream, Code.UNAVAILABLE, self._going())
        elif full is not None:
            bound, message = full
            self._counters[by_reason("requests_refused_total", bound)] += 1
            self._streams.refuse(event.stream, Code.RESOURCE_EXHAUSTED, message)
        elif self._table.get(record.request) is not None:
            self._streams.refuse(
                event.stream, Code.ABORTED, f"request id {record.request} is in use"
            )
        else:
            self._counters["requests_total"] += 1
            self._counters["prompt_tokens_total"] += len(record.prompt_ids)
            self._measures.prompt_tokens.observe(len(record.prompt_ids))
            entry = Entry(record, event.resume_key, 0, now_ms, self._measures)
            self._add(entry)
            self._open(event, entry, [0] * len(entry.choices))

    def bound_reached(self) -> tuple[str, str] | None:
        """The bound that keeps new requests out now, if one does, and a sentence about it."""
        return None if self._drain.begun else self._full(new_request=True, new_stream=True)

    def _full(self, *, new_request: bool, new_stream: bool) -> tuple[str, str] | None:
        """The bound that is reached, if one is, and a sentence about it."""
        live, streams, config = self._table.live, len(self._streams), self._config
        if new_request and live >= config.max_live_requests:
            says = f"{live} live requests, max_live_requests = {config.max_live_requests}"
            return "max_live_requests", says
        if new_stream and streams >= config.max_streams:
            return "max_streams", f"{streams} streams, max_streams = {config.max_streams}"
        return None

    def _going(self) -> str:
        return f"gateway {self._gateway} is being stopped and takes no new requests"

    def resume(self, event: Resume, now_ms: int) -> None:
        """A client comes back: go on with its record here, or take it over from what it says."""
        entry = self._table.get(event.record.request)
        agrees = (
            entry is not None
            and entry.choices[0].scores.can_follow(event.scored)
            and all(
                choice.agrees_with(received)
                for choice, received in zip(entry.choices, event.received, strict=False)
            )
        )
        full = self._full(
            new_request=entry is None or (entry.ended and not agrees),
            new_stream=entry is None or entry.stream is None,
        )
        refusal = resume_refusal(event, entry)
        if refusal is None and full is not None:
            refusal = (Code.UNAVAILABLE, f"gateway {self._gateway} is full: {full[1]}")
        if self._drain.over(now_ms) or (entry is None and not self._drain.takes_over()):
            refusal = (Code.UNAVAILABLE, self._going())
        if refusal is not None:
            self._counters["resumes_refused_total"] += 1
            self._streams.refuse(event.stream, *refusal)
            return
        if entry is not None:
            self._streams.close(entry, Code.ABORTED, f"attempt {event.claim} has taken over")
        if entry is None or not agrees:
            entry = self._take_over(event, entry)
        else:
            self._counters["resumes_total"] += 1
            self._set_claim(entry, event.claim)
        precisions = event.precisions or ((),) * len(entry.choices)
        for choice, received, modes in zip(entry.choices, event.received, precisions, strict=True):
            choice.heard_of(received, modes)
        cursors = [len(received) for received in event.received]
        self._open(event, entry, cursors)

    def _take_over(self, event: Resume, old: Entry | None) -> Entry:
        """Start a record from what the client has: another gateway was, or is, ahead of this one.

        A run that attached here before does not know what the client knows: it may not go on.
        """
        self._counters["takeovers_total"] += 1
        entry = Entry(event.record, event.resume_key, event.claim, None, self._measures)
        for choice, received in zip(entry.choices, event.received, strict=True):
            choice.hold(received, event.record)
        entry.choices[0].scores.hold(event.scored, event.record.prompt_ids)
        if old is not None:
            for choice, before in zip(entry.choices, old.choices, strict=True):
                choice.attached = before.attached
            self._table.remove(old)
        self._add(entry)
        return entry

    def _add(self, entry: Entry) -> None:
        self._table.add(entry)
        for choice in entry.choices:
            self._levels.live(choice.seq)
            self.scan(choice)

    def _set_claim(self, entry: Entry, claim: int) -> None:
        if claim != entry.claim:
            entry.claim = claim
            for choice in entry.choices:
                if choice.finish is None:
                    self._levels.touch(choice.seq)

    def _open(self, event: Generate | Resume, entry: Entry, cursors: list[int]) -> None:
        self._table.stream_opened(entry)
        scored = event.scored if isinstance(event, Resume) else 0
        self._streams.open(
            event.stream, entry, cursors, scored=scored, include_events=event.include_events
        )

    def scan(self, choice: Choice) -> None:
        """Ask for the scan that is due, if one is."""
        scan = choice.next_scan()
        if scan is not None:
            self._emit(scan)
