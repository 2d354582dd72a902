"""What each worker is told of its weights' precision: the policy, and what waits here for it."""

from __future__ import annotations

from typing import NamedTuple

from deepinfer.controller.core.pools import Worker
from deepinfer.controller.core.sequences import Sequence
from deepinfer.controller.core.world import World
from deepinfer.kvstore.core.precision import PrecisionRule
from deepinfer.kvstore.core.states import State

RENEW_MS = 100
"""The line is gone through so often at most, however many workers report."""


class Waiting(NamedTuple):
    """Requests in line that have not had a token yet."""

    seen_ms: int
    """When the line was gone through."""
    tokens: int
    """Of their prompts."""
    since_ms: int
    """When the oldest of them came."""
    workers: int
    """Among which they will be shared out."""


def rule(world: World, worker: Worker) -> PrecisionRule | None:
    """The answer's part for a worker; None if its weights are not nested.

    What waits in line is everybody's: each worker is told its share of the tokens.
    """
    if worker.precision is None:
        return None
    waiting = world.waiting
    if waiting is None or world.now_ms >= waiting.seen_ms + RENEW_MS:
        waiting = world.waiting = _look(world)
    tokens, since_ms = -(-waiting.tokens // waiting.workers), waiting.since_ms
    for seq in worker.earmarks:  # room is being made for it here, so it is not in line
        tokens, since_ms = _with(world.sequences[seq], tokens, since_ms)
    return PrecisionRule(
        settings=world.config.precision,
        waiting_tokens=tokens,
        waiting_ms=world.now_ms - since_ms if tokens else 0,
        shed=worker.planes is not None and worker.planes.wanted,
    )


def _look(world: World) -> Waiting:
    tokens, since_ms = 0, world.now_ms
    for sequence in world.line.members():
        tokens, since_ms = _with(sequence, tokens, since_ms)
    serving = sum(1 for worker in world.pools.workers.values() if worker.takes_new)
    return Waiting(world.now_ms, tokens, since_ms, max(1, serving))


def _with(sequence: Sequence, tokens: int, since_ms: int) -> tuple[int, int]:
    level = sequence.level
    if sequence.state is not State.WAITING or level is None or level.held_tokens:
        return tokens, since_ms
    return tokens + level.prompt_tokens, min(since_ms, sequence.since_ms)
