"""Swap-outs: Reserve, then order, then whatever the levels say came of it; and who is picked.

The steps of one swap-out::

    begin -> Reserve -> agreed -> SwapOut -> (copy seen) -> Departed SWAPPED
                |                                |
                refused: the victim goes on      swap_failures rose: the victim goes on
"""

from __future__ import annotations

from deepinfer.controller.core import shedding
from deepinfer.controller.core.pools import Worker, blocks_for
from deepinfer.controller.core.sequences import Resend, Sequence, SwapJob
from deepinfer.controller.core.victims import POLICIES, Candidate, choose
from deepinfer.controller.core.world import World
from deepinfer.kvstore.core.ids import StoreId, Ticket
from deepinfer.kvstore.core.messages import (
    Preempt,
    Reserve,
    ResidentLevel,
    StoreReply,
    StoreStatus,
    SwapOut,
    Usage,
)
from deepinfer.kvstore.core.states import State


def can_swap(world: World, worker: Worker) -> bool:
    """Whether a swap-out from the worker may be asked for now."""
    if not world.config.cpu_offload:
        return False
    return world.store_for(worker, 0) is not None


def movable(worker: Worker, sequence: Sequence) -> bool:
    """Whether the sequence's current run is on this worker, with nothing else in hand."""
    place = sequence.place
    if place is None or not place.confirmed or place.withdrawn or sequence.level is None:
        return False
    if sequence.swap is not None or sequence.preempt is not None or place.worker != worker.ref:
        return False
    level = sequence.residents.get(worker.id)
    if level is None or level.run != place.run:
        return False
    return level.state is State.DECODE or level.state is State.PREFILL


def candidates(world: World, worker: Worker) -> list[Candidate]:
    """Residents whose KV could leave the worker, from its last report."""
    found = []
    sequences = world.sequences
    residency = world.config.min_residency_tokens
    block_size = worker.block_size
    for seq, private_blocks, tokens, last_step, advanced in worker.usage:
        sequence = sequences.get(seq)
        if sequence is None or tokens <= 0 or not movable(worker, sequence):
            continue
        place, level = sequence.place, sequence.level
        assert place is not None
        assert level is not None
        gain = worker.full_blocks.get(seq, 0) if world.reserve_full else private_blocks
        if gain > 0:
            copy = -(-tokens // block_size)
            protected = place.protected and advanced < residency
            found.append(Candidate(seq, level.arrival_ms, last_step, gain, copy, protected))
    return found


def begin(world: World, worker: Worker, sequence: Sequence, gain_blocks: int) -> bool:
    """Ask a store for room for the sequence's payload; False if none is to be asked."""
    config = world.config
    place = sequence.place
    assert place is not None
    bound = config.max_swapped_requests
    if bound is not None and world.swapped() >= bound:
        world.counters.kv_cpu_offload_rejected_total += 1
        for each in world.stores.values():
            each.block(world.now_ms + config.retry_ms)
        return False
    usage = usage_of(worker, sequence)
    tokens = max(sequence.tokens, usage.tokens if usage else 0) + config.reserve_slack_tokens
    blocks = blocks_for(min(tokens, max(sequence.tokens_max, sequence.tokens)), worker.block_size)
    bytes_max = blocks * worker.block_bytes
    store = world.store_for(worker, bytes_max)
    if store is None:
        return False
    ticket = Ticket(sequence.seq, place.run, world.mint())
    job = SwapJob(ticket, store.id, worker.ref, bytes_max, gain_blocks)
    job.sent_ms = job.since_ms = world.now_ms
    job.failures_before = sequence.residents[worker.id].swap_failures
    sequence.swap = job
    worker.jobs[sequence.seq] = gain_blocks
    world.reserving += 1
    world.pools.touch(worker)
    world.call(store.id, Reserve(world.epoch, ticket, job.bytes_max, worker.ref))
    world.wake(sequence, world.now_ms + config.order_timeout_ms)
    return True


def usage_of(worker: Worker, sequence: Sequence) -> Usage | None:
    return next((u for u in worker.usage if u.seq == sequence.seq), None)


def agree(world: World, sequence: Sequence) -> None:
    """The store has set the bytes aside: order the copy."""
    job = sequence.swap
    assert job is not None
    assert job.order is None
    world.reserving -= 1
    job.order = SwapOut(job.ticket.order, sequence.seq, job.ticket.run, job.ticket, job.store)
    job.sent_ms = job.since_ms = world.now_ms
    world.to(sequence, State.SWAPPING_OUT)
    world.send(job.worker, job.order)
    world.wake(sequence, world.now_ms + world.config.order_timeout_ms)


def end(world: World, sequence: Sequence) -> SwapJob:
    """The swap-out is over, one way or another; its ticket is now what the levels say it is."""
    job = sequence.swap
    assert job is not None
    sequence.swap = None
    if job.order is None:
        world.reserving -= 1
    else:
        world.orders.pop(job.order.order, None)
    worker = world.pools.of(job.worker)
    if worker is not None:
        worker.jobs.pop(sequence.seq, None)
        world.pools.touch(worker)
        world.dirty_workers[worker.id] = None
    world.dirty[sequence.seq] = None
    return job


def fail(world: World, sequence: Sequence) -> None:
    """It came to nothing; the victim goes on, and the store is left alone for a while."""
    job = end(world, sequence)
    world.counters.swaps_abandoned_total += 1
    block(world, job.store)


def block(world: World, store_id: StoreId) -> None:
    store = world.stores.get(store_id)
    if store is not None:
        store.block(world.now_ms + world.config.retry_ms)


def answered(world: World, store_id: StoreId, reply: StoreReply) -> None:
    """A store has answered Reserve."""
    sequence = world.sequences.get(reply.ticket.seq)
    job = None if sequence is None else sequence.swap
    if sequence is None or job is None or job.ticket != reply.ticket or job.order is not None:
        return  # late or doubled; what it set aside is collected as a ticket nobody needs
    if reply.status is StoreStatus.OK:
        agree(world, sequence)
    elif reply.status in (StoreStatus.OVER_BUDGET, StoreStatus.TOO_MANY):
        world.counters.kv_cpu_offload_rejected_total += 1
        end(world, sequence)
        block(world, store_id)
    elif reply.status is not StoreStatus.UNREACHABLE:
        fail(world, sequence)


def pursue(world: World, sequence: Sequence, level: ResidentLevel) -> None:
    """Look at a swap-out whose victim is still resident: resend, or see that it has failed."""
    job = sequence.swap
    assert job is not None
    hopeless = world.now_ms >= job.since_ms + world.config.dead_ms
    if level.state is State.FINISHED:
        end(world, sequence)  # it has freed its blocks by itself
        return
    if job.order is None:
        held = sequence.tickets.get(job.ticket)
        if held is not None:
            agree(world, sequence)
        elif hopeless:
            fail(world, sequence)
        elif world.due(sequence, job.sent_ms):
            job.sent_ms = world.now_ms
            reserve = Reserve(world.epoch, job.ticket, job.bytes_max, job.worker)
            world.call(job.store, reserve)
            world.wake(sequence, world.now_ms + world.config.order_timeout_ms)
        return
    if level.ticket == job.ticket and level.state is State.SWAPPING_OUT:
        job.started = True
        world.orders.pop(job.order.order, None)
    elif level.swap_failures > job.failures_before or job.started or hopeless:
        fail(world, sequence)
    elif world.due(sequence, job.sent_ms):
        job.sent_ms = world.now_ms
        world.send(job.worker, job.order, again=True)
        world.wake(sequence, world.now_ms + world.config.order_timeout_ms)


def make_room(world: World, worker: Worker, sequence: Sequence) -> bool:
    """Pick victims so that a newcomer fits on the worker; False if there are none to pick.

    When they have left, it fits with the growth reserve of those who stay.
    """
    if not can_swap(world, worker):
        return False
    need = world.need_blocks(sequence, worker)
    free = worker.uncommitted_blocks(world.reserve_full, but=sequence.seq)
    staying = worker.neighbours(but=sequence.seq)
    picked = choose(
        [c for c in candidates(world, worker) if not c.protected],
        POLICIES[world.config.victims],
        lambda blocks, count: (
            free + blocks >= need + world.growth_reserve * max(staying - count, 0)
        ),
    )
    return _begin_all(world, worker, picked)


def _begin_all(world: World, worker: Worker, picked: list[Candidate]) -> bool:
    begun = False
    for victim in picked:
        if not begin(world, worker, world.sequences[victim.seq], victim.gain_blocks):
            break
        begun = True
    return begun


def relieve(world: World, worker: Worker) -> None:
    """Make blocks free for residents that cannot grow.

    Somebody always stays, unless this pool can never hold who is left; ``min_residency_tokens``
    yields once nobody can take a step; and if then nothing can be swapped, the youngest is
    recomputed later.
    """
    if not worker.alive or worker.blocks_short <= 0 or shedding.coming(world, worker):
        return
    if world.reserve_full and not (worker.stalled or shedding.closing(worker)):
        return
    short = worker.blocks_short - sum(worker.jobs.values())
    if short <= 0 or (worker.stalled and worker.jobs):
        return
    everyone = candidates(world, worker)
    if not everyone:
        return
    # Whoever lags behind skips steps for want of a block: it takes that need along when it leaves.
    newest = max(c.last_step for c in everyone)
    everyone = [
        c._replace(gain_blocks=c.gain_blocks + 1) if worker.stalled or c.last_step < newest else c
        for c in everyone
    ]
    most = len(everyone) - (len(everyone) == len(worker.residents))
    if len(worker.residents) == 1:
        alone = world.sequences[everyone[0].seq]
        most = int(alone.capacity_needed > shedding.tokens_now(worker))  # it has outgrown this pool
    if can_swap(world, worker):
        policy = POLICIES[world.config.victims]
        eligible = [c for c in everyone if not c.protected]
        picked = choose(eligible, policy, lambda blocks, count: count <= most and blocks >= short)
        if not picked and worker.stalled:
            picked = sorted(everyone, key=lambda c: (c.protected, *policy(c)))[: min(most, 1)]
        if _begin_all(world, worker, picked):
            return
    if worker.stalled and most and not worker.jobs:
        _last_resort(world, worker, everyone)


def _last_resort(world: World, worker: Worker, everyone: list[Candidate]) -> None:
    """Preempt the youngest."""
    victim = max(everyone, key=lambda c: (c.arrival_ms, c.seq))
    preempt(world, worker, world.sequences[victim.seq], victim.gain_blocks)


def preempt(world: World, worker: Worker, sequence: Sequence, gain_blocks: int) -> None:
    """Have the worker drop the run's KV; it will be computed again."""
    place = sequence.place
    assert place is not None
    order = Preempt(world.mint(), sequence.seq, place.run)
    sequence.preempt = Resend(order, world.now_ms)
    worker.jobs[sequence.seq] = gain_blocks
    world.pools.touch(worker)
    world.send(worker.ref, order)
    world.wake(sequence, world.now_ms + world.config.order_timeout_ms)
