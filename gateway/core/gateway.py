"""The gateway's core."""

from __future__ import annotations

from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.gateway.core.events import Effect, Event
from deepinfer.kvstore.core.ids import GatewayId, Incarnation


class GatewayCore:
    """Keeps the record of each live request and lets one run at a time speak for it."""

    def __init__(
        self, gateway: GatewayId, incarnation: Incarnation, config: GatewayConfig, *, now_ms: int
    ) -> None:
        self.gateway = gateway

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Take one event and return what has to be done, in order."""
        return []

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
