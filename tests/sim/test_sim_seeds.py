"""The simulator passes its seeds, repeats itself, and meets what it is there to meet."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import get_args

import pytest

from deepinfer.client.core import events as client_events
from deepinfer.controller.core import events as controller_events
from deepinfer.deploy.sim import simulate
from deepinfer.deploy.sim.coverage import Part, table
from deepinfer.deploy.sim.faults import MISHAPS
from deepinfer.deploy.sim.plan import FAULTS, draw
from deepinfer.deploy.sim.simulate import Tally
from deepinfer.deploy.sim.world import World
from deepinfer.gateway.core import events as gateway_events
from deepinfer.kvstore.core import events as store_events
from deepinfer.kvstore.core.states import NEXT, State
from deepinfer.workers.core import events as worker_events

SEEDS = 400
DIGEST = (
    "from deepinfer.deploy.sim.simulate import trace_digest as d; print(d(3), d(4), d(8), d(13))"
)
EVENTS: dict[str, ModuleType] = {
    "controller": controller_events,
    "worker": worker_events,
    "store": store_events,
    "gateway": gateway_events,
    "client": client_events,
}


RARE_MOVES = {
    "prefill -> failed",
    "decode -> failed",
    "swapping_out -> failed",
    "swapping_out -> prefill",
    "swapped -> finished",
    "swapped -> failed",
    "swapped -> recovering",
    "swapping_in -> finished",
    "swapping_in -> failed",
    "swapping_in -> cancelled",
    "swapping_in -> recovering",
    "recovering -> swapped",
    "recovering -> finished",
    "recovering -> failed",
    "recovering -> cancelled",
}
"""So seldom that only long runs are sure to make them."""


@pytest.fixture(scope="module")
def tally() -> Tally:
    return simulate.sweep(SEEDS)


def test_seeds_pass(tally: Tally) -> None:
    assert tally.failures == []
    assert tally.seeds == SEEDS


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_many_seeds_pass() -> None:
    assert simulate.sweep(10_000, start=100_000).failures == []


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


# ---- nothing is dead ------------------------------------------------------------------------


def test_every_fault_is_done(tally: Tally) -> None:
    assert set(table(tally.coverage, Part.FAULT)) == set(FAULTS)


def test_every_mishap_befalls_calls_and_replies(tally: Tally) -> None:
    befallen = table(tally.coverage, Part.MISHAP)
    assert {name.split()[0] for name in befallen} == set(MISHAPS)
    for kind in MISHAPS:
        for message in ("Admit", "SwapOut", "Reserve", "StoreReply"):
            assert befallen.get(f"{kind} {message}", 0) > 0, f"no {message} was {kind}"
    for message in ("Commit", "SwapIn", "PutGrant", "BeginGet"):
        assert any(f"{kind} {message}" in befallen for kind in MISHAPS), message


def test_every_legal_move_is_made(tally: Tally) -> None:
    legal = {f"{old.value} -> {new.value}" for old in State for new in NEXT[old]}
    assert legal - set(table(tally.coverage, Part.MOVE)) <= RARE_MOVES


def _words(kind: str, types: Iterable[type]) -> set[str]:
    return {f"{kind} {each.__name__}" for each in types}


@pytest.mark.parametrize("kind", list(EVENTS))
def test_every_event_and_effect_occurs(kind: str, tally: Tally) -> None:
    module = EVENTS[kind]
    prefix = "Worker" if kind == "worker" else ""
    events = get_args(getattr(module, f"{prefix}Event"))
    effects = get_args(getattr(module, f"{prefix}Effect"))
    assert _words(kind, events) - set(table(tally.coverage, Part.EVENT)) == set()
    assert _words(kind, effects) - set(table(tally.coverage, Part.EFFECT)) == set()


def test_every_fault_can_be_done_at_any_time() -> None:
    drawn = {name for seed in range(100) for name in draw(seed).faults}
    assert drawn == set(FAULTS)
    world = World(draw(1))
    world.start()
    world.engine.run_until(100)
    for name in FAULTS:
        getattr(world.havoc, name)()
        world.engine.run_until(world.engine.now_ms + 50)


def test_what_matters_is_frequent(tally: Tally) -> None:
    """A simulation in which nothing happens would pass as well."""
    counts = table(tally.coverage, Part.COUNT)
    assert counts["requests taken over"] >= 100
    assert counts["orders refused"] >= 3
    assert counts["switches of precision"] >= 100
    for mode in ("fp16", "mixed", "fp8", "w8a8"):
        assert counts[f"tokens of {mode} steps"] >= 100
    moves = table(tally.coverage, Part.MOVE)
    assert moves["swapping_out -> swapped"] >= 100
    assert moves["swapping_in -> decode"] >= 100
    assert moves["decode -> recovering"] >= 30


@pytest.mark.parametrize(("name", "value"), [("seeds", 0), ("start", -1)])
def test_bad_numbers_are_named(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} = {value}: must be"):
        simulate.sweep(**{"seeds": 1, name: value})
