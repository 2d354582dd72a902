"""Who should have a payload ahead of its resume: the worker where the next in line is likely to go.

A worker maps the memory of its own node's store, and copies a payload straight out of it; one in
another node's store has to come over the network. So the first sequence in line that waits with
such a payload is foreseen somewhere, and the worker there is told to have the payload in host
memory by then. It is a guess: placement goes by room, as before, and prefers that worker only where
it has room. A worker that loses a hint, or has too little memory for it, fetches as always.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.controller.core.pools import Worker
from deepinfer.controller.core.sequences import Rank, Sequence, StoredTicket
from deepinfer.controller.core.world import World
from deepinfer.kvstore.core.ids import Seq, StoreId, Ticket, WorkerRef
from deepinfer.kvstore.core.messages import Prefetch

LOOK_MS = 50
"""Hints are looked over so often: to foresee who has room first takes a look at every resident."""


@dataclass(slots=True, eq=False)
class Hint:
    """What one worker was last told to hold."""

    worker: WorkerRef
    seq: Seq
    ticket: Ticket
    store: StoreId
    blocks: int
    sent_ms: int = 0


def look_ahead(world: World) -> None:
    """Call off hints that no longer hold, repeat those that do, and give new ones."""
    if world.now_ms < world.look_ahead_ms:
        return
    world.look_ahead_ms = world.now_ms + LOOK_MS
    for hint in list(world.hints.values()):
        if not _holds(world, hint):
            _call_off(world, hint)
        elif world.now_ms >= hint.sent_ms + world.config.prefetch_renew_ms:
            _send(world, hint, again=True)
    if not world.ready or world.config.prefetch_bytes_max == 0 or not len(world.line):
        return
    heads = []
    for index, capacity in enumerate(world.pools.capacities):
        sequence = world.line.first(capacity, Rank.SWAPPED)
        if sequence is not None and sequence.hinted is None and sequence.queued is not None:
            heads.append((sequence.queued, sequence, index))
    for _, sequence, low in sorted(heads, key=lambda head: head[0]):
        _foresee(world, sequence, low)


def placed(world: World, worker: Worker, sequence: Sequence, payload: StoredTicket | None) -> None:
    """The sequence is ordered to run there: its hint has come true, or holds no longer."""
    if sequence.hinted is None:
        return
    hint = world.hints[sequence.hinted]
    if payload is not None and payload.level.ticket == hint.ticket and hint.worker == worker.ref:
        _forget(world, hint)  # the SwapIn ends it there
    else:
        _call_off(world, hint)


def over(world: World, sequence: Sequence) -> None:
    """Nobody wants the sequence any more."""
    if sequence.hinted is not None:
        _call_off(world, world.hints[sequence.hinted])


def _holds(world: World, hint: Hint) -> bool:
    sequence = world.sequences[hint.seq]
    worker = world.pools.of(hint.worker)
    if sequence.queued is None or worker is None or worker.draining:
        return False
    payload = sequence.payload()
    return (
        payload is not None and payload.level.ticket == hint.ticket and payload.store == hint.store
    )


def _call_off(world: World, hint: Hint) -> None:
    _forget(world, hint)
    if world.pools.of(hint.worker) is not None:
        nothing = Prefetch(world.mint(), hint.seq, None, None, 0)
        world.send(hint.worker, nothing, expect=False)


def _forget(world: World, hint: Hint) -> None:
    del world.hints[hint.worker.worker]
    world.sequences[hint.seq].hinted = None


def _send(world: World, hint: Hint, *, again: bool = False) -> None:
    hint.sent_ms = world.now_ms
    order = Prefetch(world.mint(), hint.seq, hint.ticket, hint.store, hint.blocks)
    world.send(hint.worker, order, again=again, expect=False)


def _foresee(world: World, sequence: Sequence, low: int) -> None:
    """Give the hint, if a payload from afar is foreseen on a worker that has no earlier one."""
    payload = sequence.payload()
    store = None if payload is None else world.stores.get(payload.store)
    if payload is None or store is None:
        return
    level = payload.level
    if level.payload_bytes > world.config.prefetch_bytes_max or not _far(world, store.node):
        return
    worker = _first_with_room(world, sequence, world.pools.capacities[low])
    if worker is None or (worker.node == store.node and world.config.stores_are_mapped):
        return
    old = world.hints.get(worker.id)
    if old is not None:
        ahead = world.sequences[old.seq].queued
        if ahead is not None and sequence.queued is not None and ahead < sequence.queued:
            return
        _forget(world, old)  # a worker holds only what it was told last
    hint = Hint(worker.ref, sequence.seq, level.ticket, payload.store, level.blocks)
    world.hints[worker.id] = hint
    sequence.hinted = worker.id
    _send(world, hint)


def _far(world: World, node: str) -> bool:
    """Whether any worker would have to fetch over the network from a store of this node."""
    workers = world.pools.workers.values()
    return not world.config.stores_are_mapped or any(worker.node != node for worker in workers)


def _first_with_room(world: World, sequence: Sequence, capacity: int) -> Worker | None:
    """Of the workers that could hold the sequence, the one that is likely to have room first."""
    best: tuple[int, int, str] | None = None
    found = None
    for worker in world.pools.workers.values():
        if not worker.takes_new or worker.capacity_tokens < capacity:
            continue
        room = worker.open_blocks(world.growth_reserve, world.reserve_full)
        missing = world.need_blocks(sequence, worker) - room
        key = (_tokens_until(world, worker, missing), -room * worker.block_size, worker.id)
        if best is None or key < best:
            best, found = key, worker
    return found


def _tokens_until(world: World, worker: Worker, missing: int) -> int:
    """Tokens until residents have ended that hold so many blocks, if each ends at its longest.

    What the others grow by meanwhile is left out, and so is whoever ends or is cancelled sooner.
    """
    if missing <= 0:
        return 0
    ends = []
    for seq, private_blocks, tokens, _, _ in worker.usage:
        resident = world.sequences.get(seq)
        if resident is not None:
            made = max(tokens, resident.tokens)  # its prompt takes few steps
            ends.append((max(0, resident.tokens_max - made), private_blocks))
    for coming in (worker.pending, worker.earmarks):
        for seq, blocks in coming.items():
            if seq not in worker.residents:
                newcomer = world.sequences[seq]
                ends.append((max(0, newcomer.tokens_max - newcomer.tokens), blocks))
    left = 0
    for left, blocks in sorted(ends):  # noqa: B007 (the last one is the answer)
        missing -= blocks + world.growth_reserve
        if missing <= 0:
            break
    return left
