"""The client's core, rule by rule."""

from __future__ import annotations

import pytest

from deepinfer.client.core.config import ClientConfig
from deepinfer.client.core.events import (
    AbortAnswered,
    AbortRequested,
    CloseStream,
    Deliver,
    Effect,
    Event,
    Fail,
    Failure,
    Got,
    OpenGenerate,
    OpenResume,
    SendAbort,
    Start,
    StreamEnded,
    Succeed,
    Tick,
    Wait,
)
from deepinfer.client.core.resume import ClientCore
from deepinfer.kvstore.core.ids import RequestId, Run, Seq, WorkerId
from deepinfer.kvstore.core.messages import Accepted, Delta, Finished, Notice, NoticeKind
from deepinfer.kvstore.core.requests import FinishReason, Token

ID = RequestId("r1")
ACCEPTED = Accepted(ID, "key", 3, 0)


class Bench:
    """A core with a clock."""

    def __init__(self, *endpoints: str, choices: int = 1, **config: int) -> None:
        self.now_ms = 0
        self.core = ClientCore(endpoints or ("a", "b"), choices, ClientConfig(**config))

    def tell(self, *events: Event) -> list[Effect]:
        effects: list[Effect] = []
        for event in events:
            effects += self.core.handle(event, self.now_ms)
            self.core.check()
        return [effect for effect in effects if not isinstance(effect, Wait)]

    def unanswered(self) -> str | None:
        return self.core.unanswered

    def retry(self, within_ms: int) -> list[Effect]:
        """Wait for the next attempt, which must not come before half of ``within_ms``."""
        self.now_ms += within_ms // 2 - 1
        assert self.tell(Tick()) == []
        self.now_ms += within_ms
        return self.tell(Tick())


def delta(index: int, *ids: int, choice: int = 0) -> Delta:
    return Delta(choice, index, tuple(map(Token, ids)))


def accepted(*endpoints: str, **config: int) -> Bench:
    bench = Bench(*endpoints, **config)
    bench.tell(Start(), Got(1, ACCEPTED))
    return bench


def test_a_stream_that_goes_well() -> None:
    bench = Bench()
    assert bench.tell(Start()) == [OpenGenerate(1, "a")]
    assert bench.tell(Got(1, ACCEPTED)) == [Deliver(ACCEPTED)]
    assert bench.tell(Got(1, delta(0, 5, 6))) == [Deliver(delta(0, 5, 6))]
    end = Finished(0, FinishReason.STOP, 2, "")
    assert bench.tell(Got(1, end)) == [Deliver(end), CloseStream(1), Succeed()]
    assert bench.core.over
    assert bench.tell(StreamEnded(1, "UNAVAILABLE", ""), Tick(), AbortRequested()) == []


def test_jitter_chooses_the_first_endpoint() -> None:
    assert Bench().tell(Start(0.5)) == [OpenGenerate(1, "b")]


def test_before_acceptance_it_is_sent_anew_elsewhere() -> None:
    bench = Bench()
    bench.tell(Start())
    assert bench.tell(StreamEnded(1, "UNAVAILABLE", "")) == []
    assert bench.retry(50) == [OpenGenerate(2, "b")]


def test_after_acceptance_it_is_resumed_with_all_there_is() -> None:
    bench = accepted()
    bench.tell(Got(1, delta(0, 5, 6)), StreamEnded(1, "UNAVAILABLE", ""))
    assert bench.retry(50) == [OpenResume(2, "b", ID, "key", 2, ((5, 6),))]
    assert bench.tell(Got(2, ACCEPTED._replace(claim=2))) == []
    assert bench.tell(Got(2, delta(2, 7))) == [Deliver(delta(2, 7))]


def test_waits_double_up_to_a_bound_and_begin_anew_with_progress() -> None:
    bench = accepted(backoff_first_ms=100, backoff_max_ms=300)
    attempt = 1
    for wait_ms in (100, 200, 300, 300):
        bench.tell(StreamEnded(attempt, "UNAVAILABLE", ""))
        attempt += 1
        assert [type(e) for e in bench.retry(wait_ms)] == [OpenResume]
    bench.tell(Got(attempt, ACCEPTED), Got(attempt, delta(0, 5)))
    bench.tell(StreamEnded(attempt, "UNAVAILABLE", ""))
    assert [type(e) for e in bench.retry(100)] == [OpenResume]


def test_jitter_spreads_the_wait_over_its_upper_half() -> None:
    waits = []
    for jitter in (0.0, 0.999):
        bench = Bench()
        bench.core.handle(Start(), 0)
        effects = bench.core.handle(StreamEnded(1, "UNAVAILABLE", "", jitter), 0)
        waits += [effect.due_ms for effect in effects if isinstance(effect, Wait)]
    assert waits == [25, 49]


def test_it_gives_up_when_nothing_was_heard_for_long() -> None:
    bench = accepted(give_up_ms=1_000)
    bench.now_ms = 900
    bench.tell(Got(1, delta(0, 5)))
    bench.now_ms = 1_899
    assert bench.tell(StreamEnded(1, "UNAVAILABLE", "gone")) == []
    bench.now_ms += 1_000
    assert [type(e) for e in bench.tell(Tick())] == [OpenResume]
    fail = Fail(Failure.UNAVAILABLE, "UNAVAILABLE", "gone for good")
    assert bench.tell(StreamEnded(2, "UNAVAILABLE", "gone for good")) == [fail]


def test_a_request_that_nobody_accepts_fails_sooner() -> None:
    bench = Bench(connect_give_up_ms=300)
    bench.tell(Start())
    bench.now_ms = 300
    fail = Fail(Failure.UNAVAILABLE, "UNAVAILABLE", "nobody")
    assert bench.tell(StreamEnded(1, "UNAVAILABLE", "nobody")) == [fail]


def test_that_nobody_answers_is_known_once_all_were_tried() -> None:
    bench = Bench()
    bench.tell(Start(), StreamEnded(1, "UNAVAILABLE", "a: refused"))
    assert bench.unanswered() is None
    bench.retry(50)
    assert bench.unanswered() is None
    bench.tell(StreamEnded(2, "UNAVAILABLE", "b: refused"))
    assert bench.unanswered() == "b: refused"
    bench.retry(100)
    assert bench.unanswered() == "b: refused", "the third attempt has brought nothing so far"
    bench.tell(Got(3, ACCEPTED))
    assert bench.unanswered() is None
    # A gateway that goes down breaks the stream, and does not answer after that.
    bench.tell(StreamEnded(3, "UNAVAILABLE", "a: went down"))
    for attempt, wait_ms, trouble in ((4, 50, None), (5, 100, "a: refused")):
        bench.retry(wait_ms)
        bench.tell(StreamEnded(attempt, "UNAVAILABLE", "a: refused"))
        assert bench.unanswered() == trouble
    bench.tell(AbortRequested())
    bench.tell(AbortAnswered(6, True))
    assert bench.core.over
    assert bench.unanswered() is None


def test_a_silent_attempt_is_left() -> None:
    bench = Bench(accept_timeout_ms=500)
    bench.tell(Start())
    bench.now_ms = 499
    assert bench.tell(Tick()) == []
    bench.now_ms = 500
    assert bench.tell(Tick()) == [CloseStream(1)]
    assert bench.retry(50) == [OpenGenerate(2, "b")]
    assert bench.tell(Got(1, ACCEPTED), StreamEnded(1, "INTERNAL", "")) == []


def test_an_accepted_stream_may_be_silent_for_ever() -> None:
    bench = accepted()
    bench.now_ms = 10**9
    assert bench.tell(Tick()) == []


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("INVALID_ARGUMENT", Failure.INVALID),
        ("UNAUTHENTICATED", Failure.UNAUTHENTICATED),
        ("PERMISSION_DENIED", Failure.UNAUTHENTICATED),
        ("NOT_FOUND", Failure.NOT_FOUND),
        ("ABORTED", Failure.REPLACED),
        ("RESOURCE_EXHAUSTED", Failure.EXHAUSTED),
        ("UNIMPLEMENTED", Failure.FAILED),
    ],
)
def test_some_statuses_are_final(code: str, failure: Failure) -> None:
    bench = accepted()
    assert bench.tell(StreamEnded(1, code, "why")) == [Fail(failure, code, "why")]


def test_a_full_gateway_is_not_the_last_word() -> None:
    bench = Bench()
    bench.tell(Start())
    assert bench.tell(StreamEnded(1, "RESOURCE_EXHAUSTED", "full")) == []
    assert bench.retry(50) == [OpenGenerate(2, "b")]
    fail = Fail(Failure.EXHAUSTED, "RESOURCE_EXHAUSTED", "full too")
    assert bench.tell(StreamEnded(2, "RESOURCE_EXHAUSTED", "full too")) == [fail]


def test_what_is_known_is_dropped() -> None:
    bench = accepted()
    bench.tell(Got(1, delta(0, 5, 6, 7)))
    assert bench.tell(Got(1, delta(0, 5, 6, 7)), Got(1, delta(1, 6))) == []


@pytest.mark.parametrize(
    "wrong",
    [
        delta(3, 9),  # a gap
        delta(1, 6, 7),  # half of it known: its text cannot be cut
        delta(1, 9),  # contradicts
        delta(0, 1, choice=1),
        Finished(0, FinishReason.STOP, 9, ""),
        Finished(1, FinishReason.STOP, 0, ""),
        Accepted(RequestId("r2"), "key", 3, 0),
    ],
)
def test_what_cannot_be_is_an_error_that_resumes(wrong: Delta | Finished | Accepted) -> None:
    bench = accepted()
    bench.tell(Got(1, delta(0, 5, 6)))
    assert bench.tell(Got(1, wrong)) == [CloseStream(1)]
    assert bench.retry(50) == [OpenResume(2, "b", ID, "key", 2, ((5, 6),))]


def test_a_gateway_that_keeps_contradicting_fails_the_request() -> None:
    bench = accepted(contradictions_max=3)
    for attempt in (1, 2):
        bench.tell(Got(attempt, ACCEPTED))
        assert bench.tell(Got(attempt, delta(9, 1))) == [CloseStream(attempt)]
        bench.now_ms += 10_000
        bench.tell(Tick())
    effects = bench.tell(Got(3, delta(9, 1)))
    assert effects[0] == CloseStream(3)
    assert isinstance(effects[1], Fail)
    assert effects[1].failure is Failure.PROTOCOL


def test_an_error_brings_its_status() -> None:
    bench = accepted()
    end = Finished(0, FinishReason.ERROR, 0, "too large", "RESOURCE_EXHAUSTED")
    fail = Fail(Failure.EXHAUSTED, "RESOURCE_EXHAUSTED", "too large")
    assert bench.tell(Got(1, end)) == [Deliver(end), CloseStream(1), fail]


def test_a_refusal_of_one_choice_is_remembered_wherever_the_other_ends() -> None:
    bench = Bench(choices=2)
    bench.tell(Start(), Got(1, ACCEPTED))
    end = Finished(0, FinishReason.ERROR, 0, "too large", "RESOURCE_EXHAUSTED")
    assert bench.tell(Got(1, end)) == [Deliver(end)]
    # The stream breaks before its status is here, and a gateway serves that sees a larger pool.
    bench.tell(StreamEnded(1, "UNAVAILABLE", ""))
    bench.retry(50)
    other = Finished(1, FinishReason.LENGTH, 0, "")
    fail = Fail(Failure.EXHAUSTED, "RESOURCE_EXHAUSTED", "too large")
    assert bench.tell(Got(2, other)) == [Deliver(other), CloseStream(2), fail]


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT, FinishReason.DEADLINE])
def test_a_gateway_that_does_not_know_of_an_end_may_try_again(reason: FinishReason) -> None:
    """Only tokens are told to a gateway that takes over; it computes the choice anew."""
    bench = Bench(choices=2)
    bench.tell(Start(), Got(1, ACCEPTED), Got(1, delta(0, 5, choice=1)))
    bench.tell(Got(1, Finished(0, reason, 0, "no room", "RESOURCE_EXHAUSTED")))
    bench.tell(StreamEnded(1, "UNAVAILABLE", "gone"))
    bench.now_ms += 20_000
    bench.tell(Tick())
    assert bench.tell(Got(2, ACCEPTED), Got(2, delta(0, 7, 8, choice=0))) == []
    last = Finished(1, FinishReason.LENGTH, 1, "")
    told = bench.tell(Got(2, Finished(0, FinishReason.LENGTH, 2, "")), Got(2, last))
    end = Fail(Failure.EXHAUSTED, "RESOURCE_EXHAUSTED", "no room")
    assert told == [
        Deliver(last),
        CloseStream(2),
        end if reason is FinishReason.ERROR else Succeed(),
    ]


def test_an_error_without_a_status_is_a_failure() -> None:
    bench = accepted()
    fail = bench.tell(Got(1, Finished(0, FinishReason.ERROR, 0, "why")))[-1]
    assert fail == Fail(Failure.FAILED, "INTERNAL", "why")


def test_a_stream_that_ends_early_is_resumed() -> None:
    bench = accepted()
    assert bench.tell(StreamEnded(1, "OK", "")) == []
    assert [type(e) for e in bench.retry(50)] == [OpenResume]


def test_all_choices_have_to_end() -> None:
    bench = Bench(choices=2)
    bench.tell(Start(), Got(1, ACCEPTED), Got(1, delta(0, 5)), Got(1, delta(0, 6, choice=1)))
    bench.tell(Got(1, Finished(1, FinishReason.STOP, 1, "")))
    bench.tell(StreamEnded(1, "UNAVAILABLE", ""))
    assert bench.retry(50) == [OpenResume(2, "b", ID, "key", 2, ((5,), (6,)))]
    bench.tell(Got(2, ACCEPTED))
    assert bench.tell(Got(2, Finished(1, FinishReason.STOP, 1, ""))) == []
    end = Finished(0, FinishReason.STOP, 1, "")
    assert bench.tell(Got(2, end)) == [Deliver(end), CloseStream(2), Succeed()]


def test_notices_are_delivered_once() -> None:
    bench = accepted()
    notice = Notice(Seq(ID, 0), Run(1, 1), 0, NoticeKind.PLACED, WorkerId("w"), None, 0, 0, 0)
    assert bench.tell(Got(1, notice), Got(1, notice)) == [Deliver(notice)]
    newer = notice._replace(run=Run(1, 2))
    assert bench.tell(Got(1, newer)) == [Deliver(newer)]


def test_abort_between_attempts_needs_no_gateway() -> None:
    bench = Bench()
    bench.tell(Start(), StreamEnded(1, "UNAVAILABLE", ""))
    (fail,) = bench.tell(AbortRequested())
    assert isinstance(fail, Fail)
    assert fail.failure is Failure.ABORTED


def test_abort_before_acceptance_waits_for_the_id() -> None:
    bench = Bench()
    assert bench.tell(Start(), AbortRequested(), AbortRequested()) == [OpenGenerate(1, "a")]
    abort = SendAbort(2, "a", ID, "key", 2)
    assert bench.tell(Got(1, ACCEPTED)) == [Deliver(ACCEPTED), CloseStream(1), abort]


@pytest.mark.parametrize("broken", [False, True])
def test_abort_before_acceptance_does_not_wait_for_long(broken: bool) -> None:
    bench = Bench(abort_accept_ms=500)
    bench.tell(Start())
    bench.now_ms = 300
    assert bench.tell(AbortRequested()) == []
    bench.now_ms = 799
    assert bench.tell(Tick()) == []
    bench.now_ms = 800
    effects = bench.tell(StreamEnded(1, "UNAVAILABLE", "") if broken else Tick())
    assert effects[:-1] == ([] if broken else [CloseStream(1)])
    assert isinstance(effects[-1], Fail)
    assert effects[-1].failure is Failure.ABORTED


def test_abort_is_told_to_one_gateway_after_the_other() -> None:
    bench = accepted(abort_attempts_max=3)
    assert bench.tell(AbortRequested()) == [CloseStream(1), SendAbort(2, "a", ID, "key", 2)]
    assert bench.tell(AbortRequested(), Got(1, delta(0, 5))) == []
    assert bench.tell(AbortAnswered(2, False)) == []
    assert bench.retry(100) == [SendAbort(3, "b", ID, "key", 3)]
    (fail,) = bench.tell(AbortAnswered(3, True))
    assert fail == Fail(Failure.ABORTED, "CANCELLED", "aborted")


def test_abort_gives_up_at_last() -> None:
    bench = accepted(abort_attempts_max=1)
    bench.tell(AbortRequested())
    (fail,) = bench.tell(AbortAnswered(2, False))
    assert isinstance(fail, Fail)
    assert "no gateway could be told" in fail.detail


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="at least one address"):
        ClientCore(())
    with pytest.raises(ValueError, match="give_up_ms = 0"):
        ClientConfig(give_up_ms=0)


def test_a_deadline_is_the_clients_own_business_when_no_gateway_is_heard() -> None:
    core = ClientCore(("a",), 1, ClientConfig(deadline_slack_ms=100), deadline_ms=1_000)
    effects = core.handle(Start(), 0)
    assert Wait(1_100) in effects  # sooner than the endpoint's patience
    effects = core.handle(StreamEnded(1, "UNAVAILABLE", "gone"), 10)
    assert isinstance(effects[-1], Wait)
    core.handle(Tick(), effects[-1].due_ms)
    core.handle(Got(2, ACCEPTED), 100)
    core.handle(Got(2, delta(0, 5)), 200)
    assert core.handle(Tick(), 1_099) == [Wait(1_100)]
    closed, failed = core.handle(Tick(), 1_100)
    assert closed == CloseStream(2)
    assert isinstance(failed, Fail)
    assert (failed.failure, failed.code) == (Failure.DEADLINE, "DEADLINE_EXCEEDED")
    assert "1000 ms" in failed.detail
    assert core.over


def test_a_gateway_that_says_so_in_time_has_the_last_word() -> None:
    core = ClientCore(("a",), 1, ClientConfig(), deadline_ms=1_000)
    core.handle(Start(), 0)
    core.handle(Got(1, ACCEPTED), 5)
    effects = core.handle(Got(1, Finished(0, FinishReason.DEADLINE, 0, "late")), 1_500)
    assert Succeed() in effects


def test_an_abort_is_not_cut_short_by_the_deadline() -> None:
    core = ClientCore(("a",), 1, ClientConfig(deadline_slack_ms=1), deadline_ms=50)
    core.handle(Start(), 0)
    core.handle(Got(1, ACCEPTED), 5)
    core.handle(AbortRequested(), 40)
    assert core.handle(Tick(), 60) == []
    assert not core.over
    (failed,) = core.handle(AbortAnswered(2, True), 70)
    assert isinstance(failed, Fail)
    assert failed.failure is Failure.ABORTED


def test_endpoints_that_are_not_trusted_are_passed_over_and_then_it_is_said() -> None:
    bench = Bench("a", "b", "c")
    bench.tell(Start())
    assert bench.tell(StreamEnded(1, "UNAVAILABLE", "a: handshake", 0.0, True)) == []
    assert bench.retry(50) == [OpenGenerate(2, "b")]
    assert bench.tell(StreamEnded(2, "UNAVAILABLE", "b: refused")) == []  # not for good
    assert bench.retry(100) == [OpenGenerate(3, "c")]
    assert bench.tell(StreamEnded(3, "RESOURCE_EXHAUSTED", "c: full")) == []
    assert bench.retry(200) == [OpenGenerate(4, "a")]
    assert bench.tell(StreamEnded(4, "UNAVAILABLE", "a: handshake", 0.0, True)) == []
    assert bench.retry(400) == [OpenGenerate(5, "b")]
    assert bench.tell(StreamEnded(5, "UNAVAILABLE", "b: handshake", 0.0, True)) == [
        Fail(Failure.UNTRUSTED, "UNAVAILABLE", "b: handshake")
    ]


def test_trust_that_is_lost_after_acceptance_is_waited_for() -> None:
    """A certificate may be about to be replaced, and the request must finish."""
    bench = Bench("a", give_up_ms=5_000)
    bench.tell(Start(), Got(1, ACCEPTED))
    assert bench.tell(StreamEnded(1, "UNAVAILABLE", "a: handshake", 0.0, True)) == []
    (again,) = bench.retry(50)
    assert isinstance(again, OpenResume)


def test_a_tick_that_comes_too_early_does_not_lose_the_retry() -> None:
    core = ClientCore(("a",))
    core.handle(Start(), 0)
    (wait,) = core.handle(StreamEnded(1, "UNAVAILABLE", "gone"), 10)
    assert isinstance(wait, Wait)
    assert core.handle(Tick(), wait.due_ms - 1) == [wait]
    assert core.handle(Tick(), wait.due_ms)[0] == OpenGenerate(2, "a")


def test_who_has_waited_long_at_a_gateway_is_patient_when_it_dies() -> None:
    """The queue was long, so nothing was heard for longer than patience lasts."""
    bench = Bench("a", "b", give_up_ms=5_000)
    bench.tell(Start(), Got(1, ACCEPTED))
    bench.now_ms += 600_000
    assert bench.tell(StreamEnded(1, "UNAVAILABLE", "gone")) == []
    (resumed,) = bench.retry(50)
    assert isinstance(resumed, OpenResume)
    bench.now_ms += 6_000
    (failed,) = bench.tell(StreamEnded(2, "UNAVAILABLE", "gone"))
    assert isinstance(failed, Fail)
    assert failed.failure is Failure.UNAVAILABLE


def test_streams_that_are_lost_again_and_again_do_not_count_as_being_served() -> None:
    bench = Bench("a", give_up_ms=5_000)
    bench.tell(Start(), Got(1, ACCEPTED))
    for attempt in range(1, 100):
        bench.now_ms += 500
        ended = bench.tell(StreamEnded(attempt, "UNAVAILABLE", "gone"))
        if ended:
            break
        bench.now_ms += 2_000
        bench.tell(Tick(), Got(attempt + 1, ACCEPTED))
    (failed,) = ended
    assert isinstance(failed, Fail)
    assert failed.failure is Failure.UNAVAILABLE
    assert bench.now_ms <= 5_000 + 2_500
