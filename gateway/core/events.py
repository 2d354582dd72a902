"""What ``GatewayCore`` is told and what it asks for.

The shell mints stream ids, request ids and resume keys, builds records (tokenized, validated,
with a seed), and verifies resume keys before it passes them on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from deepinfer.kvstore.core.ids import RequestId, Seq, StreamId, WorkerRef
from deepinfer.kvstore.core.messages import (
    GatewayReport,
    ReportReply,
    ToClient,
    ToGateway,
    ToWorker,
)
from deepinfer.kvstore.core.requests import RequestRecord

# ---- events --------------------------------------------------------------------------------


class Generate(NamedTuple):
    """A new request. ``record.request`` is the id that the shell has just minted."""

    stream: StreamId
    record: RequestRecord
    resume_key: str
    include_events: bool = False
    """Whether this stream wants ``Notice`` messages."""


class Resume(NamedTuple):
    """A client comes back for a request that this or another gateway accepted."""

    stream: StreamId
    record: RequestRecord
    resume_key: str
    claim: int
    """Which of the client's attempts this is; ``Generate`` was claim 0."""
    received: tuple[tuple[int, ...], ...]
    """The token ids that the client has, for each choice in order."""
    include_events: bool = False
    scored: int = 0
    """How many prompt tokens' log-probabilities the client has."""


class AbortRequest(NamedTuple):
    """The client no longer wants the request; this gateway may not know it."""

    request: RequestId
    claim: int
    """The highest that the client has used; below the claim held here, the abort is a stale one
    and ignored."""
    choices: int = 1
    """How many choices the request has; used only when this gateway does not hold it."""


class StreamClosed(NamedTuple):
    """The reader went away, or the call was cancelled."""

    stream: StreamId


class StreamReady(NamedTuple):
    """The stream's writer has written the last ``ToStream`` and can take the next."""

    stream: StreamId


class FromWorker(NamedTuple):
    """A message on a worker's link. ``worker`` is who the link belongs to."""

    worker: WorkerRef
    message: ToGateway


class WorkerLinkDown(NamedTuple):
    """A worker's link broke. Its runs stay attached: the worker attaches them again."""

    worker: WorkerRef


class Scanned(NamedTuple):
    """No stop string ends within the first ``tokens`` tokens of the choice: the answer to Scan."""

    seq: Seq
    tokens: int


class StopMatched(NamedTuple):
    """A stop string ends within token number ``tokens``: the sequence ends there."""

    seq: Seq
    tokens: int


class ReportAnswered(NamedTuple):
    """The controller's answer to a ``Report``."""

    reply: ReportReply


class ReportLinkUp(NamedTuple):
    """The stream to the controller is new: what the controller knows of this gateway is unknown."""


class Tick(NamedTuple):
    """Time passes; every 50 ms."""


Event = (
    Generate
    | Resume
    | AbortRequest
    | StreamClosed
    | StreamReady
    | FromWorker
    | WorkerLinkDown
    | Scanned
    | StopMatched
    | ReportAnswered
    | ReportLinkUp
    | Tick
)

# ---- effects -------------------------------------------------------------------------------


class Code(Enum):
    """How a stream ends; the names are gRPC's."""

    OK = "OK"
    ABORTED = "ABORTED"  # a newer attempt of the same client has taken over
    PERMISSION_DENIED = "PERMISSION_DENIED"  # the resume key is another request's
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"  # final: refused, with both numbers
    FAILED_PRECONDITION = "FAILED_PRECONDITION"  # final: the cluster is being stopped
    UNAVAILABLE = "UNAVAILABLE"  # not final: come back here later, or to another gateway now


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceUsage:
    """What one choice cost, as this gateway saw it; it goes out with the choice's ``Finished``."""

    prompt_tokens: int
    cached_tokens: int
    """Of the prompt's: found in a prefix cache by the run that generated the first token."""
    completion_tokens: int
    ttft_ms: int | None
    """Arrival here to the first token's arrival here; None without tokens or after a takeover."""
    last_token_ms: int | None
    """Arrival here to the last token's arrival here; None likewise."""
    swaps: int
    resumes: int
    swap_failures: int
    recomputes: int
    offload_blocks: int
    offload_bytes: int
    reload_blocks: int
    reload_bytes: int
    copy_out_us: int
    copy_in_us: int
    stall_ms: int
    """Sum over swaps: the gap between the last token before and the first one after it."""


class ToStream(NamedTuple):
    """Write to a client's stream. At most one per stream is under way: see ``StreamReady``."""

    stream: StreamId
    message: ToClient
    usage: ChoiceUsage | None = None
    """With every ``Finished``, and only there."""


class EndStream(NamedTuple):
    """Close a client's stream with a status. The core has forgotten the stream."""

    stream: StreamId
    code: Code
    message: str


class SendToWorker(NamedTuple):
    """Send on the worker's link; if there is none (any more), drop it."""

    worker: WorkerRef
    message: ToWorker


class Scan(NamedTuple):
    """Look for stop strings in these tokens, then answer ``Scanned`` or ``StopMatched``.

    Emitted only for requests with stop strings; their tokens wait until the answer, so that
    nothing behind a stop string ever goes out. ``start`` 0 begins the choice afresh; otherwise the
    tokens follow those of the scan before.
    """

    seq: Seq
    start: int
    token_ids: tuple[int, ...]


class Forget(NamedTuple):
    """The request's record is gone: the shell may drop what it keeps for it."""

    request: RequestId


class Report(NamedTuple):
    """Send to the controller, if it can be reached; an unanswered one is replaced in time."""

    report: GatewayReport


Effect = ToStream | EndStream | SendToWorker | Scan | Forget | Report
