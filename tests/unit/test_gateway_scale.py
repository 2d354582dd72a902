"""What a token costs the gateway's core does not depend on how many requests wait beside it."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, TypeAlias

import pytest

from deepinfer.gateway.core.events import (
    Event,
    FromWorker,
    Generate,
    StreamClosed,
    StreamReady,
    Tick,
)
from deepinfer.kvstore.core.ids import RequestId, Seq, StreamId
from deepinfer.kvstore.core.messages import Attach, Tokens
from deepinfer.kvstore.core.requests import Token
from support.gateway_bench import R1, S1, W1, Bench
from support.requests import record

TraceFunction: TypeAlias = Any
SEQ = Seq(RequestId("the one that runs"), 0)
TOKEN = FromWorker(W1, Tokens(SEQ, R1, 0, (Token(5),), None))
ONE_OF_THE_CROWD = StreamId(15)


def crowded(waiting: int) -> Bench:
    """A bench with so many waiting streams, and one that W1 runs; the controller knows of all."""
    bench = Bench(max_live_requests=waiting + 1, max_streams=waiting + 1)
    core = bench.core
    for i in range(waiting):
        core.handle(Generate(StreamId(i + 10), record(f"r{i}"), "key", False), bench.now_ms)
        core.handle(StreamReady(StreamId(i + 10)), bench.now_ms)
    bench.tell(Generate(S1, record(SEQ.request), "key", False), StreamReady(S1))
    bench.tell(FromWorker(W1, Attach(SEQ, R1, W1)), Tick())
    bench.settle()
    return bench


def steps(bench: Bench, events: tuple[Event, ...]) -> int:
    """Bytecode instructions that the core runs for these events; every turn of a loop counts."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> TraceFunction:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for event in events:
            bench.core.handle(event, bench.now_ms)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    ("events", "later_ms"),
    [
        ((TOKEN,), 0),
        ((TOKEN, StreamReady(S1)), 0),
        ((Tick(),), 0),
        ((TOKEN, Tick()), 150),  # a report is due
        ((StreamClosed(ONE_OF_THE_CROWD),), 0),
    ],
    ids=["token", "written", "tick", "report", "stream-closed"],
)
def test_the_work_is_the_same_in_a_crowd(events: tuple[Event, ...], later_ms: int) -> None:
    counts = []
    for waiting in (20, 2_000):
        bench = crowded(waiting)
        bench.now_ms += later_ms
        counts.append(steps(bench, events))
    assert counts[0] == counts[1] > 0
