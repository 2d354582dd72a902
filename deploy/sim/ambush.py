"""Faults that wait for their moment: a swap takes so short a time that chance seldom meets it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from deepinfer.deploy.sim.worker_host import WorkerHost
    from deepinfer.deploy.sim.world import World


class Moment(Enum):
    """When a worker can be met."""

    PUT = "put"
    """It begins to copy a payload out."""
    COMMIT = "commit"
    """It has sent a Commit."""
    FETCH = "fetch"
    """It begins to copy a payload in."""
    STEP = "step"
    """It begins a step."""


class Ambush(NamedTuple):
    """One fault to come."""

    name: str
    moment: Moment
    delay_ms: int
    """How long after that moment."""
    hit: Callable[[WorkerHost], bool]
    """Do it; says whether there was anything to break."""


class Ambushes:
    """Those that wait, oldest first."""

    __slots__ = ("_waiting", "_world")

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: list[Ambush] = []

    def lay(self, ambush: Ambush) -> None:
        """Wait for the next worker at this moment."""
        self._waiting.append(ambush)

    def has_come(self, moment: Moment, worker: WorkerHost) -> None:
        """A worker is there: hit it, if one waits for that."""
        for ambush in self._waiting:
            if ambush.moment is moment:
                self._waiting.remove(ambush)
                self._world.engine.after(ambush.delay_ms, self._spring, ambush, worker)
                return

    def _spring(self, ambush: Ambush, worker: WorkerHost) -> None:
        if not self._world.fair and ambush.hit(worker):
            self._world.note(ambush.name)
            self._world.saboteur.struck[ambush.name] += 1

    def clear(self) -> None:
        """Nothing breaks any more."""
        self._waiting.clear()
