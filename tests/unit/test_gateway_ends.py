"""The gateway's core, rule by rule: ends, stop strings, usage, reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.gateway.core.events import (
    AbortRequest,
    Code,
    EndStream,
    Forget,
    FromWorker,
    Generate,
    ReportAnswered,
    ReportLinkUp,
    Resume,
    Scan,
    Scanned,
    StopMatched,
    StreamClosed,
    StreamReady,
    Tick,
)
from deepinfer.kvstore.core.ids import (
    RequestId,
    Run,
    Seq,
    StreamId,
    WorkerRef,
)
from deepinfer.kvstore.core.messages import (
    Accepted,
    Ack,
    Attach,
    AttachRefused,
    Delta,
    Disown,
    Drop,
    Finished,
    Notice,
    NoticeKind,
    Reject,
    RejectReason,
    ReportReply,
    Tokens,
)
from deepinfer.kvstore.core.requests import FinishReason, SamplingParams, Token
from support.gateway_bench import (
    R1,
    R2,
    S1,
    S2,
    S3,
    SEQ,
    W1,
    W2,
    Bench,
    running,
    said,
)
from support.requests import record

# ---- ends ----------------------------------------------------------------------------------


def test_abort_drops_the_run_and_is_reported_until_answered() -> None:
    bench = running()
    bench.settle()
    bench.tell(FromWorker(W1, said(R1, 0, 5)))
    bench.sent()
    bench.tell(AbortRequest(RequestId("r1"), 1))
    assert bench.sent() == [(W1, Drop(SEQ, R1))]
    assert bench.read()[-1] == Finished(0, FinishReason.ABORT, 1, "")
    (report,) = bench.answer()
    assert [(v.seq, v.claim, v.cancelled) for v in report.requests] == [(SEQ, 1, True)]
    assert [r.gone for r in bench.reports()] == [(SEQ,)]


def test_an_older_abort_is_ignored() -> None:
    bench = running()
    bench.tell(Resume(S2, record(), "key", 3, ((),)))
    bench.tell(AbortRequest(RequestId("r1"), 2))
    assert bench.sent() == []
    bench.tell(AbortRequest(RequestId("r1"), 3))
    assert bench.sent() == [(W1, Drop(SEQ, R1))]


def test_an_abort_of_an_unknown_request_is_listed_and_its_runs_are_dropped() -> None:
    bench = Bench()
    bench.tell(Tick())
    bench.answer()
    bench.now_ms = 100  # young: but what is cancelled is no client's to resume
    bench.tell(AbortRequest(RequestId("r1"), 5, choices=2))
    bench.tell(FromWorker(W1, Attach(SEQ, R1, W1)))
    assert bench.sent() == [(W1, AttachRefused(SEQ, R1, None))]
    (report,) = bench.answer()
    assert [(v.seq.choice, v.claim, v.cancelled) for v in report.requests] == [
        (0, 5, True),
        (1, 5, True),
    ]


def test_an_orphan_is_cancelled_after_the_grace_and_may_come_back() -> None:
    bench = running(orphan_grace_ms=1_000)
    bench.tell(FromWorker(W1, said(R1, 0, 5)))
    bench.tell(StreamClosed(S1))
    bench.wait(999)
    bench.sent()
    bench.wait(1)
    assert bench.sent() == [(W1, Drop(SEQ, R1))]
    assert bench.take(Forget) == [Forget(RequestId("r1"))]
    assert bench.core.counters["orphans_total"] == 1
    bench.tell(ReportLinkUp())
    assert [v.cancelled for v in bench.reports()[-1].requests] == [True]
    bench.tell(Resume(S2, record(), "key", 1, ((5,),)))
    assert bench.read(S2) == [Accepted(RequestId("r1"), "key", 3, 1)]
    bench.tell(ReportLinkUp())
    assert [(v.cancelled, v.claim) for v in bench.reports()[-1].requests] == [(False, 1)]


def test_an_orphan_that_comes_back_in_time_goes_on() -> None:
    bench = running(orphan_grace_ms=1_000)
    bench.tell(StreamClosed(S1))
    bench.wait(999)
    bench.tell(Resume(S2, record(), "key", 1, ((),)))
    bench.wait(5_000)
    assert bench.core.counters["orphans_total"] == 0


def test_a_deadline_ends_the_request() -> None:
    bench = running(record(deadline_ms=11_000))
    bench.tell(FromWorker(W1, said(R1, 0, 5)))
    bench.read()
    bench.sent()
    bench.wait(999)
    assert bench.sent() == []
    bench.wait(1)
    assert bench.sent() == [(W1, Drop(SEQ, R1))]
    assert bench.read() == [Finished(0, FinishReason.DEADLINE, 1, "the deadline has passed")]
    assert bench.take(EndStream) == [EndStream(S1, Code.OK, "")]


def test_a_reject_fails_the_request_with_both_numbers_and_keeps_saying_so() -> None:
    bench = running()
    bench.answer(reject=(Reject(SEQ, 9, 8),))
    message = "the request needs 9 KV blocks, the largest pool has 8"
    assert bench.read() == [Finished(0, FinishReason.ERROR, 0, message, "RESOURCE_EXHAUSTED")]
    assert bench.take(EndStream) == [EndStream(S1, Code.RESOURCE_EXHAUSTED, message)]
    bench.tell(Resume(S2, record(), "key", 1, ((),)))
    bench.read(S2)
    assert bench.take(EndStream) == [EndStream(S2, Code.RESOURCE_EXHAUSTED, message)]


@pytest.mark.parametrize(
    ("why", "names"),
    [
        (RejectReason.PLANES_AWAY, "did not return to any card in time (shed_exact_wait_ms)"),
        (RejectReason.NO_PLANES, "no card has the weights' lower planes"),
    ],
)
def test_an_exact_request_without_planes_fails_and_says_why(why: RejectReason, names: str) -> None:
    bench = running()
    bench.answer(reject=(Reject(SEQ, 0, 0, why),))
    (finished,) = bench.read()
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.code) == (FinishReason.ERROR, "RESOURCE_EXHAUSTED")
    assert "the request is exact" in finished.message
    assert names in finished.message


def test_a_disowned_request_is_forgotten_without_cancelling_it() -> None:
    bench = running()
    bench.answer(disown=(Disown(SEQ, 0),))
    assert bench.take(EndStream) == []
    bench.answer(disown=(Disown(SEQ, 1),))
    assert [(e.stream, e.code) for e in bench.take(EndStream)] == [(S1, Code.ABORTED)]
    assert bench.take(Forget) == [Forget(RequestId("r1"))]
    assert bench.sent() == []
    # The run is about to be taken over in place: a refusal would cost it its KV.
    bench.tell(FromWorker(W1, said(R1, 0, 5)), FromWorker(W1, Attach(SEQ, R1, W1)))
    assert bench.sent() == []
    bench.wait(5_000)
    bench.tell(FromWorker(W1, said(R1, 0, 5)))
    assert bench.sent() == [(W1, Drop(SEQ, R1))]


# ---- stop strings --------------------------------------------------------------------------

STOPS = record(sampling=SamplingParams(stop=("x",)))


def test_tokens_wait_for_the_scan_and_nothing_behind_a_stop_goes_out() -> None:
    bench = running(STOPS)
    bench.tell(FromWorker(W1, said(R1, 0, 1, 2)))
    assert bench.take(Scan) == [Scan(SEQ, 0, (1, 2))]
    assert bench.read() == []
    bench.tell(Scanned(SEQ, 2))
    assert bench.read() == [Delta(0, 0, (Token(1), Token(2)))]
    bench.tell(FromWorker(W1, said(R1, 2, 3, 4, 5, finish=FinishReason.LENGTH)))
    assert bench.take(Scan) == [Scan(SEQ, 2, (3, 4, 5))]
    bench.tell(StopMatched(SEQ, 4))
    assert bench.read() == [
        Delta(0, 2, (Token(3), Token(4))),
        Finished(0, FinishReason.STOP, 4, ""),
    ]


def test_a_stop_match_drops_the_run() -> None:
    bench = running(STOPS)
    bench.tell(FromWorker(W1, said(R1, 0, 1, 2, 3)))
    bench.sent()
    bench.tell(StopMatched(SEQ, 2))
    assert bench.sent() == [(W1, Drop(SEQ, R1))]
    bench.tell(FromWorker(W1, said(R1, 3, 4)))
    assert bench.sent() == [(W1, Ack(SEQ, R1, 2, True))]
    assert bench.read()[-1] == Finished(0, FinishReason.STOP, 2, "")
    bench.tell(StopMatched(SEQ, 1))
    assert bench.read() == []


def test_a_takeover_is_scanned_from_the_beginning_and_keeps_what_the_client_has() -> None:
    bench = Bench()
    bench.tell(Resume(S1, STOPS, "key", 1, ((1, 2, 3),)))
    assert bench.take(Scan) == [Scan(SEQ, 0, (1, 2, 3))]
    bench.tell(StopMatched(SEQ, 2))
    assert bench.read()[1:] == [Finished(0, FinishReason.STOP, 3, "")]


# ---- notices and usage ---------------------------------------------------------------------


def notice(run: Run, number: int, kind: NoticeKind, worker: WorkerRef = W1) -> FromWorker:
    return FromWorker(worker, Notice(SEQ, run, number, kind, worker.worker, None, 2, 100, 7_000))


def test_notices_reach_those_who_asked_once() -> None:
    bench = running(include_events=True)
    swapped = notice(R1, 0, NoticeKind.SWAPPED_OUT)
    bench.tell(swapped, swapped, notice(R2, 0, NoticeKind.PLACED))
    assert bench.read() == [swapped.message]


def test_nobody_else_gets_notices() -> None:
    bench = running()
    bench.tell(notice(R1, 0, NoticeKind.SWAPPED_OUT))
    assert bench.read() == []


def test_a_slow_stream_loses_its_oldest_notices() -> None:
    bench = running(include_events=True, max_notices=2)
    for number in range(6):
        bench.tell(notice(R1, number, NoticeKind.SWAP_FAILED))
    assert [n.number for n in bench.read() if isinstance(n, Notice)] == [0, 4, 5]


@pytest.mark.parametrize("late", [False, True])
def test_usage_tells_the_stall_from_the_copies(late: bool) -> None:
    bench = running()
    bench.now_ms += 40
    bench.tell(FromWorker(W1, said(R1, 0, 1)))
    bench.now_ms += 10
    swapped = notice(R1, 0, NoticeKind.SWAPPED_OUT)
    if not late:
        bench.tell(swapped)
    bench.now_ms += 300
    bench.tell(FromWorker(W2, Attach(SEQ, R2, W2)))
    bench.tell(notice(R2, 0, NoticeKind.RESUMED, W2))
    bench.tell(FromWorker(W2, said(R2, 1, 2)))
    if late:
        bench.tell(swapped)
    bench.now_ms += 50
    bench.tell(FromWorker(W2, said(R2, 2, 3, finish=FinishReason.STOP)))
    bench.read()
    (usage,) = bench.usage
    assert (usage.ttft_ms, usage.last_token_ms, usage.completion_tokens) == (40, 400, 3)
    assert (usage.swaps, usage.resumes, usage.stall_ms) == (1, 1, 310)
    assert (usage.offload_blocks, usage.offload_bytes, usage.copy_out_us) == (2, 100, 7_000)
    assert (usage.reload_blocks, usage.reload_bytes, usage.copy_in_us) == (2, 100, 7_000)


def test_a_swap_before_the_first_token_stalls_from_its_notice() -> None:
    bench = running()
    bench.tell(notice(R1, 0, NoticeKind.SWAPPED_OUT))
    bench.now_ms += 200
    bench.tell(FromWorker(W1, said(R1, 0, 1, finish=FinishReason.STOP)))
    bench.read()
    assert bench.usage[0].stall_ms == 200


# ---- reports -------------------------------------------------------------------------------


def test_changes_are_reported_at_once_and_bursts_while_one_is_unanswered_together() -> None:
    bench = Bench()
    bench.tell(Generate(S1, record("a"), "key"))
    (first,) = bench.reports()
    assert (first.number, first.complete, first.epoch_seen) == (1, True, 0)
    assert [v.seq.request for v in first.requests] == ["a"]
    for name, stream in (("b", 2), ("c", 3), ("d", 4)):
        bench.tell(Generate(StreamId(stream), record(name), "key"))
    bench.tell(AbortRequest(RequestId("d"), 0))
    assert bench.reports() == []
    bench.tell(ReportAnswered(ReportReply(epoch=3, number=1, resync=False)))
    (second,) = bench.reports()
    assert (second.number, second.complete, second.epoch_seen) == (2, False, 3)
    assert [(v.seq.request, v.cancelled) for v in second.requests] == [
        ("b", False),
        ("c", False),
        ("d", True),
    ]


def test_a_quiet_gateway_reports_at_intervals() -> None:
    bench = Bench()
    bench.tell(Tick())
    bench.answer()
    bench.wait(99)
    assert bench.reports() == []
    bench.wait(1)
    (report,) = bench.reports()
    assert (report.complete, report.requests, report.gone) == (False, (), ())


def test_a_sequence_that_came_and_went_unreported_is_not_reported() -> None:
    bench = running()
    bench.settle()
    bench.wait(100)
    bench.reports()
    bench.tell(Generate(S2, record("b"), "key"))
    other = Seq(RequestId("b"), 0)
    bench.tell(FromWorker(W1, Attach(other, R2, W1)))
    bench.tell(FromWorker(W1, Tokens(other, R2, 0, (Token(1),), FinishReason.STOP)))
    bench.answer()
    assert [(r.requests, r.gone) for r in bench.reports()] == [((), ())]


@pytest.mark.parametrize("how", ["resync", "silence", "new link"])
def test_a_lost_report_is_followed_by_a_complete_one(how: str) -> None:
    bench = running()
    bench.settle()
    bench.tell(AbortRequest(RequestId("r1"), 0))
    (lost,) = bench.reports()
    if how == "resync":
        reply = ReportReply(epoch=1, number=lost.number, resync=True)
        bench.tell(ReportAnswered(reply))
    elif how == "silence":
        bench.wait(999)
        assert bench.reports() == []
        bench.wait(1)
    else:
        bench.tell(ReportLinkUp())
    (report,) = bench.reports()
    assert report.complete
    assert [(v.seq, v.cancelled) for v in report.requests] == [(SEQ, True)]
    late = ReportReply(epoch=1, number=lost.number, resync=False)
    bench.tell(ReportAnswered(late))
    assert bench.reports() == []
    bench.tell(ReportLinkUp())  # the cancel is still unanswered
    (report,) = bench.reports()
    assert [(v.seq, v.cancelled) for v in report.requests] == [(SEQ, True)]
    bench.tell(ReportAnswered(replace(late, number=report.number)))
    assert [r.gone for r in bench.reports()] == [(SEQ,)]


def test_an_outdated_controller_is_not_listened_to() -> None:
    bench = running()
    bench.settle(epoch=5)
    bench.wait(100)
    number = bench.reports()[-1].number
    reject = (Reject(SEQ, 9, 8),)
    bench.tell(ReportAnswered(ReportReply(epoch=4, number=number, resync=False, reject=reject)))
    assert bench.read() == []
    assert bench.reports() == []


def test_held_tokens_are_refreshed_now_and_then() -> None:
    bench = running()
    bench.settle()
    bench.tell(FromWorker(W1, said(R1, 0, 1, 2, 3)))
    bench.wait(1_000)
    held = [v.held_tokens for r in bench.reports() for v in r.requests]
    assert held == [3]


def test_cancelled_sequences_are_bounded() -> None:
    bench = Bench(max_cancels=2)
    for number in range(5):
        bench.tell(AbortRequest(RequestId(f"r{number}"), 0))
    bench.tell(ReportLinkUp())
    assert [v.seq.request for v in bench.reports()[-1].requests] == ["r3", "r4"]


def test_what_the_world_repeats_or_mistakes_is_harmless() -> None:
    bench = running()
    nowhere = Seq(RequestId("r9"), 0)
    for event in (
        StreamClosed(S3),
        StreamReady(S3),
        Scanned(nowhere, 3),
        Scanned(SEQ, 99),
        StopMatched(nowhere, 3),
        FromWorker(W1, Notice(nowhere, R1, 0, NoticeKind.PLACED, W1.worker, None, 0, 0, 0)),
        FromWorker(W1, Tokens(Seq(RequestId("r1"), 7), R1, 0, (), None)),
        ReportAnswered(
            ReportReply(epoch=1, number=999, resync=False, disown=(Disown(nowhere, 1),))
        ),
    ):
        bench.tell(event)
    bench.tell(FromWorker(W1, said(R1, 0, 5)))
    assert bench.read() == [Delta(0, 0, (Token(5),))]


def test_config_is_checked() -> None:
    with pytest.raises(ValueError, match="max_streams = 0: must be 1 or more"):
        GatewayConfig(max_streams=0)
    assert GatewayConfig(orphan_grace_ms=0).orphan_grace_ms == 0
