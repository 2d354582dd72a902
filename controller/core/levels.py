"""Reports taken in: what each says becomes facts of sequences, workers, stores and gateways.

Nothing is decided here. Whatever a report changes is marked for ``reconcile`` to look at.
"""

from __future__ import annotations

from deepinfer.controller.core import placement
from deepinfer.controller.core.events import Members
from deepinfer.controller.core.peers import Gateway, Link, Store, Verdict
from deepinfer.controller.core.pools import Worker
from deepinfer.controller.core.sequences import Sequence, StoredTicket
from deepinfer.controller.core.world import World
from deepinfer.kvstore.core.ids import GatewayId, Incarnation, Run, Seq, StoreId, Ticket, WorkerRef
from deepinfer.kvstore.core.messages import (
    Departed,
    Departure,
    GatewayReport,
    ResidentLevel,
    StoreReport,
    Usage,
    WorkerReport,
)
from deepinfer.kvstore.core.states import State

Report = WorkerReport | StoreReport | GatewayReport


def _judge(world: World, link: Link, report: Report) -> Verdict:
    verdict = link.judge(
        report.incarnation,
        report.number,
        report.complete,
        world.now_ms,
        world.config.settle_ms,
    )
    if verdict in (Verdict.STALE, Verdict.RESYNC) and report.incarnation == link.incarnation:
        link.heard_ms = world.now_ms
    return verdict


# ---- workers -------------------------------------------------------------------------------


def worker_report(world: World, report: WorkerReport) -> Verdict:
    """Take in a worker's report; say what became of it."""
    worker = world.pools.get(report.worker)
    verdict = _judge(world, worker.link, report)
    if verdict is Verdict.NEW_LIFE:
        lose_worker(world, worker)
    elif verdict is not Verdict.APPLY:
        return verdict
    worker.link.take(report.incarnation, report.number, world.now_ms)
    usage_before = worker.usage
    worker.learn(report)
    for departed in report.departed:
        _depart(world, worker, departed, usage_before)
    if report.complete:
        listed = {level.seq for level in report.residents}
        for seq in [seq for seq in worker.residents if seq not in listed]:
            _vanish(world, worker, world.sequences[seq])
    for level in report.residents:
        _arrive(world, worker, level)
    world.pools.touch(worker)
    if worker.watch_ms is None:
        world.watch(worker, world.now_ms + world.config.suspect_ms)
    if worker.blocks_short or worker.earmarks or worker.draining:
        world.dirty_workers[worker.id] = None
    return verdict


def _arrive(world: World, worker: Worker, level: ResidentLevel) -> None:
    sequence = world.sequence(level.seq)
    sequence.residents[worker.id] = worker.residents[level.seq] = level
    if sequence.run is None or level.run > sequence.run:
        sequence.run = level.run
    place = sequence.place
    if (
        place is not None
        and place.order is not None
        and not place.confirmed
        and place.run == level.run
        and place.worker == worker.ref
    ):
        place.confirmed = True
        worker.pending.pop(level.seq, None)
        world.orders.pop(place.order.order, None)
    world.dirty[level.seq] = None


def _remove(world: World, worker: Worker, sequence: Sequence) -> None:
    """The worker holds nothing of the sequence any more."""
    del sequence.residents[worker.id]
    del worker.residents[sequence.seq]
    if sequence.seq not in worker.pending:
        worker.full_blocks.pop(sequence.seq, None)
    resend = sequence.cancels.pop(worker.id, None)
    if resend is not None:
        world.orders.pop(resend.order.order, None)
    world.dirty[sequence.seq] = None
    store = world.nearest_store(worker)
    if store is not None:
        store.blocked_until_ms = 0  # with one resident fewer a refused swap-out may be another's


def _depart(
    world: World, worker: Worker, departed: Departed, usage_before: tuple[Usage, ...]
) -> None:
    """A run has left. Said again and again, so only the current run's word changes anything."""
    sequence = world.sequences.get(departed.seq)
    if sequence is None:
        if departed.why is not Departure.SWAPPED:
            return
        sequence = world.sequence(departed.seq)
    level = sequence.residents.get(worker.id)
    if level is not None and level.run <= departed.run:
        _remove(world, worker, sequence)
    place = sequence.place
    if place is None:
        newest = sequence.run is None or departed.run > sequence.run
        if departed.why is Departure.SWAPPED and newest and departed.ticket is not None:
            sequence.run = departed.run
            _expect_payload(world, sequence, departed.ticket, world.config.dead_ms)
            world.set_home(sequence, worker.id)
        world.dirty[sequence.seq] = None
        return
    if place.worker != worker.ref or place.run != departed.run:
        if place.worker == worker.ref and worker.pending.get(sequence.seq) == 0:
            # What the takeover was to go on from is gone: it will need room of its own.
            worker.pending[sequence.seq] = world.need_blocks(sequence, worker)
        return
    withdrawn = place.withdrawn
    job = sequence.swap
    placement.unplace(world, sequence)
    match departed.why:
        case Departure.FINISHED | Departure.DROPPED:
            if not withdrawn:  # its gateway is about to say so too
                sequence.not_before_ms = world.now_ms + world.config.settle_ms
        case Departure.SWAPPED:
            world.counters.swaps_seen_total += 1
            sequence.swaps += 1
            world.to(sequence, State.SWAPPED)
            world.set_home(sequence, worker.id)
            if departed.ticket is not None:
                _expect_payload(world, sequence, departed.ticket, world.config.dead_ms)
                if job is not None and job.ticket == departed.ticket:
                    sequence.expected_store = job.store
        case Departure.REFUSED:
            world.counters.requests_refused_late_total += 1
            worker.held = True
            if departed.blocks > 0:
                tokens = (departed.blocks - 1) * worker.block_size + 1
                sequence.tokens_min = max(sequence.tokens_min, min(tokens, sequence.tokens_max))
        case Departure.PREEMPTED:
            world.counters.requests_preempted_total += 1
            _note_tokens(sequence, usage_before)
            world.set_home(sequence, worker.id)
        case Departure.TOO_LARGE:
            sequence.capacity_min_tokens = max(
                sequence.capacity_min_tokens, worker.capacity_tokens + 1
            )
        case Departure.UNREACHABLE:
            sequence.not_before_ms = world.now_ms + world.config.retry_ms


def _note_tokens(sequence: Sequence, usage: tuple[Usage, ...]) -> None:
    for entry in usage:
        if entry.seq == sequence.seq:
            sequence.tokens_min = max(sequence.tokens_min, entry.tokens)


def _expect_payload(world: World, sequence: Sequence, ticket: Ticket, wait_ms: int) -> None:
    sequence.expected = ticket
    sequence.expected_store = None
    sequence.expected_until_ms = world.now_ms + wait_ms


def _vanish(world: World, worker: Worker, sequence: Sequence) -> None:
    """A run is not there any more and nobody has said why."""
    level = sequence.residents[worker.id]
    _remove(world, worker, sequence)
    place = sequence.place
    if place is None or place.worker != worker.ref or place.run != level.run:
        return
    ticket = level.ticket if level.state is State.SWAPPING_OUT else None
    if sequence.swap is not None and sequence.swap.order is not None:
        ticket = sequence.swap.ticket
    placement.unplace(world, sequence)
    if ticket is not None:  # it may have been committed; its store will say
        _expect_payload(world, sequence, ticket, world.config.settle_ms)
    sequence.not_before_ms = world.now_ms + world.config.settle_ms


def lose_worker(world: World, worker: Worker) -> None:
    """The life that was reported is over: what ran there is to run elsewhere."""
    for usage in worker.usage:
        sequence = world.sequences.get(usage.seq)
        if sequence is not None:
            sequence.tokens_min = max(sequence.tokens_min, usage.tokens)
    for seq in list(worker.residents):
        sequence = world.sequences[seq]
        _vanish(world, worker, sequence)
        if sequence.place is None:
            sequence.not_before_ms = world.now_ms
    for seq in [*worker.pending, *worker.earmarks]:
        sequence = world.sequences[seq]
        if sequence.place is not None and sequence.place.worker == worker.ref:
            placement.unplace(world, sequence)
        world.leave_line(sequence)
        world.dirty[seq] = None
    worker.lose()
    world.pools.touch(worker)
    members = world.members
    if members is not None and worker.id not in members.workers:
        world.pools.forget(worker.id)


def worker_gone(world: World, ref: WorkerRef) -> None:
    worker = world.pools.workers.get(ref.worker)
    if worker is None or ref.incarnation < worker.link.incarnation:
        return
    if worker.alive:
        lose_worker(world, worker)
    worker.link.incarnation = ref.incarnation
    worker.link.lose(world.now_ms)


def watch_worker(world: World, worker: Worker) -> None:
    """See how long a worker has been silent; its watch has come."""
    if not worker.alive:
        return
    heard_ms = worker.link.heard_ms
    assert heard_ms is not None
    config = world.config
    now_ms = world.now_ms
    if worker.deaf_until_ms is not None and now_ms >= worker.deaf_until_ms:
        worker.deaf_until_ms = None
    if now_ms >= heard_ms + config.dead_ms:
        lose_worker(world, worker)
        worker.link.lose()
        return
    worker.silent = now_ms >= heard_ms + config.suspect_ms
    world.pools.touch(worker)
    world.watch(worker, heard_ms + (config.dead_ms if worker.silent else config.suspect_ms))
    if worker.earmarks:
        world.dirty_workers[worker.id] = None


# ---- stores --------------------------------------------------------------------------------


def store_report(world: World, report: StoreReport) -> Verdict:
    """Take in a store's report; say what became of it."""
    store = world.stores.get(report.store)
    if store is None:
        store = world.stores[report.store] = Store(report.store)
    verdict = _judge(world, store.link, report)
    if verdict is Verdict.NEW_LIFE:
        lose_store(world, store)
    elif verdict is not Verdict.APPLY:
        return verdict
    store.link.take(report.incarnation, report.number, world.now_ms)
    store.node = report.node
    world.store_of_node[report.node] = store.id
    store.learn(report.used_bytes, report.budget_bytes)
    if report.complete:
        listed = {level.ticket for level in report.tickets}
        for ticket in [ticket for ticket in store.tickets if ticket not in listed]:
            _drop_ticket(world, store, ticket)
    for ticket in report.gone:
        _drop_ticket(world, store, ticket)
    for level in report.tickets:
        sequence = world.sequence(level.ticket.seq)
        held = sequence.tickets.get(level.ticket)
        if held is None or held.store != store.id:
            sequence.tickets[level.ticket] = StoredTicket(store.id, level)
        else:
            held.level = level
        store.tickets[level.ticket] = None
        world.dirty[sequence.seq] = None
    return verdict


def _drop_ticket(world: World, store: Store, ticket: Ticket) -> None:
    if store.tickets.pop(ticket, False) is False:
        return
    sequence = world.sequences[ticket.seq]
    held = sequence.tickets.get(ticket)
    if held is not None and held.store == store.id:
        del sequence.tickets[ticket]
    world.dirty[ticket.seq] = None


def lose_store(world: World, store: Store) -> None:
    """Its life is over, and so is every payload in it."""
    for sequence in world.sequences.values():
        expected = sequence.expected
        if expected is not None and (
            sequence.expected_store == store.id or expected in store.tickets
        ):
            sequence.expected = None
            world.dirty[sequence.seq] = None
    for ticket in list(store.tickets):
        _drop_ticket(world, store, ticket)
    store.link.lose()
    store.used_bytes = 0
    store.blocked_until_ms = store.blocked_used_bytes = 0


def store_gone(world: World, store_id: StoreId, incarnation: Incarnation) -> None:
    store = world.stores.get(store_id)
    if store is None or incarnation < store.link.incarnation:
        return
    lose_store(world, store)
    store.link.incarnation = incarnation
    store.link.lose(world.now_ms)


# ---- gateways ------------------------------------------------------------------------------


def gateway_report(world: World, report: GatewayReport) -> Verdict:
    """Take in a gateway's report; say what became of it."""
    gateway = world.gateways.get(report.gateway)
    if gateway is None:
        gateway = world.gateways[report.gateway] = Gateway(report.gateway)
    verdict = _judge(world, gateway.link, report)
    if verdict is Verdict.NEW_LIFE:
        lose_gateway(world, gateway)
    elif verdict is not Verdict.APPLY:
        return verdict
    gateway.link.take(report.incarnation, report.number, world.now_ms)
    if report.complete:
        listed = {level.seq for level in report.requests}
        for seq in [seq for seq in gateway.seqs if seq not in listed]:
            _close(world, gateway, seq)
    for seq in report.gone:
        _close(world, gateway, seq)
    for level in report.requests:
        sequence = world.sequence(level.seq)
        sequence.claims[gateway.id] = level
        sequence.closed_ms = sequence.orphan_since_ms = None
        sequence.bereaved = False
        gateway.seqs[level.seq] = None
        world.dirty[level.seq] = None
    return verdict


def _close(world: World, gateway: Gateway, seq: Seq) -> None:
    """The gateway is alive and does not list the sequence any more."""
    if gateway.seqs.pop(seq, False) is False:
        return
    gateway.disown.pop(seq, None)
    gateway.reject.pop(seq, None)
    sequence = world.sequences[seq]
    sequence.claims.pop(gateway.id, None)
    if not sequence.claims:
        sequence.closed_ms = world.now_ms
    world.dirty[seq] = None


def lose_gateway(world: World, gateway: Gateway) -> None:
    """Its life is over; what it listed waits for another gateway's claim."""
    for seq in list(gateway.seqs):
        sequence = world.sequences[seq]
        sequence.claims.pop(gateway.id, None)
        if not sequence.claims:
            sequence.orphan_since_ms = world.now_ms
            sequence.bereaved = True
        world.dirty[seq] = None
    gateway.seqs.clear()
    gateway.disown.clear()
    gateway.reject.clear()
    gateway.link.lose()


def gateway_gone(world: World, gateway_id: GatewayId, incarnation: Incarnation) -> None:
    gateway = world.gateways.get(gateway_id)
    if gateway is None or incarnation < gateway.link.incarnation:
        return
    lose_gateway(world, gateway)
    gateway.link.incarnation = incarnation
    gateway.link.lose(world.now_ms)


# ---- everyone ------------------------------------------------------------------------------


def members(world: World, now_known: Members) -> None:
    """Who should be there has changed: earlier lives are over, and who left does not count."""
    world.members = now_known
    for worker_id, life in now_known.workers.items():
        worker = world.pools.workers.get(worker_id)
        if worker is not None and life is not None and worker.link.incarnation < life:
            worker_gone(world, worker.ref)
    for store_id, life in now_known.stores.items():
        store = world.stores.get(store_id)
        if store is not None and life is not None and store.link.incarnation < life:
            store_gone(world, store_id, store.link.incarnation)
    for gateway_id, life in now_known.gateways.items():
        gateway = world.gateways.get(gateway_id)
        if gateway is not None and life is not None and gateway.link.incarnation < life:
            gateway_gone(world, gateway_id, gateway.link.incarnation)
    for worker_id in [w.id for w in world.pools.workers.values() if not w.alive]:
        if worker_id not in now_known.workers:
            world.pools.forget(worker_id)


def order_failed(world: World, number: Run) -> None:
    """Whether it ran is unknown: send it again before long, unless a report confirms it."""
    seq = world.orders.get(number)
    sequence = None if seq is None else world.sequences.get(seq)
    if sequence is None:
        return
    config = world.config
    sent_ms = world.now_ms + min(config.settle_ms - config.order_timeout_ms, 0)
    place, swap, preempt = sequence.place, sequence.swap, sequence.preempt
    if place is not None and place.order is not None and place.order.order == number:
        place.sent_ms = sent_ms
    elif swap is not None and swap.order is not None and swap.order.order == number:
        swap.sent_ms = sent_ms
    elif preempt is not None and preempt.order.order == number:
        preempt.sent_ms = sent_ms
    for resend in sequence.cancels.values():
        if resend.order.order == number:
            resend.sent_ms = sent_ms
    world.wake(sequence, sent_ms + config.order_timeout_ms)
