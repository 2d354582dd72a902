"""The controller's core: events in, effects out."""

from __future__ import annotations

from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.events import Effect, Event


class ControllerCore:
    """One life of the controller. A restarted one is a new object with a higher ``epoch``."""

    def __init__(self, epoch: int, config: ControllerConfig) -> None:
        self.epoch = epoch
        self.config = config

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Take one event at a time that never goes back; return what the shell has to do."""
        raise NotImplementedError

    def snapshot(self) -> dict[str, object]:
        """Pools, requests, swaps and counters as plain values, for ``status``."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
