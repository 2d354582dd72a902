"""The worker's core under orders, and between a run and its gateway, one schedule at a time."""

from __future__ import annotations

import pytest

from deepinfer.kvstore.core.ids import GatewayId, Run
from deepinfer.kvstore.core.messages import (
    Ack,
    Admit,
    Attach,
    AttachRefused,
    Cancel,
    Departure,
    Drop,
    Preempt,
    ReportReply,
    Tokens,
)
from deepinfer.kvstore.core.requests import Token
from deepinfer.kvstore.core.states import State
from deepinfer.workers.core.events import (
    FromGateway,
    GatewayDown,
    GatewayUp,
    ReportAnswered,
    RunStep,
    SendToGateway,
    StartDrain,
)
from support.worker_bench import Bench, G, request
from support.worker_world import WORKER, make_request


@pytest.fixture
def bench() -> Bench:
    return Bench()


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
