"""Emptying workers and gateways, so that they can be stopped and nobody notices.

A drain is a level: it is repeated with every answer to a report until the process has restarted,
and the process reports it back, so that it outlives the controller.
"""

from __future__ import annotations

from typing import NamedTuple

from deepinfer.controller.core import shedding, swaps
from deepinfer.controller.core.events import Drain
from deepinfer.controller.core.peers import Gateway
from deepinfer.controller.core.pools import Worker
from deepinfer.controller.core.sequences import Sequence
from deepinfer.controller.core.world import World
from deepinfer.kvstore.core.ids import GatewayId, Incarnation, WorkerId
from deepinfer.kvstore.core.messages import DrainRule


class DrainLevel(NamedTuple):
    """How far the emptying of one worker or gateway has come."""

    name: str
    life: Incarnation
    serving: bool
    """It is there and takes new requests."""
    draining: bool
    drained: bool
    """Nothing needs this life any more."""
    left: int
    """Requests that it still has."""


def order(world: World, wanted: Drain) -> None:
    """Begin a drain, or bring its end forward; nothing for a life that is not there (any more)."""
    until_ms = None if wanted.grace_ms is None else world.now_ms + wanted.grace_ms
    worker = world.pools.workers.get(WorkerId(wanted.peer))
    gateway = world.gateways.get(GatewayId(wanted.peer))
    peer = gateway if worker is None else worker
    if peer is None or not peer.alive or wanted.life not in (None, peer.link.incarnation):
        return
    peer.ordered_drain = True
    peer.drain_until_ms = _earlier(peer.drain_until_ms, until_ms)
    if worker is not None:
        worker.draining = True
        world.pools.touch(worker)
        world.dirty_workers[worker.id] = None


def _earlier(one_ms: int | None, other_ms: int | None) -> int | None:
    if one_ms is None or other_ms is None:
        return one_ms if other_ms is None else other_ms
    return min(one_ms, other_ms)


def rule(world: World, peer: Worker | Gateway) -> DrainRule | None:
    """What to tell a worker or gateway with the answer to its report."""
    if not peer.ordered_drain:
        return None
    until_ms = peer.drain_until_ms
    return DrainRule(None if until_ms is None else max(0, until_ms - world.now_ms))


def level(world: World, name: str) -> DrainLevel | None:
    """How far a worker or gateway is; None if none of that name is known."""
    worker = world.pools.workers.get(WorkerId(name))
    if worker is not None:
        left = len(worker.residents) + sum(s not in worker.residents for s in worker.pending)
        # Its own word is needed: until then an order that is still on its way may be obeyed.
        drained = worker.alive and worker.says_draining and left == 0
        return DrainLevel(
            name, worker.link.incarnation, worker.takes_new, worker.draining, drained, left
        )
    gateway = world.gateways.get(GatewayId(name))
    if gateway is None:
        return None
    draining = gateway.ordered_drain or gateway.draining
    return DrainLevel(
        name,
        gateway.link.incarnation,
        gateway.alive and not draining,
        draining,
        gateway.drained,
        len(gateway.seqs),
    )


def empty(world: World, worker: Worker) -> None:
    """Move away whoever can go on elsewhere; once the grace is over, everybody.

    KV goes to a store, to be resumed elsewhere, or here after the restart. Without KV, or without a
    store that takes it, the sequence is computed again.
    """
    if not worker.alive or not world.ready:
        return
    until_ms = worker.drain_until_ms
    over = until_ms is not None and world.now_ms >= until_ms
    with_kv = {c.seq: c for c in swaps.candidates(world, worker)}
    for seq in list(worker.residents):
        sequence = world.sequences[seq]
        elsewhere = _fits_elsewhere(world, sequence)
        if not (elsewhere or over):
            continue
        candidate = with_kv.get(seq)
        gain = candidate.gain_blocks if candidate is not None else 0
        if candidate is not None and world.config.cpu_offload:
            if swaps.can_swap(world, worker) and swaps.begin(world, worker, sequence, gain):
                continue
            if not over:
                continue  # a store that is full may have room before the grace is over
        if swaps.movable(worker, sequence):
            swaps.preempt(world, worker, sequence, gain)


def _fits_elsewhere(world: World, sequence: Sequence) -> bool:
    """Whether another worker that takes new requests could ever hold the sequence."""
    pools = world.pools
    low = pools.index_for(sequence.capacity_needed)
    if world.any_planes and shedding.is_exact(sequence):
        return any(
            worker.takes_new and shedding.may_hold(worker, sequence)
            for worker in pools.workers.values()
        )
    return pools.roomiest(low, len(pools.capacities)) is not None
