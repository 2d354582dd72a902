"""Replays requests against the production cores, in simulated time or in real time.

One controller core, a worker core for each worker, and nothing that breaks: messages take no time
and nobody dies (``deepinfer simulate`` is for that). What a step does is the ``Stepper``'s
business: one predicts how long it would take (``SimulatedStepper``), one computes it
(``EngineStepper``). The cores' clock is in milliseconds; everything here is in microseconds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Any, Protocol

from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.core import ControllerCore
from deepinfer.controller.core.events import Effect, Event, Members, Reply, SendOrder
from deepinfer.controller.core.events import Tick as ControllerTick
from deepinfer.deploy.bench.trace_load import Ask
from deepinfer.kvstore.core.ids import (
    GatewayId,
    Incarnation,
    NodeId,
    RequestId,
    Run,
    Seq,
    WorkerId,
    WorkerRef,
)
from deepinfer.kvstore.core.messages import (
    Ack,
    Attach,
    Attached,
    GatewayReport,
    ReportReply,
    RequestLevel,
    ToGateway,
    Tokens,
)
from deepinfer.kvstore.core.precision import Precision, PrecisionSettings, StepCost
from deepinfer.kvstore.core.requests import FinishReason, RequestRecord, SamplingParams, Token
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.core.core import WorkerCore
from deepinfer.workers.core.events import (
    FromGateway,
    GatewayUp,
    Report,
    ReportAnswered,
    RunStep,
    SendToGateway,
    StepDone,
    StepOutput,
    StepPlan,
    Tick,
    WorkerEffect,
    WorkerEvent,
)

GATEWAY = GatewayId("trace")
LIFE = Incarnation(1)
TICK_US = 50_000
SPREAD = 0.03
"""Standard deviation of a simulated step's time, as a share of what is predicted."""


class Stepper(Protocol):
    """Performs the steps of one worker."""

    def run(self, plan: StepPlan, now_us: int) -> tuple[StepDone, int]:
        """A step that begins now: what came of it, and when it ends."""


class Clock(Protocol):
    """Says when what is due at some time happens."""

    def wait(self, due_us: int) -> int:
        """Return at ``due_us``, or later if that is past; returns the time."""


class SimulatedClock:
    """Time passes when nothing is left to do."""

    def wait(self, due_us: int) -> int:
        """That very time."""
        return due_us


class WallClock:
    """Real time since the object was made."""

    def __init__(self) -> None:
        self._zero_ns = time.perf_counter_ns()

    def now_us(self) -> int:
        """Microseconds since then."""
        return (time.perf_counter_ns() - self._zero_ns) // 1000

    def wait(self, due_us: int) -> int:
        """Sleep if it is early."""
        early_us = due_us - self.now_us()
        if early_us > 0:
            time.sleep(early_us / 1e6)
        return max(due_us, self.now_us())


class SimulatedStepper:
    """Steps that take what a cost model says, give or take ``SPREAD``; every token is the same."""

    def __init__(self, costs: Sequence[StepCost], rng: Random) -> None:
        self._costs = costs
        self._rng = rng

    def run(self, plan: StepPlan, now_us: int) -> tuple[StepDone, int]:
        """Predict the step."""
        rows = sum(len(chunk.token_ids) for chunk in plan.chunks)
        context = sum(chunk.start + len(chunk.token_ids) for chunk in plan.chunks)
        us = self._costs[plan.level].predict(rows, context) if rows else 0.0
        us *= max(0.5, self._rng.gauss(1.0, SPREAD))
        token = Token(1)
        outputs = tuple(StepOutput(c.seq, c.run, token) for c in plan.chunks if c.sample)
        return StepDone(plan.step, outputs), now_us + max(1, round(us))


class Engine(Protocol):
    """The part of ``workers.engine.Engine`` that is used."""

    def run(self, plan: StepPlan) -> StepDone:
        """Compute one step."""


class EngineStepper:
    """Steps that an engine computes, in this thread."""

    def __init__(self, engine: Engine, clock: WallClock) -> None:
        self._engine = engine
        self._clock = clock

    def run(self, plan: StepPlan, now_us: int) -> tuple[StepDone, int]:
        """Compute the step."""
        done = self._engine.run(plan)
        return done, self._clock.now_us()


@dataclass(slots=True)
class Served:
    """What became of one request."""

    asked_us: int
    first_us: int | None = None
    """When its first token came."""
    last_us: int = 0
    tokens: int = 0
    finish: FinishReason | None = None
    """None: it did not end in time."""

    @property
    def ok(self) -> bool:
        return self.finish is FinishReason.LENGTH

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first token."""
        return None if self.first_us is None else (self.first_us - self.asked_us) / 1000

    @property
    def tpot_ms(self) -> float | None:
        """Mean time of each token after the first; None if there is none."""
        if self.first_us is None or self.tokens < 2:
            return None
        return (self.last_us - self.first_us) / 1000 / (self.tokens - 1)


@dataclass(slots=True)
class Replayed:
    """What came of one replay."""

    served: list[Served]
    step_us: list[int]
    """Time in steps at each level, all workers together."""
    tokens: dict[Precision, int] = field(default_factory=dict)
    """Tokens generated by steps of each precision."""
    switches: int = 0
    swaps: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were found in prefix caches."""
    end_us: int = 0


def replay(
    asks: Sequence[Ask],
    configs: Sequence[WorkerConfig],
    steppers: Sequence[Stepper],
    settings: PrecisionSettings,
    clock: Clock,
    *,
    patience_us: int = 600_000_000,
) -> Replayed:
    """Serve ``asks`` with one worker for each config; returns when the last has ended.

    What has not ended ``patience_us`` after the last arrival is left as it is.
    """
    return _Replay(asks, configs, steppers, settings, clock, patience_us).run()


@dataclass(slots=True)
class _Worker:
    ref: WorkerRef
    core: WorkerCore
    stepper: Stepper


class _Replay:
    """A heap of what is due, and the cores that hear of it."""

    def __init__(
        self,
        asks: Sequence[Ask],
        configs: Sequence[WorkerConfig],
        steppers: Sequence[Stepper],
        settings: PrecisionSettings,
        clock: Clock,
        patience_us: int,
    ) -> None:
        self._clock = clock
        self._patience_us = patience_us
        self._now_us = 0
        self._serial = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._messages: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        """Of this moment: a core is never called while it or another one is at work."""
        self._controller = ControllerCore(
            1,
            ControllerConfig(cpu_offload=False, shed=False, precision=settings),
        )
        self._workers: dict[WorkerId, _Worker] = {}
        for i, (config, stepper) in enumerate(zip(configs, steppers, strict=True)):
            ref = WorkerRef(WorkerId(f"worker-{i:04}"), LIFE)
            node = NodeId(f"node-{i:04}")
            self._workers[ref.worker] = _Worker(ref, WorkerCore(ref, node, config), stepper)
        self._asks = asks
        self._records: dict[Seq, RequestRecord] = {}
        self._attached: dict[Seq, Run] = {}
        self._held: dict[Seq, int] = {}
        """Tokens that the gateway has of those that run."""
        self._served: dict[Seq, Served] = {}
        self._gone: list[Seq] = []
        self._report = 0
        self._left = len(asks)
        levels = max(config.levels for config in configs)
        self._replayed = Replayed([], [0] * levels, dict.fromkeys(Precision, 0))

    def run(self) -> Replayed:
        """Live from the first arrival to the last token."""
        self._start()
        for ask in self._asks:
            self._at(ask.at_us, self._arrive, ask)
        deadline_us = (self._asks[-1].at_us if self._asks else 0) + self._patience_us
        heap = self._heap
        while self._left and heap[0][0] <= deadline_us:
            due_us, _, act, args = heappop(heap)
            self._now_us = self._clock.wait(due_us)
            self._do(act, *args)
        return self._total()

    # ---- the loop --------------------------------------------------------------------------

    def _at(self, due_us: int, act: Callable[..., None], *args: Any) -> None:
        self._serial += 1
        heappush(self._heap, (due_us, self._serial, act, args))

    def _send(self, act: Callable[..., None], *args: Any) -> None:
        self._messages.append((act, args))

    def _do(self, act: Callable[..., None], *args: Any) -> None:
        act(*args)
        while self._messages:
            act, args = self._messages.popleft()
            act(*args)

    def _start(self) -> None:
        names = dict.fromkeys(self._workers, LIFE)
        self._do(self._tell, Members(workers=names, stores={}, gateways={GATEWAY: LIFE}))
        self._do(self._gateway_reports, ())
        for i, worker in enumerate(self._workers.values()):
            self._do(self._drive, worker, GatewayUp(GATEWAY))
            # They do not all tick at the same moment.
            self._at(TICK_US * i // len(self._workers), self._tick, worker)
        self._at(TICK_US, self._tick_controller)

    def _tick(self, worker: _Worker) -> None:
        self._drive(worker, Tick())
        self._at(self._now_us + TICK_US, self._tick, worker)

    def _tick_controller(self) -> None:
        self._tell(ControllerTick())
        self._at(self._now_us + TICK_US, self._tick_controller)

    # ---- the controller --------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        for effect in self._controller.handle(event, self._now_us // 1000):
            self._send(self._perform_controller, effect)

    def _perform_controller(self, effect: Effect) -> None:
        if isinstance(effect, SendOrder):
            self._drive(self._workers[effect.worker.worker], effect.order)
        elif isinstance(effect, Reply):
            self._answer(effect.to.id, effect.reply)

    def _answer(self, name: str, reply: ReportReply) -> None:
        worker = self._workers.get(WorkerId(name))
        if worker is not None:
            self._drive(worker, ReportAnswered(reply))
            return
        for reject in reply.reject:
            self._end(reject.seq, FinishReason.ERROR)

    # ---- the gateway -----------------------------------------------------------------------

    def _arrive(self, ask: Ask) -> None:
        seq = Seq(RequestId(f"r{len(self._records):07}"), 0)
        record = RequestRecord(
            request=seq.request,
            prompt_ids=ask.prompt_ids,
            sampling=SamplingParams(max_tokens=ask.output_tokens, temperature=0.0, ignore_eos=True),
            arrival_ms=self._now_us // 1000,
            seed=0,
        )
        self._records[seq] = record
        # It was asked for when it was due: a loop that is late makes it wait, and that counts.
        self._served[seq] = Served(ask.at_us)
        self._held[seq] = 0
        level = RequestLevel(
            seq=seq,
            claim=1,
            cancelled=False,
            prompt_tokens=len(ask.prompt_ids),
            max_tokens=ask.output_tokens,
            held_tokens=0,
            arrival_ms=record.arrival_ms,
            priority=0,
            deadline_ms=None,
            exact=False,
            attached=None,
        )
        self._gateway_reports((level,))

    def _gateway_reports(self, levels: tuple[RequestLevel, ...]) -> None:
        self._report += 1
        gone, self._gone = tuple(self._gone), []
        self._tell(
            GatewayReport(
                gateway=GATEWAY,
                incarnation=LIFE,
                number=self._report,
                complete=self._report == 1,
                epoch_seen=1,
                requests=levels,
                gone=gone,
            )
        )

    def _hear(self, worker: _Worker, message: ToGateway) -> None:
        seq = message.seq
        if isinstance(message, Attach):
            tokens = (1,) * self._held.get(seq, 0)
            self._attached[seq] = message.run
            record = self._records[seq]
            answer = Attached(seq, message.run, record, tokens)
            self._drive(worker, FromGateway(GATEWAY, answer))
        elif isinstance(message, Tokens):
            self._take(worker, message)

    def _take(self, worker: _Worker, message: Tokens) -> None:
        seq = message.seq
        served = self._served[seq]
        if served.finish is None and message.run == self._attached.get(seq):
            fresh = message.tokens[self._held[seq] - message.index :]
            if fresh:
                if served.first_us is None:
                    served.first_us = self._now_us
                served.last_us = self._now_us
                served.tokens += len(fresh)
                self._held[seq] += len(fresh)
                for token in fresh:
                    self._replayed.tokens[token.precision] += 1
            if message.finish is not None:
                self._end(seq, message.finish)
        if served.finish is not None:  # A run's tokens need no answer before that to go on.
            ack = Ack(seq, message.run, self._held.get(seq, served.tokens), True)
            self._drive(worker, FromGateway(GATEWAY, ack))

    def _end(self, seq: Seq, finish: FinishReason) -> None:
        served = self._served[seq]
        if served.finish is None:
            served.finish = finish
            self._left -= 1
            self._gone.append(seq)
            self._send(self._gateway_reports, ())

    # ---- workers ---------------------------------------------------------------------------

    def _drive(self, worker: _Worker, event: WorkerEvent) -> None:
        for effect in worker.core.handle(event, self._now_us // 1000):
            self._send(self._perform, worker, effect)

    def _perform(self, worker: _Worker, effect: WorkerEffect) -> None:
        if isinstance(effect, SendToGateway):
            self._hear(worker, effect.message)
        elif isinstance(effect, Report):
            self._tell(effect.report)
        elif isinstance(effect, RunStep):
            done, end_us = worker.stepper.run(effect.plan, self._now_us)
            self._replayed.step_us[effect.plan.level] += end_us - self._now_us
            self._at(end_us, self._drive, worker, done)

    def _total(self) -> Replayed:
        replayed = self._replayed
        replayed.served = list(self._served.values())
        replayed.end_us = self._now_us
        for worker in self._workers.values():
            counters = worker.core.counters
            replayed.switches += counters.precision_switches
            replayed.swaps += counters.swaps_out
            replayed.cached_tokens += int(worker.core.metrics()["prefix_hit_tokens"])
        return replayed
