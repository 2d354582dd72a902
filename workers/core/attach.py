"""Asking a gateway whether a run may speak, and asking again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Attachment:
    """Where a run stands with its gateway.

    ``answered`` means that the gateway has said yes on the link that is up now. An orphan was told
    that the gateway does not know the sequence, while it holds KV: a restarted gateway may yet
    learn of it from its client, so the run pauses and keeps asking, and the controller decides.
    """

    since_ms: int
    """When the unanswered question was first asked."""
    asked_ms: int
    answered: bool = False
    orphan: bool = False

    def restart(self, now_ms: int) -> None:
        """Ask anew: for another run, or on another link."""
        self.since_ms = self.asked_ms = now_ms
        self.answered = False

    def repeat_due(self, now_ms: int, timeout_ms: int) -> bool:
        return not self.answered and now_ms - self.asked_ms >= timeout_ms

    def unreachable(self, now_ms: int, timeout_ms: int) -> bool:
        return not self.answered and now_ms - self.since_ms >= timeout_ms
