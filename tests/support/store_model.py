"""What a StoreCore should be: a model that recounts everything on every question."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from deepinfer.kvstore.core.events import PutId, ReadId
from deepinfer.kvstore.core.ids import Ticket, WorkerId, WorkerRef

PAGE = 10
PAGES = 9
BUDGET = PAGE * PAGES + 7


@dataclass
class Payload:
    """A ticket in the model."""

    writer: WorkerRef
    bytes: int
    expires_ms: int
    writing: PutId | None = None
    ready: PutId | None = None
    committed: bool = False


class Writing(NamedTuple):
    """A put whose writer has not let go."""

    ticket: Ticket
    writer: WorkerRef
    bytes: int
    pages: tuple[int, ...]
    shared: bool
    dies_ms: int | None


class Reading(NamedTuple):
    """A read that has not ended."""

    ticket: Ticket
    bytes: int
    pages: tuple[int, ...]
    stamp: PutId


@dataclass
class Model:
    """What the store should be."""

    epoch: int = 0
    tickets: dict[Ticket, Payload] = field(default_factory=dict)
    sealed: set[Ticket] = field(default_factory=set)
    lowest: dict[WorkerId, int] = field(default_factory=dict)
    puts: dict[PutId, Writing] = field(default_factory=dict)
    reads: dict[ReadId, Reading] = field(default_factory=dict)

    def parked(self) -> dict[PutId, Writing]:
        return {
            put: writing
            for put, writing in self.puts.items()
            if writing.ticket not in self.tickets or self.tickets[writing.ticket].writing != put
        }

    def used(self) -> list[int]:
        """Bytes of every holder: tickets, quarantined puts, dropped tickets still being read."""
        lingering = {r.ticket: r.bytes for r in self.reads.values() if r.ticket not in self.tickets}
        return [
            *(payload.bytes for payload in self.tickets.values()),
            *(writing.bytes for writing in self.parked().values()),
            *lingering.values(),
        ]

    def fits(self, more: int) -> bool:
        used = [*self.used(), more]
        return sum(used) <= BUDGET and sum(-(-count // PAGE) for count in used) <= PAGES

    def drop(self, ticket: Ticket) -> None:
        del self.tickets[ticket]
        self.sealed.add(ticket)

    def end_lives(self, worker: WorkerId, lowest: int) -> None:
        self.lowest[worker] = max(lowest, self.lowest.get(worker, 0))
        for ticket, payload in list(self.tickets.items()):
            life = payload.writer.incarnation
            if payload.writer.worker == worker and life < lowest and not payload.committed:
                self.drop(ticket)
