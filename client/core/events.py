"""What ``ClientCore`` is told and what it asks for.

Every stream that the core opens is an attempt with a number; events of an attempt that is no
longer the current one are ignored, so the shell need not cancel without races.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from deepinfer.kvstore.core.ids import RequestId
from deepinfer.kvstore.core.messages import ToClient
from deepinfer.kvstore.core.precision import Precision

# ---- events --------------------------------------------------------------------------------


class Start(NamedTuple):
    """Send the request. ``jitter`` in [0, 1) chooses the first endpoint."""

    jitter: float = 0.0


class Got(NamedTuple):
    """A message on an attempt's stream."""

    attempt: int
    message: ToClient


class StreamEnded(NamedTuple):
    """An attempt's stream ended; ``code`` is a gRPC status name, ``OK`` included."""

    attempt: int
    code: str
    detail: str
    jitter: float = 0.0
    """In [0, 1): spreads the wait before the next attempt."""
    untrusted: bool = False
    """There was no stream, for the two sides do not trust each other (TLS)."""


class AbortRequested(NamedTuple):
    """The user no longer wants the request."""


class AbortAnswered(NamedTuple):
    """An Abort call ended."""

    attempt: int
    ok: bool
    jitter: float = 0.0


class Tick(NamedTuple):
    """Time passes: at the time asked for with ``Wait``, or at any other."""

    jitter: float = 0.0


Event = Start | Got | StreamEnded | AbortRequested | AbortAnswered | Tick

# ---- effects -------------------------------------------------------------------------------


class OpenGenerate(NamedTuple):
    """Open a Generate stream at an endpoint."""

    attempt: int
    endpoint: str


class OpenResume(NamedTuple):
    """Open a Resume stream at an endpoint."""

    attempt: int
    endpoint: str
    request: RequestId
    resume_key: str
    claim: int
    received: tuple[tuple[int, ...], ...]
    """The token ids that the client has, for each choice in order."""
    scored: int = 0
    """How many prompt tokens' log-probabilities the client has."""
    precisions: tuple[tuple[Precision, ...], ...] = ()
    """In which modes these tokens were generated, for each choice; () if all of them in FP16."""


class CloseStream(NamedTuple):
    """Cancel an attempt's stream; what it still says is ignored."""

    attempt: int


class Deliver(NamedTuple):
    """Give the user a message: never a token twice, never a token out of order."""

    message: ToClient


class SendAbort(NamedTuple):
    """Call Abort at an endpoint."""

    attempt: int
    endpoint: str
    request: RequestId
    resume_key: str
    claim: int


class Wait(NamedTuple):
    """Send ``Tick`` at ``due_ms``. A later Wait replaces an earlier one."""

    due_ms: int


class Succeed(NamedTuple):
    """Every choice has ended and was delivered in full."""


class Failure(Enum):
    """Why a request failed, as far as a caller wants to tell failures apart."""

    INVALID = "invalid"
    UNAUTHENTICATED = "unauthenticated"
    NOT_FOUND = "not_found"
    EXHAUSTED = "exhausted"
    UNAVAILABLE = "unavailable"
    UNTRUSTED = "untrusted"
    DEADLINE = "deadline"
    FAILED = "failed"
    PROTOCOL = "protocol"
    REPLACED = "replaced"
    ABORTED = "aborted"


class Fail(NamedTuple):
    """The request has failed; nothing follows."""

    failure: Failure
    code: str
    detail: str


Effect = OpenGenerate | OpenResume | CloseStream | Deliver | SendAbort | Wait | Succeed | Fail
