"""The simulator passes its seeds, repeats itself, and says how to replay a seed that fails."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from deepinfer.deploy.sim import simulate
from deepinfer.deploy.sim.checker import ViolationError
from deepinfer.deploy.sim.plan import FAULTS, draw
from deepinfer.deploy.sim.world import World
from deepinfer.kvstore.core.precision import Precision

SEEDS = 200
DIGEST = (
    "from deepinfer.deploy.sim.simulate import trace_digest as d; print(d(3), d(4), d(8), d(13))"
)


def test_seeds_pass() -> None:
    summary = simulate.sweep(SEEDS)
    assert summary.failures == ()
    assert summary.seeds == SEEDS


@pytest.mark.slow
def test_many_seeds_pass() -> None:
    summary = simulate.sweep(10_000, start=100_000, jobs=2)
    assert summary.failures == ()


def test_a_seed_is_the_same_whatever_the_hash_seed() -> None:
    digests = []
    for hash_seed in ("0", "1", "random"):
        environment = dict(os.environ, PYTHONHASHSEED=hash_seed)
        done = subprocess.run(
            [sys.executable, "-c", DIGEST],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        digests.append(done.stdout.split())
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests[0])) == 4


def test_watching_changes_nothing() -> None:
    silent = simulate.run_seed(5)
    watched = simulate.run_seed(5, simulate.Tape())
    assert silent.engine.acts == watched.engine.acts
    assert silent.engine.now_ms == watched.engine.now_ms


def test_every_fault_is_drawn_and_can_be_done() -> None:
    drawn = {name for seed in range(100) for name, _ in draw(seed).faults}
    assert drawn == set(FAULTS)
    world = World(draw(1))
    world.start()
    world.engine.run_until(100)
    for name in FAULTS:
        getattr(world.havoc, name)()
        world.engine.run_until(world.engine.now_ms + 50)


def test_swaps_and_losses_are_frequent() -> None:
    """A simulation in which nothing happens would pass as well."""
    swaps = recomputed = takeovers = refused = switches = 0
    tokens = [0] * len(Precision)
    for seed in range(80):
        world = simulate.run_seed(seed)
        for worker in world.workers.values():
            numbers = worker.core.snapshot()
            swaps += numbers["requests_resumed_total"]
            recomputed += numbers["recomputed"]
            refused += numbers["orders_refused"]
            switches += numbers.get("precision_switches", 0)
            tokens = [a + b for a, b in zip(tokens, worker.core.counters.tokens_in, strict=True)]
        takeovers += sum(g.core.counters["takeovers_total"] for g in world.gateways.values())
    assert swaps >= 30
    assert takeovers >= 20
    assert refused + recomputed >= 5
    assert switches >= 20
    assert min(tokens) >= 20, "tokens of FP16, mixed, FP8 and W8A8 steps"


def test_a_failing_seed_prints_its_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(world: World) -> None:
        world.start()
        world.engine.run_until(60)
        raise ViolationError("as planned")

    monkeypatch.setattr(World, "run", broken)
    out = io.StringIO()
    assert simulate.run(2, start=41, out=out) == 1
    text = out.getvalue()
    assert "seed 41: ViolationError: as planned" in text
    assert "deepinfer simulate --seeds 1 --start 42 --trace" in text
    assert "WorkerReport" in text, "the last events are shown"
    assert "2 seeds, 2 failed" in text


def test_a_trace_is_printed_and_named() -> None:
    out = io.StringIO()
    assert simulate.run(1, start=3, trace=True, out=out) == 0
    assert f"passed, trace {simulate.trace_digest(3)}" in out.getvalue()


@pytest.mark.parametrize(("name", "value"), [("seeds", 0), ("start", -1), ("jobs", 0)])
def test_bad_numbers_are_named(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} = {value}: must be"):
        simulate.sweep(**{"seeds": 1, name: value})
