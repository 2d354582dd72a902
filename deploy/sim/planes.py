"""The lower planes of a worker's weights: they leave, and their copy back takes time, or fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.deploy.sim.checker import ViolationError
from deepinfer.workers.core.events import PlanesRestored, PlanesShed, RestorePlanes, ShedPlanes

if TYPE_CHECKING:
    from deepinfer.deploy.sim.worker_host import WorkerHost

GARBAGE = -1
"""What a plane's bytes are as KV."""


class SimPlanes:
    """One life's planes. While they are on the card, or on the way there, the tail is garbage."""

    __slots__ = ("_here", "_returning", "_tail", "_worker")

    def __init__(self, worker: WorkerHost) -> None:
        plan = worker.plan
        self._worker = worker
        self._tail = range(plan.blocks, plan.blocks + plan.tail_blocks)
        self._here = not plan.start_shed
        self._returning = False
        self._scribble()

    def check_level(self, level: int) -> None:
        """A step that reads lower planes needs them."""
        if level < self._worker.world.plan.levels - 1 and not self._here:
            raise ViolationError(f"{self._worker}: a step at level {level} without the planes")

    def check_blocks(self, blocks: tuple[int, ...]) -> None:
        """A step, or a copy, uses blocks: none of the tail while planes are there."""
        if (self._here or self._returning) and any(block in self._tail for block in blocks):
            raise ViolationError(f"{self._worker}: blocks {blocks} are planes")

    def shed(self, effect: ShedPlanes) -> None:
        """Give them up, once what reads them has ended."""
        if not self._here:
            raise ViolationError(f"{self._worker}: sheds planes that are away")
        worker = self._worker
        self._here = False
        worker.after(1 + worker.within(5), worker.drive, PlanesShed())

    def restore(self, effect: RestorePlanes) -> None:
        """Copy them back; now and then that fails, but not for ever."""
        if self._here or self._returning:
            raise ViolationError(f"{self._worker}: restores planes that are there")
        worker = self._worker
        self._returning = True
        self._scribble()
        delay_ms = worker.plan.return_ms + worker.within(worker.plan.return_ms + 1)
        worker.after(delay_ms, self._restored)

    def _restored(self) -> None:
        worker = self._worker
        self._returning = False
        self._scribble()
        fair = worker.world.fair
        ok = fair or worker.random() >= worker.plan.return_fails
        self._here = ok
        worker.drive(PlanesRestored(ok, "" if ok else "the copy failed"))

    def _scribble(self) -> None:
        worker = self._worker
        for block in self._tail:
            worker.pool[block] = [GARBAGE] * worker.world.block_size
