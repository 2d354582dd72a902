"""What is wanted for one sequence, held against what is reported of it.

``settle`` may be called at any time and any number of times: it looks only at facts and intents,
sends what is missing or due again, and asks to be woken when time alone would change its mind.
"""

from __future__ import annotations

from deepinfer.controller.core import placement, prefetch, shedding, swaps
from deepinfer.controller.core.sequences import ENDED, RUNNING, Placement, Resend, Sequence
from deepinfer.controller.core.world import World
from deepinfer.kvstore.core.ids import Ticket, WorkerRef
from deepinfer.kvstore.core.messages import (
    Cancel,
    Disown,
    Reject,
    RejectReason,
    Release,
    ResidentLevel,
    TicketState,
)
from deepinfer.kvstore.core.states import State


def settle(world: World, sequence: Sequence) -> None:
    """Bring one sequence as far as the facts allow."""
    _choose_owner(world, sequence)
    if not world.ready:
        return
    if sequence.live:
        if sequence.state in ENDED:
            world.revive(sequence)
        _advance(world, sequence)
        shedding.watch_exact(world, sequence)
    elif _over(world, sequence):
        _end(world, sequence)
        _cancel_strays(world, sequence)
        _release_tickets(world, sequence)
        if sequence.forgettable:
            world.forget(sequence)
        return
    if sequence.residents:
        _cancel_strays(world, sequence)
    if sequence.tickets:
        _release_tickets(world, sequence)


def _choose_owner(world: World, sequence: Sequence) -> None:
    """The highest claim owns the sequence; lower ones are told to let go of it."""
    claims = sequence.claims
    if not claims:
        sequence.owner = sequence.level = None
        return
    if len(claims) == 1:
        ((owner, level),) = claims.items()
        sequence.owner, sequence.level = owner, level
        if sequence.rejected is not None:
            world.gateways[owner].reject[sequence.seq] = sequence.rejected
        return
    old = sequence.owner
    owner = max(claims, key=lambda g: (claims[g].claim, g == old, g))
    sequence.owner, sequence.level = owner, claims[owner]
    highest = claims[owner].claim
    for gateway_id, level in claims.items():
        if level.claim < highest:
            world.gateways[gateway_id].disown[sequence.seq] = Disown(sequence.seq, highest)
    if sequence.rejected is not None:
        world.gateways[owner].reject[sequence.seq] = sequence.rejected


def _over(world: World, sequence: Sequence) -> bool:
    """Whether nobody wants the sequence any more, nor may come to want it."""
    if sequence.level is not None:
        return True
    if sequence.closed_ms is not None:
        return True
    if not sequence.bereaved:
        for level in sequence.residents.values():
            gateway = world.gateways.get(level.gateway)
            if gateway is not None and gateway.link.reported:
                sequence.closed_ms = world.now_ms  # its gateway is there and does not know it
                return True
    assert sequence.orphan_since_ms is not None
    until_ms = sequence.orphan_since_ms + world.config.orphan_grace_ms
    if world.now_ms >= until_ms:
        return True
    world.wake(sequence, until_ms)
    world.leave_line(sequence)
    return False


def _end(world: World, sequence: Sequence) -> None:
    """Want nothing more of it."""
    world.leave_line(sequence)
    prefetch.over(world, sequence)
    place = sequence.place
    if place is not None:
        if not place.confirmed:
            placement.withdraw(world, sequence)
        else:
            placement.unplace(world, sequence)
    world.set_home(sequence, None)
    sequence.expected = None
    if sequence.state not in ENDED:
        if sequence.rejected is not None:
            world.to(sequence, State.FAILED)
        elif sequence.level is None and sequence.closed_ms is not None:
            world.to(sequence, State.FINISHED)
        else:
            world.to(sequence, State.CANCELLED)


def _advance(world: World, sequence: Sequence) -> None:
    if sequence.place is None:
        _adopt(world, sequence)
    place = sequence.place
    if place is None:
        _wait(world, sequence)
    elif not place.confirmed:
        _expect(world, sequence, place)
    elif not place.withdrawn:
        level = sequence.residents.get(place.worker.worker)
        if level is not None:
            _follow(world, sequence, place, level)


def _adopt(world: World, sequence: Sequence) -> None:
    """Take on a run that is there already, unless a higher one is known to have been minted."""
    best: WorkerRef | None = None
    for worker_id, level in sequence.residents.items():
        worker = world.pools.workers[worker_id]
        if best is None or level.run > sequence.residents[best.worker].run:
            best = worker.ref
    if best is None:
        return
    level = sequence.residents[best.worker]
    if sequence.run is not None and level.run < sequence.run:
        return
    world.leave_line(sequence)
    sequence.run = level.run
    sequence.expected = None
    sequence.place = Placement(best, level.run, level.gateway, None)
    if world.reserve_full:
        worker = world.pools.workers[best.worker]
        tokens = sequence.tokens_max
        worker.full_blocks[sequence.seq] = -(-tokens // worker.block_size)
        world.pools.touch(worker)
    observe(world, sequence, level)


def _wait(world: World, sequence: Sequence) -> None:
    """It runs nowhere: find out from what it can go on, and put it in line."""
    if world.now_ms < sequence.not_before_ms:
        world.wake(sequence, sequence.not_before_ms)
        return
    if sequence.expected is not None:
        held = sequence.tickets.get(sequence.expected)
        committed = held is not None and held.level.state is TicketState.COMMITTED
        if not committed and world.now_ms < sequence.expected_until_ms:
            world.wake(sequence, sequence.expected_until_ms)
            return
        sequence.expected = None
    level = sequence.level
    assert level is not None
    if sequence.payload() is not None:
        world.to(sequence, State.SWAPPED)
    elif sequence.state is State.WAITING:
        sequence.recovering = sequence.recovering or (
            level.attached is not None or level.held_tokens > 0
        )
    elif sequence.state is not State.RECOVERING:
        recover(world, sequence)
    _reject_or_enqueue(world, sequence)


def recover(world: World, sequence: Sequence) -> None:
    """Its KV is lost: it goes to the head of everyone, with the tokens it already has."""
    if sequence.state is State.WAITING:
        return
    world.to(sequence, State.RECOVERING)
    sequence.recovering = True
    world.counters.requests_recovered_total += 1


def _reject_or_enqueue(world: World, sequence: Sequence) -> None:
    """Line up; or refuse, with both numbers, what no pool could ever hold."""
    largest = world.pools.largest()
    room_tokens = 0 if largest is None else largest.capacity_tokens
    if largest is not None and world.any_planes and shedding.is_exact(sequence):
        able = shedding.largest_for_exact(world)
        if able is None and world.pools_known():
            shedding.refuse(world, sequence, RejectReason.NO_PLANES)
            return
        largest = able or largest
        room_tokens = largest.ordinary_tokens
    if largest is None or room_tokens >= sequence.capacity_needed:
        sequence.unfit_since_ms = None
        world.enqueue(sequence)
        return
    if sequence.queued is None:
        world.enqueue(sequence)
    if sequence.unfit_since_ms is None:
        sequence.unfit_since_ms = world.now_ms
    new = sequence.state is State.WAITING and not sequence.recovering
    until_ms = sequence.unfit_since_ms + (0 if new else world.config.dead_ms)
    if not world.pools_known():
        until_ms = max(until_ms, world.now_ms + world.config.settle_ms)
    if world.now_ms < until_ms:
        world.wake(sequence, until_ms)
        return
    needed = -(-sequence.capacity_needed // largest.block_size)
    sequence.rejected = Reject(sequence.seq, needed, room_tokens // largest.block_size)
    world.counters.requests_rejected_total += 1
    world.dirty[sequence.seq] = None


def _expect(world: World, sequence: Sequence, place: Placement) -> None:
    """No report has shown the run yet: send again; give up in the end."""
    assert place.order is not None
    worker = world.pools.of(place.worker)
    if place.gateway != sequence.owner:
        if worker is not None and not sequence.tickets:
            placement.take_over(world, worker, sequence)
        else:
            placement.withdraw(world, sequence)
    elif world.now_ms >= place.since_ms + world.config.dead_ms:
        if worker is not None:
            worker.deaf_until_ms = world.now_ms + world.config.dead_ms
            world.watch(worker, worker.deaf_until_ms)
            world.pools.touch(worker)
        placement.withdraw(world, sequence)
    elif world.due(sequence, place.sent_ms):
        place.sent_ms = world.now_ms
        world.send(place.worker, place.order, again=True)
        world.wake(sequence, world.now_ms + world.config.order_timeout_ms)


def _follow(world: World, sequence: Sequence, place: Placement, level: ResidentLevel) -> None:
    """The run is there: see to its gateway, its swap-out and its preemption."""
    assert sequence.level is not None
    attached = sequence.level.attached
    foreign = level.gateway != sequence.owner or (attached is not None and attached > place.run)
    if foreign:
        worker = world.pools.of(place.worker)
        if sequence.swap is not None and sequence.swap.order is None:
            swaps.end(world, sequence)
        settled = level.state not in (State.SWAPPING_OUT, State.SWAPPING_IN)
        if sequence.swap is None and settled and worker is not None:
            placement.take_over(world, worker, sequence)
            return
        if level.state is State.SWAPPING_IN:
            place.withdrawn = True
            return
    if sequence.swap is not None:
        swaps.pursue(world, sequence, level)
    preempt = sequence.preempt
    if preempt is not None and world.due(sequence, preempt.sent_ms):
        preempt.sent_ms = world.now_ms
        world.send(place.worker, preempt.order, again=True)
        world.wake(sequence, world.now_ms + world.config.order_timeout_ms)
    observe(world, sequence, level)


def observe(world: World, sequence: Sequence, level: ResidentLevel) -> None:
    """Follow the state that the current run's worker reports."""
    old, new = sequence.state, level.state
    if new is State.FINISHED:
        return  # not before its gateway has the last tokens: until then the worker may yet die
    if sequence.swap is not None and sequence.swap.order is not None and new in RUNNING:
        return  # the order has not got there yet
    if new in RUNNING:
        if old is State.SWAPPING_IN:
            world.counters.resumes_seen_total += 1
        sequence.recovering = False
        world.set_home(sequence, None)
    if new is not State.WAITING:
        world.to(sequence, new)


def _cancel_strays(world: World, sequence: Sequence) -> None:
    """Stop runs that do not speak for the sequence."""
    place = sequence.place
    for worker_id, level in list(sequence.residents.items()):
        worker = world.pools.workers[worker_id]
        if place is not None and place.worker == worker.ref and not place.withdrawn:
            # A lower run on the same worker is what a takeover will go on from.
            if level.run == place.run or (not place.confirmed and level.run < place.run):
                continue
        elif not sequence.live and sequence.level is None:
            if sequence.closed_ms is None and not _orphan_over(world, sequence):
                continue
            if sequence.closed_ms is not None:
                due_ms = sequence.closed_ms + world.config.settle_ms
                if world.now_ms < due_ms:  # most likely it is on its way out by itself
                    world.wake(sequence, due_ms)
                    continue
        resend = sequence.cancels.get(worker_id)
        if resend is None or resend.order.run != level.run:
            if resend is not None:
                world.orders.pop(resend.order.order, None)
            order = Cancel(world.mint(), sequence.seq, level.run)
            sequence.cancels[worker_id] = Resend(order, world.now_ms)
            world.send(worker.ref, order)
        elif world.due(sequence, resend.sent_ms):
            resend.sent_ms = world.now_ms
            world.send(worker.ref, resend.order, again=True)
        world.wake(sequence, world.now_ms + world.config.order_timeout_ms)


def _orphan_over(world: World, sequence: Sequence) -> bool:
    since_ms = sequence.orphan_since_ms
    return since_ms is not None and world.now_ms >= since_ms + world.config.orphan_grace_ms


def _release_tickets(world: World, sequence: Sequence) -> None:
    """Have stores drop what nothing will ever be resumed from."""
    for ticket, held in list(sequence.tickets.items()):
        if _needed(world, sequence, ticket):
            continue
        if ticket.order.epoch != world.epoch and not world.all_reported:
            continue  # someone who has not reported yet may still need it
        if held.released_ms is not None and not world.due(sequence, held.released_ms):
            continue
        held.released_ms = world.now_ms
        world.call(held.store, Release(world.epoch, ticket))
        world.wake(sequence, world.now_ms + world.config.order_timeout_ms)


def _needed(world: World, sequence: Sequence, ticket: Ticket) -> bool:
    if sequence.tickets[ticket].released_ms is not None:
        return False
    if not sequence.live:
        return not (
            sequence.level is not None
            or sequence.closed_ms is not None
            or _orphan_over(world, sequence)
        )
    if ticket == sequence.expected:
        return True
    if sequence.swap is not None and sequence.swap.ticket == ticket:
        return True
    if any(level.ticket == ticket for level in sequence.residents.values()):
        return True
    place = sequence.place
    if place is None:
        payload = sequence.payload()
        return payload is not None and payload.level.ticket == ticket
    if place.withdrawn or (not place.confirmed and place.order is not None):
        return getattr(place.order, "ticket", None) == ticket
    return sequence.state is State.SWAPPING_IN and getattr(place.order, "ticket", None) == ticket
