"""What the controller tells workers of their weights' precision."""

from __future__ import annotations

from typing import Any

from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.core import ControllerCore
from deepinfer.controller.core.events import Members, Reply, Tick
from deepinfer.kvstore.core.ids import GatewayId, Incarnation, NodeId, RequestId, Seq, WorkerId
from deepinfer.kvstore.core.messages import GatewayReport, RequestLevel, WorkerReport
from deepinfer.kvstore.core.precision import (
    Policy,
    PrecisionLevel,
    PrecisionRule,
    PrecisionSettings,
)

SETTINGS = PrecisionSettings(policy=Policy.SLO, ttft_target_ms=700.0, level_max=3)
LEVEL = PrecisionLevel(1, 2, 0.6, "", 4, (10, 0, 5, 0), (100, 0, 50, 0))


class Bench:
    """A controller with two workers of four blocks and a gateway; time goes by 10 ms a report."""

    def __init__(self, **levels: PrecisionLevel | None) -> None:
        self.core = ControllerCore(1, ControllerConfig(precision=SETTINGS, cpu_offload=False))
        self.now_ms = 0
        self.number = 0
        self.levels = levels
        workers: dict[WorkerId, Incarnation | None] = dict.fromkeys(map(WorkerId, levels))
        self.core.handle(Members(workers=workers, stores={}, gateways={GatewayId("g"): None}), 0)
        self.requests()
        for name in levels:
            self.rule(name)

    def rule(self, worker: str) -> PrecisionRule | None:
        """A worker reports; what it is told."""
        self.number += 1
        self.now_ms += 10
        level: Any = self.levels[worker]
        report = WorkerReport(
            worker=WorkerId(worker),
            incarnation=Incarnation(1),
            node=NodeId("n"),
            number=self.number,
            complete=True,
            epoch_seen=0,
            orders_seen=0,
            block_bytes=1,
            block_size=4,
            blocks_total=4,
            blocks_free=0,
            blocks_short=0,
            stalled=False,
            draining=False,
            residents=(),
            departed=(),
            usage=(),
            precision=level,
        )
        effects = self.core.handle(report, self.now_ms)
        self.core.check()
        (reply,) = (e for e in effects if isinstance(e, Reply))
        return reply.reply.precision

    def requests(self, *prompts: int, held: int = 0) -> None:
        """The gateway lists requests with prompts of these lengths."""
        self.number += 1
        levels = tuple(
            RequestLevel(
                Seq(RequestId(f"r{i}"), 0), 0, False, prompt, 2, held, 0, 0, None, False, None
            )
            for i, prompt in enumerate(prompts)
        )
        report = GatewayReport(
            gateway=GatewayId("g"),
            incarnation=Incarnation(1),
            number=self.number,
            complete=True,
            epoch_seen=0,
            requests=levels,
            gone=(),
        )
        self.core.handle(report, self.now_ms)

    def wait(self, ms: int) -> None:
        self.now_ms += ms
        self.core.handle(Tick(), self.now_ms)


def test_every_answer_has_the_policy_but_for_weights_that_are_not_nested() -> None:
    bench = Bench(nested=LEVEL, plain=None)
    assert bench.rule("nested") == PrecisionRule(settings=SETTINGS)
    assert bench.rule("plain") is None
    said = bench.core.snapshot()["workers"]
    assert isinstance(said, dict)
    assert said["nested"]["precision"] == LEVEL._asdict()
    assert said["plain"]["precision"] is None


def test_workers_share_what_waits_in_line() -> None:
    bench = Bench(a=LEVEL, b=LEVEL)
    bench.requests(8, 7)
    came_ms = bench.now_ms
    bench.wait(100)
    rule = bench.rule("a")
    assert rule is not None
    assert rule.waiting_tokens == 8, "half of 15, and nobody's token is lost"
    assert rule.waiting_ms == bench.now_ms - came_ms
    bench.requests()
    bench.wait(100)
    assert bench.rule("b") == PrecisionRule(settings=SETTINGS)


def test_who_has_had_a_token_waits_for_no_first_one() -> None:
    bench = Bench(a=LEVEL)
    bench.requests(8, held=1)
    bench.wait(100)
    assert bench.rule("a") == PrecisionRule(settings=SETTINGS)


def test_the_line_is_not_gone_through_for_every_report() -> None:
    bench = Bench(a=LEVEL)
    bench.wait(100)
    assert bench.rule("a") == PrecisionRule(settings=SETTINGS)
    bench.requests(8)
    assert bench.rule("a") == PrecisionRule(settings=SETTINGS)
    bench.wait(100)
    rule = bench.rule("a")
    assert rule is not None
    assert rule.waiting_tokens == 8
