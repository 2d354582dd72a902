"""Who gives way: the order of candidates, and as few of them as it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from deepinfer.kvstore.core.ids import Seq


class Candidate(NamedTuple):
    """A resident that could be swapped out or preempted."""

    seq: Seq
    arrival_ms: int
    last_step: int
    """Its worker's step counter when it last computed a token."""
    gain_blocks: int
    """Blocks that come free when it leaves: its private ones."""
    copy_blocks: int
    """Blocks to copy, shared ones too."""
    protected: bool
    """It has not advanced ``min_residency_tokens`` since it was resumed."""


Policy = Callable[[Candidate], tuple[float, float, Seq]]


def lru(candidate: Candidate) -> tuple[float, float, Seq]:
    """Least recently active first; of those, the latest arrival."""
    return (candidate.last_step, -candidate.arrival_ms, candidate.seq)


def youngest(candidate: Candidate) -> tuple[float, float, Seq]:
    """Latest arrival first; of those, the least recently active."""
    return (-candidate.arrival_ms, candidate.last_step, candidate.seq)


def cost(candidate: Candidate) -> tuple[float, float, Seq]:
    """Fewest blocks copied for a block freed first; of those, the latest arrival."""
    return (
        candidate.copy_blocks / max(candidate.gain_blocks, 1),
        -candidate.arrival_ms,
        candidate.seq,
    )


POLICIES: Final[dict[str, Policy]] = {"lru": lru, "youngest": youngest, "cost": cost}


def choose(
    candidates: list[Candidate], policy: Policy, enough: Callable[[int, int], bool]
) -> list[Candidate]:
    """Return as few candidates as are enough, in the policy's order; none if all are not enough.

    ``enough(blocks, count)`` says whether ``count`` victims that free ``blocks`` do. Candidates are
    taken in order until they do; then those are spared, earliest in the order first, without whom
    the others still do.
    """
    chosen: list[Candidate] = []
    blocks = 0
    for candidate in sorted(candidates, key=policy):
        chosen.append(candidate)
        blocks += candidate.gain_blocks
        if enough(blocks, len(chosen)):
            break
    else:
        return []
    for candidate in chosen[:-1]:
        if enough(blocks - candidate.gain_blocks, len(chosen) - 1):
            chosen.remove(candidate)
            blocks -= candidate.gain_blocks
    return chosen
