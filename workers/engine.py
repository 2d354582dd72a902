"""Runs steps: a plan in, sampled tokens out, on a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from deepinfer.kvstore.core.ids import Seq
from deepinfer.kvstore.core.requests import Token
from deepinfer.workers.core.events import Chunk, StepDone, StepOutput, StepPlan
from deepinfer.workers.failpoints import Failpoints
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.runner import SequenceSlice
from deepinfer.workers.sampler import LogitsError, SampleRow

log = logging.getLogger(__name__)


class SamplingBackend(Protocol):
    """The part of ``Backend`` that chooses tokens."""

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Token]: ...


class Runner(Protocol):
    """The part of ``ModelRunner`` that a step uses."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def backend(self) -> SamplingBackend: ...

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor: ...


class Engine:
    """One model on one device. ``run`` blocks; only one thread may call it."""

    def __init__(self, runner: Runner, failpoints: Failpoints | None = None) -> None:
        self._runner = runner
        self._failpoints = failpoints or Failpoints()

    def run(self, plan: StepPlan) -> StepDone:
        """Compute one step. A chunk that cannot be computed fails its own sequence only.

        Raises whatever the device raises: after that its state is unknown and the process must go.
        """
        sane = [chunk for chunk in plan.chunks if self._computable(chunk)]
        failed = [chunk.seq for chunk in plan.chunks if not self._computable(chunk)]
        outputs: tuple[StepOutput, ...] = ()
        if sane:
            logits = self._runner.forward(
                [SequenceSlice(c.token_ids, c.start, c.block_table, c.sample) for c in sane]
            )
            self._hit(sane)
            outputs = self._sample(logits, [c for c in sane if c.sample], failed)
        return StepDone(plan.step, outputs, tuple(failed))

    def _sample(
        self, logits: torch.Tensor, chunks: list[Chunk], failed: list[Seq]
    ) -> tuple[StepOutput, ...]:
        """Choose the tokens; chunks without a choice move to ``failed``."""
        if not chunks:
            return ()
        backend = self._runner.backend
        try:
            tokens = backend.sample(logits, [sample_row(chunk) for chunk in chunks])
        except LogitsError as error:
            good = [i for i in range(len(chunks)) if i not in error.rows]
            failed += [chunks[i].seq for i in error.rows]
            chunks = [chunks[i] for i in good]
            tokens = backend.sample(logits[good], [sample_row(chunk) for chunk in chunks])
        return tuple(
            StepOutput(chunk.seq, chunk.run, token)
            for chunk, token in zip(chunks, tokens, strict=True)
        )

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
