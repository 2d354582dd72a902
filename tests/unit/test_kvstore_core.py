"""Schedules that a store must survive, told one by one; the property test mixes them."""

from __future__ import annotations

import pytest

from deepinfer.kvstore.core.config import StoreConfig, StoreConfigError
from deepinfer.kvstore.core.events import (
    AbortPut,
    Answer,
    BeginGet,
    BeginPut,
    Call,
    CallBody,
    CallId,
    Commit,
    Effect,
    EndGet,
    Event,
    FinishPut,
    GetGrant,
    PutGrant,
    PutId,
    Report,
    ReportAnswered,
    ReportLinkUp,
    Resolve,
    RevokePut,
    Tick,
    WriterGone,
)
from deepinfer.kvstore.core.ids import Incarnation, NodeId, StoreId, Ticket, WorkerId, WorkerRef
from deepinfer.kvstore.core.messages import (
    Release,
    ReportReply,
    Reserve,
    StoreReply,
    StoreReport,
    TicketState,
)
from deepinfer.kvstore.core.messages import StoreStatus as S
from deepinfer.kvstore.core.store import StoreCore
from kvstore_kit import draft, ticket

PAGE = 100
LIFE = Incarnation(9)
A1 = WorkerRef(WorkerId("a"), Incarnation(1))
A2 = WorkerRef(WorkerId("a"), Incarnation(2))
B1 = WorkerRef(WorkerId("b"), Incarnation(1))
CONFIG = StoreConfig(
    tickets_max=4, sealed_max=3, reservation_ms=1000, dma_grace_ms=200, report_interval_ms=100
)
T1, T2, T3 = ticket(1), ticket(2), ticket(3)


class Store:
    """A core with a clock; checks its invariants after every event."""

    def __init__(self, pages: int = 10, config: StoreConfig = CONFIG) -> None:
        self.core = StoreCore(
            store=StoreId("s"),
            incarnation=LIFE,
            node=NodeId("n"),
            budget_bytes=pages * PAGE,
            page_bytes=PAGE,
            config=config,
        )
        self.now_ms = 0
        self.reports: list[StoreReport] = []
        self.revoked: list[PutId] = []

    def send(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event, self.now_ms)
        self.core.check()
        for effect in effects:
            if isinstance(effect, Report):
                self.reports.append(effect.report)
            if isinstance(effect, RevokePut):
                self.revoked.append(effect.put)
        return effects

    def call(self, body: CallBody) -> StoreReply | PutGrant | GetGrant:
        (answer,) = (e for e in self.send(Call(CallId(1), body)) if isinstance(e, Answer))
        return answer.reply

    def status(self, body: CallBody) -> S:
        return self.call(body).status

    def after(self, elapsed_ms: int) -> None:
        self.now_ms += elapsed_ms
        self.send(Tick())

    def begin(self, of: Ticket, writer: WorkerRef, pages: int, *, shared: bool = True) -> PutGrant:
        grant = self.call(BeginPut(of, writer, pages * PAGE, shared))
        assert isinstance(grant, PutGrant)
        return grant

    def finish(self, grant: PutGrant, *, hash_ok: bool = True) -> S:
        assert grant.put is not None
        pages = len(grant.pages)
        manifest = draft(grant.ticket, pages, block_bytes=PAGE)
        return self.status(FinishPut(grant.ticket, grant.put, pages * PAGE, hash_ok, manifest))

    def swap_out(self, of: Ticket, writer: WorkerRef, pages: int) -> PutGrant:
        assert self.status(Reserve(1, of, pages * PAGE, writer)) is S.OK
        grant = self.begin(of, writer, pages)
        assert self.finish(grant) is S.OK
        assert self.status(Commit(of, writer)) is S.OK
        return grant

    def report(self) -> StoreReport:
        """The latest."""
        return self.reports[-1]

    @property
    def free(self) -> int:
        return self.core.snapshot()["pages_free"]


def test_a_payload_is_invisible_until_it_is_committed() -> None:
    store = Store()
    assert store.status(Reserve(1, T1, 5 * PAGE, A1)) is S.OK
    grant = store.begin(T1, A1, 3)
    assert store.status(BeginGet(T1)) is S.UNKNOWN_TICKET
    assert store.status(Commit(T1, A1)) is S.BAD_PAYLOAD
    assert store.finish(grant) is S.OK
    assert store.status(BeginGet(T1)) is S.UNKNOWN_TICKET
    assert store.core.used_bytes == 5 * PAGE
    assert store.status(Commit(T1, A1)) is S.OK
    assert store.core.used_bytes == 3 * PAGE  # the difference came back
    read = store.call(BeginGet(T1))
    assert isinstance(read, GetGrant)
    assert read.pages == grant.pages
    assert read.manifest == draft(T1, 3, block_bytes=PAGE)


def test_a_commit_that_comes_after_resolve_fails() -> None:
    store = Store()
    store.status(Reserve(1, T1, PAGE, A1))
    store.finish(store.begin(T1, A1, 1))
    assert store.status(Resolve(T1, A1)) is S.SEALED
    assert store.status(Commit(T1, A1)) is S.SEALED
    assert store.begin(T1, A1, 1).status is S.SEALED
    assert store.status(Reserve(1, T1, PAGE, A1)) is S.SEALED
    assert store.core.used_bytes == 0


def test_resolve_after_a_commit_whose_answer_was_lost_says_committed() -> None:
    store = Store()
    store.swap_out(T1, A1, 1)
    assert store.status(Resolve(T1, A1)) is S.COMMITTED
    assert store.status(Commit(T1, A1)) is S.OK
    assert store.status(Reserve(1, T1, PAGE, A1)) is S.COMMITTED


def test_resolve_of_an_unknown_ticket_shuts_out_its_own_late_reserve() -> None:
    store = Store()
    assert store.status(Resolve(T1, A1)) is S.SEALED
    assert store.status(Reserve(1, T1, PAGE, A1)) is S.SEALED


def test_release_that_overtakes_its_reserve_shuts_it_out() -> None:
    store = Store()
    assert store.status(Release(1, T1)) is S.OK
    assert store.status(Reserve(1, T1, PAGE, A1)) is S.SEALED


def test_the_memory_of_sealed_tickets_is_bounded() -> None:
    store = Store()
    for number in range(1, 6):
        store.status(Resolve(ticket(number), A1))
    assert store.status(Commit(ticket(1), A1)) is S.UNKNOWN_TICKET  # forgotten, and as harmless
    assert store.status(Commit(ticket(5), A1)) is S.SEALED


def test_orders_of_an_earlier_controller_are_refused() -> None:
    store = Store()
    assert store.status(Reserve(3, T1, PAGE, A1)) is S.OK
    assert store.status(Reserve(2, T2, PAGE, A1)) is S.STALE_EPOCH
    assert store.status(Release(2, T1)) is S.STALE_EPOCH
    store.send(ReportAnswered(ReportReply(epoch=4, number=1, resync=False)))
    assert store.status(Release(3, T1)) is S.STALE_EPOCH
    assert store.status(Release(4, T1)) is S.OK


def test_calls_for_another_life_of_the_store_are_refused() -> None:
    store = Store()
    store.status(Reserve(1, T1, PAGE, A1))
    old = Incarnation(LIFE - 1)
    assert store.status(BeginPut(T1, A1, PAGE, True, old)) is S.STALE_STORE
    assert store.status(Commit(T1, A1, old)) is S.STALE_STORE
    assert store.status(Resolve(T1, A1, old)) is S.STALE_STORE
    assert store.status(BeginGet(T1, old)) is S.STALE_STORE
    stray = FinishPut(T1, PutId(old, 1), PAGE, True, draft(T1, 1, block_bytes=PAGE))
    assert store.status(stray) is S.NOT_YOURS
    assert store.begin(T1, A1, 1).status is S.OK


def test_a_reservation_nobody_uses_expires_and_progress_keeps_it() -> None:
    store = Store()
    store.status(Reserve(1, T1, PAGE, A1))
    store.status(Reserve(1, T2, PAGE, A1))
    store.after(600)
    store.finish(store.begin(T2, A1, 1))
    store.after(600)
    assert store.status(Commit(T1, A1)) is S.SEALED
    assert store.status(Commit(T2, A1)) is S.OK
    store.after(100_000)
    assert store.status(BeginGet(T2)) is S.OK  # a payload does not expire
    assert store.core.counters["expired"] == 1


def test_pages_of_a_writer_that_was_cut_off_are_quarantined_until_it_acknowledges() -> None:
    store = Store(pages=4)
    store.status(Reserve(1, T1, 3 * PAGE, A1))
    grant = store.begin(T1, A1, 2)
    store.after(1000)  # expired, and its writer is somewhere in the middle of a copy
    assert store.revoked == [grant.put]
    assert (store.free, store.core.used_bytes) == (2, 2 * PAGE)
    assert store.status(Reserve(1, T2, 3 * PAGE, B1)) is S.OVER_BUDGET
    other = store.swap_out(T3, B1, 2)
    assert not set(other.pages) & set(grant.pages)
    assert grant.put is not None
    store.send(AbortPut(grant.put))
    store.send(AbortPut(grant.put))
    assert (store.free, store.core.used_bytes) == (2, 2 * PAGE)


def test_a_finish_after_the_cut_is_an_acknowledgement_too() -> None:
    store = Store()
    store.status(Reserve(1, T1, PAGE, A1))
    grant = store.begin(T1, A1, 1)
    store.status(Release(1, T1))
    assert store.core.used_bytes == PAGE
    assert store.finish(grant) is S.SEALED
    assert store.core.used_bytes == 0


def test_pages_of_a_dead_writer_wait_for_its_device() -> None:
    store = Store()
    store.status(Reserve(1, T1, 3 * PAGE, A1))
    store.begin(T1, A1, 2)
    store.send(WriterGone(A1))
    assert store.core.used_bytes == 2 * PAGE
    store.after(199)
    assert store.core.used_bytes == 2 * PAGE
    store.after(1)
    assert store.core.used_bytes == 0
    assert store.status(Reserve(1, T2, PAGE, A1)) is S.NOT_YOURS
    assert store.status(Reserve(1, T2, PAGE, A2)) is S.OK


def test_the_stores_own_handler_is_believed_only_when_it_says_so() -> None:
    """A process's end says nothing about a copy that the store itself makes."""
    store = Store()
    store.status(Reserve(1, T1, PAGE, A1))
    grant = store.begin(T1, A1, 1, shared=False)
    store.send(WriterGone(A1))
    store.after(10_000)
    assert store.core.used_bytes == PAGE
    assert grant.put is not None
    store.send(AbortPut(grant.put))
    assert store.core.used_bytes == 0


def test_a_dead_life_loses_its_reservations_and_not_its_payloads() -> None:
    store = Store()
    store.swap_out(T1, A1, 1)
    store.status(Reserve(1, T2, PAGE, A1))
    store.send(WriterGone(A1))
    assert store.status(Commit(T2, A1)) is S.SEALED
    assert store.status(BeginGet(T1)) is S.OK
    store.status(Reserve(1, T3, PAGE, A2))
    assert store.status(Reserve(1, ticket(4), PAGE, A1)) is S.NOT_YOURS


def test_a_later_life_ends_the_earlier_ones_but_cannot_vouch_for_their_pages() -> None:
    store = Store()
    store.status(Reserve(1, T1, 2 * PAGE, A1))
    store.begin(T1, A1, 1)
    store.status(Reserve(1, T2, PAGE, A2))
    assert store.status(Commit(T1, A1)) is S.SEALED
    assert store.core.used_bytes == 2 * PAGE  # T2's reservation, and what A1 may still write to


def test_a_second_put_of_a_ticket_never_shares_pages_with_the_first() -> None:
    store = Store(pages=5)
    store.status(Reserve(1, T1, 3 * PAGE, A1))
    first = store.begin(T1, A1, 2)
    second = store.begin(T1, A1, 3)
    assert store.revoked == [first.put]
    assert not set(first.pages) & set(second.pages)
    assert store.begin(T1, A1, 3).status is S.OVER_BUDGET  # 5 of 5 pages are in someone's hands
    assert store.finish(first) is S.NOT_YOURS
    assert store.finish(second) is S.OK
    assert store.finish(second) is S.OK
    assert store.status(Commit(T1, A1)) is S.OK


def test_a_put_after_a_finished_one_replaces_it() -> None:
    store = Store()
    store.status(Reserve(1, T1, 3 * PAGE, A1))
    store.finish(store.begin(T1, A1, 3))
    again = store.begin(T1, A1, 1)
    assert store.status(Commit(T1, A1)) is S.BAD_PAYLOAD
    store.finish(again)
    assert store.status(Commit(T1, A1)) is S.OK
    assert store.core.used_bytes == PAGE


def test_a_bad_payload_leaves_the_reservation_for_another_try() -> None:
    store = Store()
    store.status(Reserve(1, T1, 2 * PAGE, A1))
    assert store.finish(store.begin(T1, A1, 2), hash_ok=False) is S.BAD_PAYLOAD
    assert store.status(Commit(T1, A1)) is S.BAD_PAYLOAD
    assert store.finish(store.begin(T1, A1, 2)) is S.OK
    assert store.status(Commit(T1, A1)) is S.OK


@pytest.mark.parametrize(("received", "blocks", "run"), [(1, 2, T1), (2, 1, T1), (2, 2, T2)])
def test_what_differs_from_its_manifest_is_refused(received: int, blocks: int, run: Ticket) -> None:
    store = Store()
    store.status(Reserve(1, T1, 2 * PAGE, A1))
    grant = store.begin(T1, A1, 2)
    assert grant.put is not None
    manifest = draft(run, blocks, block_bytes=PAGE)
    finish = FinishPut(T1, grant.put, received * PAGE, True, manifest)
    assert store.status(finish) is S.BAD_PAYLOAD


def test_a_released_payload_stays_until_its_last_reader_has_left() -> None:
    store = Store(pages=3)
    grant = store.swap_out(T1, A1, 2)
    first, second = store.call(BeginGet(T1)), store.call(BeginGet(T1))
    assert isinstance(first, GetGrant)
    assert isinstance(second, GetGrant)
    assert store.status(Release(1, T1)) is S.OK
    assert store.status(BeginGet(T1)) is S.SEALED
    assert (store.free, store.core.used_bytes) == (1, 2 * PAGE)
    assert first.read is not None
    assert second.read is not None
    store.send(EndGet(first.read))
    assert store.status(Reserve(1, T2, 2 * PAGE, B1)) is S.OVER_BUDGET
    store.send(EndGet(second.read))
    store.send(EndGet(second.read))
    assert (store.free, store.core.used_bytes) == (3, 0)
    assert store.swap_out(T2, B1, 2).pages == grant.pages


def test_a_budget_of_nothing_refuses_every_swap() -> None:
    store = Store(pages=0)
    assert store.status(Reserve(1, T1, 1, A1)) is S.OVER_BUDGET
    assert store.core.counters["rejected"] == 1


def test_tickets_are_bounded() -> None:
    store = Store(pages=10)
    for number in range(1, 5):
        assert store.status(Reserve(1, ticket(number), PAGE, A1)) is S.OK
    assert store.status(Reserve(1, ticket(5), PAGE, A1)) is S.TOO_MANY
    store.status(Release(1, T1))
    assert store.status(Reserve(1, ticket(5), PAGE, A1)) is S.OK


def test_reports_state_levels_and_start_over_when_asked() -> None:
    store = Store()
    store.after(0)
    assert (store.report().complete, store.report().number) == (True, 1)
    store.status(Reserve(1, T1, 3 * PAGE, A1))
    (level,) = store.report().tickets
    assert (level.ticket, level.state, level.payload_bytes) == (T1, TicketState.RESERVED, 3 * PAGE)
    assert not store.report().complete
    store.finish(store.begin(T1, A1, 2))
    count = len(store.reports)
    store.after(99)
    assert len(store.reports) == count  # nothing to say yet
    store.after(1)
    assert store.report().tickets == ()
    store.status(Commit(T1, A1))
    (level,) = store.report().tickets
    assert (level.state, level.payload_bytes, level.tokens, level.blocks) == (
        TicketState.COMMITTED,
        2 * PAGE,
        32,
        2,
    )
    store.status(Release(1, T1))
    assert (store.report().tickets, store.report().gone) == ((), (T1,))

    store.status(Reserve(1, T2, PAGE, A1))
    number = store.report().number
    store.send(ReportAnswered(ReportReply(epoch=1, number=number, resync=True)))
    assert store.report().complete
    assert [level.ticket for level in store.report().tickets] == [T2]
    count = len(store.reports)
    store.send(ReportAnswered(ReportReply(epoch=1, number=number, resync=True)))  # doubled
    assert len(store.reports) == count
    store.send(ReportLinkUp())
    assert store.report().complete
    assert [report.number for report in store.reports] == list(range(1, count + 2))


def test_pages_are_lent_lowest_first() -> None:
    store = Store()
    assert store.swap_out(T1, A1, 2).pages == (0, 1)
    assert store.swap_out(T2, A1, 2).pages == (2, 3)
    store.status(Release(1, T1))
    assert store.swap_out(T3, A1, 3).pages == (0, 1, 4)
    assert store.core.pages_touched == 5


def test_settings_are_checked() -> None:
    with pytest.raises(StoreConfigError, match=r"store\.reservation_ms = 0: must be 1 or more"):
        StoreConfig(reservation_ms=0)
    with pytest.raises(StoreConfigError, match=r"store\.sealed_max = 'x': must be an integer"):
        StoreConfig(sealed_max="x")  # type: ignore[arg-type]
    with pytest.raises(StoreConfigError, match=r"store\.budget_bytes = -1"):
        StoreCore(
            store=StoreId("s"),
            incarnation=LIFE,
            node=NodeId("n"),
            budget_bytes=-1,
            page_bytes=PAGE,
            config=CONFIG,
        )
