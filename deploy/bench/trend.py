"""Whether a figure that was sampled for long is flat: a robust slope, and a limit for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

WARM_UP = 0.2
"""Share of the time at the beginning that does not count: buffers and caches fill."""
POINTS_MAX = 240
"""Slopes are taken between so many points at most, each the median of its neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A series is flat if it grows by neither more than a share of its level nor than ``least``."""

    share: float
    """Of the median, over all of the time that counts."""
    least: float
    """In the series' unit: growth up to this is none, however low the level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Theil and Sen's line through a series: the median of the slopes between all its points."""

    level: float
    """The median."""
    per_hour: float
    growth: float
    """The slope times the time that counts; or, if that is more, by what the last tenth of that
    time is above the first: half of a step's pairs have no slope, and so has their median."""
    allowed: float

    @property
    def flat(self) -> bool:
        """Whether it grows no more than is allowed; to shrink is allowed."""
        return self.growth <= self.allowed

    @property
    def growth_percent(self) -> float:
        """Growth as a share of the level."""
        return 100.0 * self.growth / self.level if self.level else 0.0


def trend(times_s: Sequence[float], values: Sequence[float], limit: Limit) -> Trend | None:
    """The trend of what comes after the warm-up; None if fewer than two points do.

    P. K. Sen, Estimates of the regression coefficient based on Kendall's tau, JASA 63 (1968): up to
    29 % of the points may be anything at all without moving the slope far.
    """
    if not times_s:
        return None
    first_s = times_s[0] + WARM_UP * (times_s[-1] - times_s[0])
    counted = [(t, v) for t, v in zip(times_s, values, strict=True) if t >= first_s]
    points = thinned(counted, POINTS_MAX)
    slopes = [
        (later - early) / (b - a)
        for i, (a, early) in enumerate(points)
        for b, later in points[i + 1 :]
        if b > a
    ]
    if not slopes:
        return None
    slope, level = median(slopes), median(value for _, value in counted)
    tenth = max(1, len(counted) // 10)
    first, last = (median(v for _, v in end) for end in (counted[:tenth], counted[-tenth:]))
    return Trend(
        level=level,
        per_hour=3600.0 * slope,
        growth=max(slope * (counted[-1][0] - counted[0][0]), last - first),
        allowed=max(limit.least, limit.share * level),
    )


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most ``most`` points: medians of as many runs of neighbours."""
    if len(points) <= most:
        return list(points)
    cuts = [round(i * len(points) / most) for i in range(most + 1)]
    runs = [points[a:b] for a, b in pairwise(cuts)]
    return [(median(t for t, _ in run), median(v for _, v in run)) for run in runs]
