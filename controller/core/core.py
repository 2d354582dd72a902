"""The controller's core: events in, effects out."""

from __future__ import annotations

from deepinfer.controller.core import (
    draining,
    levels,
    placement,
    precision,
    prefetch,
    reconcile,
    residents,
    snapshot,
    swaps,
)
from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.counters import Counters
from deepinfer.controller.core.draining import DrainLevel
from deepinfer.controller.core.events import (
    CallKind,
    Drain,
    Effect,
    Event,
    GatewayGone,
    Members,
    OrderFailed,
    Peer,
    PeerKind,
    Reply,
    Report,
    StepDown,
    StoreAnswered,
    StoreGone,
    Tick,
    WorkerGone,
)
from deepinfer.controller.core.peers import Verdict
from deepinfer.controller.core.pools import Worker
from deepinfer.controller.core.sequences import COLD
from deepinfer.controller.core.world import World
from deepinfer.kvstore.core.messages import (
    Disown,
    DrainRule,
    GatewayReport,
    Reject,
    ReportReply,
    StoreReport,
    WorkerReport,
)
from deepinfer.kvstore.core.precision import PrecisionRule


class ControllerCore:
    """One life of the controller. A restarted one is a new object with a higher ``epoch``.

    All it knows is what others report, so a new one knows as much as soon as everyone has
    reported. What it wants is held against those levels after every event and sent again until
    they agree; nothing depends on a single message.
    """

    def __init__(self, epoch: int, config: ControllerConfig) -> None:
        self.epoch = epoch
        self.config = config
        self._world = World(epoch, config)
        self._stepped_down = False

    @property
    def counters(self) -> Counters:
        """Totals since this life began."""
        return self._world.counters

    @property
    def ready(self) -> bool:
        """Whether decisions are made: everyone has reported, or the grace for that is over."""
        return self._world.ready

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Take one event; return what the shell has to do, in order.

        ``now_ms`` is any clock that is the same for one life; a reading below an earlier one
        counts as that one. Never raises for anything another process can send.
        """
        if self._stepped_down:
            return []
        world = self._world
        world.now_ms = max(world.now_ms, now_ms)
        if world.started_ms is None:
            world.started_ms = world.now_ms
        reply: Reply | None = None
        if isinstance(event, Report):
            if event.epoch_seen > self.epoch:
                self._stepped_down = True
                return [StepDown(event.epoch_seen)]
            reply = self._report(event)
        elif isinstance(event, Tick):
            world.refresh_ready()
            world.ring()
            for worker in world.watched():
                residents.watch_worker(world, worker)
        else:
            self._other(event)
        self._settle()
        effects, world.effects = world.effects, []
        if reply is not None:
            effects.append(reply)
        return effects

    def _report(self, report: Report) -> Reply | None:
        world = self._world
        disown: tuple[Disown, ...] = ()
        reject: tuple[Reject, ...] = ()
        rule: PrecisionRule | None = None
        drain: DrainRule | None = None
        if isinstance(report, WorkerReport):
            peer = Peer(PeerKind.WORKER, report.worker, report.incarnation)
            verdict = residents.worker_report(world, report)
        elif isinstance(report, StoreReport):
            peer = Peer(PeerKind.STORE, report.store, report.incarnation)
            verdict = levels.store_report(world, report)
        else:
            peer = Peer(PeerKind.GATEWAY, report.gateway, report.incarnation)
            verdict = levels.gateway_report(world, report)
        if verdict is Verdict.OLD_LIFE:
            return None
        if not world.all_reported and report.complete:
            world.refresh_ready()
        if isinstance(report, GatewayReport):
            self._settle()
            gateway = world.gateways[report.gateway]
            disown, reject = tuple(gateway.disown.values()), tuple(gateway.reject.values())
            drain = draining.rule(world, gateway)
        elif isinstance(report, WorkerReport):
            worker = world.pools.get(report.worker)
            rule, drain = precision.rule(world, worker), draining.rule(world, worker)
        return Reply(
            peer,
            ReportReply(
                epoch=self.epoch,
                number=report.number,
                resync=verdict is Verdict.RESYNC,
                disown=disown,
                reject=reject,
                precision=rule,
                drain=drain,
            ),
        )

    def _other(
        self,
        event: Members | WorkerGone | StoreGone | GatewayGone | StoreAnswered | OrderFailed | Drain,
    ) -> None:
        world = self._world
        match event:
            case Members():
                levels.members(world, event)
                world.refresh_ready()
            case WorkerGone(ref):
                residents.worker_gone(world, ref)
            case StoreGone(store, incarnation):
                levels.store_gone(world, store, incarnation)
            case GatewayGone(gateway, incarnation):
                levels.gateway_gone(world, gateway, incarnation)
            case StoreAnswered(store_id, reply, kind):
                known = world.stores.get(store_id)
                if known is not None:
                    known.learn_answer(reply)
                if kind is CallKind.RESERVE:
                    swaps.answered(world, store_id, reply)
            case OrderFailed(_, number):
                levels.order_failed(world, number)
            case Drain():
                draining.order(world, event)

    def _settle(self) -> None:
        """Look at everything the event has touched until nothing is left to look at."""
        world = self._world
        while True:
            if world.dirty:
                seq = next(iter(world.dirty))
                del world.dirty[seq]
                sequence = world.sequences.get(seq)
                if sequence is not None:
                    reconcile.settle(world, sequence)
                continue
            if world.dirty_workers:
                worker_id = next(iter(world.dirty_workers))
                del world.dirty_workers[worker_id]
                worker = world.pools.workers.get(worker_id)
                if worker is not None and world.ready:
                    self._look_after(worker)
                continue
            placement.place_all(world)
            if not (world.dirty or world.dirty_workers):
                prefetch.look_ahead(world)
                return

    def _look_after(self, worker: Worker) -> None:
        world = self._world
        if worker.draining:
            draining.empty(world, worker)
        placement.look_after_earmark(world, worker)
        swaps.relieve(world, worker)

    def drain_level(self, name: str) -> DrainLevel | None:
        """How far a worker or gateway has been emptied; None if none of that name is known."""
        return draining.level(self._world, name)

    def snapshot(self) -> dict[str, object]:
        """Pools, requests, swaps and counters as plain values, for ``status``."""
        return snapshot.snapshot(self._world)

    def summary(self) -> dict[str, object]:
        """The snapshot without the single requests, for metrics."""
        return snapshot.summary(self._world)

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold. Costs a look at everything."""
        world = self._world
        world.pools.check()
        world.line.check()
        states = dict.fromkeys(world.states, 0)
        reserving = 0
        for seq, sequence in world.sequences.items():
            assert sequence.seq == seq
            sequence.check(world.reserve_full)
            states[sequence.state] += 1
            reserving += sequence.swap is not None and sequence.swap.order is None
            for worker_id, level in sequence.residents.items():
                assert world.pools.workers[worker_id].residents[seq] is level, seq
            for ticket, held in sequence.tickets.items():
                assert ticket in world.stores[held.store].tickets, ticket
            if sequence.hinted is not None:
                assert world.hints[sequence.hinted].seq == seq, seq
            if sequence.earmark is not None:
                assert seq in world.pools.workers[sequence.earmark].earmarks, seq
            if world.ready and sequence.live:
                resting = sequence.wake_ms is not None
                held_somewhere = sequence.place or sequence.queued or sequence.earmark
                assert resting or held_somewhere, f"{seq} is forgotten"
            place = sequence.place
            if place is not None and not place.confirmed:
                assert sequence.wake_ms is not None, f"{seq}: an order nobody looks after"
        assert states == world.states, "states are miscounted"
        assert reserving == world.reserving, "reservations are miscounted"
        for worker in world.pools.workers.values():
            for seq in [*worker.residents, *worker.pending, *worker.earmarks, *worker.cold]:
                assert seq in world.sequences, f"{worker.id}: {seq} is unknown"
            for seq in worker.pending:
                waiting = world.sequences[seq].place
                assert waiting is not None, seq
                assert waiting.worker == worker.ref, seq
                assert not waiting.confirmed, seq
        for store in world.stores.values():
            for ticket in store.tickets:
                assert ticket.seq in world.sequences, f"{store.id}: {ticket} is unknown"
        for worker_id, hint in world.hints.items():
            assert hint.worker.worker == worker_id, worker_id
            assert world.sequences[hint.seq].hinted == worker_id, f"{hint.seq} is hinted elsewhere"
        for number, seq in world.orders.items():
            assert seq in world.sequences, f"order {number} for {seq}, which is forgotten"
        assert sum(states[s] for s in states if s in COLD) + reserving == world.swapped()
