"""The engine's thread: a bad sequence fails alone, a bad device ends everything."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from deepinfer.kvstore.core.ids import RequestId, Run, Seq
from deepinfer.kvstore.core.requests import RequestRecord, SamplingParams, Token
from deepinfer.workers import sampler
from deepinfer.workers.core.events import Chunk, StepDone, StepPlan
from deepinfer.workers.engine import Engine, EngineThread
from deepinfer.workers.model.runner import SequenceSlice, Visit

VOCAB = 8


class FakeRunner:
    """Logits favour the last token + 1; NaN after token 6; the device breaks on token 7."""

    config: Any = SimpleNamespace(max_positions=10, vocab_size=VOCAB)
    backend: Any = SimpleNamespace(sample=sampler.sample, kv_saturations=0)
    levels = 2
    costs = ()
    w8a8_rows = 0

    def __init__(self) -> None:
        self.steps_at: list[int] = []
        self.announced: list[int | None] = []
        self.moved: list[tuple[int, int]] = []

    def forward(
        self, slices: Sequence[SequenceSlice], level: int = 0, next_level: int | None = None
    ) -> torch.Tensor:
        self.steps_at.append(level)
        self.announced.append(next_level)
        lasts = [part.token_ids[-1] for part in slices if part.logits]
        if 7 in lasts:
            raise RuntimeError("an illegal memory access")
        logits = torch.zeros(len(lasts), VOCAB)
        for row, last in enumerate(lasts):
            logits[row, last + 1] = 1.0
            if last == 6:
                logits[row, 0] = float("nan")
        return logits

    def forward_and_score(
        self, slices: Sequence[SequenceSlice], rows: Sequence[range], visit: Visit, level: int = 0
    ) -> torch.Tensor:
        raise AssertionError("nobody here asks for the prompt's log-probabilities")

    def move_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.moved += pairs


def chunk(
    name: str,
    *token_ids: int,
    start: int = 0,
    sample: bool = True,
    stop_token_ids: tuple[int, ...] = (),
) -> Chunk:
    record = RequestRecord(
        request=RequestId(name),
        prompt_ids=(1,),
        sampling=SamplingParams(temperature=0.0, min_tokens=1),
        arrival_ms=0,
        seed=0,
        stop_token_ids=stop_token_ids,
    )
    seq = Seq(record.request, 0)
    return Chunk(seq, Run(1, 1), start, token_ids, (0,), sample, 0, record, ())


def step(*chunks: Chunk) -> StepDone:
    return Engine(FakeRunner()).run(StepPlan(4, chunks))


def test_a_step_runs_at_the_level_of_its_plan() -> None:
    runner = FakeRunner()
    engine = Engine(runner)
    for number, (level, coming) in enumerate(((0, 1), (1, 1), (0, None))):
        engine.run(StepPlan(number, (chunk("a", 1),), level, next_level=coming))
    assert runner.steps_at == [0, 1, 0]
    assert runner.announced == [1, 1, None]
    assert engine.levels == 2


def test_blocks_move_where_nothing_is_computed_too() -> None:
    runner = FakeRunner()
    done = Engine(runner).run(StepPlan(3, (), moves=((4, 1), (5, 2))))
    assert runner.moved == [(4, 1), (5, 2)]
    assert runner.steps_at == []
    assert done.outputs == ()


def test_only_chunks_that_sample_get_tokens() -> None:
    done = step(chunk("a", 1, 2), chunk("b", 3, 4, sample=False), chunk("c", 5))
    assert done.step == 4
    assert [(o.seq.request, o.token) for o in done.outputs] == [("a", Token(3)), ("c", Token(6))]
    assert done.failed == ()


def test_bad_logits_fail_their_sequence_only() -> None:
    done = step(chunk("a", 1), chunk("bad", 6), chunk("c", 2))
    assert [(o.seq.request, o.token.id) for o in done.outputs] == [("a", 2), ("c", 3)]
    assert [seq.request for seq in done.failed] == ["bad"]


def test_parameters_that_fit_no_vocabulary_fail_their_sequence_only() -> None:
    done = step(chunk("a", 1), chunk("bad", 2, stop_token_ids=(VOCAB,)))
    assert [o.seq.request for o in done.outputs] == ["a"]
    assert [seq.request for seq in done.failed] == ["bad"]


def test_what_the_model_cannot_compute_fails_alone() -> None:
    done = step(chunk("a", 1), chunk("long", 2, 3, start=9), chunk("strange", VOCAB))
    assert [o.seq.request for o in done.outputs] == ["a"]
    assert [seq.request for seq in done.failed] == ["long", "strange"]


def test_a_step_of_nothing_computable_still_ends() -> None:
    assert step(chunk("long", 2, start=10)).outputs == ()


def test_a_broken_device_is_fatal_and_runs_no_more_steps() -> None:
    done: list[StepDone] = []
    errors: list[BaseException] = []
    broken = threading.Event()

    def fatal(error: BaseException) -> None:
        errors.append(error)
        broken.set()

    thread = EngineThread(Engine(FakeRunner()), done.append, fatal)
    thread.submit(StepPlan(1, (chunk("a", 1),)))
    thread.submit(StepPlan(2, (chunk("b", 7),)))
    thread.submit(StepPlan(3, (chunk("c", 1),)))
    assert broken.wait(10)
    thread.stop()
    assert [outcome.step for outcome in done] == [1]
    assert [str(error) for error in errors] == ["an illegal memory access"]
