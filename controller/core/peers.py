"""Numbered reports of one process, and the records of stores and gateways."""

from __future__ import annotations

from enum import Enum

from deepinfer.controller.core.events import Report
from deepinfer.kvstore.core.ids import GatewayId, Incarnation, NodeId, Seq, StoreId, Ticket
from deepinfer.kvstore.core.messages import Disown, Reject, StoreReply, StoreStatus


class Verdict(Enum):
    """What to do with a report."""

    APPLY = "apply"
    NEW_LIFE = "new_life"  # the process restarted: drop the old life, then apply
    RESYNC = "resync"  # one before it was missed: ask for a complete one
    STALE = "stale"  # doubled or overtaken: its contents are known already
    OLD_LIFE = "old_life"  # of a process that is gone: no answer


class Link:
    """Which life reports, and which of its reports was taken last."""

    __slots__ = ("heard_ms", "incarnation", "lost_ms", "number")

    def __init__(self) -> None:
        self.incarnation = Incarnation(0)
        self.number: int | None = None
        """Of the last report taken; None until a complete one was."""
        self.heard_ms: int | None = None
        self.lost_ms: int | None = None
        """When this life was declared over, if it was."""

    @property
    def reported(self) -> bool:
        return self.number is not None

    def judge(self, report: Report, now_ms: int, settle_ms: int) -> Verdict:
        """Say what a report means. Of a life that goes on it is a sign, whatever else it is.

        A life that was declared over is believed again if it still sends complete reports when
        nothing can be left on the way.
        """
        verdict = self._verdict(report, now_ms, settle_ms)
        if verdict in (Verdict.STALE, Verdict.RESYNC) and report.incarnation == self.incarnation:
            self.heard_ms = now_ms
        return verdict

    def _verdict(self, report: Report, now_ms: int, settle_ms: int) -> Verdict:
        incarnation, number, complete = report.incarnation, report.number, report.complete
        if incarnation < self.incarnation:
            return Verdict.OLD_LIFE
        if incarnation > self.incarnation:
            return Verdict.NEW_LIFE if complete else Verdict.RESYNC
        if self.lost_ms is not None and now_ms < self.lost_ms + settle_ms:
            return Verdict.OLD_LIFE
        if self.number is None:
            return Verdict.APPLY if complete else Verdict.RESYNC
        if number <= self.number:
            return Verdict.STALE
        if complete or number == self.number + 1:
            return Verdict.APPLY
        return Verdict.RESYNC

    def take(self, incarnation: Incarnation, number: int, now_ms: int) -> None:
        self.incarnation = incarnation
        self.number = number
        self.heard_ms = now_ms
        self.lost_ms = None

    def lose(self, now_ms: int | None = None) -> None:
        """Only a complete report counts from here on; if ``now_ms`` is given the life is over."""
        self.number = None
        self.lost_ms = now_ms


class Store:
    """One store, by id: the levels of its current life."""

    __slots__ = ("blocked_until_ms", "blocked_used_bytes", "budget_bytes", "id", "link", "node",
                 "tickets", "used_bytes")  # fmt: skip

    def __init__(self, store: StoreId) -> None:
        self.id = store
        self.link = Link()
        self.node = NodeId("")
        self.budget_bytes = 0
        self.used_bytes = 0
        self.tickets: dict[Ticket, None] = {}
        self.blocked_until_ms = 0
        """It refused or failed a swap-out; not asked again before."""
        self.blocked_used_bytes = 0

    @property
    def room_bytes(self) -> int:
        return self.budget_bytes - self.used_bytes

    def pauses(self, now_ms: int) -> bool:
        """Whether it is left alone after a refusal."""
        return now_ms < self.blocked_until_ms

    def may_take(self, size_bytes: int, now_ms: int) -> bool:
        """Whether so many bytes may be asked of it, and are there by what is known."""
        return self.link.reported and not self.pauses(now_ms) and size_bytes <= self.room_bytes

    def block(self, until_ms: int) -> None:
        self.blocked_until_ms = until_ms
        self.blocked_used_bytes = self.used_bytes

    def learn(self, used_bytes: int, budget_bytes: int) -> None:
        """Bytes in use that fall end a refusal early."""
        self.used_bytes = used_bytes
        self.budget_bytes = budget_bytes
        if used_bytes < self.blocked_used_bytes:
            self.blocked_until_ms = 0

    def learn_answer(self, reply: StoreReply) -> None:
        """Take the bytes from an answer, unless nobody answered."""
        if self.link.reported and reply.status is not StoreStatus.UNREACHABLE:
            self.learn(reply.used_bytes, reply.budget_bytes)


class Gateway:
    """One gateway, by id: the sequences it lists, and what it has to be told."""

    __slots__ = ("disown", "drain_until_ms", "drained", "draining", "id", "link", "ordered_drain",
                 "reject", "seqs")  # fmt: skip

    def __init__(self, gateway: GatewayId) -> None:
        self.id = gateway
        self.link = Link()
        self.ordered_drain = False
        self.drain_until_ms: int | None = None
        """Then its clients are sent to another gateway; None: never."""
        self.draining = False
        """It says that it takes no new requests."""
        self.drained = False
        """It says that nothing needs it any more."""
        self.seqs: dict[Seq, None] = {}
        self.disown: dict[Seq, Disown] = {}
        self.reject: dict[Seq, Reject] = {}

    @property
    def alive(self) -> bool:
        """Whether this life has reported."""
        return self.link.reported
