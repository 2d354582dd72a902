"""Hostile input breaks nothing: what once did, a few cases of everything, and the fuzzer itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from random import Random

import pytest

from deepinfer.deploy.fuzz import corpus
from deepinfer.deploy.fuzz.campaign import Campaign, Plan
from deepinfer.deploy.fuzz.loop import Crash, fuzz, run_case, watched
from deepinfer.deploy.fuzz.registry import TARGETS
from deepinfer.deploy.fuzz.shapes import Bytes
from deepinfer.deploy.fuzz.target import Case, Target

CORPUS = Path(__file__).parent.parent / "corpus"
SLOW = ("rpc_", "same_node", "template", "chat", "tokenizer", "checkpoint", "gguf")
"""Targets whose cases take milliseconds."""


@pytest.mark.parametrize("name", TARGETS)
def test_a_few_cases_break_nothing(name: str, tmp_path: Path) -> None:
    cases = 60 if name.startswith(SLOW) else 300
    tally = fuzz(TARGETS[name], tmp_path, cases=cases, seed="in every test run")
    assert not tally.crashes, "\n\n".join(crash.detail for crash in tally.crashes[:3])
    assert tally.cases == cases


def test_what_once_broke_something_does_not_any_more(tmp_path: Path) -> None:
    found = list(corpus.kept(CORPUS))
    assert found, "the corpus is gone"
    with watched():
        for name, path in found:
            folder = tmp_path / f"{name}-{path.name}"
            folder.mkdir()
            with TARGETS[name].open(folder) as case:
                _, crash, _ = run_case(TARGETS[name], case, path.read_bytes())
                assert crash is None, f"{path.name}: {crash}"


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_make_sense(name: str, tmp_path: Path) -> None:
    """At least half are accepted, or the fuzzer would never get behind the first check."""
    target, accepted = TARGETS[name], 0
    seeds = target.seeds()
    with watched(), target.open(tmp_path) as case:
        for seed in seeds:
            error, crash, _ = run_case(target, case, seed)
            assert crash is None, crash
            accepted += error is None
    assert 2 * accepted >= len(seeds) > 0


# ---- the fuzzer itself ---------------------------------------------------------------------


def made(decode: Callable[[bytes], object], *errors: type[Exception]) -> Target:
    @contextmanager
    def opened(_: Path) -> Iterator[Case]:
        yield decode

    opens: Callable[[Path], AbstractContextManager[Case]] = opened
    return Target(
        name="planted",
        about="a fault",
        seeds=lambda: [b"seed"],
        shape=Bytes((b"magic",)),
        open=opens,
        errors=errors,
    )


def planted(data: bytes) -> None:
    """Breaks behind a check that only what was kept gets past."""
    if b"magic" not in data:
        raise ValueError("no magic")
    if data.count(b"magic") < 3:
        raise ValueError("not enough of it" + "!" * data.count(b"magic"))
    raise KeyError("the fault")


def test_a_fault_behind_several_checks_is_found(tmp_path: Path) -> None:
    tally = fuzz(made(planted, ValueError), tmp_path, cases=20_000, seed="1", crashes_max=1)
    [crash] = tally.crashes
    assert crash.kind == "KeyError"
    assert crash.data.count(b"magic") >= 3
    assert "planted" in crash.place
    again = fuzz(made(planted, ValueError), tmp_path, cases=20_000, seed="1", crashes_max=1)
    assert again.crashes == tally.crashes


def spin(data: bytes) -> None:
    began = time.thread_time()
    while time.thread_time() - began < 3:
        pass


def grow(data: bytes) -> None:
    assert len(b"x" * (300 << 20))


@pytest.mark.parametrize(("decode", "kind"), [(spin, "hang"), (grow, "memory")])
def test_hangs_and_memory_are_faults(decode: Case, kind: str, tmp_path: Path) -> None:
    target = made(decode)
    with watched():
        _, crash, took_s = run_case(target, decode, b"")
    assert crash is not None
    assert crash.kind == kind
    assert took_s < 2


def test_an_error_that_the_target_names_is_none(tmp_path: Path) -> None:
    tally = fuzz(made(planted, ValueError, KeyError), tmp_path, cases=1_000, seed="1")
    assert (tally.crashes, tally.refused) == ([], 1_000)


def test_every_change_is_a_function_of_the_seed() -> None:
    for target in TARGETS.values():
        seeds = list(target.seeds())
        first, second = (
            [target.shape.mutate(seed, rng, seeds) for seed in seeds for _ in range(3)]
            for rng in (Random(5), Random(5))
        )
        assert first == second, target.name


def test_a_campaign_keeps_what_broke_and_goes_on_where_it_was(tmp_path: Path) -> None:
    output = tmp_path / "fuzz.json"

    def campaign(cases: int, jobs: int) -> Campaign:
        plan = Plan(
            targets=("chunks", "options"),
            cases=cases,
            seed=3,
            jobs=jobs,
            budget_s=60,
            folder=tmp_path / "corpus",
        )
        return Campaign(plan, command="deepinfer fuzz", output=output)

    assert campaign(5_000, 1).run()
    more = campaign(5_100, 2)
    assert more.totals["chunks"].cases == 5_000
    assert more.run()
    assert more.figures()["cases"] == 2 * 5_100
    assert not list(corpus.kept(tmp_path / "corpus"))
    path = corpus.keep(tmp_path / "corpus", Crash("chunks", b"x", "KeyError", ""))
    assert list(corpus.kept(tmp_path / "corpus")) == [("chunks", path)]
