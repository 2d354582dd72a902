"""Which requests a gateway keeps, and for how long.

A request is live until its last choice has ended. Live ones without a stream wait out the orphan
grace; ended ones without a stream stay a while, within a bound of bytes, for a client that has
not got the end yet; disowned ones leave only their id behind, for as long as their old runs may
still call.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.gateway.core.record import Choice, Entry
from deepinfer.kvstore.core.ids import RequestId, Seq


class Shelf:
    """Requests by the time they were put here, oldest first (the clock only goes forward)."""

    def __init__(self) -> None:
        self._since_ms: dict[RequestId, int] = {}

    def put(self, request: RequestId, now_ms: int) -> None:
        """Put a request here, as of now."""
        self._since_ms.pop(request, None)
        self._since_ms[request] = now_ms

    def take(self, request: RequestId) -> bool:
        """Take a request away; return whether it was here."""
        return self._since_ms.pop(request, None) is not None

    def take_expired(self, up_to_ms: int) -> list[RequestId]:
        """Take away all that were put here at ``up_to_ms`` or before."""
        expired = []
        for request, since_ms in self._since_ms.items():
            if since_ms > up_to_ms:
                break
            expired.append(request)
        for request in expired:
            del self._since_ms[request]
        return expired

    def __contains__(self, request: RequestId) -> bool:
        return request in self._since_ms

    def __len__(self) -> int:
        return len(self._since_ms)


class RequestTable:
    """Every record, and the clocks that end its stay."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._entries: dict[RequestId, Entry] = {}
        self._deadlines: list[tuple[int, RequestId]] = []
        self._finished = Shelf()
        self._finished_sizes: dict[RequestId, int] = {}
        self._finished_bytes = 0
        self._orphans = Shelf()
        self._disowned = Shelf()
        self.live = 0
        """Requests that have not ended."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, request: RequestId) -> Entry | None:
        """The record of a request, if it is kept."""
        return self._entries.get(request)

    def choice(self, seq: Seq) -> tuple[Entry, Choice] | None:
        """A sequence's record and choice, if they are kept."""
        entry = self._entries.get(seq.request)
        if entry is None or not 0 <= seq.choice < len(entry.choices):
            return None
        return entry, entry.choices[seq.choice]

    def live_choices(self) -> Iterator[tuple[Entry, Choice]]:
        """Every sequence that has not ended."""
        for entry in self._entries.values():
            for choice in entry.choices:
                if choice.finish is None:
                    yield entry, choice

    def disowned(self, request: RequestId) -> bool:
        """Whether another gateway took the request from here a short while ago."""
        return request in self._disowned

    def add(self, entry: Entry) -> None:
        """Keep a new record; its stream is opened next."""
        request, deadline_ms = entry.record.request, entry.record.deadline_ms
        self._entries[request] = entry
        self._disowned.take(request)
        self.live += not entry.ended
        if deadline_ms is not None:
            heapq.heappush(self._deadlines, (deadline_ms, request))

    def remove(self, entry: Entry) -> None:
        """Drop a record."""
        request = entry.record.request
        self.stream_opened(entry)
        self.live -= not entry.ended
        del self._entries[request]

    def disown(self, request: RequestId, now_ms: int) -> None:
        """Remember that another gateway has the request now."""
        self._disowned.put(request, now_ms)

    def stream_opened(self, entry: Entry) -> None:
        """A record has a stream (or is dropped): no clock runs."""
        request = entry.record.request
        self._orphans.take(request)
        if self._finished.take(request):
            self._finished_bytes -= self._finished_sizes.pop(request)

    def stream_lost(self, entry: Entry, now_ms: int) -> list[Entry]:
        """A record has no stream any more; return those that should go early for it."""
        request = entry.record.request
        if not entry.ended:
            self._orphans.put(request, now_ms)
            return []
        self._finished.put(request, now_ms)
        self._finished_sizes[request] = entry.bytes()
        self._finished_bytes += self._finished_sizes[request]
        excess, early = self._finished_bytes - self._config.finished_bytes_max, []
        for oldest, size in self._finished_sizes.items():
            if excess <= 0:
                break
            early.append(self._entries[oldest])
            excess -= size
        return early

    def choice_ended(self, entry: Entry, now_ms: int) -> list[Entry]:
        """A choice of a record has just ended; return those records that should go early."""
        if not entry.ended:
            return []
        self.live -= 1
        return self.stream_lost(entry, now_ms) if self._orphans.take(entry.record.request) else []

    def take_past_deadline(self, now_ms: int) -> list[Entry]:
        """Live records whose deadline has passed; each is returned once."""
        past = []
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            deadline_ms, request = heapq.heappop(self._deadlines)
            entry = self._entries.get(request)
            if entry is not None and entry.record.deadline_ms == deadline_ms and not entry.ended:
                past.append(entry)
        if len(self._deadlines) > 2 * len(self._entries) + 64:  # ended long before their deadline
            self._deadlines = sorted(
                (entry.record.deadline_ms, request)
                for request, entry in self._entries.items()
                if entry.record.deadline_ms is not None
            )
        return past

    def expired_orphans(self, now_ms: int) -> list[Entry]:
        """Live records whose client has not come back in time."""
        expired = self._orphans.take_expired(now_ms - self._config.orphan_grace_ms)
        return [self._entries[request] for request in expired]

    def expired_finished(self, now_ms: int) -> list[Entry]:
        """Ended records that were kept long enough."""
        due = []
        self._disowned.take_expired(now_ms - self._config.orphan_grace_ms)
        for request in self._finished.take_expired(now_ms - self._config.finished_keep_ms):
            self._finished_bytes -= self._finished_sizes.pop(request)
            due.append(self._entries[request])
        return due

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        live = orphans = finished = 0
        for request, entry in self._entries.items():
            entry.check()
            assert entry.record.request == request
            live += not entry.ended
            orphan = entry.stream is None and not entry.ended
            orphans += orphan
            finished += entry.stream is None and entry.ended
            assert (request in self._orphans) == orphan, f"{request}: orphan clock"
            assert (request in self._finished) == (entry.stream is None and entry.ended), (
                f"{request}: clock of ended records"
            )
        assert self.live == live <= self._config.max_live_requests
        assert len(self._orphans) == orphans
        assert len(self._finished) == len(self._finished_sizes) == finished
        assert self._finished_bytes == sum(self._finished_sizes.values())
        assert self._finished_bytes <= self._config.finished_bytes_max
