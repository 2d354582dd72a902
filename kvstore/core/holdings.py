"""Who holds which pages and bytes: tickets, puts that write, reads that copy.

Pages come back when their last user has let go of them. A put keeps its pages *parked*
(quarantined) when its ticket is gone before its writer has stopped; a dropped payload lingers
until its readers have left. Both count against the budget.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from deepinfer.kvstore.core.budget import Budget
from deepinfer.kvstore.core.events import PutId, ReadId
from deepinfer.kvstore.core.ids import Incarnation, Ticket, WorkerRef
from deepinfer.kvstore.core.pages import PagePool
from deepinfer.kvstore.core.puts import Entry, Put


class Holdings:
    """The memory of one store's life: ``budget_bytes // page_bytes`` pages."""

    def __init__(self, incarnation: Incarnation, budget_bytes: int, page_bytes: int) -> None:
        self.budget = Budget(budget_bytes)
        self.pool = PagePool(budget_bytes // page_bytes)
        self.page_bytes = page_bytes
        self.puts: dict[PutId, Put] = {}
        """Whose writer has not let go."""
        self.reads: dict[ReadId, Entry] = {}
        self._incarnation = incarnation
        self._minted = 0
        self._grace: list[tuple[int, PutId]] = []  # heap; puts that are gone are skipped

    @property
    def pages_quarantined(self) -> int:
        """Pages of parked puts."""
        return sum(len(put.pages) for put in self.puts.values() if put.parked)

    # ---- tickets ----

    def fits(self, payload_bytes: int) -> bool:
        """Whether that much may be taken."""
        pages = -(-payload_bytes // self.page_bytes)
        return self.budget.fits(payload_bytes) and pages <= self.pool.free

    def take(self, payload_bytes: int) -> tuple[int, ...]:
        """Take bytes and the pages for them; the caller has asked ``fits``."""
        self.budget.take(payload_bytes)
        return self.pool.take(-(-payload_bytes // self.page_bytes))

    def keep_only(self, entry: Entry, payload_bytes: int) -> None:
        """Give back what the entry has beyond ``payload_bytes``, a whole number of pages."""
        pages = payload_bytes // self.page_bytes
        self._free(entry.pages[pages:], entry.payload_bytes - payload_bytes)
        entry.pages = entry.pages[:pages]
        entry.payload_bytes = payload_bytes

    def drop(self, entry: Entry) -> Put | None:
        """The entry is no ticket any more. Return the put whose writer has to be told."""
        if entry.readers:
            entry.dropped = True
            return None
        put = self.put_of(entry)
        if put is None:
            self._free(entry.pages, entry.payload_bytes)
            return None
        self._free(entry.pages[len(put.pages) :], entry.payload_bytes - put.payload_bytes)
        put.parked = True
        return put

    # ---- puts ----

    def put_of(self, entry: Entry) -> Put | None:
        """The entry's put, if its writer has not let go."""
        return None if entry.put is None else self.puts.get(entry.put)

    def begin_put(self, entry: Entry, payload_bytes: int, *, shared: bool) -> Put:
        """Lend the first of the entry's pages to its writer."""
        put = Put(
            id=PutId(self._incarnation, self._mint()),
            ticket=entry.ticket,
            writer=entry.writer,
            payload_bytes=payload_bytes,
            pages=entry.pages[: payload_bytes // self.page_bytes],
            shared=shared,
        )
        self.puts[put.id] = put
        entry.put = put.id
        entry.manifest = None
        return put

    def replace_pages(self, entry: Entry, put: Put) -> None:
        """Park the entry's put and give the entry other pages; the caller has asked ``fits``."""
        count = len(put.pages)
        entry.pages = (*self.take(put.payload_bytes), *entry.pages[count:])
        put.parked = True

    def let_go(self, put_id: PutId) -> Put | None:
        """The put's writer will not write any more. Return the put, if that is news."""
        put = self.puts.pop(put_id, None)
        if put is not None and put.parked:
            self._free(put.pages, put.payload_bytes)
        return put

    def writer_gone(self, writer: WorkerRef, free_ms: int) -> None:
        """A writer's process has exited: what it held is let go of at ``free_ms``.

        Only where it wrote itself: the store's own handlers speak for the rest.
        """
        for put in self.puts.values():
            if put.writer == writer and put.shared:
                heapq.heappush(self._grace, (free_ms, put.id))

    def tick(self, now_ms: int) -> None:
        """Let go of what dead writers held, where the time has come."""
        while self._grace and self._grace[0][0] <= now_ms:
            self.let_go(heapq.heappop(self._grace)[1])

    # ---- reads ----

    def begin_get(self, entry: Entry) -> ReadId:
        """Pin the entry's pages."""
        read = ReadId(self._incarnation, self._mint())
        self.reads[read] = entry
        entry.readers += 1
        return read

    def end_get(self, read: ReadId) -> None:
        """Unpin them; a read that has ended already is ignored."""
        entry = self.reads.pop(read, None)
        if entry is None:
            return
        entry.readers -= 1
        if entry.dropped and entry.readers == 0:
            self._free(entry.pages, entry.payload_bytes)

    def _free(self, pages: tuple[int, ...], payload_bytes: int) -> None:
        self.pool.give_back(pages)
        self.budget.give_back(payload_bytes)

    def _mint(self) -> int:
        self._minted += 1
        return self._minted

    def check(self, tickets: Mapping[Ticket, Entry]) -> None:
        """Every page is free, held or quarantined exactly once; the bytes add up."""
        entries = list(tickets.values())
        for entry in self.reads.values():
            if entry.dropped and not any(entry is other for other in entries):
                entries.append(entry)
        parked = [put for put in self.puts.values() if put.parked]
        held = [page for entry in entries for page in entry.pages]
        held += [page for put in parked for page in put.pages]
        used = sum(entry.payload_bytes for entry in entries)
        used += sum(put.payload_bytes for put in parked)
        self.pool.check(held)
        self.budget.check()
        assert used == self.budget.used, (used, self.budget)
        for entry in entries:
            entry.check()
            readers = sum(1 for reading in self.reads.values() if reading is entry)
            assert readers == entry.readers, entry
        for put_id, put in self.puts.items():
            assert put.id == put_id, put
            owner = tickets.get(put.ticket)
            assert put.parked == (owner is None or owner.put != put_id), (put, owner)
            if not put.parked:
                assert owner is not None
                assert not owner.committed, (put, owner)
                assert owner.manifest is None, (put, owner)
                assert owner.pages[: len(put.pages)] == put.pages, (put, owner)
