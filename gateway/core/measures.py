"""What this gateway has measured since it started: histograms over all of its requests.

Pure counting: an observation costs one binary search, whatever was observed before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise


def by_reason(name: str, reason: str) -> str:
    """The key in ``counters`` of a total that is kept by reason."""
    return f'{name}{{reason="{reason}"}}'


class Histogram:
    """Integer observations, counted by the smallest bound that is not below them.

    Args:
        *bounds: upper bounds, inclusive, strictly rising; whatever is above the last one is
            counted too.

    Raises:
        ValueError: the bounds do not rise.
    """

    __slots__ = ("_counts", "bounds", "total")

    def __init__(self, *bounds: int) -> None:
        if not bounds or any(b <= a for a, b in pairwise(bounds)):
            raise ValueError(f"bounds = {bounds}: must rise, and be one or more")
        self.bounds = bounds
        self.total = 0
        """Sum of all observations."""
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: int, times: int = 1) -> None:
        """Count a value, ``times`` times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        """Observations so far."""
        return sum(self._counts)

    def cumulative(self) -> Iterator[tuple[int, int]]:
        """For each bound, how many observations were not above it."""
        seen = 0
        for bound, count in zip(self.bounds, self._counts, strict=False):
            seen += count
            yield bound, seen


_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
_STEP_MS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 750, 1_000, 2_000,
            5_000, 10_000)  # fmt: skip
_WAIT_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000,
            100_000, 200_000, 500_000)  # fmt: skip
_COPY_US = (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000,
            200_000, 500_000, 1_000_000, 2_000_000, 5_000_000)  # fmt: skip


class Measures:
    """One observation a choice (of ``n``), except where it says otherwise.

    Times from arrival are known only where the request arrived: a choice that was taken over from
    another gateway adds none.
    """

    __slots__ = (
        "choice_ms",
        "copy_in_us",
        "copy_out_us",
        "generation_tokens",
        "inter_token_ms",
        "prompt_tokens",
        "queue_ms",
        "stall_ms",
        "tpot_us",
        "ttft_ms",
    )

    def __init__(self) -> None:
        self.queue_ms = Histogram(*_WAIT_MS)
        """Arrival to the first run that attached: a worker has taken the choice."""
        self.ttft_ms = Histogram(*_WAIT_MS)
        """Arrival to the first token's arrival here."""
        self.inter_token_ms = Histogram(*_STEP_MS)
        """A token's arrival to the next one's: one observation a token but the first. Tokens of
        one message arrive together."""
        self.tpot_us = Histogram(*(1_000 * ms for ms in _STEP_MS))
        """First token to last, over the tokens but one; of ended choices with two or more."""
        self.choice_ms = Histogram(*_WAIT_MS)
        """Arrival to the end."""
        self.prompt_tokens = Histogram(*_TOKENS)
        """One observation an accepted request."""
        self.generation_tokens = Histogram(*_TOKENS)
        """Of ended choices."""
        self.stall_ms = Histogram(*_WAIT_MS)
        """One observation a stall: the gap between the last token before a swap-out and the first
        one after it."""
        self.copy_out_us = Histogram(*_COPY_US)
        """One observation a swap-out: copies, hashing and the store's calls."""
        self.copy_in_us = Histogram(*_COPY_US)
        """The same of a swap-in."""
