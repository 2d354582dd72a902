"""The worker's core, one schedule at a time: lives, shortage, reports and settings."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from deepinfer.kvstore.core.ids import Run
from deepinfer.kvstore.core.messages import (
    Ack,
    Attach,
    Cancel,
    Departure,
    Notice,
    NoticeKind,
    Preempt,
    ReportReply,
    Tokens,
)
from deepinfer.kvstore.core.requests import FinishReason, Token
from deepinfer.kvstore.core.states import State
from deepinfer.workers.core.config import WorkerConfigError
from deepinfer.workers.core.events import (
    ForgetSeq,
    FromGateway,
    ReportAnswered,
    ReportsUp,
    RunStep,
    StepDone,
    StepOutput,
    WorkerEvent,
)
from support.worker_bench import CONFIG, Bench, G, request
from support.worker_world import STOP, WORKER, kv_of, make_request


@pytest.fixture
def bench() -> Bench:
    return Bench()


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
