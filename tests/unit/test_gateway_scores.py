"""The gateway's core and a prompt's log-probabilities: each once, all before the first token."""

from __future__ import annotations

import pytest

from deepinfer.gateway.core.events import (
    AbortRequest,
    Code,
    EndStream,
    FromWorker,
    Generate,
    Resume,
    StreamClosed,
)
from deepinfer.kvstore.core.ids import RequestId, Run
from deepinfer.kvstore.core.messages import (
    Ack,
    Attach,
    Attached,
    Delta,
    Drop,
    Finished,
    PromptDelta,
    Scores,
)
from deepinfer.kvstore.core.requests import FinishReason, RequestRecord, SamplingParams, Token
from support.gateway_bench import R1, R2, S1, S2, SEQ, W1, W2, Bench, running, said
from support.requests import record

PROMPT = (1, 2, 3, 4, 5)


def asked(*, n: int = 1, logprobs: int | None = None) -> RequestRecord:
    sampling = SamplingParams(prompt_logprobs=1, n=n, logprobs=logprobs)
    return record(prompt=PROMPT, sampling=sampling)


def score(position: int, value: float | None = -0.5) -> Token:
    return Token(PROMPT[position], value, () if value is None else ((9, -0.25),))


def scores(run: Run, first: int, last: int, value: float = -0.5) -> Scores:
    tokens = tuple(score(p, value) for p in range(first, last + 1))
    return Scores(SEQ, run, first, tokens)


def test_they_go_out_as_they_come_each_once() -> None:
    bench = running(asked())
    bench.tell(FromWorker(W1, scores(R1, 1, 2)))
    assert bench.sent() == [(W1, Ack(SEQ, R1, 0, False, 2))]
    assert bench.read() == [PromptDelta(1, (score(1), score(2)))]
    # Doubled and overlapping: the first word counts.
    bench.tell(FromWorker(W1, scores(R1, 2, 4, value=-0.75)))
    assert bench.sent() == [(W1, Ack(SEQ, R1, 0, False, 4))]
    assert bench.read() == [PromptDelta(3, (score(3, -0.75), score(4, -0.75)))]
    bench.tell(FromWorker(W1, said(R1, 0, 7, finish=FinishReason.LENGTH)))
    assert bench.read() == [
        Delta(0, 0, (Token(7),)),
        Finished(0, FinishReason.LENGTH, 1, ""),
    ]


def test_tokens_wait_for_all_of_them() -> None:
    bench = running(asked())
    bench.tell(FromWorker(W1, scores(R1, 1, 3)), FromWorker(W1, said(R1, 0, 7)))
    assert bench.sent()[-1] == (W1, Ack(SEQ, R1, 0, False, 3)), "nothing was taken"
    bench.tell(FromWorker(W1, scores(R1, 4, 4)), FromWorker(W1, said(R1, 0, 7)))
    assert bench.sent()[-1] == (W1, Ack(SEQ, R1, 1, False, 4))


def test_a_gap_is_not_taken_and_a_failure_is() -> None:
    bench = running(asked())
    bench.tell(FromWorker(W1, scores(R1, 2, 3)))
    assert bench.sent() == [(W1, Ack(SEQ, R1, 0, False, 0))]
    bench.tell(FromWorker(W1, said(R1, 0, finish=FinishReason.ERROR)))
    assert bench.read() == [Finished(0, FinishReason.ERROR, 0, "")]


@pytest.mark.parametrize(
    "wrong",
    [
        Scores(SEQ, R1, 0, (Token(1, -1.0),)),
        Scores(SEQ, R1, 1, (Token(9, -1.0),)),
        Scores(SEQ, R1, 1, tuple(Token(t, -1.0) for t in (*PROMPT[1:], 6))),
    ],
)
def test_what_is_not_the_prompts_ends_the_run(wrong: Scores) -> None:
    bench = running(asked())
    bench.tell(FromWorker(W1, wrong))
    assert bench.sent() == [(W1, Drop(SEQ, R1))]
    assert bench.read() == []


def test_a_further_run_is_told_how_many_there_are() -> None:
    bench = running(asked())
    bench.tell(FromWorker(W1, scores(R1, 1, 2)))
    bench.sent()
    bench.tell(FromWorker(W2, Attach(SEQ, R2, W2)))
    assert (W2, Attached(SEQ, R2, asked(), (), 2)) in bench.sent()
    bench.tell(FromWorker(W1, scores(R1, 3, 4)))
    assert bench.sent() == [(W1, Drop(SEQ, R1))], "a run that was replaced is not heard"


def test_only_the_first_choice_brings_them() -> None:
    bench = Bench()
    bench.tell(Generate(S1, asked(n=2), "key"))
    other = SEQ._replace(choice=1)
    bench.tell(FromWorker(W1, Attach(other, R1, W1)))
    assert bench.sent() == [(W1, Attached(other, R1, asked(n=2), (), 0))]
    bench.tell(FromWorker(W1, Scores(other, R1, 1, (score(1),))))
    assert bench.sent() == [(W1, Drop(other, R1))]


# ---- resuming ------------------------------------------------------------------------------


def resume(
    claim: int, scored: int, received: tuple[int, ...] = (), *, logprobs: int | None = None
) -> Resume:
    return Resume(S2, asked(logprobs=logprobs), "key", claim, (received,), scored=scored)


def test_a_client_that_comes_back_gets_the_rest() -> None:
    bench = running(asked())
    bench.tell(FromWorker(W1, scores(R1, 1, 4)), StreamClosed(S1))
    bench.tell(resume(1, 3))
    assert bench.read(S2)[1:] == [PromptDelta(4, (score(4),))]


def test_another_gateway_asks_the_worker_for_the_rest() -> None:
    bench = Bench()
    bench.tell(resume(1, 3))
    bench.tell(FromWorker(W1, Attach(SEQ, R1, W1)))
    assert bench.sent() == [(W1, Attached(SEQ, R1, asked(), (), 3))]
    bench.tell(FromWorker(W1, scores(R1, 4, 4)))
    assert bench.read(S2)[1:] == [PromptDelta(4, (score(4),))]


def test_a_client_behind_the_one_that_brought_them_starts_a_takeover() -> None:
    """What this gateway has from a client alone it has without log-probabilities."""
    bench = Bench()
    bench.tell(resume(1, 3))
    bench.tell(FromWorker(W1, Attach(SEQ, R1, W1)))
    bench.tell(resume(2, 1))
    assert bench.core.counters["takeovers_total"] == 2
    bench.tell(FromWorker(W1, Attach(SEQ, R2, W1)))
    assert bench.sent()[-1] == (W1, Attached(SEQ, R2, asked(), (), 1))


def test_generated_tokens_without_theirs_are_not_passed_on_either() -> None:
    bench = Bench()
    bench.tell(resume(1, 4, (7, 8), logprobs=0))
    bench.tell(resume(2, 4, (7,), logprobs=0))
    assert bench.core.counters["takeovers_total"] == 2
    # Those that the client has are no reason.
    bench.tell(resume(3, 4, (7,), logprobs=0))
    assert bench.core.counters["takeovers_total"] == 2


@pytest.mark.parametrize(("scored", "received"), [(5, ()), (3, (7,))])
def test_progress_that_cannot_be_is_refused(scored: int, received: tuple[int, ...]) -> None:
    bench = Bench()
    bench.tell(resume(1, scored, received))
    (end,) = bench.take(EndStream)
    assert end.code is Code.INVALID_ARGUMENT
    assert f"prompt_logprobs = {scored}: must be 4" in end.message


def test_an_abort_ends_it_with_those_that_are_here() -> None:
    bench = running(asked())
    bench.tell(FromWorker(W1, scores(R1, 1, 2)))
    bench.tell(AbortRequest(RequestId("r1"), 0))
    assert bench.read() == [
        PromptDelta(1, (score(1), score(2))),
        Finished(0, FinishReason.ABORT, 0, ""),
    ]
    bench.sent()
    bench.tell(FromWorker(W1, scores(R1, 3, 4)))
    assert bench.sent() == [(W1, Ack(SEQ, R1, 0, True, 2))]
