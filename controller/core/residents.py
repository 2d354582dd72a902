"""Workers' reports taken in: who is where, who has left and why, and which workers are lost.

Nothing is decided here. Whatever a report changes is marked for ``reconcile`` to look at.
"""

from __future__ import annotations

from deepinfer.controller.core import placement, shedding
from deepinfer.controller.core.peers import Verdict
from deepinfer.controller.core.pools import Worker
from deepinfer.controller.core.sequences import Sequence
from deepinfer.controller.core.world import World
from deepinfer.kvstore.core.ids import Ticket, WorkerRef
from deepinfer.kvstore.core.messages import (
    Departed,
    Departure,
    ResidentLevel,
    Usage,
    WorkerReport,
)
from deepinfer.kvstore.core.states import State


def worker_report(world: World, report: WorkerReport) -> Verdict:
    """Take in a worker's report; say what became of it."""
    worker = world.pools.get(report.worker)
    verdict = worker.link.judge(report, world.now_ms, world.config.settle_ms)
    if verdict is Verdict.NEW_LIFE:
        lose_worker(world, worker)
        worker = world.pools.get(report.worker)  # which forgets who is no member yet
    elif verdict is not Verdict.APPLY:
        return verdict
    worker.link.take(report.incarnation, report.number, world.now_ms)
    usage_before = worker.usage
    worker.learn(report)
    shedding.learn(world, worker, report)
    for departed in report.departed:
        _depart(world, worker, departed, usage_before)
    if report.complete:
        listed = {level.seq for level in report.residents}
        for seq in [seq for seq in worker.residents if seq not in listed]:
            _vanish(world, worker, world.sequences[seq])
    for level in report.residents:
        _arrive(world, worker, level)
    world.pools.touch(worker)
    shedding.review(world, worker)
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
        ticket = departed.ticket
        if departed.why is not Departure.SWAPPED or ticket is None:
            return
        if ticket.order.epoch == world.epoch:
            return  # an order of ours: it was known then, and is over
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
            shedding.crossed(worker, departed.blocks)
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
    world.shedding.pop(worker.id, None)
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
