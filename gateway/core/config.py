"""The gateway's bounds and times."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Bounds and times of one gateway; checked on construction.

    Raises:
        ValueError: a value is below its minimum; names the field and the minimum.
    """

    orphan_grace_ms: int = 5_000
    """How long a request outlives its last stream."""
    startup_grace_ms: int = 5_000
    """How long after its start a gateway leaves runs of unknown sequences unanswered: their
    clients may be about to resume here, and a refusal would cost the runs their KV."""
    max_live_requests: int = 1_024
    """Requests that have not ended; more are refused with RESOURCE_EXHAUSTED."""
    max_streams: int = 2_048
    max_delta_tokens: int = 256
    """Tokens in one message to a client."""
    max_notices: int = 64
    """Notices that wait for one slow stream; of more, the oldest are lost."""
    max_cancels: int = 4_096
    """Cancelled sequences the controller has not acknowledged; of more, the oldest are left to
    its garbage collection."""
    unread_ms: int = 120_000
    """A stream whose reader takes no message for so long is ended; its client may resume."""
    lifetime_ms: int = 3_600_000
    """How long a request may take in all, whatever state it is in: every other wait ends by then
    at the latest. A client's own deadline may be earlier."""
    finished_keep_ms: int = 60_000
    """How long an ended request can still be resumed for its last messages."""
    finished_bytes_max: int = 64 << 20
    """Estimated bytes of ended records; above it the oldest go early."""
    report_interval_ms: int = 100
    report_timeout_ms: int = 1_000
    """An unanswered report is followed by a complete one after this."""
    held_refresh_ms: int = 1_000
    """How often a report brings ``held_tokens`` of otherwise unchanged sequences up to date."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value, least = getattr(self, f.name), 0 if f.name.endswith("grace_ms") else 1
            if value < least:
                raise ValueError(f"{f.name} = {value}: must be {least} or more")
