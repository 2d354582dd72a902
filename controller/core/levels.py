"""Reports of stores and gateways taken in: what each says becomes facts of sequences.

Nothing is decided here. Whatever a report changes is marked for ``reconcile`` to look at.
``residents`` does the same for workers.
"""

from __future__ import annotations

from deepinfer.controller.core import residents
from deepinfer.controller.core.events import Members
from deepinfer.controller.core.peers import Gateway, Store, Verdict
from deepinfer.controller.core.sequences import StoredTicket
from deepinfer.controller.core.world import World
from deepinfer.kvstore.core.ids import GatewayId, Incarnation, Run, Seq, StoreId, Ticket
from deepinfer.kvstore.core.messages import GatewayReport, StoreReport

# ---- stores --------------------------------------------------------------------------------


def store_report(world: World, report: StoreReport) -> Verdict:
    """Take in a store's report; say what became of it."""
    store = world.stores.get(report.store)
    if store is None:
        store = world.stores[report.store] = Store(report.store)
    verdict = store.link.judge(report, world.now_ms, world.config.settle_ms)
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
        known = level.ticket.seq in world.sequences
        sequence = world.sequence(level.ticket.seq)
        if not known and level.ticket.order.epoch == world.epoch:
            sequence.closed_ms = world.now_ms  # an order of ours: it was known then, and is over
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
    verdict = gateway.link.judge(report, world.now_ms, world.config.settle_ms)
    if verdict is Verdict.NEW_LIFE:
        lose_gateway(world, gateway)
    elif verdict is not Verdict.APPLY:
        return verdict
    gateway.link.take(report.incarnation, report.number, world.now_ms)
    gateway.draining, gateway.drained = report.draining, report.drained
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
    gateway.ordered_drain = gateway.draining = gateway.drained = False
    gateway.drain_until_ms = None
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
            residents.worker_gone(world, worker.ref)
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
