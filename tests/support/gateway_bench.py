"""A gateway core on a bench: a clock, what it asks for, and a reader for its streams."""

from __future__ import annotations

from typing import TypeVar

from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.gateway.core.events import (
    ChoiceUsage,
    Effect,
    Event,
    FromWorker,
    Generate,
    Report,
    ReportAnswered,
    SendToWorker,
    StreamReady,
    Tick,
    ToStream,
)
from deepinfer.gateway.core.gateway import GatewayCore
from deepinfer.kvstore.core.ids import (
    GatewayId,
    Incarnation,
    RequestId,
    Run,
    Seq,
    StreamId,
    WorkerId,
    WorkerRef,
)
from deepinfer.kvstore.core.messages import (
    Attach,
    GatewayReport,
    ReportReply,
    ToClient,
    Tokens,
    ToWorker,
)
from deepinfer.kvstore.core.requests import FinishReason, RequestRecord, Token
from support.requests import record

E = TypeVar("E")

W1 = WorkerRef(WorkerId("w1"), Incarnation(1))
W1_AGAIN = WorkerRef(WorkerId("w1"), Incarnation(2))
W2 = WorkerRef(WorkerId("w2"), Incarnation(1))
R1, R2, R3 = Run(1, 1), Run(1, 2), Run(1, 3)
SEQ = Seq(RequestId("r1"), 0)
S1, S2, S3 = StreamId(1), StreamId(2), StreamId(3)


class Bench:
    """A core with a clock, and the effects it has asked for."""

    def __init__(self, **config: int) -> None:
        self.now_ms = 10_000
        self.core = GatewayCore(GatewayId("g1"), Incarnation(1), GatewayConfig(**config), now_ms=0)
        self.effects: list[Effect] = []
        self.number = 0
        self.usage: list[ChoiceUsage] = []

    def tell(self, *events: Event) -> list[Effect]:
        """Tell it; return the effects of all of these events."""
        new: list[Effect] = []
        for event in events:
            new += self.core.handle(event, self.now_ms)
            self.core.check()
        self.effects += new
        for effect in new:
            if isinstance(effect, Report):
                self.number = effect.report.number
        return new

    def wait(self, ms: int) -> list[Effect]:
        """Let time pass."""
        self.now_ms += ms
        return self.tell(Tick())

    def read(self, stream: StreamId = S1) -> list[ToClient]:
        """Read all that a stream has to give."""
        got: list[ToClient] = []
        pending = [e for e in self.effects if isinstance(e, ToStream) and e.stream == stream]
        self.effects = [e for e in self.effects if e not in pending]
        while pending:
            effect = pending.pop(0)
            got.append(effect.message)
            if effect.usage is not None:
                self.usage.append(effect.usage)
            for new in self.tell(StreamReady(stream)):
                if isinstance(new, ToStream) and new.stream == stream:
                    pending.append(new)
                    self.effects.remove(new)
        return got

    def take(self, kind: type[E]) -> list[E]:
        """Take the effects of a kind."""
        found: list[E] = [e for e in self.effects if isinstance(e, kind)]
        self.effects = [e for e in self.effects if not isinstance(e, kind)]
        return found

    def sent(self) -> list[tuple[WorkerRef, ToWorker]]:
        """Take what was sent to workers."""
        return [(e.worker, e.message) for e in self.take(SendToWorker)]

    def reports(self) -> list[GatewayReport]:
        """Take the reports."""
        return [e.report for e in self.take(Report)]

    def answer(self, epoch: int = 1, **reply: object) -> list[GatewayReport]:
        """Answer the newest report; return the ones sent since the last call."""
        reports, number = self.reports(), self.number
        self.tell(ReportAnswered(ReportReply(epoch=epoch, number=number, resync=False, **reply)))  # type: ignore[arg-type]
        return reports

    def settle(self, epoch: int = 1) -> None:
        """Answer reports until none is unanswered."""
        answered = 0
        while answered < self.number:
            answered = self.number
            self.answer(epoch)


def running(
    record_: RequestRecord | None = None, *, include_events: bool = False, **config: int
) -> Bench:
    """A bench with one request that W1 has attached under R1, and nothing else left to look at."""
    bench = Bench(**config)
    bench.tell(Generate(S1, record_ or record(), "key", include_events))
    bench.tell(FromWorker(W1, Attach(SEQ, R1, W1)))
    bench.read()
    bench.effects.clear()
    return bench


def said(run: Run, index: int, *ids: int, finish: FinishReason | None = None) -> Tokens:
    return Tokens(SEQ, run, index, tuple(map(Token, ids)), finish)
