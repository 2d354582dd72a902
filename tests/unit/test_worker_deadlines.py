"""A device that never answers ends its worker's life, and nothing less does."""

from __future__ import annotations

from deepinfer.workers.core.events import GiveUp
from support.worker_bench import Bench, request


def test_a_step_that_never_ends_is_given_up_once() -> None:
    bench = Bench(step_timeout_ms=5_000)
    r = request()
    bench.attached(r, bench.admit(r))
    bench.wait(4_999)
    assert bench.none(GiveUp)
    bench.wait(1)
    assert "step 1 has not ended after 5000 ms" in bench.only(GiveUp).why
    bench.wait(5_000)
    assert bench.none(GiveUp)


def test_steps_that_end_are_never_given_up() -> None:
    bench = Bench(step_timeout_ms=5_000)
    r = request()
    bench.attached(r, bench.admit(r))
    for tokens in ((), (40,), (41,)):
        bench.wait(4_000)
        assert bench.none(GiveUp)
        bench.step(*tokens)


def test_no_step_is_waited_for_when_none_is_in_flight() -> None:
    bench = Bench(step_timeout_ms=5_000)
    bench.wait(60_000)
    assert bench.none(GiveUp)
