"""Runs steps: a plan in, sampled tokens out, on a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from deepinfer.kvstore.core.ids import Seq
from deepinfer.kvstore.core.precision import StepCost
from deepinfer.kvstore.core.requests import Token
from deepinfer.proto.failpoints import Failpoints
from deepinfer.workers.core.events import Chunk, StepDone, StepOutput, StepPlan, StepScores
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.runner import SequenceSlice, Visit
from deepinfer.workers.sampler import SampleRow, score

log = logging.getLogger(__name__)


class SamplingBackend(Protocol):
    """The part of ``Backend`` that a step uses directly."""

    @property
    def kv_saturations(self) -> int: ...

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Token]: ...


class Runner(Protocol):
    """The part of ``ModelRunner`` that a step uses."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def backend(self) -> SamplingBackend: ...

    @property
    def levels(self) -> int:
        """How many levels the weights have; those of a model that is not nested have one."""

    @property
    def costs(self) -> tuple[StepCost, ...]:
        """What steps take at each level; () if that was not measured."""

    @property
    def w8a8_rows(self) -> int:
        """Steps of so many rows may be at the level ``levels``, W8A8; 0: none."""

    def forward(
        self, slices: Sequence[SequenceSlice], level: int = 0, next_level: int | None = None
    ) -> torch.Tensor: ...

    def forward_and_score(
        self, slices: Sequence[SequenceSlice], rows: Sequence[range], visit: Visit, level: int = 0
    ) -> torch.Tensor: ...

    def move_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks within the pool, (from, to), before what is computed next."""


class Engine:
    """One model on one device. ``run`` blocks; only one thread may call it."""

    def __init__(self, runner: Runner, failpoints: Failpoints | None = None) -> None:
        self._runner = runner
        self._failpoints = failpoints or Failpoints()

    @property
    def levels(self) -> int:
        """Levels that a plan may name: one more than the highest."""
        return self._runner.levels

    @property
    def costs(self) -> tuple[StepCost, ...]:
        """What steps take at each level; () if that was not measured."""
        return self._runner.costs

    @property
    def w8a8_rows(self) -> int:
        """Steps of so many rows may be W8A8; 0: none."""
        return self._runner.w8a8_rows

    @property
    def kv_saturations(self) -> int:
        """K and V elements that did not fit the pool's dtype and were clamped, since start."""
        return self._runner.backend.kv_saturations

    def run(self, plan: StepPlan) -> StepDone:
        """Compute one step. A chunk that cannot be computed fails its own sequence only.

        Raises whatever the device raises: after that its state is unknown and the process must go.
        """
        if plan.moves:
            self._runner.move_blocks(plan.moves)
        sane = [chunk for chunk in plan.chunks if self._computable(chunk)]
        failed = [chunk.seq for chunk in plan.chunks if not self._computable(chunk)]
        outputs: tuple[StepOutput, ...] = ()
        scores: tuple[StepScores, ...] = ()
        if sane:
            slices = [SequenceSlice(c.token_ids, c.start, c.block_table, c.sample) for c in sane]
            if any(chunk.score_ids for chunk in sane):
                logits, scores = self._score(slices, sane, failed, plan.level)
            else:
                logits = self._runner.forward(slices, plan.level, plan.next_level)
            self._hit(sane)
            outputs = self._sample(logits, [c for c in sane if c.sample], failed)
        return StepDone(plan.step, outputs, tuple(failed), scores)

    def _score(
        self, slices: list[SequenceSlice], chunks: list[Chunk], failed: list[Seq], level: int
    ) -> tuple[torch.Tensor, tuple[StepScores, ...]]:
        """Compute a step in which prompt tokens are scored; chunks without one go to ``failed``."""
        scored: list[list[Token]] = [[] for _ in chunks]
        rows = [
            range(c.score_from - c.start, c.score_from - c.start + len(c.score_ids)) for c in chunks
        ]

        def visit(index: int, first: int, logits: torch.Tensor) -> None:
            chunk = chunks[index]
            begin = first - rows[index].start
            targets = chunk.score_ids[begin : begin + logits.shape[0]]
            count = chunk.record.sampling.prompt_logprobs or 0
            if chunk.seq in failed:
                return
            try:
                scored[index] += score(logits, targets, count)
            except ValueError as error:
                log.warning("%s: its prompt cannot be scored: %s", chunk.seq, error)
                failed.append(chunk.seq)

        logits = self._runner.forward_and_score(slices, rows, visit, level)
        return logits, tuple(
            StepScores(chunk.seq, chunk.run, tuple(tokens))
            for chunk, tokens in zip(chunks, scored, strict=True)
            if chunk.score_ids and chunk.seq not in failed
        )

    def _sample(
        self, logits: torch.Tensor, chunks: list[Chunk], failed: list[Seq]
    ) -> tuple[StepOutput, ...]:
        """Choose the tokens; chunks without a choice move to ``failed``."""
        if not chunks:
            return ()
        sample = self._runner.backend.sample
        rows = [sample_row(chunk) for chunk in chunks]
        try:
            tokens: list[Token | None] = [*sample(logits, rows)]
        except ValueError:
            # A row of logits without a choice (LogitsError), or parameters that fit no vocabulary:
            # each row alone shows whose.
            tokens = [
                self._sample_one(logits[i : i + 1], row, chunks[i].seq)
                for i, row in enumerate(rows)
            ]
        outputs = []
        for chunk, token in zip(chunks, tokens, strict=True):
            if token is None:
                failed.append(chunk.seq)
            else:
                outputs.append(StepOutput(chunk.seq, chunk.run, token))
        return tuple(outputs)

    def _sample_one(self, logits: torch.Tensor, row: SampleRow, seq: Seq) -> Token | None:
        try:
            (token,) = self._runner.backend.sample(logits, [row])
        except ValueError as error:
            log.warning("%s: no token can be chosen: %s", seq, error)
            return None
        return token

    def _computable(self, chunk: Chunk) -> bool:
        config = self._runner.config
        return (
            chunk.start + len(chunk.token_ids) <= config.max_positions
            and max(chunk.token_ids) < config.vocab_size
        )

    def _hit(self, chunks: list[Chunk]) -> None:
        if any(len(chunk.token_ids) > 1 for chunk in chunks):
            self._failpoints.hit("mid_prefill")
        if any(len(chunk.token_ids) == 1 and chunk.index > 0 for chunk in chunks):
            self._failpoints.hit("mid_decode")


def sample_row(chunk: Chunk) -> SampleRow:
    """What chooses the token after a chunk, besides its logits."""
    record = chunk.record
    return SampleRow(
        params=record.sampling,
        seed=record.seed,
        index=chunk.index,
        choice=chunk.seq.choice,
        prompt_ids=record.prompt_ids,
        output_ids=chunk.output_ids,
        stop_token_ids=record.stop_token_ids,
    )


class EngineThread:
    """Runs an engine's steps off the event loop.

    ``done`` and ``fatal`` are called on the engine's thread; after ``fatal`` no step runs.
    """

    def __init__(
        self,
        engine: Engine,
        done: Callable[[StepDone], None],
        fatal: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._done = done
        self._fatal = fatal
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        """Run a step when those before it have ended."""
        self._plans.put(plan)

    def stop(self) -> None:
        """End the thread after the steps submitted so far."""
        self._plans.put(None)
        self._thread.join()

    def _loop(self) -> None:
        while (plan := self._plans.get()) is not None:
            try:
                outcome = self._engine.run(plan)
            except BaseException as error:
                log.exception("step %d failed: the device's state is unknown", plan.step)
                self._fatal(error)
                return
            self._done(outcome)
