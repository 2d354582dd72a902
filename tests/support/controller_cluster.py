"""A naive cluster around a ControllerCore: workers, stores and gateways that just obey.

It counts blocks exactly and complains when an order asks for what cannot be. Messages go through
``Cluster.carry``, which a test may make lossy. Nothing here has a protocol of its own beyond what
a report has to say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.core import ControllerCore
from deepinfer.controller.core.events import (
    CallKind,
    CallStore,
    Drain,
    Effect,
    Event,
    GatewayGone,
    Members,
    Reply,
    SendOrder,
    StepDown,
    StoreAnswered,
    StoreGone,
    Tick,
    WorkerGone,
)
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

_O = TypeVar("_O", bound=Order)

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
        elif blocks > self.blocks_free:
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
            draining=False,
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
        )  # fmt: skip

    def answered(self, reply: ReportReply) -> None:
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


class Cluster:
    """The core and its fake peers, in 50 ms rounds."""

    def __init__(self, config: ControllerConfig | None = None, epoch: int = 1) -> None:
        self.config = config or ControllerConfig()
        self.core = ControllerCore(epoch, self.config)
        self.now_ms = 1000
        self.workers: dict[WorkerId, FakeWorker] = {}
        self.stores: dict[StoreId, FakeStore] = {}
        self.gateways: dict[GatewayId, FakeGateway] = {}
        self.effects: list[Effect] = []
        """Everything the core has asked for."""
        self.carry: Callable[[object], bool] = lambda message: True
        """Whether a message arrives."""
        self.recomputed = 0

    def worker(self, name: str, blocks_total: int, node: str = "n") -> FakeWorker:
        made = self.workers[WorkerId(name)] = FakeWorker(self, name, blocks_total, node)
        return made

    def store(self, name: str = "store", budget_bytes: int = 10**9, node: str = "n") -> FakeStore:
        made = self.stores[StoreId(name)] = FakeStore(self, name, budget_bytes, node)
        return made

    def gateway(self, name: str = "gw") -> FakeGateway:
        made = self.gateways[GatewayId(name)] = FakeGateway(GatewayId(name))
        return made

    def start(self) -> None:
        """Tell the core who should be there, and let everyone report."""
        self.tell(
            Members(
                workers={w.id: None for w in self.workers.values()},
                stores={s.id: None for s in self.stores.values()},
                gateways={g.id: None for g in self.gateways.values()},
            )
        )
        self.round()

    def submit(
        self, name: str, prompt: int, max_tokens: int, *, gateway: str = "gw", claim: int = 1
    ) -> Seq:
        request = FakeRequest(prompt, max_tokens, self.now_ms, claim)
        self.gateways[GatewayId(gateway)].requests[seq(name)] = request
        return seq(name)

    def tell(self, event: Event) -> None:
        """Give the core an event and do what it asks for, as far as messages arrive."""
        for effect in self.core.handle(event, self.now_ms):
            self.effects.append(effect)
            if not self.carry(effect):
                continue
            match effect:
                case SendOrder(ref, order):
                    worker = self.workers.get(ref.worker)
                    if worker is not None and worker.alive and worker.ref == ref:
                        worker.order(order)
                case CallStore(store_id, call):
                    self._call(store_id, call)
                case Reply(peer, reply):
                    self._answer(peer.id, reply)
                case StepDown():
                    raise AssertionError("nobody else is there")
        self.core.check()

    def _call(self, store_id: StoreId, call: Reserve | Release) -> None:
        store = self.stores[store_id]
        kind = CallKind.RESERVE if isinstance(call, Reserve) else CallKind.RELEASE
        if store.answers:
            reply = store.call(call)
            answer = StoreAnswered(store_id, reply, kind)
            if self.carry(answer):
                self.tell(answer)

    def _answer(self, peer: str, reply: ReportReply) -> None:
        worker, gateway = self.workers.get(WorkerId(peer)), self.gateways.get(GatewayId(peer))
        if worker is not None:
            worker.answered(reply)
        elif gateway is not None:
            gateway.answered(reply)

    def report(self) -> None:
        for gateway in list(self.gateways.values()):
            if gateway.alive:
                self._send(gateway.report())
        for worker in self.workers.values():
            if worker.alive:
                self._send(worker.report())
        for store in self.stores.values():
            self._send(store.report())

    def _send(self, report: WorkerReport | StoreReport | GatewayReport) -> None:
        if self.carry(report):
            self.tell(report)

    def round(self, *, steps: int = 1) -> None:
        """50 ms: workers step, everyone reports, the core hears a tick."""
        self.now_ms += 50
        for _ in range(steps):
            for worker in self.workers.values():
                if worker.alive:
                    worker.step()
        self.report()
        self.tell(Tick())

    def run(self, until: Callable[[], bool], rounds: int = 2000) -> int:
        """Go round until something holds; return how many rounds it took."""
        for count in range(rounds):
            if until():
                return count
            self.round()
        raise AssertionError(f"did not come about in {rounds} rounds")

    def kill(self, worker: FakeWorker, *, announced: bool = True) -> None:
        worker.alive = False
        if announced:
            self.tell(WorkerGone(worker.ref))

    def restart_controller(self) -> None:
        self.core = ControllerCore(self.core.epoch + 1, self.config)
        self.start()

    def drain(self, worker: str) -> None:
        self.tell(Drain(WorkerId(worker)))

    def lose_gateway(self, name: str) -> None:
        gateway = self.gateways.pop(GatewayId(name))
        gateway.alive = False
        self.tell(GatewayGone(gateway.id, gateway.incarnation))

    def lose_store(self, store: FakeStore) -> None:
        old = store.incarnation
        store.restart()
        self.tell(StoreGone(store.id, old))

    def sent(self, *kinds: type[_O]) -> list[_O]:
        """Distinct orders of some kinds that were sent, in order."""
        orders = [e.order for e in self.effects if isinstance(e, SendOrder)]
        return list(dict.fromkeys(order for order in orders if isinstance(order, kinds)))

    def status(self) -> dict[str, Any]:
        """The core's snapshot."""
        return self.core.snapshot()

    def state(self, name: Seq) -> str | None:
        """A sequence's state as the core sees it; None if it knows none."""
        for found in self.status()["sequences"]:
            if found["request"] == name.request:
                return str(found["state"])
        return None

    def finished(self) -> list[Seq]:
        return [name for gateway in self.gateways.values() for name in gateway.finished]
