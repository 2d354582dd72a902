"""The client's core: one request, however many streams it takes."""

from __future__ import annotations

from deepinfer.client.core.events import Effect, Event


class ClientCore:
    """Receives one request exactly once."""

    def __init__(self, endpoints: tuple[str, ...], choices: int = 1) -> None:
        self.endpoints = endpoints

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Take one event and return what has to be done, in order."""
        return []

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
