"""Who gives way: each policy's order, and that no more are taken than it takes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deepinfer.controller.core.victims import POLICIES, Candidate, choose, cost, lru, youngest
from support.controller_peers import seq


def candidate(
    name: str, *, arrival_ms: int = 0, last_step: int = 0, gain: int = 1, copy: int = 1
) -> Candidate:
    return Candidate(seq(name), arrival_ms, last_step, gain, copy, protected=False)


def order(policy: str, *some: Candidate) -> list[str]:
    return [c.seq.request for c in sorted(some, key=POLICIES[policy])]


def test_lru_takes_the_least_recently_active_and_of_those_the_latest() -> None:
    a = candidate("a", arrival_ms=1, last_step=9)
    b = candidate("b", arrival_ms=2, last_step=9)
    c = candidate("c", arrival_ms=0, last_step=3)
    assert order("lru", a, b, c) == ["c", "b", "a"]


def test_youngest_takes_the_latest_arrival() -> None:
    a = candidate("a", arrival_ms=1, last_step=1)
    b = candidate("b", arrival_ms=2, last_step=9)
    assert order("youngest", a, b) == ["b", "a"]


def test_cost_takes_whoever_frees_most_for_what_is_copied() -> None:
    shared = candidate("shared", gain=1, copy=8)
    private = candidate("private", gain=8, copy=8)
    assert order("cost", shared, private) == ["private", "shared"]


def test_ties_end_in_the_name() -> None:
    for policy in (lru, youngest, cost):
        assert policy(candidate("a")) < policy(candidate("b"))


def test_one_who_suffices_spares_those_before() -> None:
    """Least recently active first would be small, then large; large alone is enough."""
    small = candidate("small", last_step=1, gain=1)
    large = candidate("large", last_step=2, gain=5)
    chosen = choose([large, small], lru, lambda blocks, count: blocks >= 4)
    assert chosen == [large]


def test_nobody_is_taken_in_vain() -> None:
    assert choose([candidate("a"), candidate("b")], lru, lambda blocks, count: blocks >= 3) == []


def test_shared_blocks_do_not_count() -> None:
    sharing = candidate("sharing", gain=0, copy=9)
    assert choose([sharing], lru, lambda blocks, count: blocks >= 1) == []


@given(
    gains=st.lists(st.integers(0, 6), max_size=8),
    steps=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    short=st.integers(1, 20),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_chosen_suffice_and_none_could_stay(
    gains: list[int], steps: list[int], short: int, policy: str
) -> None:
    some = [
        candidate(f"c{i}", gain=gain, last_step=steps[i], arrival_ms=i)
        for i, gain in enumerate(gains)
    ]
    chosen = choose(some, POLICIES[policy], lambda blocks, count: blocks >= short)
    total = sum(c.gain_blocks for c in chosen)
    if sum(gains) < short:
        assert chosen == []
        return
    assert total >= short
    assert all(total - c.gain_blocks < short for c in chosen)
