"""A cluster's traffic for the controller bench: who reports what, with the core in the loop.

The core that is measured has to be fed with events that fit its own orders. So a first core is run
against the cluster below, which obeys it; what it was told is kept, and a second core, which must
decide the same, is told it again with the clock running.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.core import ControllerCore
from deepinfer.controller.core.events import (
    CallKind,
    CallStore,
    Event,
    Members,
    SendOrder,
    StoreAnswered,
    Tick,
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

BLOCK_SIZE = 16
BLOCK_BYTES = 16 * 28_672
"""One block of 16 tokens of a 3B model's FP16 KV: 28 layers, 2 KV heads, head size 128."""
ROUND_MS = 100
TOKENS_A_ROUND = 3
WORKERS_A_NODE = 8
WORKERS_A_GATEWAY = 50
LIFE = Incarnation(1)


@dataclass(slots=True)
class _Request:
    """A request, and its run if it has one."""

    seq: Seq
    gateway: int
    prompt: int
    new: int
    arrival_ms: int
    tokens: int
    run: Run | None = None
    state: State = State.WAITING
    blocks: int = 0
    advanced: int = 0
    step: int = 0
    ticket: Ticket | None = None
    store: StoreId | None = None


@dataclass(slots=True)
class _Worker:
    ref: WorkerRef
    node: NodeId
    blocks_total: int
    number: int = 0
    steps: int = 0
    used: int = 0
    short: int = 0
    stalled: bool = False
    runs: dict[Seq, _Request] = field(default_factory=dict)
    changed: dict[Seq, None] = field(default_factory=dict)
    departed: list[Departed] = field(default_factory=list)


@dataclass(slots=True)
class _Store:
    id: StoreId
    node: NodeId
    budget_bytes: int
    number: int = 0
    used_bytes: int = 0
    tickets: dict[Ticket, TicketLevel] = field(default_factory=dict)
    changed: dict[Ticket, None] = field(default_factory=dict)
    gone: dict[Ticket, None] = field(default_factory=dict)


@dataclass(slots=True)
class _Gateway:
    id: GatewayId
    number: int = 0
    live: dict[Seq, _Request] = field(default_factory=dict)
    changed: dict[Seq, None] = field(default_factory=dict)
    gone: list[Seq] = field(default_factory=list)


class Traffic:
    """Workers that step and obey, stores that keep sizes, gateways whose requests never run out.

    Each request that ends is followed by a new one, so ``requests`` are live all the time.
    """

    def __init__(self, workers: int, requests: int, pool_blocks: int, seed: int) -> None:
        self.core = ControllerCore(1, ControllerConfig())
        self.random = Random(seed)
        self.now_ms = 1_000
        self.kept: list[tuple[Event, int]] = []
        """Every event with the clock's reading, in order."""
        self._made = 0
        self._requests: dict[Seq, _Request] = {}
        self._workers = [
            _Worker(
                WorkerRef(WorkerId(f"worker-{i:05}"), LIFE),
                NodeId(f"node-{i // WORKERS_A_NODE:05}"),
                pool_blocks,
            )
            for i in range(workers)
        ]
        nodes = -(-workers // WORKERS_A_NODE)
        self._stores = {
            StoreId(f"store-{i:05}"): _Store(
                StoreId(f"store-{i:05}"), NodeId(f"node-{i:05}"), 64 << 30
            )
            for i in range(nodes)
        }
        count = max(2, -(-workers // WORKERS_A_GATEWAY))
        self._gateways = [_Gateway(GatewayId(f"gateway-{i:04}")) for i in range(count)]
        self._by_id = {worker.ref.worker: worker for worker in self._workers}
        for _ in range(requests):
            self._submit()
        for request in self._requests.values():  # at the start they are of every age
            request.tokens += self.random.randrange(request.new)
        self._tell(
            Members(
                workers=dict.fromkeys(self._by_id, LIFE),
                stores=dict.fromkeys(self._stores, LIFE),
                gateways={gateway.id: LIFE for gateway in self._gateways},
            )
        )

    def run(self, rounds: int) -> None:
        """Go on for ``rounds`` times 100 ms."""
        for _ in range(rounds):
            self.now_ms += ROUND_MS
            for gateway in self._gateways:
                self._tell(self._gateway_report(gateway))
            for worker in self._workers:
                self._step(worker)
                self._tell(self._worker_report(worker))
            for store in self._stores.values():
                if store.changed or store.gone or store.number == 0:
                    self._tell(self._store_report(store))
            self._tell(Tick())

    # ---- the core's side -------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        self.kept.append((event, self.now_ms))
        for effect in self.core.handle(event, self.now_ms):
            if isinstance(effect, SendOrder):
                self._obey(self._by_id[effect.worker.worker], effect.order)
            elif isinstance(effect, CallStore):
                self._call(effect)

    def _call(self, effect: CallStore) -> None:
        store, call = self._stores[effect.store], effect.call
        if isinstance(call, Reserve):
            status = StoreStatus.OVER_BUDGET
            if store.used_bytes + call.bytes_max <= store.budget_bytes:
                status = StoreStatus.OK
                self._keep(
                    store, TicketLevel(call.ticket, TicketState.RESERVED, call.bytes_max, 0, 0)
                )
        else:
            status = StoreStatus.OK
            old = store.tickets.pop(call.ticket, None)
            if old is not None:
                store.used_bytes -= old.payload_bytes
                store.changed.pop(call.ticket, None)
                store.gone[call.ticket] = None
        reply = StoreReply(call.ticket, status, store.used_bytes, store.budget_bytes)
        kind = CallKind.RESERVE if isinstance(call, Reserve) else CallKind.RELEASE
        self._tell(StoreAnswered(store.id, reply, kind))

    def _keep(self, store: _Store, level: TicketLevel) -> None:
        old = store.tickets.get(level.ticket)
        store.used_bytes += level.payload_bytes - (old.payload_bytes if old else 0)
        store.tickets[level.ticket] = level
        store.changed[level.ticket] = None

    def _obey(self, worker: _Worker, order: Order) -> None:
        match order:
            case Admit() | SwapIn():
                request = self._requests.get(order.seq)
                if request is None:
                    return
                blocks = -(-request.tokens // BLOCK_SIZE)
                if worker.used + blocks > worker.blocks_total:
                    worker.departed.append(
                        Departed(order.seq, order.run, Departure.REFUSED, None, blocks, 0)
                    )
                    return
                request.run, request.blocks, request.advanced = order.run, blocks, 0
                worker.used += blocks
                worker.runs[order.seq] = request
                worker.changed[order.seq] = None
                request.state = State.PREFILL
                if isinstance(order, SwapIn):
                    request.state, request.ticket = State.SWAPPING_IN, order.ticket
            case SwapOut():
                request = worker.runs.get(order.seq)
                if request is not None and request.run == order.run:
                    request.state, request.ticket = State.SWAPPING_OUT, order.ticket
                    request.store = order.store
                    worker.changed[order.seq] = None
            case Preempt() | Cancel():
                request = worker.runs.get(order.seq)
                if request is not None and request.run is not None and request.run <= order.run:
                    why = Departure.PREEMPTED if isinstance(order, Preempt) else Departure.DROPPED
                    self._leave(worker, request, why)

    # ---- workers ---------------------------------------------------------------------------

    def _leave(self, worker: _Worker, request: _Request, why: Departure) -> None:
        assert request.run is not None
        swapped = why is Departure.SWAPPED
        worker.departed.append(
            Departed(
                request.seq,
                request.run,
                why,
                request.ticket if swapped else None,
                request.blocks if swapped else 0,
                request.blocks * BLOCK_BYTES if swapped else 0,
            )
        )
        worker.used -= request.blocks
        del worker.runs[request.seq]
        worker.changed.pop(request.seq, None)
        request.run = request.ticket = None
        request.state, request.blocks = State.WAITING, 0

    def _step(self, worker: _Worker) -> None:
        worker.steps += 1
        worker.short = 0
        worker.stalled = bool(worker.runs)
        for request in list(worker.runs.values()):
            if request.state is State.SWAPPING_OUT:
                assert request.ticket is not None
                assert request.store is not None
                level = TicketLevel(
                    request.ticket,
                    TicketState.COMMITTED,
                    request.blocks * BLOCK_BYTES,
                    request.tokens,
                    request.blocks,
                )
                self._keep(self._stores[request.store], level)
                self._leave(worker, request, Departure.SWAPPED)
                worker.stalled = False
                continue
            tokens = min(request.tokens + TOKENS_A_ROUND, request.prompt + request.new)
            more = -(-tokens // BLOCK_SIZE) - request.blocks
            if more > worker.blocks_total - worker.used:
                worker.short += more
                continue
            worker.stalled = False
            worker.used += more
            request.blocks += more
            request.advanced += tokens - request.tokens
            request.tokens = tokens
            request.step = worker.steps
            if request.state is not State.DECODE:
                request.state, request.ticket = State.DECODE, None
                worker.changed[request.seq] = None
            if tokens == request.prompt + request.new:
                self._leave(worker, request, Departure.FINISHED)
                self._finish(request)

    def _worker_report(self, worker: _Worker) -> WorkerReport:
        worker.number += 1
        report = WorkerReport(
            worker=worker.ref.worker,
            incarnation=worker.ref.incarnation,
            node=worker.node,
            number=worker.number,
            complete=worker.number == 1,
            epoch_seen=1,
            orders_seen=0,
            block_bytes=BLOCK_BYTES,
            block_size=BLOCK_SIZE,
            blocks_total=worker.blocks_total,
            blocks_free=worker.blocks_total - worker.used,
            blocks_short=worker.short,
            stalled=worker.stalled,
            draining=False,
            residents=tuple(_level(worker.runs[s], self._gateways) for s in worker.changed),
            departed=tuple(worker.departed),
            usage=tuple(
                Usage(seq, run.blocks, run.tokens, run.step, run.advanced)
                for seq, run in worker.runs.items()
            ),
        )
        worker.changed.clear()
        worker.departed.clear()
        return report

    # ---- stores and gateways ---------------------------------------------------------------

    def _store_report(self, store: _Store) -> StoreReport:
        store.number += 1
        report = StoreReport(
            store=store.id,
            incarnation=LIFE,
            node=store.node,
            number=store.number,
            complete=store.number == 1,
            epoch_seen=1,
            budget_bytes=store.budget_bytes,
            used_bytes=store.used_bytes,
            tickets=tuple(store.tickets[ticket] for ticket in store.changed),
            gone=tuple(store.gone),
        )
        store.changed.clear()
        store.gone.clear()
        return report

    def _submit(self) -> None:
        self._made += 1
        index = self.random.randrange(len(self._gateways))
        prompt = self.random.randrange(32, 480)
        request = _Request(
            Seq(RequestId(f"r{self._made:08}"), 0),
            index,
            prompt,
            self.random.randrange(64, 768),
            self.now_ms + self.random.randrange(ROUND_MS),
            prompt,
        )
        self._requests[request.seq] = request
        gateway = self._gateways[index]
        gateway.live[request.seq] = request
        gateway.changed[request.seq] = None

    def _finish(self, request: _Request) -> None:
        del self._requests[request.seq]
        gateway = self._gateways[request.gateway]
        del gateway.live[request.seq]
        gateway.changed.pop(request.seq, None)
        gateway.gone.append(request.seq)
        self._submit()

    def _gateway_report(self, gateway: _Gateway) -> GatewayReport:
        gateway.number += 1
        report = GatewayReport(
            gateway=gateway.id,
            incarnation=LIFE,
            number=gateway.number,
            complete=gateway.number == 1,
            epoch_seen=1,
            requests=tuple(
                RequestLevel(
                    seq,
                    1,
                    False,
                    request.prompt,
                    request.new,
                    request.tokens - request.prompt,
                    request.arrival_ms,
                    0,
                    None,
                    False,
                    None,
                )
                for seq in gateway.changed
                for request in (gateway.live[seq],)
            ),
            gone=tuple(gateway.gone),
        )
        gateway.changed.clear()
        gateway.gone.clear()
        return report


def _level(request: _Request, gateways: list[_Gateway]) -> ResidentLevel:
    assert request.run is not None
    return ResidentLevel(
        request.seq, request.run, request.state, request.ticket, 0, gateways[request.gateway].id
    )
