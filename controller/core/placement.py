"""Who is placed where: the lines' order, room made for newcomers, and the orders themselves."""

from __future__ import annotations

from deepinfer.controller.core import prefetch, shedding, swaps
from deepinfer.controller.core.pools import Worker, blocks_for
from deepinfer.controller.core.sequences import Placement, Rank, Sequence
from deepinfer.controller.core.world import World
from deepinfer.kvstore.core.messages import Admit, Cancel, SwapIn
from deepinfer.kvstore.core.states import State


def place_all(world: World) -> None:
    """Place whoever fits now, and begin to make room for newcomers who do not."""
    line, pools = world.line, world.pools
    pools.refresh()
    if world.line_generation != pools.generation:
        _line_up_anew(world)
    if not world.ready or not len(line) or not (line.moved or pools.roomier):
        return
    line.moved = pools.roomier = False
    while _place_one(world):
        pass
    if world.config.cpu_offload:
        while _clear_one(world):
            pass


def _line_up_anew(world: World) -> None:
    waiting = sorted(world.line.members(), key=lambda s: s.seq)
    world.line.clear()
    world.line_generation = world.pools.generation
    for sequence in waiting:
        world.enqueue(sequence)
        world.dirty[sequence.seq] = None


def _place_one(world: World) -> bool:
    """Place the first sequence that may be placed.

    A head that does not fit holds up whoever stands behind it on every worker that could ever hold
    it, and nobody on a smaller one.
    """
    capacities = world.pools.capacities
    high = len(capacities)
    for _, sequence, low in world.line.heads(capacities):
        if low >= high:
            continue
        if world.any_planes and shedding.is_exact(sequence):
            worker = shedding.place_for_exact(world, sequence)
        else:
            worker = world.pools.roomiest(low, high)
            if worker is not None:
                worker = _preferred(world, sequence, worker)
        if worker is not None:
            assert worker.open_posted is not None
            need = world.need_blocks(sequence, worker)
            if need * worker.block_size <= worker.open_posted:
                put(world, worker, sequence)
                return True
        high = low
    return False


def _preferred(world: World, sequence: Sequence, roomiest: Worker) -> Worker:
    """Where the payload is already, if there is room; home, if it has as much as the roomiest."""
    hinted = world.pools.workers.get(sequence.hinted) if sequence.hinted is not None else None
    if hinted is not None and hinted.open_posted is not None:
        need = world.need_blocks(sequence, hinted) * hinted.block_size
        if need <= hinted.open_posted and hinted.capacity_tokens >= sequence.capacity_needed:
            return hinted
    home = world.pools.workers.get(sequence.home) if sequence.home is not None else None
    if (
        home is not None
        and home.open_posted == roomiest.open_posted
        and home.capacity_tokens >= sequence.capacity_needed
    ):
        return home
    return roomiest


def _clear_one(world: World) -> bool:
    """Begin to make room for the first newcomer that has none.

    None is made on a worker that has swapped out somebody who is not back, nor for anyone while
    a recovering sequence waits for the same workers: those would starve.
    """
    capacities = world.pools.capacities
    line = world.line
    heads = []
    for index, capacity in enumerate(capacities):
        for rank in (Rank.RECOVERING, Rank.WAITING):
            sequence = line.first(capacity, rank)
            if sequence is not None and sequence.queued is not None:
                heads.append((sequence.queued, sequence, index))
                break
    high = len(capacities)
    for place, sequence, low in sorted(heads, key=lambda head: head[0]):
        if place.rank is Rank.WAITING:
            while low < high and (worker := world.pools.clearable(low, high)) is not None:
                if shedding.waits_for_planes(world, worker, sequence):
                    break
                if swaps.make_room(world, worker, sequence):
                    set_aside(world, worker, sequence)
                    return True
                worker.room_tried = True
                world.pools.touch(worker)
        high = min(high, low)
    return False


def set_aside(world: World, worker: Worker, sequence: Sequence) -> None:
    """Keep the blocks that come free for this newcomer: its victims would take them back."""
    world.line.remove(sequence)
    sequence.earmark = worker.id
    worker.earmarks[sequence.seq] = world.need_blocks(sequence, worker)
    world.pools.touch(worker)


def look_after_earmark(world: World, worker: Worker) -> None:
    """Place the newcomer once its room is there; give up when nothing more will come free."""
    for seq in list(worker.earmarks):
        sequence = world.sequences[seq]
        need = world.need_blocks(sequence, worker)
        worker.earmarks[seq] = need
        if (
            worker.takes_new
            and shedding.may_hold(worker, sequence)
            and worker.uncommitted_blocks(world.reserve_full, but=seq) >= need
        ):
            world.leave_line(sequence)
            put(world, worker, sequence)
        elif not worker.jobs and not (
            worker.takes_new and swaps.make_room(world, worker, sequence)
        ):
            world.leave_line(sequence)
            world.dirty[seq] = None


def put(world: World, worker: Worker, sequence: Sequence) -> None:
    """Order the worker to run the sequence, from its payload if it has one."""
    level, owner = sequence.level, sequence.owner
    assert level is not None
    assert owner is not None
    assert sequence.place is None
    world.leave_line(sequence)
    payload = sequence.payload()
    prefetch.placed(world, worker, sequence, payload)
    run, number = world.mint(), world.mint()
    order: Admit | SwapIn
    if payload is None:
        order = Admit(number, sequence.seq, run, owner, sequence.tokens, sequence.tokens_max)
        if sequence.state is State.RECOVERING:
            world.to(sequence, State.WAITING)
    else:
        stored = payload.level
        order = SwapIn(
            number,
            sequence.seq,
            run,
            owner,
            stored.ticket,
            payload.store,
            stored.tokens,
            stored.blocks,
            sequence.tokens_max,
        )
        world.to(sequence, State.SWAPPING_IN)
    place = Placement(worker.ref, run, owner, order)
    place.protected = payload is not None or sequence.recovering
    _order(world, worker, sequence, place, world.need_blocks(sequence, worker))
    world.counters.requests_admitted_total += 1


def take_over(world: World, worker: Worker, sequence: Sequence) -> None:
    """Let the run go on in place, KV and all, under a new number for another gateway."""
    old, level, owner = sequence.place, sequence.level, sequence.owner
    assert old is not None
    assert level is not None
    assert owner is not None
    run, number = world.mint(), world.mint()
    order = Admit(number, sequence.seq, run, owner, sequence.tokens, sequence.tokens_max)
    if old.order is not None:
        world.orders.pop(old.order.order, None)
    _call_off_preemption(world, sequence)
    worker.jobs.pop(sequence.seq, None)
    place = Placement(worker.ref, run, owner, order)
    place.protected = old.protected
    there = sequence.seq in worker.residents
    blocks = 0 if there else worker.pending.get(sequence.seq, 0)
    _order(world, worker, sequence, place, blocks)
    world.counters.requests_taken_over_total += there


def _order(world: World, worker: Worker, sequence: Sequence, place: Placement, blocks: int) -> None:
    assert place.order is not None
    sequence.run = place.run
    sequence.place = place
    place.sent_ms = place.since_ms = world.now_ms
    worker.pending[sequence.seq] = blocks
    if world.reserve_full:
        worker.full_blocks[sequence.seq] = blocks_for(sequence.tokens_max, worker.block_size)
    world.pools.touch(worker)
    world.send(worker.ref, place.order)
    world.wake(sequence, world.now_ms + world.config.order_timeout_ms)


def unplace(world: World, sequence: Sequence) -> None:
    """The placement is over: the run has left, or nothing more is expected of it."""
    place = sequence.place
    if place is None:
        return
    if sequence.swap is not None:
        swaps.end(world, sequence)
    _call_off_preemption(world, sequence)
    if place.order is not None:
        world.orders.pop(place.order.order, None)
    sequence.place = None
    worker = world.pools.of(place.worker)
    if worker is not None:
        worker.pending.pop(sequence.seq, None)
        worker.jobs.pop(sequence.seq, None)
        if sequence.seq not in worker.residents:
            worker.full_blocks.pop(sequence.seq, None)
        world.pools.touch(worker)
        world.dirty_workers[worker.id] = None
    world.dirty[sequence.seq] = None


def _call_off_preemption(world: World, sequence: Sequence) -> None:
    """It named a run that is gone or has been taken over; the worker ignores it from now on."""
    if sequence.preempt is not None:
        world.orders.pop(sequence.preempt.order.order, None)
        sequence.preempt = None


def withdraw(world: World, sequence: Sequence) -> None:
    """Give up a placement that no report has shown; should it turn up after all, it is stopped."""
    place = sequence.place
    assert place is not None
    world.send(place.worker, Cancel(world.mint(), sequence.seq, place.run), expect=False)
    unplace(world, sequence)
