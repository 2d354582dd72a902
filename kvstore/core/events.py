"""What happens to a store, and what its core wants done about it.

The life of a payload::

    Reserve ── BeginPut ── FinishPut ── Commit ── BeginGet … EndGet ── Release
               pages out   pages back   visible

A put or a read that was granted pages owns them until it says that it has let go (``FinishPut``,
``AbortPut``, ``EndGet``); what became of the ticket meanwhile makes no difference.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

from deepinfer.kvstore.core.ids import Incarnation, Ticket, WorkerRef
from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.core.messages import (
    Release,
    ReportReply,
    Reserve,
    StoreReply,
    StoreReport,
    StoreStatus,
)

CallId = NewType("CallId", int)
"""Minted by the shell; comes back in the one ``Answer`` to the call."""


class PutId(NamedTuple):
    """One attempt to write one payload: the store's life and a number within it."""

    incarnation: Incarnation
    number: int


class ReadId(NamedTuple):
    """One reader's hold on one payload: the store's life and a number within it."""

    incarnation: Incarnation
    number: int


# ---- calls: each gets exactly one Answer ------------------------------------------------------
# ``incarnation`` is the life of the store that the caller believes it talks to; None if it does
# not know. A call for another life is answered STALE_STORE.


class BeginPut(NamedTuple):
    """The writer is about to write: give it pages. Answered with a ``PutGrant``.

    A second one for the same ticket revokes the first.
    """

    ticket: Ticket
    writer: WorkerRef
    payload_bytes: int
    shared: bool
    """True: another process writes into the pages itself, and can be fenced only by its own word
    or its death. False: the store's own handler writes, and always says when it has stopped."""
    incarnation: Incarnation | None = None


class FinishPut(NamedTuple):
    """The writer has stopped writing. Answered with a ``StoreReply``; the ticket stays invisible.

    OK: ready to commit. BAD_PAYLOAD: length, hash or manifest does not fit; the pages are free
    and the reservation stands. NOT_YOURS: a later put took over. SEALED, UNKNOWN_TICKET: the
    ticket went away meanwhile.
    """

    ticket: Ticket
    put: PutId
    received_bytes: int
    hash_ok: bool
    manifest: Manifest


class Commit(NamedTuple):
    """Make a finished put visible. Answered OK, again and again if asked again."""

    ticket: Ticket
    writer: WorkerRef
    incarnation: Incarnation | None = None


class Resolve(NamedTuple):
    """What became of my commit? COMMITTED; or SEALED, and then it never will be."""

    ticket: Ticket
    writer: WorkerRef
    incarnation: Incarnation | None = None


class BeginGet(NamedTuple):
    """Read a committed payload. Answered with a ``GetGrant``; its pages stay until ``EndGet``."""

    ticket: Ticket
    incarnation: Incarnation | None = None


CallBody = Reserve | Release | BeginPut | FinishPut | Commit | Resolve | BeginGet


class Call(NamedTuple):
    """A call with the name under which its answer will come."""

    call: CallId
    body: CallBody


class PutGrant(NamedTuple):
    """Answer to ``BeginPut``: with OK, the pages to write in order; otherwise no put was begun."""

    ticket: Ticket
    status: StoreStatus
    put: PutId | None
    pages: tuple[int, ...]


class GetGrant(NamedTuple):
    """Answer to ``BeginGet``: with OK, the pages to read in order; otherwise nothing is held."""

    ticket: Ticket
    status: StoreStatus
    read: ReadId | None
    pages: tuple[int, ...]
    manifest: Manifest | None


Reply = StoreReply | PutGrant | GetGrant

# ---- other events -----------------------------------------------------------------------------


class AbortPut(NamedTuple):
    """The writer will not touch the put's pages again: after giving up, or answering a revoke."""

    put: PutId


class EndGet(NamedTuple):
    """The reader will not touch the pages again."""

    read: ReadId


class WriterGone(NamedTuple):
    """The process of this life of a worker has exited (its pidfd fired)."""

    writer: WorkerRef


class ReportAnswered(NamedTuple):
    """The controller has answered a report."""

    reply: ReportReply


class ReportLinkUp(NamedTuple):
    """A new stream to a controller is open: it knows nothing, so the next report is complete."""


class Tick(NamedTuple):
    """Time has passed."""


Event = Call | AbortPut | EndGet | WriterGone | ReportAnswered | ReportLinkUp | Tick

# ---- effects ----------------------------------------------------------------------------------


class Answer(NamedTuple):
    """The one reply to a call."""

    call: CallId
    reply: Reply


class RevokePut(NamedTuple):
    """Tell the put's writer to stop; its pages stay quarantined until it says that it has."""

    put: PutId
    writer: WorkerRef
    shared: bool


class Report(NamedTuple):
    """Send this to the controller."""

    report: StoreReport


Effect = Answer | RevokePut | Report
