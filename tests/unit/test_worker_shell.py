"""The shell: effects reach their part, a failed core ends the process, a stopped one is deaf."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

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
from deepinfer.kvstore.core.messages import Admit, Attach
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.core.core import WorkerCore
from deepinfer.workers.core.events import ReportsUp, Tick, WorkerEvent
from deepinfer.workers.engine import Engine
from deepinfer.workers.shell import WorkerShell

SEQ = Seq(RequestId("r"), 0)


class Recorder:
    """Gateways, reports and swapper in one: remembers every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self.calls.append((name, *args))

    def learn(self, addresses: Mapping[Any, str]) -> None:
        self.calls.append(("learn", dict(addresses)))

    async def close(self) -> None:
        self.calls.append(("close",))

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


class Parts:
    """A shell with a core of 4 blocks and recorders around it."""

    def __init__(self) -> None:
        core = WorkerCore(
            WorkerRef(WorkerId("w"), Incarnation(1)),
            NodeId("n"),
            WorkerConfig(blocks_total=4, block_size=2, block_bytes=1),
        )
        runner: Any = SimpleNamespace(backend=SimpleNamespace(kv_saturations=3))
        self.deaths: list[BaseException] = []
        self.shell = WorkerShell(core, Engine(runner), die=self.deaths.append, clock_ms=lambda: 5)
        self.gateways, self.reports, self.swapper = Recorder(), Recorder(), Recorder()
        self.shell.connect(self.gateways, self.reports, self.swapper)


def run(main: Callable[[Parts], Awaitable[None]]) -> None:
    async def whole() -> None:
        parts = Parts()
        await main(parts)
        await parts.shell.stop()

    asyncio.run(whole())


def test_an_order_teaches_addresses_first_and_its_effects_go_out() -> None:
    async def main(parts: Parts) -> None:
        number = Run(1, 1)
        directory = {"g": "127.0.0.1:1", "s": "127.0.0.1:2"}
        parts.shell.order(Admit(number, SEQ, number, GatewayId("g"), 3, 5), directory)
        assert parts.gateways.calls[0] == ("learn", directory)
        assert parts.swapper.named("learn") == [(directory,)]
        ((gateway, message),) = parts.gateways.named("send")
        assert gateway == "g"
        assert isinstance(message, Attach)
        ((report,),) = parts.reports.named("send")
        assert report.residents[0].seq == SEQ

    run(main)


def test_ticks_come_by_themselves() -> None:
    async def main(parts: Parts) -> None:
        parts.shell.start()
        await asyncio.sleep(0)
        assert len(parts.reports.named("send")) == 1, "the first tick reports"

    run(main)


def test_a_failed_core_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(parts: Parts) -> None:
        def broken(event: WorkerEvent, now_ms: int) -> list[Any]:
            raise AssertionError("more was promised than there is")

        monkeypatch.setattr(parts.shell.core, "handle", broken)
        parts.shell.feed(Tick())
        assert [str(death) for death in parts.deaths] == ["more was promised than there is"]

    run(main)


def test_after_stop_nothing_is_heard() -> None:
    async def main(parts: Parts) -> None:
        await parts.shell.stop()
        parts.shell.feed(ReportsUp())
        assert parts.reports.named("send") == []
        assert parts.deaths == []

    run(main)


def test_counters_are_the_cores_and_the_devices() -> None:
    async def main(parts: Parts) -> None:
        counters = parts.shell.counters()
        assert counters["deepinfer_worker_kv_saturations_total"] == 3.0
        assert counters["deepinfer_worker_steps_total"] == counters["cpu_offload_seconds"] == 0.0
        assert parts.shell.status()["blocks_free"] == 4

    run(main)
