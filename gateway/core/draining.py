"""A gateway on its way out: it takes nothing new, and its streams may finish for a while."""

from __future__ import annotations

from deepinfer.kvstore.core.messages import DrainRule


class Drain:
    """Whether this gateway drains, and until when its streams may go on here."""

    def __init__(self) -> None:
        self.begun = False
        """New requests are refused, until this life ends."""
        self.until_ms: int | None = None
        """Then streams end, for their clients to go on at another gateway. None: they stay."""

    def ordered(self, rule: DrainRule, now_ms: int) -> None:
        """The controller wants it; said again, it can only bring the end forward."""
        self.begun = True
        if rule.left_ms is not None:
            until_ms = now_ms + rule.left_ms
            self.until_ms = until_ms if self.until_ms is None else min(self.until_ms, until_ms)

    def takes_over(self) -> bool:
        """Whether requests that other gateways have accepted may still come here.

        They may where clients have nowhere else to go: what was accepted is to finish.
        """
        return self.until_ms is None

    def over(self, now_ms: int) -> bool:
        """Whether the streams' time is up."""
        return self.until_ms is not None and now_ms >= self.until_ms
