"""The KV store's decisions: who may hold how many bytes, and which payloads are visible.

A payload becomes visible only by Reserve, BeginPut, FinishPut and Commit, in this order and by one
writer life. Resolve seals whatever has not got that far. Pages come back when their last user has
let go of them: the ticket, the put that writes them (``quarantined`` once the ticket is gone) and
the reads that copy from them.
"""

from __future__ import annotations

import heapq
from typing import assert_never

from deepinfer.kvstore.core.config import StoreConfig, StoreConfigError
from deepinfer.kvstore.core.events import (
    AbortPut,
    Answer,
    BeginGet,
    BeginPut,
    Call,
    Commit,
    Effect,
    EndGet,
    Event,
    FinishPut,
    GetGrant,
    PutGrant,
    Reply,
    Report,
    ReportAnswered,
    ReportLinkUp,
    Resolve,
    RevokePut,
    Tick,
    WriterGone,
)
from deepinfer.kvstore.core.holdings import Holdings
from deepinfer.kvstore.core.ids import Incarnation, NodeId, StoreId, Ticket, WorkerId, WorkerRef
from deepinfer.kvstore.core.messages import (
    Release,
    ReportReply,
    Reserve,
    StoreReply,
    StoreReport,
    StoreStatus,
    TicketLevel,
)
from deepinfer.kvstore.core.puts import Entry, Lives, Sealed
from deepinfer.kvstore.core.reports import Ledger


class StoreCore:
    """One life of one store.

    ``page_bytes`` is the bytes of one block, as every payload's ``block_bytes``; the store has
    ``budget_bytes // page_bytes`` pages.
    """

    def __init__(
        self,
        *,
        store: StoreId,
        incarnation: Incarnation,
        node: NodeId,
        budget_bytes: int,
        page_bytes: int,
        config: StoreConfig,
    ) -> None:
        if budget_bytes < 0:
            raise StoreConfigError("budget_bytes", budget_bytes, "0 or more")
        if page_bytes < 1:
            raise StoreConfigError("page_bytes", page_bytes, "1 or more")
        self.store = store
        self.incarnation = incarnation
        self.node = node
        self.page_bytes = page_bytes
        self.config = config
        self.epoch_seen = 0
        self.counters = dict.fromkeys(
            ("reserved", "rejected", "committed", "released", "sealed", "expired", "bad_payloads"),
            0,
        )
        self._memory = Holdings(incarnation, budget_bytes, page_bytes)
        self._entries: dict[Ticket, Entry] = {}
        self._sealed = Sealed(config.sealed_max)
        self._lives = Lives(config.writers_max)
        self._expiry: list[tuple[int, Ticket]] = []  # heap; stale entries are dropped when popped
        self._ledger = Ledger(config.report_interval_ms)
        self._reported_used = 0

    # ---- reading ----

    @property
    def budget_bytes(self) -> int:
        """Bytes that may be used."""
        return self._memory.budget.bytes_max

    @property
    def used_bytes(self) -> int:
        """Reserved, committed and quarantined bytes."""
        return self._memory.budget.used

    @property
    def pages_touched(self) -> int:
        """Every page ever granted is below this: how far the shell must have mapped slabs."""
        return self._memory.pool.touched

    def levels(self) -> tuple[TicketLevel, ...]:
        """Every ticket."""
        return tuple(entry.level() for entry in self._entries.values())

    def snapshot(self) -> dict[str, int]:
        """Numbers for status and metrics."""
        committed = [entry for entry in self._entries.values() if entry.committed]
        return {
            "incarnation": self.incarnation,
            "epoch_seen": self.epoch_seen,
            "budget_bytes": self._memory.budget.bytes_max,
            "used_bytes": self._memory.budget.used,
            "page_bytes": self.page_bytes,
            "pages_total": self._memory.pool.total,
            "pages_free": self._memory.pool.free,
            "pages_quarantined": self._memory.pages_quarantined,
            "tickets_reserved": len(self._entries) - len(committed),
            "tickets_committed": len(committed),
            "committed_bytes": sum(entry.payload_bytes for entry in committed),
            "puts": len(self._memory.puts),
            "reads": len(self._memory.reads),
            **self.counters,
        }

    # ---- events ----

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Take one event; return what is to be done, in order."""
        effects: list[Effect] = []
        match event:
            case Call(call, body):
                effects.append(Answer(call, self._answer(body, now_ms, effects)))
            case AbortPut(put):
                self._memory.let_go(put)
            case EndGet(read):
                self._memory.end_get(read)
            case WriterGone(writer):
                self._writer_gone(writer, now_ms, effects)
            case ReportAnswered(reply):
                self._report_answered(reply)
            case ReportLinkUp():
                self._ledger.start_over()
            case Tick():
                self._tick(now_ms, effects)
            case _:
                assert_never(event)
        self._report_if_due(now_ms, effects)
        return effects

    def _answer(
        self,
        body: Reserve | Release | BeginPut | FinishPut | Commit | Resolve | BeginGet,
        now_ms: int,
        effects: list[Effect],
    ) -> Reply:
        match body:
            case Reserve():
                return self._reply(body.ticket, self._reserve(body, now_ms, effects))
            case Release():
                return self._reply(body.ticket, self._release(body, effects))
            case BeginPut():
                return self._begin_put(body, now_ms, effects)
            case FinishPut():
                return self._reply(body.ticket, self._finish_put(body, now_ms))
            case Commit():
                return self._reply(body.ticket, self._commit(body))
            case Resolve():
                return self._reply(body.ticket, self._resolve(body, effects))
            case BeginGet():
                return self._begin_get(body)
            case _:
                assert_never(body)

    def _reply(self, ticket: Ticket, status: StoreStatus) -> StoreReply:
        return StoreReply(ticket, status, self._memory.budget.used, self._memory.budget.bytes_max)

    # ---- the controller's calls ----

    def _reserve(self, call: Reserve, now_ms: int, effects: list[Effect]) -> StoreStatus:
        if call.epoch < self.epoch_seen:
            return StoreStatus.STALE_EPOCH
        self.epoch_seen = call.epoch
        self._end_lives(call.writer.worker, call.writer.incarnation, effects)
        if call.ticket in self._sealed:
            return StoreStatus.SEALED
        entry = self._entries.get(call.ticket)
        if entry is not None:
            if entry.writer != call.writer:
                return StoreStatus.NOT_YOURS
            if entry.committed:
                return StoreStatus.COMMITTED
            entry.expires_ms = now_ms + self.config.reservation_ms
            return StoreStatus.OK
        if self._lives.departed(call.writer):
            return StoreStatus.NOT_YOURS
        if call.bytes_max < 1:
            return StoreStatus.BAD_PAYLOAD
        if not self._memory.fits(call.bytes_max):
            self.counters["rejected"] += 1
            return StoreStatus.OVER_BUDGET
        if len(self._entries) >= self.config.tickets_max:
            self.counters["rejected"] += 1
            return StoreStatus.TOO_MANY
        expires_ms = now_ms + self.config.reservation_ms
        self._entries[call.ticket] = Entry(
            ticket=call.ticket,
            writer=call.writer,
            payload_bytes=call.bytes_max,
            pages=self._memory.take(call.bytes_max),
            expires_ms=expires_ms,
        )
        heapq.heappush(self._expiry, (expires_ms, call.ticket))
        self._ledger.changed(call.ticket)
        self.counters["reserved"] += 1
        return StoreStatus.OK

    def _release(self, call: Release, effects: list[Effect]) -> StoreStatus:
        if call.epoch < self.epoch_seen:
            return StoreStatus.STALE_EPOCH
        self.epoch_seen = call.epoch
        entry = self._entries.get(call.ticket)
        if entry is None:
            # Also what overtook its own Reserve: that one must find the door shut.
            self._sealed.add(call.ticket)
        else:
            self._drop(entry, effects)
            self.counters["released"] += 1
        return StoreStatus.OK

    # ---- the writer's calls ----

    def _begin_put(self, call: BeginPut, now_ms: int, effects: list[Effect]) -> PutGrant:
        def refuse(status: StoreStatus) -> PutGrant:
            return PutGrant(call.ticket, status, None, ())

        entry = self._writers_entry(call.ticket, call.writer, call.incarnation)
        if isinstance(entry, StoreStatus):
            return refuse(entry)
        if entry.committed:
            return refuse(StoreStatus.COMMITTED)
        whole = call.payload_bytes % self.page_bytes == 0
        if not whole or not 0 < call.payload_bytes <= entry.payload_bytes:
            self.counters["bad_payloads"] += 1
            return refuse(StoreStatus.BAD_PAYLOAD)
        old = self._memory.put_of(entry)
        if old is not None:
            # Its writer may still be writing: those pages stay with it and others take their place.
            if not self._memory.fits(old.payload_bytes):
                self.counters["rejected"] += 1
                return refuse(StoreStatus.OVER_BUDGET)
            self._memory.replace_pages(entry, old)
            effects.append(RevokePut(old.id, old.writer, old.shared))
        put = self._memory.begin_put(entry, call.payload_bytes, shared=call.shared)
        entry.expires_ms = now_ms + self.config.reservation_ms
        return PutGrant(call.ticket, StoreStatus.OK, put.id, put.pages)

    def _finish_put(self, call: FinishPut, now_ms: int) -> StoreStatus:
        put = self._memory.puts.get(call.put)
        if put is not None and put.ticket != call.ticket:
            return StoreStatus.NOT_YOURS
        entry = self._entries.get(call.ticket)
        current = entry is not None and entry.put == call.put
        self._memory.let_go(call.put)
        if entry is None:
            return self._absent(call.ticket)
        if not current:
            return StoreStatus.NOT_YOURS
        if entry.committed or entry.manifest is not None:
            return StoreStatus.OK
        if put is None:
            return StoreStatus.BAD_PAYLOAD
        manifest = call.manifest
        if not (
            call.hash_ok
            and call.received_bytes == put.payload_bytes == manifest.payload_bytes
            and manifest.block_bytes == self.page_bytes
            and manifest.run == call.ticket.run
        ):
            self.counters["bad_payloads"] += 1
            return StoreStatus.BAD_PAYLOAD
        entry.manifest = manifest
        entry.expires_ms = now_ms + self.config.reservation_ms
        return StoreStatus.OK

    def _commit(self, call: Commit) -> StoreStatus:
        entry = self._writers_entry(call.ticket, call.writer, call.incarnation)
        if isinstance(entry, StoreStatus):
            return entry
        if entry.committed:
            return StoreStatus.OK
        if entry.manifest is None:
            return StoreStatus.BAD_PAYLOAD
        entry.committed = True
        self._memory.keep_only(entry, entry.manifest.payload_bytes)
        self._ledger.changed(call.ticket)
        self.counters["committed"] += 1
        return StoreStatus.OK

    def _resolve(self, call: Resolve, effects: list[Effect]) -> StoreStatus:
        entry = self._writers_entry(call.ticket, call.writer, call.incarnation)
        if isinstance(entry, Entry):
            if entry.committed:
                return StoreStatus.COMMITTED
            self._drop(entry, effects)
        elif entry in (StoreStatus.STALE_STORE, StoreStatus.NOT_YOURS):
            return entry
        else:
            self._sealed.add(call.ticket)
        self.counters["sealed"] += 1
        return StoreStatus.SEALED

    def _writers_entry(
        self, ticket: Ticket, writer: WorkerRef, incarnation: Incarnation | None
    ) -> Entry | StoreStatus:
        """The ticket's entry if ``writer`` may act on it, else why not."""
        if incarnation is not None and incarnation != self.incarnation:
            return StoreStatus.STALE_STORE
        entry = self._entries.get(ticket)
        if entry is None:
            return self._absent(ticket)
        return entry if entry.writer == writer else StoreStatus.NOT_YOURS

    def _absent(self, ticket: Ticket) -> StoreStatus:
        return StoreStatus.SEALED if ticket in self._sealed else StoreStatus.UNKNOWN_TICKET

    # ---- reads ----

    def _begin_get(self, call: BeginGet) -> GetGrant:
        if call.incarnation is not None and call.incarnation != self.incarnation:
            return GetGrant(call.ticket, StoreStatus.STALE_STORE, None, (), None)
        entry = self._entries.get(call.ticket)
        if entry is None or not entry.committed:
            status = self._absent(call.ticket)
            return GetGrant(call.ticket, status, None, (), None)
        read = self._memory.begin_get(entry)
        return GetGrant(call.ticket, StoreStatus.OK, read, entry.pages, entry.manifest)

    # ---- lives of writers ----

    def _end_lives(self, worker: WorkerId, lowest: Incarnation, effects: list[Effect]) -> None:
        """Drop what lives of ``worker`` below ``lowest`` have reserved; their payloads stay."""
        if not self._lives.end_below(worker, lowest):
            return
        for entry in tuple(self._entries.values()):
            writer = entry.writer
            if writer.worker == worker and writer.incarnation < lowest and not entry.committed:
                self._drop(entry, effects)

    def _writer_gone(self, writer: WorkerRef, now_ms: int, effects: list[Effect]) -> None:
        self._end_lives(writer.worker, Incarnation(writer.incarnation + 1), effects)
        self._memory.writer_gone(writer, now_ms + self.config.dma_grace_ms)

    def _drop(self, entry: Entry, effects: list[Effect]) -> None:
        """The ticket is gone for good; its pages go as soon as nobody uses them."""
        del self._entries[entry.ticket]
        self._sealed.add(entry.ticket)
        self._ledger.changed(entry.ticket)
        put = self._memory.drop(entry)
        if put is not None:
            effects.append(RevokePut(put.id, put.writer, put.shared))

    # ---- time ----

    def _tick(self, now_ms: int, effects: list[Effect]) -> None:
        while self._expiry and self._expiry[0][0] <= now_ms:
            _, ticket = heapq.heappop(self._expiry)
            entry = self._entries.get(ticket)
            if entry is None or entry.committed:
                continue
            if entry.expires_ms > now_ms:
                heapq.heappush(self._expiry, (entry.expires_ms, ticket))
                continue
            self.counters["expired"] += 1
            self._drop(entry, effects)
        self._memory.tick(now_ms)

    # ---- reports ----

    def _report_answered(self, reply: ReportReply) -> None:
        if reply.epoch >= self.epoch_seen:
            self.epoch_seen = reply.epoch
            self._ledger.answered(reply)

    def _report_if_due(self, now_ms: int, effects: list[Effect]) -> None:
        if self._memory.budget.used == self._reported_used and not self._ledger.due(now_ms):
            return
        complete, tickets, gone = self._ledger.next(self._entries, now_ms)
        self._reported_used = self._memory.budget.used
        effects.append(
            Report(
                StoreReport(
                    store=self.store,
                    incarnation=self.incarnation,
                    node=self.node,
                    number=self._ledger.number,
                    complete=complete,
                    epoch_seen=self.epoch_seen,
                    budget_bytes=self._memory.budget.bytes_max,
                    used_bytes=self._memory.budget.used,
                    tickets=tickets,
                    gone=gone,
                )
            )
        )

    # ---- invariants ----

    def check(self) -> None:
        """Every page is free, held or quarantined exactly once; no ticket lives and is sealed."""
        self._memory.check(self._entries)
        assert len(self._entries) <= self.config.tickets_max
        assert len(self._sealed) <= self.config.sealed_max
        for ticket, entry in self._entries.items():
            assert entry.ticket == ticket, (ticket, entry)
            assert not entry.dropped, entry
            assert ticket not in self._sealed, entry
