"""Everything the controller knows, and the few verbs with which its rules act on it."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.counters import Counters
from deepinfer.controller.core.events import CallStore, Effect, Members, SendOrder
from deepinfer.controller.core.line import Line
from deepinfer.controller.core.peers import Gateway, Store
from deepinfer.controller.core.pools import Pools, Worker, blocks_for
from deepinfer.controller.core.sequences import ENDED, Place, Rank, Sequence, walk
from deepinfer.kvstore.core.ids import (
    GatewayId,
    Incarnation,
    Run,
    Seq,
    StoreId,
    WorkerId,
    WorkerRef,
)
from deepinfer.kvstore.core.messages import Order, Release, Reserve
from deepinfer.kvstore.core.states import State

if TYPE_CHECKING:
    from deepinfer.controller.core.precision import Waiting
    from deepinfer.controller.core.prefetch import Hint


class World:
    """Tables, indices and outgoing effects. The rules live in the modules that take a World."""

    def __init__(self, epoch: int, config: ControllerConfig) -> None:
        self.epoch = epoch
        self.config = config
        self.reserve_full = config.reserve == "full"
        self.growth_reserve = 0 if self.reserve_full else config.growth_reserve_blocks
        self.now_ms = 0
        self.started_ms: int | None = None
        self.ready = False
        """Decisions are made: everyone has reported, or the grace is over."""
        self.all_reported = False
        """Every member has reported at least once since this controller started."""
        self.members: Members | None = None
        self.sequences: dict[Seq, Sequence] = {}
        self.pools = Pools(self.growth_reserve, self.reserve_full)
        self.stores: dict[StoreId, Store] = {}
        self.store_of_node: dict[str, StoreId] = {}
        self.gateways: dict[GatewayId, Gateway] = {}
        self.line = Line()
        self.line_generation = 0
        self.any_planes = False
        """Some worker has lower planes that may be away."""
        self.shedding: dict[WorkerId, None] = {}
        """Workers that were told to shed and have not yet."""
        self.counters = Counters()
        self.states: dict[State, int] = dict.fromkeys(State, 0)
        """Sequences in each state."""
        self.reserving = 0
        """Swap-outs that wait for their store's word."""
        self.hints: dict[WorkerId, Hint] = {}
        """What each worker was told to fetch ahead."""
        self.waiting: Waiting | None = None
        """What the workers are told of the line."""
        self.look_ahead_ms = 0
        """When that is looked over again."""
        self.effects: list[Effect] = []
        self.dirty: dict[Seq, None] = {}
        """Sequences to be looked at before this event is done."""
        self.dirty_workers: dict[WorkerId, None] = {}
        """Workers whose shortage or earmark is to be looked at."""
        self.orders: dict[Run, Seq] = {}
        """Orders that the levels have not confirmed yet."""
        self._timers: list[tuple[int, Seq]] = []
        self._watches: list[tuple[int, WorkerId]] = []
        self._counter = 0

    # ---- numbers, time ---------------------------------------------------------------------

    def mint(self) -> Run:
        """Return the next number; runs and orders come from one counter."""
        self._counter += 1
        return Run(self.epoch, self._counter)

    def wake(self, sequence: Sequence, at_ms: int) -> None:
        """Look at the sequence again then (or before)."""
        if sequence.wake_ms is None or at_ms < sequence.wake_ms:
            sequence.wake_ms = at_ms
            heappush(self._timers, (at_ms, sequence.seq))

    def ring(self) -> None:
        """Mark the sequences whose time has come."""
        while self._timers and self._timers[0][0] <= self.now_ms:
            due_ms, seq = heappop(self._timers)
            sequence = self.sequences.get(seq)
            if sequence is not None and sequence.wake_ms == due_ms:
                sequence.wake_ms = None
                self.dirty[seq] = None

    def watch(self, worker: Worker, at_ms: int) -> None:
        """See then whether the worker has been heard from since."""
        if worker.watch_ms is None or at_ms < worker.watch_ms:
            worker.watch_ms = at_ms
            heappush(self._watches, (at_ms, worker.id))

    def watched(self) -> list[Worker]:
        """Workers whose watch has come."""
        found = []
        while self._watches and self._watches[0][0] <= self.now_ms:
            due_ms, worker_id = heappop(self._watches)
            worker = self.pools.workers.get(worker_id)
            if worker is not None and worker.watch_ms == due_ms:
                worker.watch_ms = None
                found.append(worker)
        return found

    # ---- sequences -------------------------------------------------------------------------

    def sequence(self, seq: Seq) -> Sequence:
        """The record of a sequence, made if it is new."""
        found = self.sequences.get(seq)
        if found is None:
            found = self.sequences[seq] = Sequence(seq, self.now_ms)
            found.orphan_since_ms = self.now_ms
            self.states[found.state] += 1
        return found

    def forget(self, sequence: Sequence) -> None:
        self.set_home(sequence, None)
        self.states[sequence.state] -= 1
        del self.sequences[sequence.seq]

    def to(self, sequence: Sequence, state: State) -> None:
        """Move a sequence to a state, by legal steps."""
        if sequence.state is not state:
            new = walk(sequence.seq, sequence.state, state)
            self.states[sequence.state] -= 1
            self.states[new] += 1
            sequence.state = new

    def revive(self, sequence: Sequence) -> None:
        """A claim has come for a sequence that had ended: it begins anew."""
        assert sequence.state in ENDED
        self.states[sequence.state] -= 1
        self.states[State.WAITING] += 1
        sequence.state = State.WAITING
        sequence.recovering = True

    def set_home(self, sequence: Sequence, home: WorkerId | None) -> None:
        """Note where a sequence was swapped out or preempted; None when it is resident again."""
        if sequence.home == home:
            return
        if sequence.home is not None:
            old = self.pools.workers.get(sequence.home)
            if old is not None:
                old.cold.pop(sequence.seq, None)
                self.pools.touch(old)
        sequence.home = home
        if home is not None:
            new = self.pools.get(home)
            new.cold[sequence.seq] = None
            self.pools.touch(new)

    def enqueue(self, sequence: Sequence) -> None:
        """Put a sequence that runs nowhere in the line it belongs to."""
        if sequence.earmark is not None:
            return
        level = sequence.level
        assert level is not None
        payload = sequence.payload()
        if payload is not None:
            order = payload.level.ticket.order
            place = Place(Rank.SWAPPED, order.epoch, order.counter, sequence.seq)
        else:
            rank = Rank.RECOVERING if sequence.recovering else Rank.WAITING
            place = Place(rank, level.arrival_ms, 0, sequence.seq)
        capacities = self.pools.capacities
        index = self.pools.index_for(sequence.capacity_needed)
        capacity = capacities[index] if index < len(capacities) else None
        if sequence.queued != place or sequence.queue_capacity != capacity:
            self.line.remove(sequence)
            self.line.add(sequence, place, capacity)

    def leave_line(self, sequence: Sequence) -> None:
        """Take a sequence out of line, and give up room that is being made for it."""
        self.line.remove(sequence)
        if sequence.earmark is not None:
            worker = self.pools.workers.get(sequence.earmark)
            sequence.earmark = None
            if worker is not None:
                worker.earmarks.pop(sequence.seq, None)
                self.pools.touch(worker)

    def swapped(self) -> int:
        """Sequences that ``max_swapped_requests`` counts."""
        states = self.states
        return (
            self.reserving
            + states[State.SWAPPING_OUT]
            + states[State.SWAPPED]
            + states[State.SWAPPING_IN]
        )

    # ---- orders and calls ------------------------------------------------------------------

    def send(
        self, worker: WorkerRef, order: Order, *, again: bool = False, expect: bool = True
    ) -> None:
        """Order a worker; ``expect``: until the levels confirm it, failed calls are looked at."""
        if again:
            self.counters.orders_resent_total += 1
        else:
            self.counters.orders_sent_total += 1
        if expect:
            self.orders[order.order] = order.seq
        self.effects.append(SendOrder(worker, order))

    def call(self, store: StoreId, call: Reserve | Release) -> None:
        self.effects.append(CallStore(store, call))

    def due(self, sequence: Sequence, sent_ms: int) -> bool:
        """Whether something sent then has to be sent again; if not, look again in time."""
        again_ms = sent_ms + self.config.order_timeout_ms
        if self.now_ms >= again_ms:
            return True
        self.wake(sequence, again_ms)
        return False

    # ---- choices ---------------------------------------------------------------------------

    def need_blocks(self, sequence: Sequence, worker: Worker) -> int:
        """Blocks of this worker that placing the sequence takes."""
        return blocks_for(sequence.need_tokens(self.reserve_full), worker.block_size)

    def nearest_store(self, worker: Worker) -> Store | None:
        """The store on the worker's node, or else the emptiest."""
        named = self.store_of_node.get(worker.node)
        if named is not None and self.stores[named].link.reported:
            return self.stores[named]
        alive = [store for store in self.stores.values() if store.link.reported]
        return min(alive, key=lambda s: (-s.room_bytes, s.id), default=None)

    def store_for(self, worker: Worker, bytes_max: int) -> Store | None:
        """The store to ask for room for a payload of the worker; None while there is none to ask.

        The nearest, or else the one with the most room of those that are known to have enough.
        Where nobody has, the nearest is asked all the same: what is known of it may be old.
        """
        near = self.nearest_store(worker)
        if near is None or near.may_take(bytes_max, self.now_ms):
            return near
        others = [store for store in self.stores.values() if store.may_take(bytes_max, self.now_ms)]
        if others:
            return min(others, key=lambda s: (-s.room_bytes, s.id))
        return None if near.pauses(self.now_ms) else near

    def pools_known(self) -> bool:
        """Whether every member that is a worker has said how large its pool is."""
        known = self.pools.workers
        return self.members is None or all(
            worker_id in known and known[worker_id].capacity_tokens > 0
            for worker_id in self.members.workers
        )

    def refresh_ready(self) -> None:
        """Find out whether everyone has reported, or the wait is over."""
        if self.all_reported:
            return
        assert self.started_ms is not None
        members = self.members
        if members is not None and (members.workers or members.stores or members.gateways):
            self.all_reported = (
                all(_heard(self.pools.workers.get(w), life) for w, life in members.workers.items())
                and all(_heard(self.stores.get(s), life) for s, life in members.stores.items())
                and all(_heard(self.gateways.get(g), life) for g, life in members.gateways.items())
            )
        ready = self.all_reported or self.now_ms >= (self.started_ms + self.config.startup_grace_ms)
        if (ready and not self.ready) or self.all_reported:
            self.ready = True
            self.dirty.update(dict.fromkeys(self.sequences))
            self.dirty_workers.update(dict.fromkeys(self.pools.workers))


def _heard(record: Worker | Store | Gateway | None, life: Incarnation | None) -> bool:
    if record is None or not record.link.reported:
        return False
    return life is None or record.link.incarnation >= life
