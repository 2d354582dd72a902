"""The controller's knowledge as plain values, for ``deepinfer status`` and metrics."""

from __future__ import annotations

from dataclasses import asdict

from deepinfer.controller.core.planes import Planes
from deepinfer.controller.core.pools import Worker
from deepinfer.controller.core.sequences import Sequence
from deepinfer.controller.core.world import World
from deepinfer.kvstore.core.messages import TicketState
from deepinfer.kvstore.core.states import State


def snapshot(world: World) -> dict[str, object]:
    """Pools, stores, requests by state and one by one, ``swapped``, ``cpu_offload``, counters."""
    return summary(world) | {"sequences": [_request(s) for s in world.sequences.values()]}


def summary(world: World) -> dict[str, object]:
    """The snapshot without the single requests."""
    stores = {}
    payload_bytes = 0
    for store in world.stores.values():
        held = [
            world.sequences[ticket.seq].tickets[ticket].level
            for ticket in store.tickets
            if ticket in world.sequences[ticket.seq].tickets
        ]
        committed = [level for level in held if level.state is TicketState.COMMITTED]
        stored_bytes = sum(level.payload_bytes for level in committed)
        payload_bytes += stored_bytes
        stores[str(store.id)] = {
            "node": str(store.node),
            "alive": store.link.reported,
            "incarnation": store.link.incarnation,
            "budget_bytes": store.budget_bytes,
            "used_bytes": store.used_bytes,
            "payload_bytes": stored_bytes,
            "tickets": len(committed),
        }
    budget_bytes = sum(s.budget_bytes for s in world.stores.values() if s.link.reported)
    bound = world.config.max_swapped_requests
    cpu_offload = {
        "enabled": world.config.cpu_offload,
        "payload_bytes": payload_bytes,
        "budget_bytes": budget_bytes,
        "max_swapped_requests": bound,
    }
    counters = {_exported(name): count for name, count in asdict(world.counters).items()}
    counters["swapped_requests"] = world.states[State.SWAPPED]
    counters["cpu_offload_bytes"] = payload_bytes
    counters["cpu_offload_budget_bytes"] = budget_bytes
    counters["cpu_offload_enabled"] = int(world.config.cpu_offload)
    if bound is not None:
        counters["max_swapped_requests"] = bound
    return {
        "epoch": world.epoch,
        "ready": world.ready,
        "deterministic": world.config.deterministic,
        "all_reported": world.all_reported,
        "workers": {str(w.id): _worker(w) for w in world.pools.workers.values()},
        "stores": stores,
        "gateways": {
            str(g.id): {
                "alive": g.link.reported,
                "incarnation": g.link.incarnation,
                "requests": len(g.seqs),
                "draining": g.ordered_drain or g.draining,
                "drained": g.drained,
            }
            for g in world.gateways.values()
        },
        "requests": {state.value: world.states[state] for state in State},
        "waiting": len(world.line),
        "swapped": world.states[State.SWAPPED],
        "cpu_offload": cpu_offload,
        "counters": counters,
    }


def _exported(name: str) -> str:
    return name if name.startswith("kv_cpu_offload_") else f"deepinfer_controller_{name}"


def _worker(worker: Worker) -> dict[str, object]:
    return {
        "node": str(worker.node),
        "state": _state(worker),
        "incarnation": worker.link.incarnation,
        "block_size": worker.block_size,
        "block_bytes": worker.block_bytes,
        "blocks_total": worker.blocks_total,
        "blocks_free": worker.blocks_free,
        "blocks_short": worker.blocks_short,
        "precision": None if worker.precision is None else worker.precision._asdict(),
        "planes": None if worker.planes is None else _planes(worker, worker.planes),
        "residents": len(worker.residents),
        "pending": len(worker.pending),
        "swapped_from_here": len(worker.cold),
    }


def _planes(worker: Worker, planes: Planes) -> dict[str, object]:
    level = planes.level
    return {
        "state": level.state.value,
        "wanted_away": planes.wanted,
        "blocks_gained": max(0, worker.blocks_total - level.ordinary_blocks),
        "blocks_to_gain": level.tail_blocks,
        "return_ms": level.return_ms,
    }


def _state(worker: Worker) -> str:
    if not worker.alive:
        return "gone"
    if worker.silent or worker.deaf_until_ms is not None:
        return "suspected"
    return "draining" if worker.draining else "serving"


def _request(sequence: Sequence) -> dict[str, object]:
    level, place, payload = sequence.level, sequence.place, sequence.payload()
    return {
        "request": str(sequence.seq.request),
        "choice": sequence.seq.choice,
        "state": sequence.state.value,
        "gateway": None if sequence.owner is None else str(sequence.owner),
        "worker": None if place is None else str(place.worker.worker),
        "run": None if place is None else tuple(place.run),
        "store": None if payload is None else str(payload.store),
        "swaps": sequence.swaps,
        "prompt_tokens": None if level is None else level.prompt_tokens,
        "tokens": sequence.tokens,
        "tokens_max": sequence.tokens_max,
        "arrival_ms": None if level is None else level.arrival_ms,
    }
