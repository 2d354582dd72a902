"""The controller bench measures what it says, on a cluster small enough for a test."""

from __future__ import annotations

from deepinfer.deploy.bench.controller import _growth, measure


def test_a_small_cluster_is_measured() -> None:
    figures = measure(4, 100, events=300)
    assert figures["events"] >= 300
    assert sum(figures["events_by_kind"].values()) == figures["events"]
    assert sum(figures["states"].values()) >= 100
    assert figures["events_per_s"] > 0
    # More requests than the pools hold: the mix has what it promises.
    assert figures["decided"]["swaps_seen_total"] > 0
    assert figures["decided"]["resumes_seen_total"] > 0
    assert figures["decided"]["requests_admitted_total"] > 0


def test_growth_is_held_against_the_logarithm() -> None:
    low = {"workers": 10, "requests": 100, "event_us": {"mean": 10.0}}
    high = {"workers": 1000, "requests": 10_000, "event_us": {"mean": 19.0}}
    assert _growth([low, high])["holds"] is True  # twice the logarithm, 1.9 times the cost
    high = {"workers": 1000, "requests": 10_000, "event_us": {"mean": 21.0}}
    assert _growth([low, high])["holds"] is False
