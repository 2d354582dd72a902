"""What a simulation has seen: without it, nobody knows what a green run has not tried.

Keys are words: ``fault kill_worker``, ``mishap lost Commit``, ``move prefill -> decode`` (of a
worker, or in the controller's view), ``event worker FetchDone``, ``effect store RevokePut``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING

from deepinfer.controller.core import world as controller_world
from deepinfer.controller.core.sequences import walk
from deepinfer.kvstore.core.precision import Precision
from deepinfer.kvstore.core.states import NEXT, State, move
from deepinfer.workers.core import sequence as worker_sequence

if TYPE_CHECKING:
    from deepinfer.deploy.sim.world import World

Moves = dict[tuple[State, State], int]
_MOVERS = ((worker_sequence, "move"), (controller_world, "walk"))
"""Where the cores look up the functions by which they move."""


@contextmanager
def watched_moves() -> Iterator[Moves]:
    """Count the legal moves that the cores make from here on."""
    seen: Moves = {(old, new): 0 for old in State for new in NEXT[old]}

    def counted_move(name: object, old: State, new: State) -> State:
        seen[old, new] = seen.get((old, new), 0) + 1
        return move(name, old, new)

    def counted_walk(name: object, old: State, new: State) -> State:
        if (old, new) in seen:  # one step; between two reports there may be several
            seen[old, new] += 1
        return walk(name, old, new)

    _put(counted_move, counted_walk)
    try:
        yield seen
    finally:
        _put(move, walk)


def _put(*functions: Callable[[object, State, State], State]) -> None:
    """Have the cores move by these functions."""
    for (module, name), function in zip(_MOVERS, functions, strict=True):
        setattr(module, name, function)


def of_moves(seen: Moves) -> Counter[str]:
    """The moves that were made, as keys."""
    return Counter({f"move {a.value} -> {b.value}": n for (a, b), n in seen.items() if n})


def of_world(world: World) -> Counter[str]:
    """What happened in one world."""
    counts = Counter({f"fault {name}": n for name, n in world.saboteur.struck.items()})
    counts.update({f"mishap {what}": n for what, n in world.weather.befallen.items()})
    counts.update({f"count {what}": n for what, n in _numbers(world).items()})
    for word, heard in (("event", world.heard), ("effect", world.done)):
        for kind, types in heard.items():
            counts.update({f"{word} {kind} {t.__name__}": n for t, n in types.items()})
    return counts


def _numbers(world: World) -> Counter[str]:
    """What the last life of each worker and gateway has counted."""
    found: Counter[str] = Counter()
    for worker in world.workers.values():
        if worker.core is None:
            continue
        counters = worker.core.counters
        found["orders refused"] += counters.orders_refused
        found["switches of precision"] += counters.precision_switches
        for precision, tokens in zip(Precision, counters.tokens_in, strict=True):
            found[f"tokens of {precision.value} steps"] += tokens
    for gateway in world.gateways.values():
        if gateway.core is not None:
            found["requests taken over"] += gateway.core.counters["takeovers_total"]
    return found


class Part(Enum):
    """What may be counted; a key begins with one of these words."""

    FAULT = "fault"
    MISHAP = "mishap"
    MOVE = "move"
    EVENT = "event"
    EFFECT = "effect"
    COUNT = "count"


def table(coverage: Counter[str], part: Part) -> dict[str, int]:
    """The counts of one part, the most frequent first."""
    chosen = {
        key.partition(" ")[2]: n for key, n in coverage.items() if key.startswith(f"{part.value} ")
    }
    return dict(sorted(chosen.items(), key=lambda item: (-item[1], item[0])))
