"""The gateway's core, rule by rule: attaching, tokens, streams, takeover."""

from __future__ import annotations

import pytest

from deepinfer.gateway.core.events import (
    AbortRequest,
    Code,
    EndStream,
    Forget,
    FromWorker,
    Generate,
    Resume,
    ToStream,
    WorkerLinkDown,
)
from deepinfer.kvstore.core.ids import (
    RequestId,
    Seq,
    StreamId,
    WorkerRef,
)
from deepinfer.kvstore.core.messages import (
    Accepted,
    Ack,
    Attach,
    Attached,
    AttachRefused,
    Delta,
    Drop,
    Finished,
    Tokens,
)
from deepinfer.kvstore.core.requests import FinishReason, SamplingParams, Token
from support.gateway_bench import (
    R1,
    R2,
    R3,
    S1,
    S2,
    S3,
    SEQ,
    W1,
    W1_AGAIN,
    W2,
    Bench,
    running,
    said,
)
from support.requests import record

# ---- attaching and the exactly-once filter -------------------------------------------------


def test_accepted_comes_first_and_attach_brings_the_record() -> None:
    bench = Bench()
    bench.tell(Generate(S1, record(), "key"))
    assert bench.read() == [Accepted(RequestId("r1"), "key", 3, 0)]
    bench.tell(FromWorker(W1, Attach(SEQ, R1, W1)))
    assert bench.sent() == [(W1, Attached(SEQ, R1, record(), ()))]


def test_an_equal_run_of_the_same_life_is_attached_again_with_the_tokens_held() -> None:
    bench = running()
    bench.tell(FromWorker(W1, said(R1, 0, 5, 6)))
    bench.tell(WorkerLinkDown(W1))
    bench.sent()
    bench.tell(FromWorker(W1, Attach(SEQ, R1, W1)))
    assert bench.sent() == [(W1, Attached(SEQ, R1, record(), (5, 6)))]


@pytest.mark.parametrize("worker", [W1_AGAIN, W2])
def test_an_equal_run_of_another_life_is_refused(worker: WorkerRef) -> None:
    bench = running()
    bench.tell(FromWorker(worker, Attach(SEQ, R1, worker)))
    assert bench.sent() == [(worker, AttachRefused(SEQ, R1, R1))]


def test_a_higher_run_takes_over_and_the_lower_one_is_dropped_and_not_heard() -> None:
    bench = running()
    bench.tell(FromWorker(W1, said(R1, 0, 5)))
    bench.sent()
    bench.tell(FromWorker(W2, Attach(SEQ, R2, W2)))
    assert bench.sent() == [(W1, Drop(SEQ, R1)), (W2, Attached(SEQ, R2, record(), (5,)))]
    bench.tell(FromWorker(W1, said(R1, 1, 6)), FromWorker(W1, Attach(SEQ, R1, W1)))
    assert bench.sent() == [(W1, Drop(SEQ, R1)), (W1, AttachRefused(SEQ, R1, R2))]
    assert bench.read() == [Delta(0, 0, (Token(5),))]


def test_in_place_the_older_run_is_not_dropped() -> None:
    bench = running()
    bench.tell(FromWorker(W1, Attach(SEQ, R2, W1)))
    assert bench.sent() == [(W1, Attached(SEQ, R2, record(), ()))]


def test_tokens_are_taken_once_and_gaps_are_told_the_length() -> None:
    bench = running()
    for message, held in (
        (said(R1, 0, 5, 6), 2),
        (said(R1, 0, 5, 6), 2),
        (said(R1, 1, 6, 7), 3),
        (said(R1, 4, 9), 3),
    ):
        bench.tell(FromWorker(W1, message))
        assert bench.sent() == [(W1, Ack(SEQ, R1, held, False))], message
    assert bench.read() == [Delta(0, 0, (Token(5), Token(6))), Delta(0, 2, (Token(7),))]
    counters = bench.core.counters
    assert counters["tokens_total"] == 3
    assert counters["tokens_repeated_total"] == 3
    assert counters["tokens_after_gap_dropped_total"] == 1


@pytest.mark.parametrize(
    "message",
    [said(R1, 1, 66, 7, 8), said(R1, 0, *range(200)), said(R1, 0, 5, finish=FinishReason.STOP)],
)
def test_a_run_that_contradicts_what_was_sent_is_not_heard_again(message: Tokens) -> None:
    bench = running()
    bench.tell(FromWorker(W1, said(R1, 0, 5, 6)))
    assert bench.sent() == [(W1, Ack(SEQ, R1, 2, False))]
    bench.tell(FromWorker(W1, message))
    assert bench.sent() == [(W1, Drop(SEQ, R1))]
    assert bench.core.counters["tokens_contradicting_dropped_total"] == len(message.tokens)
    bench.tell(FromWorker(W1, said(R1, 2, 7)))
    assert bench.sent() == [(W1, Drop(SEQ, R1))]
    assert bench.read() == [Delta(0, 0, (Token(5), Token(6)))]


def test_a_run_that_never_attached_is_left_alone() -> None:
    bench = running()
    bench.tell(FromWorker(W2, said(R2, 0, 5)))
    assert bench.sent() == []
    assert bench.core.counters["tokens_unattached_total"] == 1


def test_the_finish_is_acknowledged_again_and_the_run_may_not_attach_any_more() -> None:
    bench = running()
    end = said(R1, 0, 5, finish=FinishReason.STOP)
    bench.tell(FromWorker(W1, end), FromWorker(W1, end), FromWorker(W1, Attach(SEQ, R1, W1)))
    assert bench.sent() == [
        (W1, Ack(SEQ, R1, 1, True)),
        (W1, Ack(SEQ, R1, 1, True)),
        (W1, AttachRefused(SEQ, R1, None)),
    ]
    assert bench.read() == [Delta(0, 0, (Token(5),)), Finished(0, FinishReason.STOP, 1, "")]
    assert bench.take(EndStream) == [EndStream(S1, Code.OK, "")]


def test_an_unknown_sequence_is_refused_but_not_by_a_young_gateway() -> None:
    bench = Bench()
    bench.tell(FromWorker(W1, Attach(SEQ, R1, W1)), FromWorker(W1, said(R1, 0, 5)))
    assert bench.sent() == [(W1, AttachRefused(SEQ, R1, None)), (W1, Drop(SEQ, R1))]
    bench = Bench()
    bench.now_ms = 4_999
    bench.tell(FromWorker(W1, Attach(SEQ, R1, W1)), FromWorker(W1, said(R1, 0, 5)))
    assert bench.sent() == []


# ---- streams -------------------------------------------------------------------------------


def test_one_message_is_under_way_and_the_rest_waits_in_the_record() -> None:
    bench = running(max_delta_tokens=2)
    bench.tell(FromWorker(W1, said(R1, 0, 1)))
    bench.tell(FromWorker(W1, said(R1, 1, 2, 3, 4)))
    assert [e.message for e in bench.effects if isinstance(e, ToStream)] == [
        Delta(0, 0, (Token(1),))
    ]
    assert bench.read() == [
        Delta(0, 0, (Token(1),)),
        Delta(0, 1, (Token(2), Token(3))),
        Delta(0, 3, (Token(4),)),
    ]


def test_choices_take_turns() -> None:
    two = record(sampling=SamplingParams(n=2))
    bench = running(two, max_delta_tokens=1)
    other = Seq(RequestId("r1"), 1)
    bench.tell(FromWorker(W2, Attach(other, R2, W2)))
    bench.tell(FromWorker(W1, said(R1, 0, 1, 2, 3)))
    bench.tell(FromWorker(W2, Tokens(other, R2, 0, (Token(7), Token(8)), FinishReason.STOP)))
    assert [(d.choice, d.index) for d in bench.read() if isinstance(d, Delta)] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
        (0, 2),
    ]
    assert bench.take(EndStream) == []


def test_a_resume_gets_what_follows_and_replaces_the_old_stream() -> None:
    bench = running()
    bench.tell(FromWorker(W1, said(R1, 0, 1, 2, 3)))
    bench.tell(Resume(S2, record(), "key", 1, ((1,),)))
    assert bench.take(EndStream) == [EndStream(S1, Code.ABORTED, "attempt 1 has taken over")]
    assert bench.read(S2) == [
        Accepted(RequestId("r1"), "key", 3, 1),
        Delta(0, 1, (Token(2), Token(3))),
    ]


@pytest.mark.parametrize(
    ("resume", "code"),
    [
        (Resume(S2, record(), "another", 1, ((),)), Code.PERMISSION_DENIED),
        (Resume(S2, record(prompt=(1,)), "key", 1, ((),)), Code.INVALID_ARGUMENT),
        (Resume(S2, record(), "key", 1, ((), ())), Code.INVALID_ARGUMENT),
        (Resume(S2, record(), "key", 1, (tuple(range(129)),)), Code.INVALID_ARGUMENT),
    ],
)
def test_a_resume_that_cannot_be_right_is_refused_and_harms_nothing(
    resume: Resume, code: Code
) -> None:
    bench = running()
    bench.tell(resume)
    assert [(e.stream, e.code) for e in bench.take(EndStream)] == [(S2, code)]
    bench.tell(FromWorker(W1, said(R1, 0, 1)))
    assert bench.read() == [Delta(0, 0, (Token(1),))]


def test_an_older_attempt_is_refused() -> None:
    bench = running()
    bench.tell(Resume(S2, record(), "key", 2, ((),)))
    bench.tell(Resume(S3, record(), "key", 1, ((),)))
    assert [(e.stream, e.code) for e in bench.take(EndStream)] == [
        (S1, Code.ABORTED),
        (S3, Code.ABORTED),
    ]


def test_the_end_can_be_fetched_again_until_it_is_forgotten() -> None:
    bench = running(finished_keep_ms=1_000)
    bench.tell(FromWorker(W1, said(R1, 0, 5, finish=FinishReason.STOP)))
    bench.read()
    bench.wait(999)
    bench.tell(Resume(S2, record(), "key", 1, ((5,),)))
    assert bench.read(S2)[1:] == [Finished(0, FinishReason.STOP, 1, "")]
    bench.wait(999)
    assert bench.take(Forget) == []
    bench.wait(1)
    assert bench.take(Forget) == [Forget(RequestId("r1"))]


def test_ended_records_are_bounded_in_bytes() -> None:
    bench = Bench(finished_bytes_max=5_000)
    for number in range(20):
        stream, name = StreamId(number), f"r{number}"
        bench.tell(Generate(stream, record(name), "key"))
        bench.tell(AbortRequest(RequestId(name), 0))
        bench.read(stream)
    forgotten = [e.request for e in bench.take(Forget)]
    assert forgotten == [f"r{n}" for n in range(20 - 4)]


def test_bounds_refuse_by_name() -> None:
    bench = Bench(max_live_requests=1)
    bench.tell(Generate(S1, record("a"), "key"), Generate(S2, record("b"), "key"))
    message = "1 live requests, max_live_requests = 1"
    assert bench.take(EndStream) == [EndStream(S2, Code.RESOURCE_EXHAUSTED, message)]
    bench.tell(Resume(S3, record("c"), "key", 1, ((),)))
    refused = bench.take(EndStream)
    assert [(e.stream, e.code) for e in refused] == [(S3, Code.UNAVAILABLE)]
    bench.tell(Resume(S3, record("a"), "key", 1, ((),)))
    assert [e.stream for e in bench.take(EndStream)] == [S1]

    bench = Bench(max_streams=1)
    bench.tell(Generate(S1, record("a"), "key"), Generate(S2, record("b"), "key"))
    message = "1 streams, max_streams = 1"
    assert bench.take(EndStream) == [EndStream(S2, Code.RESOURCE_EXHAUSTED, message)]


def test_a_request_id_is_used_once() -> None:
    bench = running()
    bench.tell(Generate(S2, record(), "key2"))
    assert [(e.stream, e.code) for e in bench.take(EndStream)] == [(S2, Code.ABORTED)]


# ---- takeover ------------------------------------------------------------------------------


def test_a_takeover_starts_with_what_the_client_has() -> None:
    bench = Bench()
    bench.tell(Resume(S1, record(), "key", 4, ((7, 8),)))
    assert bench.read() == [Accepted(RequestId("r1"), "key", 3, 4)]
    (report,) = bench.reports()
    (level,) = report.requests
    assert (level.claim, level.held_tokens, level.attached) == (4, 2, None)
    bench.tell(FromWorker(W1, Attach(SEQ, R2, W1)))
    assert bench.sent() == [(W1, Attached(SEQ, R2, record(), (7, 8)))]


def test_a_client_that_knows_more_was_served_elsewhere_and_old_runs_may_not_go_on() -> None:
    bench = running()
    bench.tell(FromWorker(W1, said(R1, 0, 1, 2)))
    bench.sent()
    bench.tell(Resume(S2, record(), "key", 2, ((1, 9, 8),)))
    bench.tell(FromWorker(W1, said(R1, 2, 3)), FromWorker(W1, Attach(SEQ, R1, W1)))
    assert bench.sent() == [(W1, Drop(SEQ, R1)), (W1, AttachRefused(SEQ, R1, R1))]
    bench.tell(FromWorker(W2, Attach(SEQ, R3, W2)))
    assert bench.sent() == [(W2, Attached(SEQ, R3, record(), (1, 9, 8)))]


@pytest.mark.parametrize(
    ("received", "reason"),
    [((4, 2), FinishReason.STOP), ((4, 4, 4), FinishReason.LENGTH)],
)
def test_a_client_that_has_everything_but_the_end_gets_it(
    received: tuple[int, ...], reason: FinishReason
) -> None:
    ends = record(sampling=SamplingParams(max_tokens=3), stop_token_ids=(2,))
    bench = Bench()
    bench.tell(Resume(S1, ends, "key", 1, (received,)))
    assert bench.read()[1:] == [Finished(0, reason, len(received), "")]
    assert bench.take(EndStream) == [EndStream(S1, Code.OK, "")]
    assert [r.requests for r in bench.reports()][-1] == ()


def test_a_stop_token_before_min_tokens_is_no_end() -> None:
    early = record(sampling=SamplingParams(min_tokens=3), stop_token_ids=(2,))
    bench = Bench()
    bench.tell(Resume(S1, early, "key", 1, ((4, 2),)))
    assert bench.read()[1:] == []
