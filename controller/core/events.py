"""What the controller's core is told, and what it asks its shell to do.

The three reports of ``kvstore.core.messages`` are events as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from deepinfer.kvstore.core.ids import GatewayId, Incarnation, Run, StoreId, WorkerId, WorkerRef
from deepinfer.kvstore.core.messages import (
    GatewayReport,
    Order,
    Release,
    ReportReply,
    Reserve,
    StoreReply,
    StoreReport,
    WorkerReport,
)

# ---- events --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Everyone who should be there, by name; sent at the start and whenever it changes.

    The value is the life that is known to be current, or None where only the name is known. "All
    have reported" means these. A member that is missing from a later Members has left for good.
    """

    workers: Mapping[WorkerId, Incarnation | None]
    stores: Mapping[StoreId, Incarnation | None]
    gateways: Mapping[GatewayId, Incarnation | None]


class WorkerGone(NamedTuple):
    """This life of the worker, and every earlier one, is over."""

    worker: WorkerRef


class StoreGone(NamedTuple):
    """This life of the store is over, and every payload in it is lost."""

    store: StoreId
    incarnation: Incarnation


class GatewayGone(NamedTuple):
    """This life of the gateway is over; its requests wait for another gateway's claim."""

    gateway: GatewayId
    incarnation: Incarnation


class CallKind(Enum):
    """Which of the controller's two calls on a store was answered."""

    RESERVE = "reserve"
    RELEASE = "release"


class StoreAnswered(NamedTuple):
    """A store's answer; ``StoreStatus.UNREACHABLE`` when the call failed or timed out."""

    store: StoreId
    reply: StoreReply
    kind: CallKind


class OrderFailed(NamedTuple):
    """The call that carried the order failed: it may or may not have run."""

    worker: WorkerRef
    order: Run


class Drain(NamedTuple):
    """Empty a worker or a gateway, and give it nothing new, until it restarts."""

    peer: WorkerId | GatewayId
    grace_ms: int | None = None
    """After so long a worker gives up those too that have nowhere else to go, and a gateway sends
    its clients to another one. None: they finish where they are."""
    life: Incarnation | None = None
    """Only this life of it; None: whichever is there."""


class Tick(NamedTuple):
    """Time has passed; sent about every 50 ms."""


Report = WorkerReport | StoreReport | GatewayReport

Event = (
    Members
    | Report
    | WorkerGone
    | StoreGone
    | GatewayGone
    | StoreAnswered
    | OrderFailed
    | Drain
    | Tick
)

# ---- effects -------------------------------------------------------------------------------


class PeerKind(Enum):
    """The three kinds of processes that send reports."""

    WORKER = "worker"
    STORE = "store"
    GATEWAY = "gateway"


class Peer(NamedTuple):
    """One life of a process that sends reports."""

    kind: PeerKind
    id: str
    incarnation: Incarnation


class Reply(NamedTuple):
    """Answer the report that was just handled, on the link it came from."""

    to: Peer
    reply: ReportReply


class SendOrder(NamedTuple):
    """Call the worker; an order that the levels do not confirm in time is sent again."""

    worker: WorkerRef
    order: Order


class CallStore(NamedTuple):
    """Call the store; the outcome comes back as ``StoreAnswered``."""

    store: StoreId
    call: Reserve | Release


class StepDown(NamedTuple):
    """Another controller with this higher epoch exists: stop. Nothing follows it."""

    epoch: int


Effect = Reply | SendOrder | CallStore | StepDown
