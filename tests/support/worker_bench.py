"""A WorkerCore on a bench: one event at a time, in short words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from deepinfer.kvstore.core.ids import GatewayId, NodeId, Run, Seq, Ticket
from deepinfer.kvstore.core.messages import (
    Admit,
    Attached,
    Departure,
    SwapIn,
    SwapOut,
    WorkerReport,
)
from deepinfer.kvstore.core.requests import Token
from deepinfer.kvstore.core.states import State
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.core.core import WorkerCore
from deepinfer.workers.core.events import (
    FromGateway,
    Report,
    RunStep,
    SendToGateway,
    StepDone,
    StepOutput,
    Tick,
    WorkerEffect,
    WorkerEvent,
)
from support.worker_world import STORE, WORKER, Request, make_request

G = GatewayId("g")
_E = TypeVar("_E")

CONFIG = WorkerConfig(
    blocks_total=8,
    block_size=2,
    block_bytes=10,
    max_batch_tokens=16,
    max_batch_seqs=4,
    prefill_chunk_tokens=4,
    put_timeout_ms=500,
    commit_timeout_ms=300,
    resolve_timeout_ms=200,
    fetch_timeout_ms=500,
)


class Bench:
    """A core, the effects of the last event, and short words for what tests do."""

    def __init__(self, **changes: object) -> None:
        self.config = replace(CONFIG, **changes)  # type: ignore[arg-type]
        self.core = WorkerCore(WORKER, NodeId("n"), self.config)
        self.now_ms = 0
        self.out: list[WorkerEffect] = []
        self.report: WorkerReport | None = None
        self.counter = 0

    def do(self, event: WorkerEvent) -> list[WorkerEffect]:
        self.out = self.core.handle(event, self.now_ms)
        self.core.check()
        for effect in self.out:
            if isinstance(effect, Report):
                self.report = effect.report
        return self.out

    def only(self, kind: type[_E]) -> _E:
        found = [effect for effect in self.out if isinstance(effect, kind)]
        assert len(found) == 1, f"{len(found)} effects {kind.__name__} in {self.out}"
        return found[0]

    def none(self, kind: type[object]) -> bool:
        return not any(isinstance(effect, kind) for effect in self.out)

    def said(self, kind: type[_E]) -> list[_E]:
        """Messages of one kind to gateways, after the last event."""
        messages = [e.message for e in self.out if isinstance(e, SendToGateway)]
        return [message for message in messages if isinstance(message, kind)]

    def mint(self, epoch: int = 1) -> Run:
        self.counter += 1
        return Run(epoch, self.counter)

    def wait(self, ms: int) -> None:
        self.now_ms += ms
        self.do(Tick())

    def admit(self, request: Request, *, gateway: GatewayId = G, tokens: int | None = None) -> Run:
        run = self.mint()
        record = request.record
        prompt = len(record.prompt_ids)
        total = prompt + record.sampling.max_tokens
        self.do(Admit(run, request.seq, run, gateway, tokens or prompt, total))
        return run

    def attached(
        self, request: Request, run: Run, held: Sequence[int] = (), gateway: GatewayId = G
    ) -> None:
        answer = Attached(request.seq, run, request.record, tuple(held))
        self.do(FromGateway(gateway, answer))

    def step(self, *tokens: int) -> RunStep | None:
        """End the step in flight; ``tokens`` go to its sampling chunks in order."""
        plan = self.core._steps.in_flight
        assert plan is not None, "no step in flight"
        sampling = [chunk for chunk in plan.chunks if chunk.sample]
        assert len(sampling) == len(tokens), f"{len(sampling)} chunks sample"
        outputs = tuple(
            StepOutput(chunk.seq, chunk.run, Token(token))
            for chunk, token in zip(sampling, tokens, strict=True)
        )
        self.do(StepDone(plan.step, outputs))
        return next((e for e in self.out if isinstance(e, RunStep)), None)

    def running(self, request: Request, *tokens: int) -> Run:
        """Admit, attach, prefill and generate; a step is in flight afterwards."""
        run = self.admit(request)
        self.attached(request, run)
        plan = self.only(RunStep).plan
        while not plan.chunks[0].sample:
            next_step = self.step()
            assert next_step is not None
            plan = next_step.plan
        for token in tokens:
            self.step(token)
        return run

    def swap_out(self, request: Request, run: Run) -> Ticket:
        order = self.mint()
        ticket = Ticket(request.seq, run, order)
        self.do(SwapOut(order, request.seq, run, ticket, STORE))
        return ticket

    def swap_in(self, request: Request, ticket: Ticket, tokens: int) -> Run:
        run = self.mint()
        total = len(request.record.prompt_ids) + request.record.sampling.max_tokens
        blocks = self.config.blocks_for(tokens)
        self.do(SwapIn(run, request.seq, run, G, ticket, STORE, tokens, blocks, total))
        return run

    def state(self, request: Request) -> State | None:
        resident = self.core.residents.get(request.seq)
        return None if resident is None else resident.state

    def departed(self) -> list[tuple[Seq, Departure]]:
        assert self.report is not None
        return [(d.seq, d.why) for d in self.report.departed]


def request(name: str = "r", prompt: int = 5, max_tokens: int = 6) -> Request:
    start = 100 * (ord(name[0]) - 96)
    return make_request(name, range(start, start + prompt), max_tokens, "g")
