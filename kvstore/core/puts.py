"""What a store keeps about a ticket, about a put under way, and about what never may commit."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.kvstore.core.events import PutId
from deepinfer.kvstore.core.ids import Incarnation, Ticket, WorkerId, WorkerRef
from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.core.messages import TicketLevel, TicketState


@dataclass(slots=True, eq=False)
class Entry:
    """One ticket: a reservation until ``committed``, then a payload.

    ``pages`` covers ``payload_bytes``; while a put is under way its pages are the first of them.
    """

    ticket: Ticket
    writer: WorkerRef
    payload_bytes: int
    pages: tuple[int, ...]
    expires_ms: int
    put: PutId | None = None
    """The latest put."""
    manifest: Manifest | None = None
    """Set when the latest put has finished and fits."""
    committed: bool = False
    readers: int = 0
    dropped: bool = False
    """No longer a ticket; kept only for its readers."""

    def level(self) -> TicketLevel:
        """What a report says about it."""
        if self.committed:
            assert self.manifest is not None, self
            return TicketLevel(
                self.ticket,
                TicketState.COMMITTED,
                self.payload_bytes,
                self.manifest.tokens,
                self.manifest.blocks,
            )
        return TicketLevel(
            self.ticket, TicketState.RESERVED, self.payload_bytes, 0, len(self.pages)
        )

    def check(self) -> None:
        """Restate the invariants of one entry."""
        assert self.payload_bytes > 0, self
        assert self.pages, self
        assert self.readers >= 0, self
        if self.committed:
            assert self.manifest is not None, self
            assert self.manifest.payload_bytes == self.payload_bytes, self
            assert self.manifest.blocks == len(self.pages), self
        else:
            assert self.readers == 0, self
        if self.dropped:
            assert self.readers > 0, self


@dataclass(slots=True, eq=False)
class Put:
    """One writer's hold on pages. While ``parked`` is false they also belong to the ticket."""

    id: PutId
    ticket: Ticket
    writer: WorkerRef
    payload_bytes: int
    pages: tuple[int, ...]
    shared: bool
    parked: bool = False
    """Quarantined: the ticket let go of the pages, the writer has not."""


class Sealed:
    """Tickets that will never be committed (again), as many as fit: the oldest goes first.

    Forgetting one is safe for the payload: an unknown ticket can be neither put nor committed. It
    could only be reserved again by a call that was under way all the while, and that expires.
    """

    __slots__ = ("_count_max", "_tickets")

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._tickets: dict[Ticket, None] = {}

    def __contains__(self, ticket: Ticket) -> bool:
        return ticket in self._tickets

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, ticket: Ticket) -> None:
        """Remember one, as the newest."""
        self._tickets.pop(ticket, None)
        self._tickets[ticket] = None
        if len(self._tickets) > self._count_max:
            del self._tickets[next(iter(self._tickets))]


class Lives:
    """The lowest life of each worker that may still write; the oldest entry is forgotten first."""

    __slots__ = ("_count_max", "_lowest")

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._lowest: dict[WorkerId, Incarnation] = {}

    def departed(self, writer: WorkerRef) -> bool:
        """Whether this life is known to be over."""
        return writer.incarnation < self._lowest.get(writer.worker, writer.incarnation)

    def end_below(self, worker: WorkerId, lowest: Incarnation) -> bool:
        """Lives of ``worker`` below ``lowest`` are over. Return whether that is news."""
        if self._lowest.get(worker, Incarnation(lowest - 1)) >= lowest:
            return False
        self._lowest.pop(worker, None)
        self._lowest[worker] = lowest
        if len(self._lowest) > self._count_max:
            del self._lowest[next(iter(self._lowest))]
        return True
