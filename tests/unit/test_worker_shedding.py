"""The worker's core and its lower planes: out, back, and whoever is in the way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepinfer.kvstore.core.messages import AttachRefused, Departure, ReportReply
from deepinfer.kvstore.core.precision import PrecisionRule
from deepinfer.kvstore.core.shed import ShedLevel, ShedState
from deepinfer.workers.core.config import WorkerConfigError
from deepinfer.workers.core.events import (
    FromGateway,
    PlanesRestored,
    PlanesShed,
    PutDone,
    PutPayload,
    ReportAnswered,
    RestorePlanes,
    RunStep,
    ShedPlanes,
    StepDone,
    StepPlan,
)
from support.worker_bench import CONFIG, Bench, G, request
from support.worker_world import Request

TOP = 1


def bench_of(**changes: object) -> Bench:
    given: dict[str, object] = {
        "blocks_total": 4,
        "levels": TOP + 1,
        "tail_blocks": 4,
        "return_ms": 30,
        "prefix_cache": False,
    }
    return Bench(**(given | changes))


def exact(name: str, prompt: int = 3, max_tokens: int = 2) -> Request:
    made = request(name, prompt, max_tokens)
    made.record = replace(made.record, exact=True)
    return made


def want(bench: Bench, away: bool) -> None:
    rule = PrecisionRule(shed=away)
    bench.do(ReportAnswered(ReportReply(epoch=1, number=0, resync=False, precision=rule)))


def shed(bench: Bench) -> None:
    want(bench, True)
    bench.only(ShedPlanes)
    bench.do(PlanesShed())


def state(bench: Bench) -> ShedState:
    assert bench.report is not None
    assert bench.report.shed is not None
    return bench.report.shed.state


def in_flight(bench: Bench) -> StepPlan:
    plan = bench.core._steps.in_flight
    assert plan is not None
    return plan


def test_planes_leave_and_come_back() -> None:
    bench = bench_of()
    shed(bench)
    assert bench.report is not None
    assert bench.report.shed == ShedLevel(ShedState.OPEN, 4, 4, 30)
    assert (bench.report.blocks_total, bench.report.blocks_free) == (8, 8)
    want(bench, False)
    bench.only(RestorePlanes)
    assert state(bench) is ShedState.RESTORING
    assert (bench.report.blocks_total, bench.report.blocks_free) == (4, 4)
    bench.do(PlanesRestored(True))
    assert state(bench) is ShedState.HELD
    counters = bench.core.counters
    assert (counters.sheds, counters.planes_returns, counters.blocks_moved) == (1, 1, 0)


def test_a_step_in_flight_at_a_lower_level_is_waited_for() -> None:
    bench = bench_of()
    r = request("r", prompt=3, max_tokens=6)
    bench.running(r, 40)
    assert in_flight(bench).level == 0
    want(bench, True)
    assert state(bench) is ShedState.SHEDDING
    assert bench.none(ShedPlanes), "the step in flight reads the planes"
    bench.step(41)
    bench.only(ShedPlanes)
    assert in_flight(bench).level == TOP
    bench.do(PlanesShed())
    bench.step(42)
    assert in_flight(bench).level == TOP


def test_what_has_not_begun_is_called_off_and_what_has_is_undone() -> None:
    bench = bench_of()
    bench.running(request("r", prompt=3, max_tokens=6), 40)
    want(bench, True)
    want(bench, False)
    assert state(bench) is ShedState.HELD
    want(bench, True)
    bench.step(41)
    bench.only(ShedPlanes)
    want(bench, False)
    assert state(bench) is ShedState.SHEDDING, "the shell will answer, and the bytes may be gone"
    bench.do(PlanesShed())
    bench.only(RestorePlanes)


def test_the_tail_is_handed_out_last_and_held_blocks_move_before_it_closes() -> None:
    bench = bench_of()
    shed(bench)
    first = request("a", prompt=7, max_tokens=1)
    second = request("b", prompt=3, max_tokens=8)
    bench.running(first)
    run = bench.admit(second)
    bench.attached(second, run)
    tables = {s.request: r.blocks for s, r in bench.core.residents.items()}
    assert tables == {"a": [0, 1, 2, 3], "b": [4, 5]}
    plan = bench.step(1)  # the first ends: its blocks are free
    while plan is not None and not plan.plan.chunks[0].sample:
        plan = bench.step()
    want(bench, False)
    assert state(bench) is ShedState.CLOSING
    assert bench.none(RestorePlanes)
    bench.step(40)
    moved = in_flight(bench)
    assert moved.moves == ((4, 3), (5, 2))
    assert moved.chunks[0].block_table[:2] == (3, 2)
    assert moved.level == TOP
    assert bench.none(RestorePlanes), "the step still reads the old blocks"
    bench.step(41)
    bench.only(RestorePlanes)
    bench.do(PlanesRestored(True))
    bench.step(42)
    assert in_flight(bench).next_level == 0
    bench.step(43)
    assert in_flight(bench).level == 0
    assert bench.core.counters.blocks_moved == 2


def test_blocks_move_in_a_step_of_their_own_if_nobody_computes() -> None:
    bench = bench_of()
    shed(bench)
    r = request("r", prompt=3, max_tokens=4)
    bench.running(request("a", prompt=7, max_tokens=2))
    run = bench.admit(r)
    bench.attached(r, run)
    bench.step(1)  # the first has ended
    bench.step(40)
    bench.do(FromGateway(G, AttachRefused(r.seq, run, None)))
    want(bench, False)
    bench.step(41)  # of an orphan: it takes no further one
    assert (in_flight(bench).chunks, in_flight(bench).moves) == ((), ((4, 3), (5, 2)))
    assert bench.none(RestorePlanes)
    bench.step()
    bench.only(RestorePlanes)


def test_a_copy_keeps_its_blocks_in_the_tail_to_its_end() -> None:
    bench = bench_of()
    shed(bench)
    r = request("r", prompt=3, max_tokens=4)
    bench.running(request("a", prompt=7, max_tokens=2))
    run = bench.admit(r)
    bench.attached(r, run)
    bench.step(1)  # the first has ended
    bench.step(40)
    ticket = bench.swap_out(r, run)
    want(bench, False)
    bench.step(41)
    put = bench.only(PutPayload)
    assert put.block_ids == (4, 5)
    assert bench.none(RestorePlanes), "a copy reads the tail"
    bench.do(PutDone(ticket, ok=False, payload_bytes=0, copy_us=0))
    assert in_flight(bench).moves, "the swap-out came to nothing, so it stays, in ordinary blocks"


def test_too_little_room_is_reported_as_a_shortage_and_nothing_grows() -> None:
    bench = bench_of()
    shed(bench)
    long = request("r", prompt=11, max_tokens=4)
    bench.running(long)
    assert len(bench.core.residents[long.seq].blocks) == 6
    want(bench, False)
    bench.step(40)
    assert bench.report is not None
    assert bench.report.blocks_short >= 2, "two of its blocks have nowhere to go"
    assert bench.report.blocks_free == 0
    want(bench, True)
    assert state(bench) is ShedState.OPEN, "it needs them after all"


def test_an_exact_request_forces_the_return_and_waits_for_it() -> None:
    bench = bench_of()
    shed(bench)
    e = exact("e")
    run = bench.admit(e)
    assert state(bench) is ShedState.OPEN, "nobody knows yet that it is exact"
    bench.attached(e, run)
    bench.only(RestorePlanes)
    assert bench.none(RunStep)
    want(bench, True)
    assert state(bench) is ShedState.RESTORING, "whatever the controller says"
    bench.do(PlanesRestored(True))
    assert in_flight(bench).level == 0
    want(bench, True)
    assert state(bench) is ShedState.HELD, "shedding never starts while it is here"


def test_a_failed_return_is_counted_and_tried_again_later_each_time() -> None:
    bench = bench_of(restore_retry_ms=100, restore_retry_max_ms=300)
    shed(bench)
    want(bench, False)
    for pause in (100, 200, 300, 300):
        bench.do(PlanesRestored(False, "the bus"))
        assert state(bench) is ShedState.OPEN
        bench.wait(pause - 1)
        assert bench.none(RestorePlanes)
        bench.wait(1)
        bench.only(RestorePlanes)
    bench.do(PlanesRestored(True))
    assert bench.core.counters.planes_return_failures == 4
    assert state(bench) is ShedState.HELD


def test_promises_that_the_ordinary_blocks_cannot_keep_go_back() -> None:
    bench = bench_of()
    shed(bench)
    early, late = request("a", prompt=7), request("b", prompt=5)
    bench.admit(early)
    bench.admit(late)
    want(bench, False)
    assert bench.departed() == [(late.seq, Departure.REFUSED)]
    assert bench.state(early) is not None
    assert bench.core.counters.late_refusals == 1


def test_without_planes_from_the_start_every_step_is_at_the_top() -> None:
    bench = bench_of(tail_blocks=0, return_ms=0, start_shed=True)
    want(bench, True)
    assert bench.none(ShedPlanes)
    assert state(bench) is ShedState.LOCKED
    bench.running(request("r", prompt=3, max_tokens=4), 40)
    assert in_flight(bench).level == TOP


def test_events_that_nobody_waits_for_change_nothing() -> None:
    bench = bench_of()
    bench.do(PlanesShed())
    bench.do(PlanesRestored(True))
    assert state(bench) is ShedState.HELD
    bench.do(StepDone(7, ()))
    assert bench.core.counters.sheds == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tail_blocks": -1}, r"tail_blocks = -1: must be 0 or more"),
        ({"tail_blocks": 3}, r"tail_blocks = 3: must be 0 where levels is 1"),
        ({"start_shed": True}, r"start_shed = True: must be False where levels is 1"),
        (
            {"levels": 2, "tail_blocks": 3, "start_shed": True},
            r"start_shed = True: must be False with tail_blocks",
        ),
        ({"restore_retry_max_ms": 5}, r"restore_retry_max_ms = 5: must be at least"),
    ],
)
def test_settings_that_cannot_work(changes: dict[str, object], says: str) -> None:
    with pytest.raises(WorkerConfigError, match=says):
        replace(CONFIG, **changes)  # type: ignore[arg-type]
