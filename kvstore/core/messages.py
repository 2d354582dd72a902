"""Every message that one process sends to another, as values.

The five cores speak in these; shells translate them to and from protobuf or Ray calls, and the
simulator carries them as they are. A message may be lost, doubled or late unless its link says
otherwise, so each handler is idempotent and each message says whom it speaks for (run, order,
incarnation).

Links:

====================  ======================================================================
worker -> controller  ``WorkerReport`` (every 100 ms and with every change; levels)
store -> controller   ``StoreReport``; ``Reserve`` and ``Release`` go the other way
gateway -> controller ``GatewayReport``; the reply may say ``Disown``
controller -> worker  ``Admit``, ``SwapOut``, ``SwapIn``, ``Preempt``, ``Cancel``, ``Prefetch``
worker <-> gateway    ``Attach``, ``Attached``, ``AttachRefused``, ``Scores``, ``Tokens``,
                      ``Ack``, ``Drop``, ``Notice``
worker <-> store      ``Reserve`` is the controller's; the rest of the store's calls
client <-> gateway    ``Accepted``, ``PromptDelta``, ``Delta``, ``Notice``, ``Finished``; calls
                      the other way
====================  ======================================================================

A report is a difference against the one before it (``number - 1``) unless it is ``complete``;
within it every entry states a level, not an event. A receiver that missed one answers ``resync``
and ignores it; the sender's next report is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from deepinfer.kvstore.core.ids import (
    GatewayId,
    Incarnation,
    NodeId,
    RequestId,
    Run,
    Seq,
    StoreId,
    StreamId,
    Ticket,
    WorkerId,
    WorkerRef,
)
from deepinfer.kvstore.core.precision import PrecisionLevel, PrecisionRule
from deepinfer.kvstore.core.requests import FinishReason, RequestRecord, Token
from deepinfer.kvstore.core.shed import ShedLevel
from deepinfer.kvstore.core.states import State

# ---- reports -------------------------------------------------------------------------------


class Departure(Enum):
    """Why a run is no longer on its worker."""

    FINISHED = "finished"  # its last token was acknowledged by the gateway
    DROPPED = "dropped"  # the gateway, or a Cancel, said so
    SWAPPED = "swapped"  # its KV is committed under a ticket
    REFUSED = "refused"  # no room after all: put it back at the head
    PREEMPTED = "preempted"  # dropped for recompute, as ordered
    TOO_LARGE = "too_large"  # this pool can never hold it
    UNREACHABLE = "unreachable"  # its gateway did not answer Attach in time


class ResidentLevel(NamedTuple):
    """One run on a worker, as far as it changes who may be placed where."""

    seq: Seq
    run: Run
    state: State
    ticket: Ticket | None
    """In SWAPPING_OUT and SWAPPING_IN: the payload's ticket."""
    swap_failures: int
    """Failed swap-outs of this run so far; after one the resident is back in its old state."""
    gateway: GatewayId


class Usage(NamedTuple):
    """One resident's use of its worker, reported raw and read only when someone must be chosen."""

    seq: Seq
    private_blocks: int
    """Blocks that only this resident holds: what swapping it out would free."""
    tokens: int
    """Tokens of prompt and output with KV in the pool."""
    last_step: int
    """The worker's step counter when it last computed a token."""
    advanced: int
    """Tokens generated since this run began here."""


class Departed(NamedTuple):
    """A run that has left its worker; repeated until a report that says so is acknowledged."""

    seq: Seq
    run: Run
    why: Departure
    ticket: Ticket | None
    blocks: int
    """SWAPPED: blocks in the payload. REFUSED, TOO_LARGE: blocks it needs. Otherwise 0."""
    payload_bytes: int
    """SWAPPED: key, value and scale bytes in the payload. Otherwise 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """A worker's levels."""

    worker: WorkerId
    incarnation: Incarnation
    node: NodeId
    number: int
    complete: bool
    epoch_seen: int
    orders_seen: int
    """Orders handled by this incarnation, refused ones too (a count, for metrics)."""
    block_bytes: int
    block_size: int
    blocks_total: int
    blocks_free: int
    """Blocks an allocation could take now: unused ones and unreferenced cached ones, less those
    promised to admissions under way."""
    blocks_short: int
    """Blocks that residents need for their next step and cannot get."""
    stalled: bool
    """Nobody here can take the next step without another block, and no swap is under way."""
    draining: bool
    residents: tuple[ResidentLevel, ...]
    departed: tuple[Departed, ...]
    usage: tuple[Usage, ...]
    """Every resident, in every report (complete or not)."""
    precision: PrecisionLevel | None = None
    """Of nested weights; None: they are not."""
    shed: ShedLevel | None = None
    """Where the weights' lower planes are; None: they always stay."""


class TicketState(Enum):
    RESERVED = "reserved"
    COMMITTED = "committed"


class TicketLevel(NamedTuple):
    """One ticket at a store."""

    ticket: Ticket
    state: TicketState
    payload_bytes: int
    """Reserved upper bound, or the committed payload's key, value and scale bytes."""
    tokens: int
    """Tokens in the committed payload; 0 while reserved."""
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """A store's levels. ``gone`` names tickets that were here at the report before."""

    store: StoreId
    incarnation: Incarnation
    node: NodeId
    number: int
    complete: bool
    epoch_seen: int
    budget_bytes: int
    used_bytes: int
    """Reserved, committed and quarantined bytes."""
    tickets: tuple[TicketLevel, ...]
    gone: tuple[Ticket, ...]


class RequestLevel(NamedTuple):
    """One live (or cancelled, not yet acknowledged) sequence at a gateway."""

    seq: Seq
    claim: int
    """Which of the client's attempts this gateway speaks for; the highest claim owns it."""
    cancelled: bool
    prompt_tokens: int
    max_tokens: int
    held_tokens: int
    """Tokens the gateway holds when it reports: a lower bound later."""
    arrival_ms: int
    priority: int
    deadline_ms: int | None
    exact: bool
    attached: Run | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayReport:
    """A gateway's levels. ``gone`` names sequences that were here at the report before."""

    gateway: GatewayId
    incarnation: Incarnation
    number: int
    complete: bool
    epoch_seen: int
    requests: tuple[RequestLevel, ...]
    gone: tuple[Seq, ...]
    draining: bool = False
    """It takes no new requests, until it restarts."""
    drained: bool = False
    """And nothing here needs it any more: it may be stopped."""


class Disown(NamedTuple):
    """Another gateway holds a higher claim: forget the sequence without cancelling it."""

    seq: Seq
    claim: int
    """The higher claim; a gateway whose own claim is not lower ignores this."""


class RejectReason(Enum):
    """Why the controller will not run a sequence."""

    TOO_LARGE = "too_large"
    """No pool can ever hold it; the gateway names both numbers."""
    PLANES_AWAY = "planes_away"
    """It is exact, and the weights' lower planes did not return to any card in time."""
    NO_PLANES = "no_planes"
    """It is exact, and no card ever has the lower planes (``start_shed``)."""


class Reject(NamedTuple):
    """The controller will not run it; the gateway fails the request and says why.

    TOO_LARGE: ``blocks_total`` is the largest pool's. Otherwise the numbers are 0.
    """

    seq: Seq
    blocks_needed: int
    blocks_total: int
    why: RejectReason = RejectReason.TOO_LARGE


class DrainRule(NamedTuple):
    """To a worker or gateway that is to be emptied: take nothing new, until it restarts."""

    left_ms: int | None
    """To a gateway: clients that have not got their answer by then are sent to another one; None:
    none is, for they could go nowhere else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportReply:
    """The controller's answer to any report."""

    epoch: int
    number: int
    """The number answered."""
    resync: bool
    disown: tuple[Disown, ...] = ()
    """To gateways only; repeated until the gateway's report no longer lists the sequence."""
    reject: tuple[Reject, ...] = ()
    """To gateways only; repeated likewise."""
    precision: PrecisionRule | None = None
    """To workers only."""
    drain: DrainRule | None = None
    """To workers and gateways that are to be emptied; repeated until they restart."""


# ---- controller -> worker ------------------------------------------------------------------


class Admit(NamedTuple):
    """Run the sequence: attach to its gateway, allocate, compute.

    On a worker that already holds the sequence under a lower run it takes over in place, KV and
    all: that is how a gateway is replaced.
    """

    order: Run
    seq: Seq
    run: Run
    gateway: GatewayId
    tokens: int
    """Prompt and held tokens: what to make room for at once."""
    max_total_tokens: int
    """Prompt tokens + max_tokens."""


class SwapOut(NamedTuple):
    """At a step boundary: copy the run's blocks to the store under the ticket, commit, free."""

    order: Run
    seq: Seq
    run: Run
    ticket: Ticket
    store: StoreId


class SwapIn(NamedTuple):
    """Run the sequence from its payload: attach, allocate, fetch, verify, go on."""

    order: Run
    seq: Seq
    run: Run
    gateway: GatewayId
    ticket: Ticket
    store: StoreId
    tokens: int
    """Tokens in the payload."""
    blocks: int
    """Blocks in the payload."""
    max_total_tokens: int


class Preempt(NamedTuple):
    """Drop the run's KV; it will be recomputed. The last resort."""

    order: Run
    seq: Seq
    run: Run


class Cancel(NamedTuple):
    """Drop the sequence's runs up to and including ``run``, whatever they are doing."""

    order: Run
    seq: Seq
    run: Run


class Prefetch(NamedTuple):
    """Hold this payload in host memory, and no other: its SwapIn is likely to come here.

    A level, and only a hint: it is repeated while it holds, nothing answers it, and to lose it
    costs time.
    """

    order: Run
    seq: Seq
    ticket: Ticket | None
    """None: hold nothing."""
    store: StoreId | None
    blocks: int
    """Blocks in the payload."""


Order = Admit | SwapOut | SwapIn | Preempt | Cancel | Prefetch

# ---- worker <-> gateway --------------------------------------------------------------------


class Attach(NamedTuple):
    """May this run speak for the sequence? Repeated after a broken link with the same run."""

    seq: Seq
    run: Run
    worker: WorkerRef


class Attached(NamedTuple):
    """Yes: here is the record and every token sent or held so far."""

    seq: Seq
    run: Run
    record: RequestRecord
    tokens: tuple[int, ...]
    scored: int = 0
    """Prompt tokens whose log-probabilities the gateway holds, from the second token on."""


class AttachRefused(NamedTuple):
    """No: a higher run has attached, or the sequence is not (or no longer) this gateway's."""

    seq: Seq
    run: Run
    highest: Run | None
    """The run attached now; None when the gateway does not know the sequence."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Prompt tokens with their log-probabilities, from ``position`` in the prompt on.

    Position 0 has none: a list of them begins with position 1. They come before the first of
    ``Tokens``, once each, from whichever runs computed them.
    """

    seq: Seq
    run: Run
    position: int
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Generated tokens from position ``index`` on (0 is the first generated token)."""

    seq: Seq
    run: Run
    index: int
    tokens: tuple[Token, ...]
    finish: FinishReason | None
    """Set when the last of them ends the sequence."""
    cached: int = 0
    """Prompt tokens that this run found in its worker's prefix cache."""


class Ack(NamedTuple):
    """The gateway holds every token below ``next_index`` (and the finish, if it was sent)."""

    seq: Seq
    run: Run
    next_index: int
    finished: bool
    scored: int = 0
    """Prompt tokens whose log-probabilities it holds, from the second token on."""


class Drop(NamedTuple):
    """Runs up to and including ``run`` no longer speak: stop them and free what they hold."""

    seq: Seq
    run: Run


class NoticeKind(Enum):
    PLACED = "placed"
    SWAPPED_OUT = "swapped_out"
    RESUMED = "resumed"
    SWAP_FAILED = "swap_failed"
    RECOMPUTED = "recomputed"  # its payload was lost or refused: computed again


class Notice(NamedTuple):
    """Something a watcher of the request wants to see. May be lost; never doubled at a client."""

    seq: Seq
    run: Run
    number: int
    """Counts a run's notices, so that a doubled one is dropped."""
    kind: NoticeKind
    worker: WorkerId
    store: StoreId | None
    blocks: int
    payload_bytes: int
    copy_us: int
    """Time in copies, hashing and the store's calls, in microseconds."""


ToGateway = Attach | Scores | Tokens | Notice
ToWorker = Attached | AttachRefused | Ack | Drop

# ---- the store's calls ---------------------------------------------------------------------


class StoreStatus(Enum):
    """The outcome of a call on a store."""

    OK = "ok"
    OVER_BUDGET = "over_budget"
    TOO_MANY = "too_many"  # the bound on tickets
    UNKNOWN_TICKET = "unknown_ticket"
    SEALED = "sealed"  # resolved as never to be committed
    NOT_YOURS = "not_yours"  # another writer's, or a departed writer's
    STALE_EPOCH = "stale_epoch"
    STALE_STORE = "stale_store"  # the ticket belongs to an earlier life of this store
    BAD_PAYLOAD = "bad_payload"  # length, hash, size bound or manifest does not fit
    COMMITTED = "committed"
    UNREACHABLE = "unreachable"  # said by clients: no answer in time; nothing is known


class Reserve(NamedTuple):
    """Controller -> store: set bytes aside for a payload that ``writer`` will put."""

    epoch: int
    ticket: Ticket
    bytes_max: int
    writer: WorkerRef


class Release(NamedTuple):
    """Controller -> store: the payload or reservation is no longer wanted."""

    epoch: int
    ticket: Ticket


class StoreReply(NamedTuple):
    """A store's answer to Reserve, Release, Commit or Resolve."""

    ticket: Ticket
    status: StoreStatus
    used_bytes: int
    budget_bytes: int


# ---- gateway -> client ---------------------------------------------------------------------


class Accepted(NamedTuple):
    """The first message of a stream: from here on the request must finish."""

    request: RequestId
    resume_key: str
    prompt_tokens: int
    claim: int


@dataclass(frozen=True, slots=True)
class PromptDelta:
    """Prompt tokens with log-probabilities from ``position`` (1 or more) on, each exactly once."""

    position: int
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens of one choice from position ``index`` on, each exactly once in a client's life."""

    choice: int
    index: int
    tokens: tuple[Token, ...]


class Finished(NamedTuple):
    """The end of one choice. ``message`` says why where ``reason`` is DEADLINE or ERROR."""

    choice: int
    reason: FinishReason
    tokens: int
    message: str
    code: str = ""
    """Of an ERROR that is a refusal: the name of the gRPC status with which the stream will end."""


ToClient = Accepted | PromptDelta | Delta | Notice | Finished

__all__ = [
    "Accepted", "Ack", "Admit", "Attach", "AttachRefused", "Attached", "Cancel", "Delta",
    "Departed", "Departure", "Disown", "DrainRule", "Drop", "Finished", "GatewayReport", "Notice",
    "NoticeKind", "Order", "Preempt", "Prefetch", "PromptDelta", "Reject", "RejectReason",
    "Release", "ReportReply", "RequestLevel", "Reserve", "ResidentLevel", "Scores", "StoreReply",
    "StoreReport", "StoreStatus", "StreamId", "SwapIn", "SwapOut", "TicketLevel", "TicketState",
    "ToClient", "ToGateway", "ToWorker", "Tokens", "Usage", "WorkerReport",
]  # fmt: skip
