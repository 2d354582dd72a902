"""Naive workers, stores and gateways around a ControllerCore: they just obey.

They count blocks exactly and complain when an order asks for what cannot be. None has a protocol of
its own beyond what a report has to say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deepinfer.kvstore.core.ids import (
    GatewayId,
    Incarnation,
    NodeId,
    RequestId,
    Run,
    Seq,
    StoreId,
    Ticket,
    WorkerId,
    WorkerRef,
)
from deepinfer.kvstore.core.messages import (
    Admit,
    Cancel,
    Departed,
    Departure,
    GatewayReport,
    Order,
    Preempt,
    Release,
    ReportReply,
    RequestLevel,
    Reserve,
    ResidentLevel,
    StoreReply,
    StoreReport,
    StoreStatus,
    SwapIn,
    SwapOut,
    TicketLevel,
    TicketState,
    Usage,
    WorkerReport,
)
from deepinfer.kvstore.core.states import State

if TYPE_CHECKING:
    from support.controller_cluster import Cluster

BLOCK_BYTES = 1000
BLOCK_SIZE = 16


def seq(name: str) -> Seq:
    return Seq(RequestId(name), 0)


@dataclass
class FakeRun:
    """A run on a fake worker."""

    run: Run
    gateway: GatewayId
    state: State
    tokens: int
    blocks: int
    prompt: int
    ticket: Ticket | None = None
    swap_failures: int = 0
    advanced: int = 0
    last_step: int = 0
    store: StoreId | None = None


class FakeStore:
    """Keeps sizes, not bytes."""

    def __init__(self, cluster: Cluster, name: str, budget_bytes: int, node: str) -> None:
        self.cluster = cluster
        self.id = StoreId(name)
        self.node = NodeId(node)
        self.incarnation = Incarnation(1)
        self.budget_bytes = budget_bytes
        self.tickets: dict[Ticket, TicketLevel] = {}
        self.number = 0
        self.epoch_seen = 0
        self.answers = True

    @property
    def used_bytes(self) -> int:
        return sum(level.payload_bytes for level in self.tickets.values())

    def call(self, call: Reserve | Release) -> StoreReply:
        self.epoch_seen = max(self.epoch_seen, call.epoch)
        if isinstance(call, Release):
            self.tickets.pop(call.ticket, None)
            return self._reply(call.ticket, StoreStatus.OK)
        if call.ticket not in self.tickets:
            if self.used_bytes + call.bytes_max > self.budget_bytes:
                return self._reply(call.ticket, StoreStatus.OVER_BUDGET)
            self.tickets[call.ticket] = TicketLevel(
                call.ticket, TicketState.RESERVED, call.bytes_max, 0, 0
            )
        return self._reply(call.ticket, StoreStatus.OK)

    def _reply(self, ticket: Ticket, status: StoreStatus) -> StoreReply:
        return StoreReply(ticket, status, self.used_bytes, self.budget_bytes)

    def commit(self, ticket: Ticket, run: FakeRun) -> bool:
        reserved = self.tickets.get(ticket)
        if reserved is None or run.blocks * BLOCK_BYTES > reserved.payload_bytes:
            return False
        self.tickets[ticket] = TicketLevel(
            ticket, TicketState.COMMITTED, run.blocks * BLOCK_BYTES, run.tokens, run.blocks
        )
        return True

    def restart(self) -> None:
        self.incarnation = Incarnation(self.incarnation + 1)
        self.tickets.clear()

    def report(self) -> StoreReport:
        self.number += 1
        return StoreReport(
            store=self.id,
            incarnation=self.incarnation,
            node=self.node,
            number=self.number,
            complete=True,
            epoch_seen=self.epoch_seen,
            budget_bytes=self.budget_bytes,
            used_bytes=self.used_bytes,
            tickets=tuple(self.tickets.values()),
            gone=(),
        )


class FakeWorker:
    """Obeys orders, grows its residents, says what it has."""

    def __init__(self, cluster: Cluster, name: str, blocks_total: int, node: str) -> None:
        self.cluster = cluster
        self.id = WorkerId(name)
        self.node = NodeId(node)
        self.incarnation = Incarnation(1)
        self.blocks_total = blocks_total
        self.alive = True
        self.runs: dict[Seq, FakeRun] = {}
        self.departed: dict[tuple[Seq, Run], Departed] = {}
        self.said: dict[int, list[tuple[Seq, Run]]] = {}
        self.number = 0
        self.steps = 0
        self.short = 0
        self.progressed = True
        self.epoch_seen = 0
        self.orders: list[Order] = []
        self.seen: dict[Run, None] = {}
        self.highest: dict[Seq, Run] = {}
        self.swap_ms = 0
        """How long a copy takes."""
        self.swaps_due: dict[Seq, int] = {}
        self.breaks_swaps = False
        self.draining = False

    @property
    def ref(self) -> WorkerRef:
        return WorkerRef(self.id, self.incarnation)

    @property
    def blocks_free(self) -> int:
        free = self.blocks_total - sum(run.blocks for run in self.runs.values())
        assert free >= 0, f"{self.id} holds more than it has"
        return free

    def order(self, order: Order) -> None:
        self.orders.append(order)
        if order.order in self.seen or order.order.epoch < self.epoch_seen:
            return
        self.epoch_seen = order.order.epoch
        self.seen[order.order] = None
        run = self.runs.get(order.seq)
        match order:
            case Admit() | SwapIn():
                if order.run <= self.highest.get(order.seq, Run(0, 0)):
                    return
                self.highest[order.seq] = order.run
                self._admit(order, run)
            case Cancel():
                if self.highest.get(order.seq, Run(0, 0)) < order.run:
                    self.highest[order.seq] = order.run
                if run is not None and run.run <= order.run:
                    self.leave(order.seq, Departure.DROPPED)
            case SwapOut():
                if run is not None and run.run == order.run and run.state is not State.SWAPPING_OUT:
                    run.state, run.ticket, run.store = State.SWAPPING_OUT, order.ticket, order.store
                    self.swaps_due[order.seq] = self.cluster.now_ms + self.swap_ms
            case Preempt():
                if run is not None and run.run == order.run:
                    self.leave(order.seq, Departure.PREEMPTED)

    def _admit(self, order: Admit | SwapIn, there: FakeRun | None) -> None:
        if isinstance(order, Admit) and there is not None:
            there.run, there.gateway = order.run, order.gateway  # a takeover
            there.swap_failures = 0
            return
        gateway = self.cluster.gateways[order.gateway]
        record = gateway.requests.get(order.seq)
        if record is None:
            self._say(Departed(order.seq, order.run, Departure.DROPPED, None, 0, 0))
            return
        tokens = record.prompt + record.held
        blocks = -(-tokens // BLOCK_SIZE)
        if -(-(record.prompt + record.max_tokens) // BLOCK_SIZE) > self.blocks_total:
            self._say(Departed(order.seq, order.run, Departure.TOO_LARGE, None, blocks, 0))
        elif self.draining or blocks > self.blocks_free:
            self._say(Departed(order.seq, order.run, Departure.REFUSED, None, blocks, 0))
        else:
            self.runs[order.seq] = run = FakeRun(
                order.run, order.gateway, State.PREFILL, tokens, blocks, record.prompt
            )
            if isinstance(order, SwapIn):
                store = self.cluster.stores[order.store]
                run.state, run.ticket = State.SWAPPING_IN, order.ticket
                held = store.tickets.get(order.ticket)
                if held is None or held.state is not TicketState.COMMITTED:
                    self.cluster.recomputed += 1

    def leave(self, name: Seq, why: Departure) -> None:
        run = self.runs.pop(name)
        ticket = run.ticket if why is Departure.SWAPPED else None
        size = run.blocks if why is Departure.SWAPPED else 0
        self._say(Departed(name, run.run, why, ticket, size, size * BLOCK_BYTES))

    def _say(self, departed: Departed) -> None:
        self.departed[departed.seq, departed.run] = departed

    def step(self) -> None:
        """One token for everyone who has a block for it; copies that are due."""
        self.steps += 1
        self.short = 0
        self.progressed = not self.runs
        for name, run in list(self.runs.items()):
            gateway = self.cluster.gateways.get(run.gateway)
            record = gateway.requests.get(name) if gateway is not None else None
            if run.state is State.SWAPPING_OUT:
                self._copy(name, run)
                self.progressed = True
                continue
            if run.state is State.SWAPPING_IN:
                run.state, run.ticket = State.DECODE, None
                self.progressed = True
                continue
            if gateway is None or not gateway.alive:
                continue
            if record is None or record.cancelled:
                self.leave(name, Departure.DROPPED)
                continue
            if record.attached is None or record.attached < run.run:
                record.attached = run.run
            if record.attached > run.run:
                self.leave(name, Departure.DROPPED)
                continue
            if -(-(run.tokens + 1) // BLOCK_SIZE) > run.blocks:
                if self.blocks_free < 1:
                    self.short += 1
                    continue
                run.blocks += 1
            run.state = State.DECODE
            run.tokens += 1
            run.advanced += 1
            run.last_step = self.steps
            self.progressed = True
            record.held = max(record.held, run.tokens - record.prompt)
            if record.held >= record.max_tokens:
                gateway.finish(name)
                self.leave(name, Departure.FINISHED)

    def _copy(self, name: Seq, run: FakeRun) -> None:
        if self.cluster.now_ms < self.swaps_due[name]:
            return
        assert run.store is not None
        assert run.ticket is not None
        if not self.breaks_swaps and self.cluster.stores[run.store].commit(run.ticket, run):
            self.leave(name, Departure.SWAPPED)
        else:
            run.state, run.ticket = State.DECODE, None
            run.swap_failures += 1

    def report(self) -> WorkerReport:
        self.number += 1
        self.said[self.number] = list(self.departed)
        return WorkerReport(
            worker=self.id,
            incarnation=self.incarnation,
            node=self.node,
            number=self.number,
            complete=True,
            epoch_seen=self.epoch_seen,
            orders_seen=len(self.seen),
            block_bytes=BLOCK_BYTES,
            block_size=BLOCK_SIZE,
            blocks_total=self.blocks_total,
            blocks_free=self.blocks_free,
            blocks_short=self.short,
            stalled=not self.progressed,
            draining=self.draining,
            residents=tuple(
                ResidentLevel(name, r.run, r.state, r.ticket, r.swap_failures, r.gateway)
                for name, r in self.runs.items()
            ),
            departed=tuple(self.departed.values()),
            usage=tuple(
                Usage(name, r.blocks, r.tokens, r.last_step, r.advanced)
                for name, r in self.runs.items()
            ),
        )

    def answered(self, reply: ReportReply) -> None:
        self.draining = self.draining or reply.drain is not None
        if not reply.resync:
            for key in self.said.pop(reply.number, []):
                self.departed.pop(key, None)

    def restart(self) -> None:
        self.incarnation = Incarnation(self.incarnation + 1)
        self.runs.clear()
        self.departed.clear()
        self.said.clear()
        self.seen.clear()
        self.highest.clear()
        self.number = self.epoch_seen = 0
        self.progressed, self.short, self.alive = True, 0, True
        self.draining = False


@dataclass
class FakeRequest:
    """What a fake gateway keeps of one request."""

    prompt: int
    max_tokens: int
    arrival_ms: int
    claim: int = 1
    held: int = 0
    cancelled: bool = False
    attached: Run | None = None


@dataclass
class FakeGateway:
    """Lists its requests; drops those that finish."""

    id: GatewayId
    incarnation: Incarnation = field(default=Incarnation(1))
    requests: dict[Seq, FakeRequest] = field(default_factory=dict)
    finished: list[Seq] = field(default_factory=list)
    rejected: dict[Seq, tuple[int, int]] = field(default_factory=dict)
    disowned: list[Seq] = field(default_factory=list)
    number: int = 0
    alive: bool = True
    draining: bool = False

    def finish(self, name: Seq) -> None:
        del self.requests[name]
        self.finished.append(name)

    def report(self) -> GatewayReport:
        self.number += 1
        return GatewayReport(
            gateway=self.id,
            incarnation=self.incarnation,
            number=self.number,
            complete=True,
            epoch_seen=0,
            requests=tuple(
                RequestLevel(
                    name, r.claim, r.cancelled, r.prompt, r.max_tokens, r.held, r.arrival_ms,
                    0, None, False, r.attached,
                )
                for name, r in self.requests.items()
            ),
            gone=(),
            draining=self.draining,
            drained=self.draining and not self.requests,
        )  # fmt: skip

    def answered(self, reply: ReportReply) -> None:
        self.draining = self.draining or reply.drain is not None
        for disown in reply.disown:
            record = self.requests.get(disown.seq)
            if record is not None and record.claim < disown.claim:
                del self.requests[disown.seq]
                self.disowned.append(disown.seq)
        for reject in reply.reject:
            if self.requests.pop(reject.seq, None) is not None:
                self.rejected[reject.seq] = (reject.blocks_needed, reject.blocks_total)
        for name in [n for n, r in self.requests.items() if r.cancelled]:
            del self.requests[name]
