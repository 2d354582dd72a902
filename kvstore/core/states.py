"""The states of a sequence and the table of its legal moves (S1)."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """Where a sequence is in its life; the picture is in docs/architecture.md."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    SWAPPING_OUT = "swapping_out"
    SWAPPED = "swapped"
    SWAPPING_IN = "swapping_in"
    RECOVERING = "recovering"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ENDS = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})

NEXT: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.PREFILL}) | _ENDS,
    State.PREFILL: frozenset({State.DECODE, State.SWAPPING_OUT, State.RECOVERING}) | _ENDS,
    State.DECODE: frozenset({State.SWAPPING_OUT, State.RECOVERING}) | _ENDS,
    # A failed swap-out leaves its blocks where they are: the request goes on as it was.
    State.SWAPPING_OUT: frozenset(
        {State.SWAPPED, State.PREFILL, State.DECODE, State.RECOVERING} | _ENDS
    ),
    State.SWAPPED: frozenset({State.SWAPPING_IN, State.RECOVERING}) | _ENDS,
    State.SWAPPING_IN: frozenset(
        {State.PREFILL, State.DECODE, State.SWAPPED, State.RECOVERING} | _ENDS
    ),
    State.RECOVERING: frozenset({State.WAITING, State.SWAPPED}) | _ENDS,
    State.FINISHED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}


class IllegalMoveError(RuntimeError):
    """A move that the table does not have: a bug in the caller, never something the world did."""


def move(name: object, old: State, new: State) -> State:
    """Return ``new`` if a sequence may go there from ``old``; otherwise raise with id and states.

    >>> move("r1", State.WAITING, State.PREFILL)
    <State.PREFILL: 'prefill'>
    """
    if new not in NEXT[old]:
        allowed = ", ".join(sorted(s.value for s in NEXT[old])) or "none: it has ended"
        raise IllegalMoveError(f"{name}: {old.value} -> {new.value} is illegal (legal: {allowed})")
    return new
