"""Which workers give up their weights' lower planes for KV blocks, and who needs them back.

``review`` decides anew with each report of a worker; answers carry it (``PrecisionRule.shed``), so
it is a level like any other. Planes leave

* when the first in a line, or a resident that is short of blocks, can never finish in the ordinary
  blocks;
* when pressure persists, and to swap would cost more (``planes.worthwhile``); an eighth of the
  workers at a time.

They return when ordinary blocks have been enough for a while, and the planes have been away for
long enough to be worth it. An ``exact`` request runs only where they are: it goes to such a worker
if there is one, or else to the one with the most room, and planes do not leave while it is there or
on its way; the worker itself fetches them back once it knows of the request.
"""

from __future__ import annotations

from deepinfer.controller.core.planes import LOSS, Planes, horizon_ms, worthwhile
from deepinfer.controller.core.pools import Worker
from deepinfer.controller.core.sequences import RUNNING, Sequence
from deepinfer.controller.core.world import World
from deepinfer.kvstore.core.messages import Reject, RejectReason, WorkerReport
from deepinfer.kvstore.core.precision import Policy
from deepinfer.kvstore.core.shed import ShedState
from deepinfer.kvstore.core.states import State

AT_ONCE = 8
"""One worker in so many may be about to shed at a time."""


def learn(world: World, worker: Worker, report: WorkerReport) -> None:
    """Take over what the report says of the planes."""
    level = report.shed
    if level is None:
        worker.planes = None
        return
    permitted = permits(world, worker)
    if not permitted:
        level = level._replace(tail_blocks=0)
    world.any_planes = True
    planes = worker.planes
    if planes is None:
        worker.planes = Planes(level, world.now_ms)
        changed = True
    else:
        changed = planes.learn(level, world.now_ms)
    assert worker.planes is not None
    worker.planes.wanted = worker.planes.wanted and permitted
    if level.state is not ShedState.SHEDDING and level.state is not ShedState.HELD:
        world.shedding.pop(worker.id, None)
    if changed:
        for seq in [*worker.residents, *worker.pending]:
            if is_exact(world.sequences[seq]):
                world.dirty[seq] = None


def permits(world: World, worker: Worker) -> bool:
    """Whether the policy lets the worker run at the top level for as long as it takes."""
    config, precision = world.config, worker.precision
    top = 0 if precision is None else precision.levels - 1
    settings = config.precision
    return config.shed and settings.policy is not Policy.FP16 and settings.level_max >= top > 0


def review(world: World, worker: Worker) -> None:
    """Decide whether the worker's planes should be away."""
    planes = worker.planes
    if planes is None or not planes.level.tail_blocks or not world.ready:
        return
    level = planes.level
    over_ms = horizon_ms(level, world.config.shed_dwell_ms)
    waits = _line_waits(world, worker)
    planes.weigh(bool(worker.blocks_short or worker.cold or waits), over_ms, world.now_ms)
    if waits and not runs_exact(worker) and _exact_waits(world):
        world.pools.roomier = True  # time alone may let it in
    policy = world.config.precision.policy
    if planes.wanted:
        # Planes that only an exact request would read gain nothing by a return.
        calm = policy is not Policy.FP8 and level.state is ShedState.OPEN
        calm = calm and _may_return(world, worker, planes, waits, over_ms)
        if calm or _exact_runs(world, worker):
            _want(world, worker, planes, False)
        return
    loss = 0.0 if policy is Policy.FP8 else LOSS
    due = level.state in (ShedState.HELD, ShedState.CLOSING) and _fits_only_so(world, worker)
    due = due or (
        level.state is ShedState.HELD
        and len(world.shedding) * AT_ONCE <= len(world.pools.workers)
        and world.now_ms >= planes.since_ms + over_ms
        and worthwhile(planes.crossed_blocks, planes.waited_ms, level, over_ms, loss)
    )
    if due and not _exact_there(world, worker):
        _want(world, worker, planes, True)


def _want(world: World, worker: Worker, planes: Planes, wanted: bool) -> None:
    if wanted is planes.wanted:
        return
    planes.wanted, planes.wanted_ms = wanted, world.now_ms
    planes.calm_since_ms = None
    planes.forget_pressure()
    if wanted:
        world.shedding[worker.id] = None
        world.counters.sheds_wanted_total += 1
    else:
        world.shedding.pop(worker.id, None)
        world.counters.planes_returns_wanted_total += 1


def crossed(worker: Worker, blocks: int) -> None:
    """A swap-out has taken so many blocks across the bus, and they will come back."""
    if worker.planes is not None:
        worker.planes.crossed_blocks += 2 * blocks


def coming(world: World, worker: Worker) -> bool:
    """Whether more blocks are about to be there anyway: nobody has to be swapped out for them."""
    planes = worker.planes
    return (
        planes is not None
        and planes.wanted
        and planes.level.state in (ShedState.HELD, ShedState.SHEDDING)
        and not _exact_there(world, worker)
        and world.now_ms < planes.wanted_ms + world.config.order_timeout_ms
    )


def closing(worker: Worker) -> bool:
    """Whether the tail is being emptied, or its planes are on the way back."""
    planes = worker.planes
    return planes is not None and planes.level.state in (ShedState.CLOSING, ShedState.RESTORING)


def tokens_now(worker: Worker) -> int:
    """What one sequence may grow to there, as things go."""
    return worker.ordinary_tokens if closing(worker) else worker.capacity_tokens


# ---- when -----------------------------------------------------------------------------------


def _line_waits(world: World, worker: Worker) -> bool:
    """Somebody who could run on the worker waits for room."""
    if not len(world.line):
        return False
    capacities = world.pools.capacities
    heads = world.line.heads(capacities)
    return any(capacities[index] <= worker.capacity_tokens for _, _, index in heads)


def _fits_only_so(world: World, worker: Worker) -> bool:
    """Somebody needs more than the ordinary blocks, and this is the worker for them."""
    if worker.blocks_short and _too_large_here(world, worker):
        return True
    if not len(world.line):
        return False
    pools, capacities = world.pools, world.pools.capacities
    high = len(capacities)
    for _, sequence, low in world.line.heads(capacities):
        if low >= high:
            continue
        here = worker.ordinary_tokens < sequence.capacity_needed <= worker.capacity_tokens
        if here and not is_exact(sequence):
            best = pools.roomiest(low, high)
            if best is None or best is worker or not _could_shed(best):
                return True
        high = low
    return False


def _could_shed(worker: Worker) -> bool:
    planes = worker.planes
    return (
        planes is not None
        and planes.level.tail_blocks > 0
        and planes.level.state
        in (
            ShedState.HELD,
            ShedState.SHEDDING,
            ShedState.OPEN,
        )
    )


def _too_large_here(world: World, worker: Worker) -> bool:
    """Somebody on the worker, or on the way there, cannot finish in its ordinary blocks."""
    present = [seq for seq, level in worker.residents.items() if level.state is not State.FINISHED]
    return any(
        world.sequences[seq].capacity_needed > worker.ordinary_tokens
        for seq in [*present, *worker.pending, *worker.earmarks]
    )


def _may_return(world: World, worker: Worker, planes: Planes, waits: bool, over_ms: int) -> bool:
    """Whether ordinary blocks have been enough for long enough."""
    level, now_ms = planes.level, world.now_ms
    used = worker.blocks_total - worker.uncommitted_blocks(world.reserve_full)
    used += world.growth_reserve * worker.neighbours()
    calm = (
        not (waits or worker.cold or worker.blocks_short)
        and used <= level.ordinary_blocks
        and not _too_large_here(world, worker)
    )
    if not calm:
        planes.calm_since_ms = None
        return False
    if planes.calm_since_ms is None:
        planes.calm_since_ms = now_ms
    calm_ms = max(level.return_ms, world.config.shed_calm_ms)
    return now_ms >= planes.calm_since_ms + calm_ms and now_ms >= planes.since_ms + over_ms


# ---- exact requests -------------------------------------------------------------------------


def is_exact(sequence: Sequence) -> bool:
    """Whether the sequence has to be computed in FP16."""
    return sequence.level is not None and sequence.level.exact


def _exact_waits(world: World) -> bool:
    """Whether one is the first of a line."""
    return any(is_exact(head) for _, head, _ in world.line.heads(world.pools.capacities))


def _exact_runs(world: World, worker: Worker) -> bool:
    """Whether one has its blocks there: until then what is promised to it must not be cut."""
    return any(
        level.state in RUNNING and is_exact(world.sequences[seq])
        for seq, level in worker.residents.items()
    )


def _exact_there(world: World, worker: Worker) -> bool:
    """Whether one is there, or on its way."""
    return any(
        is_exact(world.sequences[seq])
        for seq in [*worker.residents, *worker.pending, *worker.earmarks]
    )


def runs_exact(worker: Worker) -> bool:
    """Whether exact requests take steps there now."""
    return worker.planes is None or worker.planes.level.state.exact_runs


def may_hold(worker: Worker, sequence: Sequence) -> bool:
    """Whether the worker could ever run the sequence to its end."""
    if not is_exact(sequence):
        return worker.capacity_tokens >= sequence.capacity_needed
    if worker.planes is not None and worker.planes.level.state is ShedState.LOCKED:
        return False
    return worker.ordinary_tokens >= sequence.capacity_needed


def place_for_exact(world: World, sequence: Sequence) -> Worker | None:
    """Where an exact sequence goes now: where the planes are, or else where there is most room.

    One that needs the tail is not driven out before the planes have been away for their least time.
    """
    world.pools.refresh()
    best: tuple[bool, int, str] | None = None
    found = None
    for worker in world.pools.workers.values():
        posted = worker.open_posted
        if posted is None or not may_hold(worker, sequence):
            continue
        if world.need_blocks(sequence, worker) * worker.block_size > posted:
            continue
        planes = worker.planes
        away = not runs_exact(worker)
        if away and planes is not None and _too_large_here(world, worker):
            over_ms = horizon_ms(planes.level, world.config.shed_dwell_ms)
            if planes.level.state is ShedState.OPEN and world.now_ms < planes.since_ms + over_ms:
                continue
        key = (away, -posted, worker.id)
        if best is None or key < best:
            best, found = key, worker
    return found


def waits_for_planes(world: World, worker: Worker, sequence: Sequence) -> bool:
    """Whether blocks that others gave up there would not help: it is exact, and has enough."""
    if not (world.any_planes and is_exact(sequence)):
        return False
    room = worker.open_blocks(world.growth_reserve, world.reserve_full)
    return not may_hold(worker, sequence) or world.need_blocks(sequence, worker) <= room


def largest_for_exact(world: World) -> Worker | None:
    """The worker that could hold the longest exact request; None if no planes can ever be there."""
    able = [
        worker
        for worker in world.pools.workers.values()
        if worker.planes is None or worker.planes.level.state is not ShedState.LOCKED
    ]
    return max(able, key=lambda w: (w.ordinary_tokens, w.id), default=None)


def watch_exact(world: World, sequence: Sequence) -> None:
    """Refuse an exact sequence that has waited too long for planes to return."""
    if not is_exact(sequence) or not world.any_planes:
        return
    if not _waits_for_planes(world, sequence):
        sequence.planes_since_ms = None
        return
    if sequence.planes_since_ms is None:
        sequence.planes_since_ms = world.now_ms
    until_ms = sequence.planes_since_ms + world.config.shed_exact_wait_ms
    if world.now_ms < until_ms:
        world.wake(sequence, until_ms)
        return
    world.counters.exact_expired_total += 1
    refuse(world, sequence, RejectReason.PLANES_AWAY)


def refuse(world: World, sequence: Sequence, why: RejectReason) -> None:
    """It cannot run in FP16 anywhere."""
    sequence.rejected = Reject(sequence.seq, 0, 0, why)
    world.counters.requests_rejected_total += 1
    world.dirty[sequence.seq] = None


def _waits_for_planes(world: World, sequence: Sequence) -> bool:
    place = sequence.place
    if place is not None:
        worker = world.pools.of(place.worker)
        return worker is not None and not runs_exact(worker)
    able = [w for w in world.pools.workers.values() if w.alive and may_hold(w, sequence)]
    return bool(able) and not any(runs_exact(worker) for worker in able)
