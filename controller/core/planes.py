"""What the controller knows of one worker's lower planes, and whether they are worth their bytes.

A worker of a nested model under KV pressure may give up the weights' lower planes: its pool grows
by their bytes, and every step runs at the top level until they are back. ``worthwhile`` weighs the
two costs, both in milliseconds of the worker's time over one horizon:

* to go on as it is: the KV blocks that cross the bus (out, and in again), and the time in which
  somebody waits for blocks;
* to shed: the planes' one copy back, and what FP8 costs in quality, as a share of the time.

A block is taken to cross the bus in the planes' copy time, divided by the blocks that they are, so
nothing but that one time has to be known.
"""

from __future__ import annotations

from math import exp

from deepinfer.kvstore.core.shed import ShedLevel, ShedState

RETURNS = 10
"""Least time that planes stay away, in copies back."""
LOSS = 0.02
"""A policy that prefers FP16 gives up this share of the time sooner than FP16 itself."""


def horizon_ms(level: ShedLevel, least_ms: int) -> int:
    """How far ahead costs are weighed; also how long planes stay away, or here, at the least."""
    return max(least_ms, RETURNS * level.return_ms)


def worthwhile(
    crossed_blocks: float, waited_ms: float, level: ShedLevel, over_ms: int, loss: float
) -> bool:
    """Whether going on costs more than shedding.

    ``crossed_blocks`` and ``waited_ms`` are of the horizon ``over_ms``: the one that has passed
    is taken for the one to come.
    """
    block_ms = level.return_ms / level.tail_blocks
    return crossed_blocks * block_ms + waited_ms > level.return_ms + loss * over_ms


def _away(level: ShedLevel) -> bool:
    return level.state in (ShedState.SHEDDING, ShedState.OPEN)


class Planes:
    """One worker's planes: its last word of them, what is wanted, and the pressure so far."""

    __slots__ = ("calm_since_ms", "crossed_blocks", "level", "lost", "since_ms", "waited_ms",
                 "wanted", "wanted_ms", "weighed_ms")  # fmt: skip

    def __init__(self, level: ShedLevel, now_ms: int) -> None:
        self.level = level
        self.wanted = _away(level)
        """Away; what another controller had begun is not undone at once."""
        self.wanted_ms = now_ms
        """When that was last decided."""
        self.since_ms = now_ms
        """Since when the state is what it is, as far as this controller knows."""
        self.calm_since_ms: int | None = None
        """Since when ordinary blocks would do, while the planes are away."""
        self.crossed_blocks = 0.0
        """Blocks that crossed the bus for swaps; fades over a horizon."""
        self.waited_ms = 0.0
        """Time in which somebody waited for blocks; fades likewise."""
        self.weighed_ms = now_ms
        self.lost = False
        """The worker has not been heard from since it was taken for dead."""

    def learn(self, level: ShedLevel, now_ms: int) -> bool:
        """Take the worker's word; True if the state is another now."""
        changed = level.state is not self.level.state or self.lost
        if self.lost:
            self.lost = False
            self.wanted = _away(level)
        if changed:
            self.since_ms = now_ms
            self.calm_since_ms = None
        self.level = level
        return changed

    def weigh(self, pressed: bool, over_ms: int, now_ms: int) -> None:
        """Let the past fade; ``pressed``: somebody waits for blocks."""
        passed_ms = now_ms - self.weighed_ms
        self.weighed_ms = now_ms
        fade = exp(-passed_ms / over_ms)
        self.crossed_blocks *= fade
        self.waited_ms *= fade
        if pressed:
            self.waited_ms += min(passed_ms, over_ms)

    def lose(self) -> None:
        """The worker's life seems to be over; its next word shows where the planes are."""
        self.lost = True
        self.calm_since_ms = None
        self.forget_pressure()

    def forget_pressure(self) -> None:
        """What has been seen belongs to another state of the pool."""
        self.crossed_blocks = self.waited_ms = 0.0
