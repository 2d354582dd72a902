"""The simulator's clock, its chance, and the processes that share them.

Everything that happens is an act on one heap, ordered by (simulated millisecond, serial number);
nothing else decides an order, so a seed fixes the whole run. Each process, channel and fault draws
from a stream of its own, so that leaving one fault out does not redraw all the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any
from zlib import crc32

Act = Callable[..., object]


class Engine:
    """A heap of acts in simulated time."""

    __slots__ = ("_heap", "_seed", "_serial", "acts", "now_ms")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.now_ms = 0
        self.acts = 0
        """Acts done so far."""
        self._heap: list[tuple[int, int, Act, tuple[Any, ...]]] = []
        self._serial = 0

    def chance(self, of: str) -> Random:
        """A stream of random numbers, the same for a seed and a name."""
        return Random(self._seed << 32 | crc32(of.encode()))

    def after(self, delay_ms: int, act: Act, *args: Any) -> None:
        """Do ``act(*args)`` ``delay_ms`` (0 or more) from now, behind what is already due then."""
        self._serial += 1
        heappush(self._heap, (self.now_ms + delay_ms, self._serial, act, args))

    def step(self) -> bool:
        """Do the next act; False if there is none."""
        if not self._heap:
            return False
        self.now_ms, _, act, args = heappop(self._heap)
        self.acts += 1
        act(*args)
        return True

    def run_until(self, end_ms: int) -> None:
        """Do every act that is due up to and including ``end_ms``; the clock then stands there."""
        heap = self._heap
        while heap and heap[0][0] <= end_ms:
            self.now_ms, _, act, args = heappop(heap)
            self.acts += 1
            act(*args)
        self.now_ms = end_ms


class Process:
    """One operating-system process: up or down, running or stopped (SIGSTOP).

    What is posted to one life of it is lost with that life; what comes while it is stopped waits,
    in order, until it goes on.
    """

    __slots__ = ("_backlog", "engine", "life", "name", "random", "stopped", "streams", "up")

    def __init__(self, engine: Engine, name: str) -> None:
        self.engine = engine
        self.name = name
        self.random = engine.chance(name).random
        """This process's own chance: the next number in [0, 1)."""
        self.life = 0
        """Its incarnation: 0 before the first start, then one more with each."""
        self.up = False
        self.stopped = False
        self.streams: dict[Any, None] = {}
        """Open streams of this life, oldest first."""
        self._backlog: deque[tuple[Act, tuple[Any, ...]]] = deque()

    def __repr__(self) -> str:
        return f"{self.name}.{self.life}"

    def start(self) -> None:
        """Begin the next life."""
        assert not self.up, f"{self.name} is up already"
        self.life += 1
        self.up = True
        self.stopped = False

    def kill(self) -> None:
        """SIGKILL: the life ends here, with everything that waited for it."""
        self.up = False
        self.stopped = False
        self._backlog.clear()
        for stream in list(self.streams):
            stream.cut()

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def go_on(self) -> None:
        """SIGCONT: do what came meanwhile, in order."""
        self.stopped = False
        while self._backlog and not self.stopped and self.up:
            act, args = self._backlog.popleft()
            act(*args)

    def within(self, count: int) -> int:
        """One of 0 .. ``count`` - 1, by this process's own chance."""
        return int(self.random() * count)

    def after(self, delay_ms: int, act: Act, *args: Any) -> None:
        """Do ``act`` in this life, ``delay_ms`` from now; never if the life ends first."""
        self.engine.after(delay_ms, self.take, self.life, act, args)

    def take(self, life: int, act: Act, args: tuple[Any, ...]) -> None:
        """Do ``act`` now if ``life`` still lasts, or when the process goes on if it is stopped."""
        if life != self.life or not self.up:
            return
        if self.stopped or self._backlog:
            self._backlog.append((act, args))
        else:
            act(*args)
