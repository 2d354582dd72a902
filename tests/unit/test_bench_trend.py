"""The slope that says whether something grows, and the limit that it is held against."""

from __future__ import annotations

from random import Random

import pytest

from deepinfer.deploy.bench.trend import POINTS_MAX, WARM_UP, Limit, thinned, trend

EXACT = Limit(share=0.0, least=0.5)
HOUR = [10.0 * i for i in range(361)]


def test_a_straight_line_is_found_whatever_a_quarter_of_the_points_are() -> None:
    draw = Random(1)
    values = [100 + 7 * t / 3600 + draw.gauss(0, 0.2) for t in HOUR]
    for i in draw.sample(range(len(values)), len(values) // 4):
        values[i] = draw.choice([0.0, 5000.0])
    line = trend(HOUR, values, EXACT)
    assert line is not None
    assert line.per_hour == pytest.approx(7, abs=0.7)
    assert line.growth == pytest.approx(7 * (1 - WARM_UP), abs=0.6)
    assert not line.flat


def test_what_fills_up_at_the_beginning_is_flat() -> None:
    values = [50 + 40 * min(1.0, t / 700) for t in HOUR]
    line = trend(HOUR, values, EXACT)
    assert line is not None
    assert (line.level, line.growth, line.growth_percent, line.flat) == (90, 0, 0, True)


def test_a_leak_of_one_descriptor_in_an_hour_is_one_too_many() -> None:
    leaking = [61 + int(t / 1800) for t in HOUR]
    line = trend(HOUR, leaking, EXACT)
    assert line is not None
    assert not line.flat
    assert trend(HOUR, leaking, Limit(share=0.02, least=2)).flat  # type: ignore[union-attr]


def test_a_share_of_the_level_may_be_allowed() -> None:
    values = [1000 + 10 * t / 3600 for t in HOUR]
    within, beyond = Limit(share=0.01, least=0), Limit(share=0.007, least=0)
    assert trend(HOUR, values, within).flat  # type: ignore[union-attr]
    assert not trend(HOUR, values, beyond).flat  # type: ignore[union-attr]
    falling = [1000 - 500 * t / 3600 for t in HOUR]
    assert trend(HOUR, falling, beyond).flat  # type: ignore[union-attr]


def test_too_few_points_have_no_trend() -> None:
    assert trend([], [], EXACT) is None
    assert trend([1.0], [1.0], EXACT) is None
    assert trend([1.0, 1.0], [1.0, 2.0], EXACT) is None


def test_points_are_thinned_to_medians_of_neighbours() -> None:
    points = [(float(i), float(i % 7)) for i in range(1000)]
    few = thinned(points, POINTS_MAX)
    assert len(few) == POINTS_MAX
    assert [t for t, _ in few] == sorted(t for t, _ in few)
    assert thinned(points[:5], POINTS_MAX) == points[:5]
    spiked = [(float(i), 1e9 if i % 100 == 0 else 1.0) for i in range(1000)]
    assert {value for _, value in thinned(spiked, 100)} == {1.0}
