"""StoreCore against a model that recounts everything on every question.

The model also has the pages' contents: whoever was granted pages scribbles over them until it has
let go (its device even for a grace after its process died), and a payload that is being read must
never change.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepinfer.kvstore.core.config import StoreConfig
from deepinfer.kvstore.core.events import (
    AbortPut,
    Answer,
    BeginGet,
    BeginPut,
    Call,
    CallBody,
    CallId,
    Commit,
    EndGet,
    Event,
    FinishPut,
    GetGrant,
    PutGrant,
    PutId,
    Reply,
    Report,
    ReportAnswered,
    ReportLinkUp,
    Resolve,
    RevokePut,
    Tick,
    WriterGone,
)
from deepinfer.kvstore.core.ids import (
    Incarnation,
    NodeId,
    RequestId,
    Run,
    Seq,
    StoreId,
    Ticket,
    WorkerId,
    WorkerRef,
)
from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.core.messages import (
    Release,
    ReportReply,
    Reserve,
    StoreReply,
    StoreReport,
    StoreStatus,
    TicketLevel,
    TicketState,
)
from deepinfer.kvstore.core.states import State
from deepinfer.kvstore.core.store import StoreCore
from support.store_model import BUDGET, PAGE, PAGES, Model, Payload, Reading, Writing

LIFE = Incarnation(4)
CONFIG = StoreConfig(tickets_max=5, reservation_ms=300, dma_grace_ms=100, report_interval_ms=70)
S = StoreStatus

WORKERS = (WorkerId("a"), WorkerId("b"))
MOSTLY = st.sampled_from([True] * 7 + [False])


def new_ticket(number: int) -> Ticket:
    return Ticket(Seq(RequestId(f"r{number % 3}"), 0), Run(1, number), Run(1, number + 1000))


def manifest(ticket: Ticket, pages: int) -> Manifest:
    return Manifest(
        dtype="fp16",
        layout="test",
        block_bytes=PAGE,
        blocks=pages,
        payload_bytes=pages * PAGE,
        token_ids=tuple(range(pages)),
        state=State.DECODE,
        precision="fp16",
        model="test",
        run=ticket.run,
        group_blocks=pages,
        group_hashes=(1,),
        payload_hash=2,
    )


class StoreAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.core = StoreCore(
            store=StoreId("s"),
            incarnation=LIFE,
            node=NodeId("n"),
            budget_bytes=BUDGET,
            page_bytes=PAGE,
            config=CONFIG,
        )
        self.model = Model()
        self.now_ms = 1_000
        self.calls = 0
        self.tickets_made = 0
        self.lives = dict.fromkeys(WORKERS, 1)
        self.memory: list[PutId | None] = [None] * PAGES
        self.revoked: list[PutId] = []
        self.heard: dict[Ticket, TicketLevel] = {}
        self.heard_number = 0
        self.sent_number = 0
        self.lost = False
        self.link_lossy = False

    # ---- driving ----

    def send(self, event: Event) -> list[Reply]:
        replies = []
        for effect in self.core.handle(event, self.now_ms):
            match effect:
                case Answer(call, reply):
                    assert call == self.calls
                    replies.append(reply)
                case RevokePut(put):
                    assert put in self.model.puts
                    self.revoked.append(put)
                case Report(report):
                    self.hear(report)
        return replies

    def hear(self, report: StoreReport) -> None:
        self.sent_number = report.number
        if self.link_lossy:
            self.lost = True
            return
        if report.complete:
            self.heard = {level.ticket: level for level in report.tickets}
            self.lost = False
        elif not self.lost:
            assert report.number == self.heard_number + 1
            for ticket in report.gone:
                self.heard.pop(ticket, None)
            self.heard.update({level.ticket: level for level in report.tickets})
        self.heard_number = report.number
        if not self.lost:
            assert report.used_bytes == self.core.used_bytes

    def call(self, body: CallBody) -> Reply:
        self.calls += 1
        replies = self.send(Call(CallId(self.calls), body))
        assert len(replies) == 1
        return replies[0]

    def status(self, body: CallBody) -> StoreStatus:
        reply = self.call(body)
        assert isinstance(reply, StoreReply)
        assert (reply.used_bytes, reply.budget_bytes) == (self.core.used_bytes, BUDGET)
        return reply.status

    def absent(self, ticket: Ticket) -> StoreStatus:
        return S.SEALED if ticket in self.model.sealed else S.UNKNOWN_TICKET

    def any_ticket(self, data: st.DataObject) -> Ticket:
        """Mostly one that the store has; otherwise any, gone or never heard of."""
        if data.draw(MOSTLY) and self.model.tickets:
            return data.draw(st.sampled_from(sorted(self.model.tickets)))
        return new_ticket(data.draw(st.integers(1, self.tickets_made + 2)))

    def any_writer(self, data: st.DataObject, ticket: Ticket | None = None) -> WorkerRef:
        """Mostly the ticket's own, or a current life."""
        payload = None if ticket is None else self.model.tickets.get(ticket)
        if payload is not None and data.draw(MOSTLY):
            return payload.writer
        worker = data.draw(st.sampled_from(WORKERS))
        life = self.lives[worker]
        return WorkerRef(worker, Incarnation(life if data.draw(MOSTLY) else max(1, life - 1)))

    def any_epoch(self, data: st.DataObject) -> int:
        return self.model.epoch + (0 if data.draw(MOSTLY) else data.draw(st.sampled_from([-1, 1])))

    # ---- the controller ----

    @rule(data=st.data(), size=st.sampled_from([0, 10, 20, 30, 40, 33, 25]), fresh=MOSTLY)
    def reserve(self, data: st.DataObject, size: int, fresh: bool) -> None:
        self.tickets_made += fresh
        ticket = new_ticket(self.tickets_made) if fresh else self.any_ticket(data)
        self.do_reserve(ticket, self.any_writer(data, ticket), self.any_epoch(data), size)

    def do_reserve(self, ticket: Ticket, writer: WorkerRef, epoch: int, size: int) -> None:
        model = self.model
        got = self.status(Reserve(epoch, ticket, size, writer))
        if epoch < model.epoch:
            assert got is S.STALE_EPOCH
            return
        model.epoch = epoch
        model.end_lives(writer.worker, writer.incarnation)
        if ticket in model.sealed:
            assert got is S.SEALED
            return
        payload = model.tickets.get(ticket)
        if payload is not None:
            if payload.writer != writer:
                assert got is S.NOT_YOURS
            elif payload.committed:
                assert got is S.COMMITTED
            else:
                assert got is S.OK
                payload.expires_ms = self.now_ms + CONFIG.reservation_ms
        elif writer.incarnation < model.lowest[writer.worker]:
            assert got is S.NOT_YOURS
        elif size == 0:
            assert got is S.BAD_PAYLOAD
        elif not model.fits(size):
            assert got is S.OVER_BUDGET
        elif len(model.tickets) >= CONFIG.tickets_max:
            assert got is S.TOO_MANY
        else:
            assert got is S.OK
            model.tickets[ticket] = Payload(writer, size, self.now_ms + CONFIG.reservation_ms)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ticket, epoch = self.any_ticket(data), self.any_epoch(data)
        got = self.status(Release(epoch, ticket))
        if epoch < self.model.epoch:
            assert got is S.STALE_EPOCH
            return
        assert got is S.OK
        self.model.epoch = epoch
        if ticket in self.model.tickets:
            self.model.drop(ticket)
        self.model.sealed.add(ticket)

    # ---- writers ----

    def allowed(self, ticket: Ticket, writer: WorkerRef, stale: bool) -> StoreStatus | None:
        if stale:
            return S.STALE_STORE
        payload = self.model.tickets.get(ticket)
        if payload is None:
            return self.absent(ticket)
        return None if payload.writer == writer else S.NOT_YOURS

    @rule(data=st.data(), whole=MOSTLY, shared=st.booleans())
    def begin_put(self, data: st.DataObject, whole: bool, shared: bool) -> None:
        ticket = self.any_ticket(data)
        writer = self.any_writer(data, ticket)
        life = data.draw(st.sampled_from([None, None, LIFE, LIFE, Incarnation(3)]))
        payload = self.model.tickets.get(ticket)
        size = data.draw(st.integers(0, 45))
        if whole and payload is not None:
            size = max(PAGE, min(size, payload.bytes) // PAGE * PAGE)
        self.do_begin_put(ticket, writer, size, shared, life)

    def do_begin_put(
        self,
        ticket: Ticket,
        writer: WorkerRef,
        size: int,
        shared: bool,
        life: Incarnation | None,
    ) -> None:
        model = self.model
        payload = model.tickets.get(ticket)
        old = None if payload is None else payload.writing
        room = old is None or model.fits(model.puts[old].bytes)
        grant = self.call(BeginPut(ticket, writer, size, shared, life))
        assert isinstance(grant, PutGrant)
        expected = self.allowed(ticket, writer, life == Incarnation(3))
        if expected is None:
            assert payload is not None
            if payload.committed:
                expected = S.COMMITTED
            elif size % PAGE or not 0 < size <= payload.bytes:
                expected = S.BAD_PAYLOAD
            elif not room:
                expected = S.OVER_BUDGET
            else:
                expected = S.OK
        assert grant.status is expected
        if expected is not S.OK:
            assert grant.put is None
            assert grant.pages == ()
            return
        assert payload is not None
        assert grant.put is not None
        assert len(grant.pages) == size // PAGE
        payload.writing, payload.ready = grant.put, None
        payload.expires_ms = self.now_ms + CONFIG.reservation_ms
        model.puts[grant.put] = Writing(ticket, writer, size, grant.pages, shared, None)

    @precondition(lambda self: self.model.puts)
    @rule(data=st.data(), fits=MOSTLY)
    def finish_put(self, data: st.DataObject, fits: bool) -> None:
        self.do_finish_put(data.draw(st.sampled_from(sorted(self.model.puts))), fits)

    def do_finish_put(self, put: PutId, fits: bool) -> None:
        model = self.model
        writing = model.puts.pop(put)
        if self.process_dead(writing):
            model.puts[put] = writing
            return
        for page in writing.pages:
            self.memory[page] = put
        pages = len(writing.pages)
        got = self.status(
            FinishPut(writing.ticket, put, writing.bytes, fits, manifest(writing.ticket, pages))
        )
        payload = model.tickets.get(writing.ticket)
        if payload is None:
            assert got is self.absent(writing.ticket)
        elif payload.writing != put:
            assert got is S.NOT_YOURS
        else:
            payload.writing = None
            assert got is (S.OK if fits else S.BAD_PAYLOAD)
            if fits:
                payload.ready = put
                payload.expires_ms = self.now_ms + CONFIG.reservation_ms

    @precondition(lambda self: self.model.puts)
    @rule(data=st.data(), asked=st.booleans())
    def abort_put(self, data: st.DataObject, asked: bool) -> None:
        known = [put for put in self.revoked if put in self.model.puts]
        put = data.draw(st.sampled_from(known if asked and known else sorted(self.model.puts)))
        if self.process_dead(self.model.puts[put]):
            return
        self.send(AbortPut(put))
        writing = self.model.puts.pop(put)
        payload = self.model.tickets.get(writing.ticket)
        if payload is not None and payload.writing == put:
            payload.writing = None

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        ticket = self.any_ticket(data)
        self.do_commit(ticket, self.any_writer(data, ticket))

    def do_commit(self, ticket: Ticket, writer: WorkerRef) -> None:
        payload = self.model.tickets.get(ticket)
        got = self.status(Commit(ticket, writer))
        expected = self.allowed(ticket, writer, False)
        if expected is not None:
            assert got is expected
            return
        assert payload is not None
        if payload.committed:
            assert got is S.OK
        elif payload.ready is None:
            assert got is S.BAD_PAYLOAD
        else:
            assert got is S.OK
            payload.committed = True
            payload.bytes = self.memory.count(payload.ready) * PAGE

    @rule(data=st.data())
    def resolve(self, data: st.DataObject) -> None:
        ticket = self.any_ticket(data)
        writer = self.any_writer(data, ticket)
        payload = self.model.tickets.get(ticket)
        got = self.status(Resolve(ticket, writer))
        if payload is not None and payload.writer != writer:
            assert got is S.NOT_YOURS
        elif payload is not None and payload.committed:
            assert got is S.COMMITTED
        else:
            assert got is S.SEALED
            if payload is not None:
                self.model.drop(ticket)
            self.model.sealed.add(ticket)

    @rule(data=st.data())
    def writer_gone(self, data: st.DataObject) -> None:
        writer = self.any_writer(data)
        self.lives[writer.worker] = max(self.lives[writer.worker], writer.incarnation + 1)
        self.send(WriterGone(writer))
        self.model.end_lives(writer.worker, writer.incarnation + 1)
        for put, writing in self.model.puts.items():
            if writing.writer == writer and writing.shared and writing.dies_ms is None:
                dies_ms = self.now_ms + CONFIG.dma_grace_ms
                self.model.puts[put] = writing._replace(dies_ms=dies_ms)

    def process_dead(self, writing: Writing) -> bool:
        return writing.dies_ms is not None

    @rule()
    def everyone_scribbles(self) -> None:
        """Writers that have not let go (or their devices) write wherever they were granted."""
        for put, writing in self.model.puts.items():
            for page in writing.pages:
                self.memory[page] = put

    @rule(data=st.data(), size=st.sampled_from([20, 25, 30]), fits=MOSTLY)
    def swap_out(self, data: st.DataObject, size: int, fits: bool) -> None:
        """The usual way, in one go, so that payloads are common."""
        self.tickets_made += 1
        ticket = new_ticket(self.tickets_made)
        worker = data.draw(st.sampled_from(WORKERS))
        writer = WorkerRef(worker, Incarnation(self.lives[worker]))
        self.do_reserve(ticket, writer, self.model.epoch, size)
        self.do_begin_put(ticket, writer, data.draw(st.sampled_from([10, 20])), True, None)
        payload = self.model.tickets.get(ticket)
        if payload is not None and payload.writing is not None:
            self.do_finish_put(payload.writing, fits)
        self.do_commit(ticket, writer)

    # ---- readers ----

    @rule(data=st.data())
    def begin_get(self, data: st.DataObject) -> None:
        ticket = self.any_ticket(data)
        grant = self.call(BeginGet(ticket))
        assert isinstance(grant, GetGrant)
        payload = self.model.tickets.get(ticket)
        if payload is None or not payload.committed:
            assert grant.status is self.absent(ticket)
            assert grant.read is None
            return
        assert grant.status is S.OK
        assert grant.read is not None
        assert grant.manifest is not None
        assert grant.manifest.payload_bytes == payload.bytes == PAGE * len(grant.pages)
        assert payload.ready is not None
        self.model.reads[grant.read] = Reading(ticket, payload.bytes, grant.pages, payload.ready)

    @precondition(lambda self: self.model.reads)
    @rule(data=st.data())
    def end_get(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from(sorted(self.model.reads)))
        del self.model.reads[read]
        self.send(EndGet(read))

    # ---- time and reports ----

    @rule(elapsed_ms=st.sampled_from([10, 50, 90]))
    def tick(self, elapsed_ms: int) -> None:
        self.now_ms += elapsed_ms
        self.send(Tick())
        model = self.model
        for ticket, payload in list(model.tickets.items()):
            if not payload.committed and payload.expires_ms <= self.now_ms:
                model.drop(ticket)
        for put, writing in list(model.puts.items()):
            if writing.dies_ms is not None and writing.dies_ms <= self.now_ms:
                del model.puts[put]

    @rule(lossy=st.booleans())
    def report_link(self, lossy: bool) -> None:
        self.link_lossy = lossy
        if not lossy:
            if self.calls % 2:
                self.send(ReportLinkUp())
            else:
                reply = ReportReply(epoch=self.model.epoch, number=self.sent_number, resync=True)
                self.send(ReportAnswered(reply))
            assert not self.lost

    # ---- what must hold ----

    @invariant()
    def core_agrees_with_itself(self) -> None:
        self.core.check()

    @invariant()
    def counts_agree(self) -> None:
        assert self.core.used_bytes == sum(self.model.used())
        assert self.core.epoch_seen == self.model.epoch
        assert self.core.snapshot()["pages_quarantined"] == sum(
            len(writing.pages) for writing in self.model.parked().values()
        )

    @invariant()
    def levels_agree(self) -> None:
        levels = {level.ticket: level for level in self.core.levels()}
        assert levels.keys() == self.model.tickets.keys()
        for ticket, payload in self.model.tickets.items():
            level = levels[ticket]
            assert level.payload_bytes == payload.bytes
            assert (level.state is TicketState.COMMITTED) == payload.committed
            assert level.blocks == -(-payload.bytes // PAGE)
            assert level.tokens == (level.blocks if payload.committed else 0)
        if not self.lost:
            assert self.heard == levels

    @invariant()
    def nobody_reads_what_another_writes(self) -> None:
        for reading in self.model.reads.values():
            assert {self.memory[page] for page in reading.pages} == {reading.stamp}


StoreAgainstModel.TestCase.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None
)
TestStoreAgainstModel = StoreAgainstModel.TestCase
