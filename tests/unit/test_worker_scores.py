"""The worker's core and log-probabilities: none is lost with a gateway, a link or a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from deepinfer.kvstore.core.ids import (
    GatewayId,
    Incarnation,
    NodeId,
    RequestId,
    Run,
    Seq,
    StoreId,
    Ticket,
    WorkerId,
)
from deepinfer.kvstore.core.ids import WorkerRef as Ref
from deepinfer.kvstore.core.messages import (
    Ack,
    Admit,
    Attached,
    Departure,
    Scores,
    StoreStatus,
    SwapIn,
    Tokens,
)
from deepinfer.kvstore.core.requests import FinishReason, RequestRecord, SamplingParams, Token
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.core.core import WorkerCore
from deepinfer.workers.core.events import (
    Chunk,
    FetchDone,
    FromGateway,
    GatewayDown,
    GatewayUp,
    Report,
    RunStep,
    SendToGateway,
    StepDone,
    StepOutput,
    StepScores,
    Tick,
    WorkerEffect,
    WorkerEvent,
)

G1, G2 = GatewayId("g1"), GatewayId("g2")
SEQ = Seq(RequestId("r"), 0)
PROMPT = (10, 11, 12, 13, 14, 15)
RECORD = RequestRecord(
    request=SEQ.request,
    prompt_ids=PROMPT,
    sampling=SamplingParams(max_tokens=5, logprobs=0, prompt_logprobs=0),
    arrival_ms=0,
    seed=0,
)


def scored(*positions: int) -> tuple[Token, ...]:
    return tuple(Token(PROMPT[p], -p / 8) for p in positions)


def drawn(*ids: int) -> tuple[Token, ...]:
    return tuple(Token(i, -i / 8) for i in ids)


class Bench:
    """A worker that computes what it is asked to; tokens count up from 40."""

    def __init__(self, *, prefix_cache: bool = True, chunk: int = 2) -> None:
        config = WorkerConfig(
            blocks_total=16,
            block_size=2,
            block_bytes=1,
            prefill_chunk_tokens=chunk,
            prefix_cache=prefix_cache,
        )
        self.core = WorkerCore(Ref(WorkerId("w"), Incarnation(1)), NodeId("n"), config)
        self.now_ms = 0
        self.out: list[WorkerEffect] = []
        self.plan: RunStep | None = None
        self.departed: list[Departure] = []
        self._counter = 0

    def do(self, event: WorkerEvent) -> None:
        out = self.core.handle(event, self.now_ms)
        self.core.check()
        self.out += out
        for effect in out:
            if isinstance(effect, RunStep):
                self.plan = effect
            elif isinstance(effect, Report):
                self.departed += [departed.why for departed in effect.report.departed]

    def said(self, kind: type[Scores] | type[Tokens]) -> list[Scores | Tokens]:
        """Take what was said."""
        messages = [e.message for e in self.out if isinstance(e, SendToGateway)]
        self.out = [e for e in self.out if not isinstance(e, SendToGateway)]
        return [m for m in messages if isinstance(m, kind)]

    def admit(
        self,
        held: Sequence[int] = (),
        scores: int = 0,
        *,
        to: GatewayId = G1,
        record: object = None,
    ) -> Run:
        self._counter += 1
        run = Run(1, self._counter)
        tokens = len(PROMPT) + len(held)
        self.do(Admit(run, SEQ, run, to, tokens, len(PROMPT) + 5))
        self.attached(run, held, scores, to=to)
        return run

    def attached(
        self, run: Run, held: Sequence[int] = (), scores: int = 0, *, to: GatewayId = G1
    ) -> None:
        self.do(FromGateway(to, Attached(SEQ, run, RECORD, tuple(held), scores)))

    def step(self) -> Chunk:
        """End the step in flight; return its only chunk."""
        assert self.plan is not None, "no step in flight"
        step, (chunk,) = self.plan.plan[:2]
        self.plan = None
        outputs: tuple[StepOutput, ...] = ()
        scores: tuple[StepScores, ...] = ()
        if chunk.sample:
            (token,) = drawn(40 + chunk.index)
            outputs = (StepOutput(chunk.seq, chunk.run, token),)
        if chunk.score_ids:
            first = chunk.score_from + 1
            tokens = scored(*range(first, first + len(chunk.score_ids)))
            assert tuple(token.id for token in tokens) == chunk.score_ids
            scores = (StepScores(chunk.seq, chunk.run, tokens),)
        self.do(StepDone(step, outputs, (), scores))
        return chunk

    def ack(self, run: Run, held: int, scores: int, *, finished: bool = False) -> None:
        self.do(FromGateway(G1, Ack(SEQ, run, held, finished, scores)))


def test_they_are_sent_chunk_by_chunk_before_the_first_token() -> None:
    bench = Bench()
    run = bench.admit()
    assert (bench.step().score_from, bench.said(Scores)) == (0, [Scores(SEQ, run, 1, scored(1, 2))])
    assert (bench.step().score_from, bench.said(Scores)) == (2, [Scores(SEQ, run, 3, scored(3, 4))])
    last = bench.step()
    assert (last.start, last.score_ids, last.sample) == (4, (15,), True)
    messages = [e.message for e in bench.out if isinstance(e, SendToGateway)]
    assert [type(m) for m in messages] == [Scores, Tokens]


def test_unacknowledged_ones_are_sent_again() -> None:
    bench = Bench()
    run = bench.admit()
    bench.step()
    bench.ack(run, 0, 1)
    bench.said(Scores)
    bench.now_ms += bench.core.config.resend_ms
    bench.do(Tick())
    assert bench.said(Scores) == [Scores(SEQ, run, 2, scored(2))]


def test_a_link_that_breaks_loses_none() -> None:
    bench = Bench()
    run = bench.admit()
    bench.do(GatewayDown(G1))
    bench.step()
    assert bench.said(Scores) == [], "nobody hears it"
    bench.do(GatewayUp(G1))
    bench.attached(run)
    assert bench.said(Scores) == [Scores(SEQ, run, 1, scored(1, 2))]


def test_rows_whose_scores_are_held_are_not_looked_at() -> None:
    bench = Bench()
    run = bench.admit(scores=3)
    assert bench.step().score_ids == ()
    assert bench.step().score_ids == (14,)
    assert bench.said(Scores) == [Scores(SEQ, run, 4, scored(4))]


def test_the_prefix_cache_gives_only_what_is_scored() -> None:
    bench = Bench()
    run = bench.admit()
    for _ in range(7):
        bench.step()
    bench.ack(run, 5, 5, finished=True)
    assert bench.departed == [Departure.FINISHED]
    bench.admit()
    first = bench.step()
    assert (first.start, first.score_ids) == (0, (11, 12))
    again = Bench()
    run = again.admit()
    for _ in range(7):
        again.step()
    again.ack(run, 5, 5, finished=True)
    again.admit(scores=3)
    first = again.step()
    assert (first.start, first.score_from, first.score_ids) == (2, 3, (14,))


@pytest.mark.parametrize(("scores", "start"), [(0, 0), (2, 2), (3, 3), (4, 4), (5, 4)])
def test_a_payload_goes_on_where_the_scores_held_end(scores: int, start: int) -> None:
    """It was swapped out after four tokens; of what was said of them, some was lost on the way."""
    bench = Bench()
    run, ticket = Run(1, 9), Ticket(SEQ, Run(1, 8), Run(1, 8))
    store = StoreId("s")
    bench.do(SwapIn(run, SEQ, run, G1, ticket, store, 4, 2, len(PROMPT) + 5))
    bench.attached(run, scores=scores)
    bench.do(FetchDone(ticket, run, StoreStatus.OK, PROMPT[:4], 2, 1))
    chunk = bench.step()
    assert chunk.start == start
    assert chunk.score_ids == PROMPT[scores + 1 :][: 2 + start - scores]


def test_another_gateway_that_lacks_what_a_former_one_had_gets_it_computed_again() -> None:
    """The run was told of tokens by G1; G2 knows fewer, and only G1 had their numbers."""
    bench = Bench(prefix_cache=False)
    bench.admit(held=(40, 41), scores=5)
    for _ in range(4):
        bench.step()
    bench.said(Tokens)
    run = bench.admit(held=(40,), scores=5, to=G2)
    assert bench.said(Tokens) == [], "token 41 has no log-probability here"
    while bench.plan is not None and not bench.core.residents[SEQ].finish:
        bench.step()
    tokens = [t for m in bench.said(Tokens) if isinstance(m, Tokens) for t in m.tokens]
    assert tokens == [*drawn(41, 42, 43, 44)]
    assert run == bench.core.residents[SEQ].run


def test_own_tokens_go_on_to_another_gateway_as_they_are() -> None:
    bench = Bench(prefix_cache=False)
    bench.admit()
    for _ in range(4):
        bench.step()
    before = bench.core.counters.tokens_computed
    bench.said(Scores)
    run = bench.admit(scores=2, to=G2)
    messages = [e.message for e in bench.out if isinstance(e, SendToGateway)]
    sent = [m for m in messages if isinstance(m, Scores | Tokens)]
    assert sent == [
        Scores(SEQ, run, 3, scored(3, 4, 5)),
        Tokens(SEQ, run, 0, drawn(40, 41), None),
    ]
    assert bench.core.counters.tokens_computed == before, "nothing is computed again"


def test_a_step_that_was_not_asked_for_them_does_not_count_for_a_gateway_that_lacks_them() -> None:
    """G1 held every number, so the step in flight looks at no row; then G2, which has none."""
    bench = Bench(prefix_cache=False)
    bench.admit(held=(40,), scores=5)
    assert bench.plan is not None
    assert bench.plan.plan.chunks[0].score_ids == ()
    bench.admit(scores=0, to=G2)
    bench.step()
    while len(bench.core.residents[SEQ].scores) < 5:
        chunk = bench.step()
        assert chunk.score_from == chunk.start, "each row is computed while it is looked at"
    assert bench.core.residents[SEQ].scores == [*scored(1, 2, 3, 4, 5)]


@pytest.mark.parametrize("scores", [1, 4])
def test_a_finished_run_that_lacks_some_is_put_back(scores: int) -> None:
    bench = Bench(prefix_cache=False)
    bench.admit(scores=4)
    for _ in range(7):
        bench.step()
    assert bench.core.residents[SEQ].finish is FinishReason.LENGTH
    bench.admit(scores=scores, to=G2)
    if scores == 4:
        assert bench.core.residents[SEQ].finish is FinishReason.LENGTH
        assert bench.departed == []
    else:
        assert SEQ not in bench.core.residents
        assert bench.departed == [Departure.DROPPED]


def test_choices_but_the_first_have_none() -> None:
    assert RECORD.scores_due(0) == 5
    assert RECORD.scores_due(1) == 0
    plain = replace(RECORD, sampling=SamplingParams())
    assert plain.scores_due(0) == 0
