"""The worker's core, one schedule at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TypeVar

import pytest

from deepinfer.kvstore.core.ids import GatewayId, NodeId, Run, Seq, Ticket
from deepinfer.kvstore.core.messages import (
    Ack,
    Admit,
    Attach,
    Attached,
    AttachRefused,
    Cancel,
    Departure,
    Drop,
    Notice,
    NoticeKind,
    Preempt,
    ReportReply,
    StoreStatus,
    SwapIn,
    SwapOut,
    Tokens,
    WorkerReport,
)
from deepinfer.kvstore.core.requests import FinishReason, Token
from deepinfer.kvstore.core.states import State
from deepinfer.workers.core.config import WorkerConfig, WorkerConfigError
from deepinfer.workers.core.core import WorkerCore
from deepinfer.workers.core.events import (
    AbortPut,
    CancelFetch,
    Commit,
    CommitReply,
    FetchDone,
    FetchPayload,
    ForgetSeq,
    FromGateway,
    GatewayDown,
    GatewayUp,
    PutDone,
    PutPayload,
    Report,
    ReportAnswered,
    ReportsUp,
    Resolve,
    ResolveReply,
    RunStep,
    SendToGateway,
    StartDrain,
    StepDone,
    StepOutput,
    StoreGone,
    Tick,
    WorkerEffect,
    WorkerEvent,
)
from support.worker_world import STOP, STORE, WORKER, Request, kv_of, make_request

G = GatewayId("g")
_E = TypeVar("_E")

CONFIG = WorkerConfig(
    blocks_total=8,
    block_size=2,
    block_bytes=10,
    max_batch_tokens=16,
    max_batch_seqs=4,
    prefill_chunk_tokens=4,
    put_timeout_ms=500,
    commit_timeout_ms=300,
    resolve_timeout_ms=200,
    fetch_timeout_ms=500,
)


class Bench:
    """A core, the effects of the last event, and short words for what tests do."""

    def __init__(self, **changes: object) -> None:
        self.config = replace(CONFIG, **changes)  # type: ignore[arg-type]
        self.core = WorkerCore(WORKER, NodeId("n"), self.config)
        self.now_ms = 0
        self.out: list[WorkerEffect] = []
        self.report: WorkerReport | None = None
        self.counter = 0

    def do(self, event: WorkerEvent) -> list[WorkerEffect]:
        self.out = self.core.handle(event, self.now_ms)
        self.core.check()
        for effect in self.out:
            if isinstance(effect, Report):
                self.report = effect.report
        return self.out

    def only(self, kind: type[_E]) -> _E:
        found = [effect for effect in self.out if isinstance(effect, kind)]
        assert len(found) == 1, f"{len(found)} effects {kind.__name__} in {self.out}"
        return found[0]

    def none(self, kind: type[object]) -> bool:
        return not any(isinstance(effect, kind) for effect in self.out)

    def said(self, kind: type[_E]) -> list[_E]:
        """Messages of one kind to gateways, after the last event."""
        messages = [e.message for e in self.out if isinstance(e, SendToGateway)]
        return [message for message in messages if isinstance(message, kind)]

    def mint(self, epoch: int = 1) -> Run:
        self.counter += 1
        return Run(epoch, self.counter)

    def wait(self, ms: int) -> None:
        self.now_ms += ms
        self.do(Tick())

    def admit(self, request: Request, *, gateway: GatewayId = G, tokens: int | None = None) -> Run:
        run = self.mint()
        record = request.record
        prompt = len(record.prompt_ids)
        total = prompt + record.sampling.max_tokens
        self.do(Admit(run, request.seq, run, gateway, tokens or prompt, total))
        return run

    def attached(
        self, request: Request, run: Run, held: Sequence[int] = (), gateway: GatewayId = G
    ) -> None:
        answer = Attached(request.seq, run, request.record, tuple(held))
        self.do(FromGateway(gateway, answer))

    def step(self, *tokens: int) -> RunStep | None:
        """End the step in flight; ``tokens`` go to its sampling chunks in order."""
        plan = self.core._steps.in_flight
        assert plan is not None, "no step in flight"
        sampling = [chunk for chunk in plan.chunks if chunk.sample]
        assert len(sampling) == len(tokens), f"{len(sampling)} chunks sample"
        outputs = tuple(
            StepOutput(chunk.seq, chunk.run, Token(token))
            for chunk, token in zip(sampling, tokens, strict=True)
        )
        self.do(StepDone(plan.step, outputs))
        return next((e for e in self.out if isinstance(e, RunStep)), None)

    def running(self, request: Request, *tokens: int) -> Run:
        """Admit, attach, prefill and generate; a step is in flight afterwards."""
        run = self.admit(request)
        self.attached(request, run)
        plan = self.only(RunStep).plan
        while not plan.chunks[0].sample:
            next_step = self.step()
            assert next_step is not None
            plan = next_step.plan
        for token in tokens:
            self.step(token)
        return run

    def swap_out(self, request: Request, run: Run) -> Ticket:
        order = self.mint()
        ticket = Ticket(request.seq, run, order)
        self.do(SwapOut(order, request.seq, run, ticket, STORE))
        return ticket

    def swap_in(self, request: Request, ticket: Ticket, tokens: int) -> Run:
        run = self.mint()
        total = len(request.record.prompt_ids) + request.record.sampling.max_tokens
        blocks = self.config.blocks_for(tokens)
        self.do(SwapIn(run, request.seq, run, G, ticket, STORE, tokens, blocks, total))
        return run

    def state(self, request: Request) -> State | None:
        resident = self.core.residents.get(request.seq)
        return None if resident is None else resident.state

    def departed(self) -> list[tuple[Seq, Departure]]:
        assert self.report is not None
        return [(d.seq, d.why) for d in self.report.departed]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def request(name: str = "r", prompt: int = 5, max_tokens: int = 6) -> Request:
    start = 100 * (ord(name[0]) - 96)
    return make_request(name, range(start, start + prompt), max_tokens, "g")


# ---- a plain life --------------------------------------------------------------------------


def test_a_plain_life(bench: Bench) -> None:
    r = request()
    run = bench.admit(r)
    assert bench.said(Attach) == [Attach(r.seq, run, WORKER)]
    assert bench.report is not None
    assert bench.report.blocks_free == 5, "the prompt's 3 blocks are promised at once"
    assert bench.state(r) is State.WAITING

    bench.attached(r, run)
    assert bench.said(Notice)[0].kind is NoticeKind.PLACED
    first = bench.only(RunStep).plan
    assert first.chunks[0].token_ids == r.record.prompt_ids[:4]
    assert not first.chunks[0].sample

    second = bench.step()
    assert second is not None
    assert second.plan.chunks[0].sample
    assert second.plan.chunks[0].index == 0
    bench.step(40)
    assert bench.said(Tokens) == [Tokens(r.seq, run, 0, (Token(40),), None)]
    assert bench.state(r) is State.DECODE
    for token in (41, 42, 43, 44):
        bench.step(token)
    last = bench.step(45)
    assert last is None
    assert bench.said(Tokens) == [Tokens(r.seq, run, 5, (Token(45),), FinishReason.LENGTH)]
    assert bench.state(r) is State.FINISHED
    assert bench.report.blocks_free == 8, "blocks are free before the end is acknowledged"
    assert bench.departed() == []

    bench.do(FromGateway(G, Ack(r.seq, run, 6, True)))
    assert bench.only(ForgetSeq) == ForgetSeq(r.seq, run)
    assert bench.departed() == [(r.seq, Departure.FINISHED)]


def test_a_stop_token_ends_and_is_sent(bench: Bench) -> None:
    r = request()
    run = bench.running(r, 40)
    bench.step(STOP)
    assert bench.said(Tokens) == [Tokens(r.seq, run, 1, (Token(STOP),), FinishReason.STOP)]


def test_min_tokens_outlasts_a_stop_token(bench: Bench) -> None:
    r = make_request("r", [2, 3], 6, "g", min_tokens=2)
    bench.running(r, STOP, STOP)
    assert bench.state(r) is State.DECODE
    bench.step(STOP)
    assert bench.state(r) is State.FINISHED


def test_a_sequence_that_cannot_be_sampled_fails_alone(bench: Bench) -> None:
    bad, good = request("b", 2), request("g", 2)
    run = bench.running(bad)
    bench.attached(good, bench.admit(good))
    bench.step(40)
    plan = bench.only(RunStep).plan
    output = StepOutput(good.seq, Run(1, 2), Token(50))
    bench.do(StepDone(plan.step, (output,), failed=(bad.seq,)))
    ends = [t for t in bench.said(Tokens) if t.seq == bad.seq]
    assert ends == [Tokens(bad.seq, run, 1, (), FinishReason.ERROR)]
    assert bench.state(good) is State.DECODE


# ---- orders --------------------------------------------------------------------------------


def test_orders_below_the_highest_epoch_are_refused(bench: Bench) -> None:
    r = request()
    bench.do(Cancel(Run(5, 1), r.seq, Run(0, 1)))
    bench.admit(r)
    assert not bench.core.residents
    assert bench.core.counters.orders_refused == 1


def test_the_epoch_of_a_report_reply_counts_too(bench: Bench) -> None:
    bench.do(ReportAnswered(ReportReply(epoch=9, number=1, resync=False)))
    bench.admit(request())
    assert bench.core.counters.orders_refused == 1


def test_a_doubled_order_does_nothing(bench: Bench) -> None:
    r = request()
    run = bench.admit(r)
    bench.do(Admit(run, r.seq, run, G, 5, 11))
    assert bench.none(SendToGateway)
    bench.do(Cancel(bench.mint(), r.seq, run))
    bench.do(Admit(run, r.seq, run, G, 5, 11))
    assert not bench.core.residents, "a run that has left never comes back"


def test_a_cancel_that_overtakes_its_admit_wins(bench: Bench) -> None:
    r = request()
    run = bench.mint()
    bench.do(Cancel(bench.mint(), r.seq, run))
    bench.do(Admit(run, r.seq, run, G, 5, 11))
    assert not bench.core.residents


def test_what_can_never_fit_is_told_with_its_need(bench: Bench) -> None:
    r = request(max_tokens=12)
    bench.admit(r)
    assert bench.report is not None
    assert [(d.why, d.blocks) for d in bench.report.departed] == [(Departure.TOO_LARGE, 9)]


def test_a_late_refusal_counts_promises(bench: Bench) -> None:
    bench.admit(request("a", 10, 2))
    bench.admit(request("b", 8, 2))
    assert bench.departed() == [(request("b").seq, Departure.REFUSED)]
    assert bench.core.counters.late_refusals == 1


def test_a_draining_worker_refuses(bench: Bench) -> None:
    bench.do(StartDrain())
    assert bench.report is not None
    assert bench.report.draining
    bench.admit(request())
    assert bench.departed() == [(request().seq, Departure.REFUSED)]


def test_preempt_frees_at_once_but_not_under_the_step(bench: Bench) -> None:
    r = request()
    run = bench.running(r, 40)
    bench.do(Preempt(bench.mint(), r.seq, run))
    assert bench.departed() == [(r.seq, Departure.PREEMPTED)]
    snapshot = bench.core.snapshot()
    assert snapshot["blocks_quarantined"] == 3, "the step in flight still writes there"
    bench.step(41)
    assert bench.core.snapshot()["blocks_quarantined"] == 0
    assert bench.none(SendToGateway), "a late token of a dropped run is not sent"


def test_a_drop_of_an_older_run_does_not_touch_a_newer_one(bench: Bench) -> None:
    r = request()
    old = bench.running(r, 40)
    bench.admit(r, gateway=GatewayId("h"))
    bench.do(FromGateway(G, Drop(r.seq, old)))
    assert bench.state(r) is State.WAITING


def test_a_drop_reaches_runs_that_have_not_come_yet(bench: Bench) -> None:
    r = request()
    bench.running(r, 40)
    coming = Run(1, bench.counter + 1)
    bench.do(FromGateway(G, Drop(r.seq, coming)))
    assert bench.departed() == [(r.seq, Departure.DROPPED)]
    bench.step(41)
    assert bench.admit(r) == coming
    assert not bench.core.residents


def test_another_prompt_under_the_same_name_starts_from_nothing(bench: Bench) -> None:
    r = request()
    bench.running(r, 40, 41)
    run = bench.admit(r)
    bench.step(42)
    other = make_request("r", [*r.record.prompt_ids, 40], 6, "g")
    bench.attached(other, run)
    chunk = bench.only(RunStep).plan.chunks[0]
    assert (chunk.start, chunk.token_ids, chunk.index) == (4, (r.record.prompt_ids[4], 40), 0)
    assert bench.said(Tokens) == []


# ---- attaching -----------------------------------------------------------------------------


def test_attach_is_repeated_and_a_run_with_nothing_gives_up(bench: Bench) -> None:
    r = request()
    run = bench.admit(r)
    for _ in range(9):
        bench.wait(1000)
        assert bench.said(Attach) == [Attach(r.seq, run, WORKER)]
    bench.wait(1000)
    assert bench.departed() == [(r.seq, Departure.UNREACHABLE)]


def test_a_run_with_kv_waits_for_its_gateway(bench: Bench) -> None:
    r = request()
    run = bench.running(r, 40)
    bench.do(GatewayDown(G))
    bench.step(41)
    assert bench.said(Tokens) == []
    bench.wait(20_000)
    assert bench.state(r) is State.DECODE
    bench.do(GatewayUp(G))
    assert bench.said(Attach) == [Attach(r.seq, run, WORKER)]
    bench.attached(r, run, [40])
    assert bench.said(Tokens) == [Tokens(r.seq, run, 1, (Token(41),), None)]


def test_a_higher_run_elsewhere_ends_this_one(bench: Bench) -> None:
    r = request()
    run = bench.running(r, 40)
    bench.do(FromGateway(G, AttachRefused(r.seq, run, Run(1, 99))))
    assert bench.departed() == [(r.seq, Departure.DROPPED)]


def test_a_gateway_that_forgot_pauses_a_run_with_kv(bench: Bench) -> None:
    r = request()
    run = bench.running(r, 40)
    bench.do(FromGateway(G, AttachRefused(r.seq, run, None)))
    bench.step(41)
    assert bench.none(RunStep), "nobody to compute for"
    bench.wait(1000)
    assert bench.said(Attach) == [Attach(r.seq, run, WORKER)]
    bench.attached(r, run, [40])
    assert not bench.none(RunStep)
    assert bench.said(Tokens) == [Tokens(r.seq, run, 1, (Token(41),), None)]


def test_a_gateway_that_forgot_ends_a_run_without_kv(bench: Bench) -> None:
    r = request()
    run = bench.admit(r)
    bench.do(FromGateway(G, AttachRefused(r.seq, run, None)))
    assert bench.departed() == [(r.seq, Departure.DROPPED)]


def test_unacknowledged_tokens_are_sent_again_then_the_run_attaches_anew(bench: Bench) -> None:
    r = request()
    run = bench.running(r, 40, 41)
    bench.do(FromGateway(G, Ack(r.seq, run, 1, False)))
    bench.wait(1000)
    assert bench.said(Tokens) == [Tokens(r.seq, run, 1, (Token(41),), None)]
    bench.wait(1000)
    assert bench.said(Attach) == [Attach(r.seq, run, WORKER)]


def test_takeover_keeps_the_kv_and_resends_what_the_new_gateway_lacks(bench: Bench) -> None:
    r = request()
    bench.running(r, 40, 41, 42)
    computed = bench.core.residents[r.seq].computed
    h = GatewayId("h")
    run = bench.admit(r, gateway=h)
    assert bench.said(Attach) == [Attach(r.seq, run, WORKER)]
    bench.step(43)
    assert bench.none(RunStep), "not before the new gateway agrees"
    bench.attached(r, run, [40], gateway=h)
    tokens = (Token(41), Token(42), Token(43))
    assert bench.said(Tokens) == [Tokens(r.seq, run, 1, tokens, None)]
    assert bench.core.residents[r.seq].computed == computed + 1
    assert bench.state(r) is State.DECODE


def test_takeover_uses_kv_only_up_to_the_common_prefix(bench: Bench) -> None:
    r = request()
    bench.running(r, 40, 41, 42)
    run = bench.admit(r)
    bench.step(43)
    bench.attached(r, run, [40, 77])
    # 5 prompt tokens and 40 stand: 6, and block 3 (tokens 6 and 7) held 41 and 42.
    chunk = bench.only(RunStep).plan.chunks[0]
    assert (chunk.start, chunk.token_ids, chunk.index) == (6, (77,), 2)


def test_a_full_block_is_never_written_again(bench: Bench) -> None:
    r = request(prompt=4)
    bench.running(r, 40, 41, 42, 43)
    table = list(bench.core.residents[r.seq].blocks)
    run = bench.admit(r)
    bench.step(44)
    bench.attached(r, run, [40, 77])
    # Token 5 (77) shares a full block with token 4 (40): that block may be in others' tables.
    chunk = bench.only(RunStep).plan.chunks[0]
    assert (chunk.start, chunk.token_ids) == (4, (40, 77))
    assert chunk.block_table[:2] == tuple(table[:2])
    assert chunk.block_table[2] != table[2]


def test_tokens_of_a_step_that_was_overtaken_do_not_count(bench: Bench) -> None:
    r = request(prompt=4)
    bench.running(r, 40, 41, 42, 43)
    run = bench.admit(r)
    bench.attached(r, run, [40, 77])
    plan = bench.core._steps.in_flight
    assert plan is not None
    assert plan.chunks[0].token_ids == (43,), "still the old step"
    following = bench.step(90)
    assert following is not None
    assert following.plan.chunks[0].token_ids == (40, 77)
    assert bench.core.residents[r.seq].tokens[4:] == [40, 77]


def test_a_step_over_kv_that_was_given_up_does_not_count(bench: Bench) -> None:
    r = request(prompt=4)
    bench.running(r, 40, 41, 42, 43)
    run = bench.admit(r)
    # The step in flight computes 43, which stands; but what it attends to does not.
    bench.attached(r, run, [77, 41, 42, 43])
    following = bench.step(90)
    assert following is not None
    chunk = following.plan.chunks[0]
    assert (chunk.start, chunk.token_ids) == (4, (77, 41, 42, 43))


def test_a_doubled_answer_to_attach_does_not_repeat_tokens(bench: Bench) -> None:
    r = request()
    run = bench.running(r, 40)
    bench.attached(r, run)
    assert bench.said(Tokens) == []


# ---- swap out ------------------------------------------------------------------------------


def test_a_swap_frees_only_after_the_commit(bench: Bench) -> None:
    r = request()
    run = bench.running(r, 40, 41)
    ticket = bench.swap_out(r, run)
    assert bench.none(PutPayload), "it is in the running step"
    assert bench.state(r) is State.SWAPPING_OUT
    bench.step(42)
    put = bench.only(PutPayload)
    assert put.token_ids == (*r.record.prompt_ids, 40, 41)
    assert len(put.block_ids) == 4
    assert put.state is State.DECODE
    assert bench.said(Tokens) == [Tokens(r.seq, run, 2, (Token(42),), None)]
    bench.do(PutDone(ticket, True, 40, 1500))
    assert bench.only(Commit) == Commit(ticket, STORE)
    assert bench.core.snapshot()["blocks_held"] == 4
    bench.now_ms += 2
    bench.do(CommitReply(ticket, StoreStatus.OK))
    assert bench.report is not None
    assert bench.report.departed[0][2:] == (Departure.SWAPPED, ticket, 4, 40)
    assert bench.report.blocks_free == 8
    (notice,) = bench.said(Notice)
    assert (notice.kind, notice.blocks, notice.payload_bytes, notice.copy_us) == (
        NoticeKind.SWAPPED_OUT,
        4,
        40,
        3500,
    )
    metrics = bench.core.metrics()
    assert metrics["cpu_offload_seconds"] == 0.0035
    assert metrics["requests_swapped_total"] == 1
    assert metrics["kv_cpu_offload_blocks_total"] == 4
    assert metrics["kv_cpu_offload_bytes_total"] == 40


def test_a_swap_in_the_middle_of_a_prompt_resumes_there(bench: Bench) -> None:
    r = request(prompt=9, max_tokens=2)
    run = bench.admit(r)
    bench.attached(r, run)
    ticket = bench.swap_out(r, run)
    bench.step()
    put = bench.only(PutPayload)
    assert (put.token_ids, put.state) == (r.record.prompt_ids[:4], State.PREFILL)
    bench.do(PutDone(ticket, True, 20, 1))
    bench.do(CommitReply(ticket, StoreStatus.OK))
    run = bench.swap_in(r, ticket, 4)
    bench.attached(r, run)
    bench.do(FetchDone(ticket, run, StoreStatus.OK, put.token_ids, 2, 9))
    assert bench.state(r) is State.PREFILL
    assert bench.said(Notice)[0].kind is NoticeKind.RESUMED
    assert bench.only(RunStep).plan.chunks[0].start == 4


def test_a_swap_of_a_request_that_finishes_meanwhile_is_dropped(bench: Bench) -> None:
    r = request(max_tokens=2)
    run = bench.running(r, 40)
    bench.swap_out(r, run)
    bench.step(41)
    assert bench.none(PutPayload)
    assert bench.state(r) is State.FINISHED


def test_a_swap_out_twice_copies_once(bench: Bench) -> None:
    r = request()
    run = bench.running(r, 40)
    ticket = bench.swap_out(r, run)
    bench.do(SwapOut(ticket.order, r.seq, run, ticket, STORE))
    bench.step(41)
    bench.only(PutPayload)
    bench.do(PutDone(ticket, False, 0, 0))
    assert bench.state(r) is State.DECODE
    bench.do(SwapOut(ticket.order, r.seq, run, ticket, STORE))
    assert bench.state(r) is State.DECODE, "the same order does not start it again"


@pytest.mark.parametrize("how", ["put", "commit", "put_timeout", "store_gone", "sealed"])
def test_a_failed_swap_leaves_the_request_where_it_was(bench: Bench, how: str) -> None:
    r = request()
    run = bench.running(r, 40)
    ticket = bench.swap_out(r, run)
    bench.step(41)
    if how == "put":
        bench.do(PutDone(ticket, False, 0, 0, "refused"))
    elif how == "put_timeout":
        bench.wait(499)
        assert bench.state(r) is State.SWAPPING_OUT
        bench.wait(1)
        assert bench.only(AbortPut) == AbortPut(ticket, STORE)
    elif how == "store_gone":
        bench.do(StoreGone(STORE))
    else:
        bench.do(PutDone(ticket, True, 30, 5))
        status = StoreStatus.BAD_PAYLOAD if how == "commit" else StoreStatus.UNREACHABLE
        bench.do(CommitReply(ticket, status))
        if how == "sealed":
            assert bench.only(Resolve) == Resolve(ticket, STORE)
            bench.do(ResolveReply(ticket, StoreStatus.SEALED))
    assert bench.state(r) is State.DECODE
    assert bench.said(Notice)[0].kind is NoticeKind.SWAP_FAILED
    assert bench.report is not None
    assert bench.report.residents[0].swap_failures == 1
    chunk = bench.only(RunStep).plan.chunks[0]
    assert (chunk.start, chunk.token_ids) == (6, (41,)), "nothing is computed again"
    bench.do(CommitReply(ticket, StoreStatus.COMMITTED))
    assert bench.state(r) is State.DECODE, "what comes after the decision changes nothing"


def test_a_lost_commit_reply_is_resolved(bench: Bench) -> None:
    r = request()
    run = bench.running(r, 40)
    ticket = bench.swap_out(r, run)
    bench.step(41)
    bench.do(PutDone(ticket, True, 30, 5))
    bench.wait(300)
    assert bench.only(Resolve) == Resolve(ticket, STORE)
    bench.do(ResolveReply(ticket, StoreStatus.UNREACHABLE))
    assert bench.state(r) is State.SWAPPING_OUT
    bench.do(ResolveReply(ticket, StoreStatus.COMMITTED))
    assert bench.departed() == [(r.seq, Departure.SWAPPED)]


def test_a_resolve_that_is_never_answered_keeps_the_blocks(bench: Bench) -> None:
    r = request()
    run = bench.running(r, 40)
    ticket = bench.swap_out(r, run)
    bench.step(41)
    bench.do(PutDone(ticket, True, 30, 5))
    bench.wait(300)
    bench.wait(200)
    assert bench.state(r) is State.DECODE


def test_a_cancel_during_the_copy_waits_for_it_with_the_blocks(bench: Bench) -> None:
    r = request()
    run = bench.running(r, 40)
    ticket = bench.swap_out(r, run)
    bench.step(41)
    bench.do(Cancel(bench.mint(), r.seq, run))
    assert bench.only(AbortPut) == AbortPut(ticket, STORE)
    assert bench.departed() == [(r.seq, Departure.DROPPED)]
    assert bench.core.snapshot()["blocks_quarantined"] == 3
    bench.do(PutDone(ticket, False, 0, 0))
    assert bench.core.snapshot()["blocks_free"] == 8
    assert bench.none(Commit)


def test_shared_blocks_are_copied_but_only_private_ones_counted() -> None:
    bench = Bench(blocks_total=10)
    one, two = (make_request(name, range(10, 15), 6, "g") for name in "ab")
    bench.running(one, 40)
    run = bench.admit(two)
    bench.attached(two, run)
    bench.step(41)
    chunks = bench.only(RunStep).plan.chunks
    assert [chunk.start for chunk in chunks if chunk.seq == two.seq] == [4], "4 tokens are shared"
    bench.wait(100)
    assert bench.report is not None
    assert {u.seq: u.private_blocks for u in bench.report.usage} == {one.seq: 2, two.seq: 1}
    bench.swap_out(two, run)
    bench.step(42, 50)
    put = bench.only(PutPayload)
    assert len(put.block_ids) == 3
    bench.do(PutDone(put.ticket, True, 30, 5))
    bench.do(CommitReply(put.ticket, StoreStatus.OK))
    assert bench.core.snapshot()["blocks_held"] == 4, "the other still holds the shared ones"


def test_a_resident_without_kv_cannot_be_swapped(bench: Bench) -> None:
    r = request()
    run = bench.admit(r)
    bench.swap_out(r, run)
    assert bench.state(r) is State.WAITING
    assert bench.report is not None
    assert bench.report.residents[0].swap_failures == 1


# ---- swap in -------------------------------------------------------------------------------


def swapped(bench: Bench, r: Request, *tokens: int) -> tuple[Ticket, tuple[int, ...]]:
    run = bench.running(r, *tokens[:-1])
    bench.swap_out(r, run)
    bench.step(tokens[-1])
    put = bench.only(PutPayload)
    bench.do(PutDone(put.ticket, True, 10 * len(put.block_ids), 5))
    bench.do(CommitReply(put.ticket, StoreStatus.OK))
    return put.ticket, put.token_ids


def test_a_resume_attaches_fetches_and_goes_on(bench: Bench) -> None:
    r = request()
    ticket, token_ids = swapped(bench, r, 40, 41, 42)
    run = bench.swap_in(r, ticket, len(token_ids))
    assert bench.state(r) is State.SWAPPING_IN
    assert bench.none(FetchPayload), "not before the gateway has agreed"
    bench.attached(r, run, [40, 41, 42])
    fetch = bench.only(FetchPayload)
    assert len(fetch.block_ids) == 4
    bench.do(FetchDone(ticket, run, StoreStatus.OK, token_ids, 4, 7))
    chunk = bench.only(RunStep).plan.chunks[0]
    assert (chunk.start, chunk.token_ids, chunk.index) == (7, (42,), 3)
    assert bench.state(r) is State.DECODE
    assert bench.report is not None
    assert bench.report.residents[0].ticket is None
    metrics = bench.core.metrics()
    assert metrics["cpu_reload_seconds"] == 7e-6
    assert metrics["cpu_offload_seconds"] == pytest.approx(5e-6)
    assert metrics["requests_resumed_total"] == 1
    assert metrics["kv_cpu_reload_blocks_total"] == 4


def test_a_payload_counts_only_up_to_the_gateways_tokens(bench: Bench) -> None:
    r = request()
    ticket, token_ids = swapped(bench, r, 40, 41, 42)
    run = bench.swap_in(r, ticket, len(token_ids))
    bench.attached(r, run, [40])
    bench.do(FetchDone(ticket, run, StoreStatus.OK, token_ids, 4, 7))
    chunk = bench.only(RunStep).plan.chunks[0]
    assert (chunk.start, chunk.token_ids, chunk.index) == (5, (40,), 1)


def test_a_bad_fetch_recomputes_in_the_same_blocks() -> None:
    bench = Bench(prefix_cache=False)
    r = request()
    ticket, token_ids = swapped(bench, r, 40, 41)
    run = bench.swap_in(r, ticket, len(token_ids))
    bench.attached(r, run, [40, 41])
    fetch = bench.only(FetchPayload)
    bench.do(FetchDone(ticket, run, StoreStatus.BAD_PAYLOAD, (), 0, 0))
    assert bench.said(Notice)[0].kind is NoticeKind.RECOMPUTED
    chunk = bench.only(RunStep).plan.chunks[0]
    assert chunk.start == 0
    assert set(fetch.block_ids) <= set(chunk.block_table)
    assert bench.core.counters.recomputed == 1
    assert bench.core.metrics()["requests_resumed_total"] == 0


def test_a_bad_fetch_takes_what_the_prefix_cache_still_has(bench: Bench) -> None:
    r = request()
    ticket, token_ids = swapped(bench, r, 40, 41)
    run = bench.swap_in(r, ticket, len(token_ids))
    bench.attached(r, run, [40, 41])
    fetch = bench.only(FetchPayload)
    bench.do(FetchDone(ticket, run, StoreStatus.BAD_PAYLOAD, (), 0, 0))
    chunk = bench.only(RunStep).plan.chunks[0]
    assert (chunk.start, chunk.token_ids) == (6, (41,))
    assert not set(fetch.block_ids) & set(chunk.block_table[:3])


@pytest.mark.parametrize("how", ["deadline", "store_gone"])
def test_a_fetch_without_an_end_is_left_and_its_blocks_wait(bench: Bench, how: str) -> None:
    r = request()
    ticket, token_ids = swapped(bench, r, 40, 41)
    run = bench.swap_in(r, ticket, len(token_ids))
    bench.attached(r, run, [40, 41])
    fetch = bench.only(FetchPayload)
    if how == "deadline":
        bench.wait(500)
    else:
        bench.do(StoreGone(STORE))
    assert bench.only(CancelFetch) == CancelFetch(ticket, run)
    chunk = bench.only(RunStep).plan.chunks[0]
    assert chunk.start == 0
    assert not set(fetch.block_ids) & set(chunk.block_table), "the copy may still write there"
    bench.do(FetchDone(ticket, run, StoreStatus.OK, token_ids, 3, 1))
    assert bench.core.residents[r.seq].computed == 0, "what came too late is not used"
    assert bench.core.snapshot()["blocks_quarantined"] == 0


def test_a_cancel_during_a_fetch_waits_for_it_with_the_blocks(bench: Bench) -> None:
    r = request()
    ticket, token_ids = swapped(bench, r, 40, 41)
    run = bench.swap_in(r, ticket, len(token_ids))
    bench.attached(r, run, [40, 41])
    bench.do(Cancel(bench.mint(), r.seq, run))
    assert bench.only(CancelFetch) == CancelFetch(ticket, run)
    assert bench.core.snapshot()["blocks_quarantined"] == 3
    bench.do(FetchDone(ticket, run, StoreStatus.UNREACHABLE, (), 0, 0))
    assert bench.core.snapshot()["blocks_free"] == 8


def test_fetched_blocks_are_never_shared(bench: Bench) -> None:
    r = request()
    ticket, token_ids = swapped(bench, r, 40, 41)
    # Others have taken every block since, so that nothing of it is cached here any more.
    other = make_request("z", range(500, 515), 1, "g")
    bench.attached(other, bench.admit(other))
    for _ in range(3):
        bench.step()
    bench.step(3)
    bench.do(FromGateway(G, Ack(other.seq, Run(1, bench.counter), 1, True)))
    run = bench.swap_in(r, ticket, len(token_ids))
    bench.attached(r, run, [40, 41])
    bench.do(FetchDone(ticket, run, StoreStatus.OK, token_ids, 3, 1))
    bench.step(42)
    twin = make_request("q", [*r.record.prompt_ids, 40, 9], 1, "g")
    bench.attached(twin, bench.admit(twin))
    assert bench.core.residents[twin.seq].computed == 0


# ---- shortage ------------------------------------------------------------------------------


def test_a_shortage_is_a_level_and_others_go_on() -> None:
    bench = Bench(blocks_total=5, prefix_cache=False)
    one, two = request("a", 4, 4), request("b", 3, 4)
    bench.running(one, 40)
    bench.attached(two, bench.admit(two))
    bench.step(41)
    assert bench.report is not None
    assert bench.report.blocks_short == 0
    bench.step(42, 50)
    assert bench.report.blocks_short == 1
    assert not bench.report.stalled
    assert [chunk.seq for chunk in bench.only(RunStep).plan.chunks] == [two.seq]


def test_a_stall_is_said_and_ends_with_room() -> None:
    bench = Bench(blocks_total=3, prefix_cache=False)
    one, two = request("a", 2, 4), request("b", 2, 4)
    bench.running(one)
    run = bench.admit(two)
    bench.attached(two, run)
    bench.step(40)
    bench.step(41, 50)
    bench.step(42)
    assert bench.report is not None
    assert (bench.report.stalled, bench.report.blocks_short) == (True, 2)
    bench.do(Preempt(bench.mint(), two.seq, run))
    assert not bench.report.stalled
    bench.only(RunStep)


# ---- reports -------------------------------------------------------------------------------


def test_reports_are_numbered_differences(bench: Bench) -> None:
    bench.wait(0)
    assert bench.report is not None
    assert (bench.report.number, bench.report.complete) == (1, True)
    r = request()
    run = bench.admit(r)
    assert (bench.report.number, bench.report.complete) == (2, False)
    assert [(level.seq, level.run) for level in bench.report.residents] == [(r.seq, run)]
    bench.wait(99)
    assert bench.report.number == 2
    bench.wait(1)
    assert (bench.report.number, bench.report.residents) == (3, ())
    assert [usage.seq for usage in bench.report.usage] == [r.seq]


@pytest.mark.parametrize("how", ["resync", "new stream", "new controller"])
def test_a_receiver_that_knows_nothing_gets_a_complete_report(bench: Bench, how: str) -> None:
    r = request()
    bench.admit(r)
    bench.wait(100)
    assert bench.report is not None
    number = bench.report.number
    events: dict[str, WorkerEvent] = {
        "resync": ReportAnswered(ReportReply(epoch=1, number=number, resync=True)),
        "new stream": ReportsUp(),
        "new controller": ReportAnswered(ReportReply(epoch=2, number=number, resync=False)),
    }
    bench.do(events[how])
    assert bench.report.number == number + 1
    assert bench.report.complete
    assert [level.seq for level in bench.report.residents] == [r.seq]


def test_the_departed_are_repeated_until_a_report_that_names_them_is_acknowledged(
    bench: Bench,
) -> None:
    bench.wait(0)
    r = request()
    run = bench.admit(r)
    before = bench.report
    assert before is not None
    bench.do(Cancel(bench.mint(), r.seq, run))
    said = bench.report
    assert said is not None
    assert bench.departed() == [(r.seq, Departure.DROPPED)]
    bench.do(ReportAnswered(ReportReply(epoch=1, number=before.number, resync=False)))
    bench.do(ReportAnswered(ReportReply(epoch=0, number=said.number, resync=False)))
    bench.do(ReportAnswered(ReportReply(epoch=1, number=said.number, resync=True)))
    bench.wait(100)
    assert bench.departed() == [(r.seq, Departure.DROPPED)]
    bench.do(ReportAnswered(ReportReply(epoch=1, number=said.number, resync=False)))
    bench.wait(100)
    assert bench.departed() == []


# ---- settings ------------------------------------------------------------------------------


def test_settings_are_checked_by_name() -> None:
    with pytest.raises(WorkerConfigError, match=r"worker\.blocks_total = 0: must be 1 or more"):
        replace(CONFIG, blocks_total=0)
    with pytest.raises(WorkerConfigError, match=r"max_batch_tokens = 3: .*max_batch_seqs \(4\)"):
        replace(CONFIG, max_batch_tokens=3)


def test_the_worlds_kv_depends_on_every_token_before() -> None:
    rng = Random(1)
    tokens = [rng.randrange(9) for _ in range(6)]
    assert kv_of(tokens)[:5] == kv_of(tokens[:5])
    assert kv_of([tokens[0] + 1, *tokens[1:]])[5] != kv_of(tokens)[5]
