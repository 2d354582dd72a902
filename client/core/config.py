"""How long the client waits, and for what."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Times of one request's reconnecting; checked on construction.

    Raises:
        ValueError: a value is below 1; names the field.
    """

    accept_timeout_ms: int = 10_000
    """How long an attempt may go without ``Accepted`` before the next endpoint is tried."""
    backoff_first_ms: int = 50
    backoff_max_ms: int = 2_000
    connect_give_up_ms: int = 15_000
    """How long a request may go without being accepted before it fails."""
    give_up_ms: int = 60_000
    """How long nothing new may be heard of an accepted request before it fails."""
    deadline_slack_ms: int = 1_000
    """How long after a request's deadline its gateway may take to say so."""
    contradictions_max: int = 8
    """Streams in a row that contradict what is here, and bring nothing new, before it fails."""
    abort_attempts_max: int = 8
    abort_accept_ms: int = 2_000
    """How long an abort waits for ``Accepted``, without which there is no id to abort."""

    def __post_init__(self) -> None:
        for f in fields(self):
            if getattr(self, f.name) < 1:
                raise ValueError(f"{f.name} = {getattr(self, f.name)}: must be 1 or more")
