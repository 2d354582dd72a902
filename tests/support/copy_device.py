"""A card that does nothing before it must: what was not waited for has not happened yet."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from deepinfer.workers.gpu.copying import STREAMS, Event, PinError, Way


class Mark(NamedTuple):
    """An event: a place on a stream."""

    stream: str
    place: int


class Table:
    """Pairs of rows, on the card."""

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.pairs = list(pairs)


class LazyDevice:
    """Steps and copies are streams of work; ``synchronize`` does what is due and nothing more.

    Addresses are those of this process. So a copy that should have waited for a step reads what was
    there before it, and one that nobody waits for is done at the very end, by ``finish``.
    """

    def __init__(self) -> None:
        self.copying = [f"{way.name}{stream}" for way in Way for stream in range(STREAMS)]
        self.streams: dict[str, list[Callable[[], None]]] = {
            stream: [] for stream in (*self.copying, "steps")
        }
        self.done = dict.fromkeys(self.streams, 0)
        self.log: list[tuple[object, ...]] = []
        self.registered: dict[int, int] = {}
        self.pinnable = 1 << 40
        """Bytes; more is refused."""
        self.copies_left = 1 << 40
        """Copies until one fails."""
        self._buffers: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []
        self._lock = threading.RLock()

    # ---- steps ----

    def launch(self, step: Callable[[], None]) -> None:
        """What an engine does."""
        with self._lock:
            self.streams["steps"].append(step)

    def steps_done(self) -> int:
        return self.done["steps"]

    def finish(self) -> None:
        """Time passes: everything that was launched is done, steps last."""
        for stream in (*self.copying, "steps"):
            self._advance(Mark(stream, len(self.streams[stream])))

    # ---- CopyDevice ----

    def steps_event(self) -> Event:
        return self._mark("steps")

    def wait_for(self, way: Way, stream: int, event: Event) -> None:
        with self._lock:
            self.log.append(("wait", way, event))
            self.streams[f"{way.name}{stream}"].append(lambda: self._advance(event))

    def copy(self, way: Way, stream: int, target: int, source: int, size: int) -> None:
        with self._lock:
            if self.copies_left == 0:
                raise RuntimeError("the bus is broken")
            self.copies_left -= 1
            self.log.append(("copy", way, target, source, size))
            self.streams[f"{way.name}{stream}"].append(lambda: ctypes.memmove(target, source, size))  # type: ignore[arg-type]

    def pairs(self, way: Way, pairs: Sequence[tuple[int, int]]) -> Table:
        with self._lock:
            self.log.append(("pairs", way, tuple(pairs)))
            return Table(pairs)

    def copy_rows(self, way: Way, stream: int, memory: Tensor, pairs: Table, some: range) -> None:
        kept = weakref.ref(pairs)

        def rows() -> None:
            table = kept()
            assert table is not None, "nobody kept the pairs until their copy"
            for source, target in table.pairs[some.start : some.stop]:
                memory[target] = memory[source]

        with self._lock:
            if self.copies_left == 0:
                raise RuntimeError("the bus is broken")
            self.copies_left -= 1
            self.log.append(("rows", way, stream, some))
            self.streams[f"{way.name}{stream}"].append(rows)

    def copies_event(self, way: Way, stream: int) -> Event:
        return self._mark(f"{way.name}{stream}")

    def synchronize(self, event: Event) -> None:
        with self._lock:
            self.log.append(("synchronize", event))
            self._advance(event)

    def register(self, address: int, size: int) -> None:
        if size > self.pinnable:
            raise PinError(f"{size} bytes are too many")
        self.registered[address] = size

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def pinned(self, size: int) -> int:
        if size > self.pinnable:
            raise PinError(f"{size} bytes are too many")
        self._buffers.append(np.zeros(size, np.uint8))
        return self._buffers[-1].ctypes.data

    # ---- what tests ask ----

    def copied(self) -> list[tuple[int, int, int]]:
        """Target, source and size of every copy so far."""
        return [entry[2:] for entry in self.log if entry[0] == "copy"]  # type: ignore[misc]

    def in_flight(self) -> int:
        """Copies and waits that have not happened."""
        return sum(len(self.streams[stream]) - self.done[stream] for stream in self.copying)

    def _mark(self, stream: str) -> Mark:
        with self._lock:
            return Mark(stream, len(self.streams[stream]))

    def _advance(self, mark: Mark) -> None:
        with self._lock:
            while self.done[mark.stream] < mark.place:
                work = self.streams[mark.stream][self.done[mark.stream]]
                self.done[mark.stream] += 1
                work()
