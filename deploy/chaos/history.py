"""What one stream delivered, and every way in which that may be wrong."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise

from deepinfer.client import Accepted, Delta, Event, Finished, Notice


@dataclass(slots=True)
class History:
    """Everything one stream delivered, as it was delivered; times are of ``perf_counter``."""

    expected: tuple[int, ...]
    request: str = ""
    gateway: str = ""
    """The one that accepted it, or took it over last."""
    error: str = ""
    """How the SDK gave it up."""
    events: list[tuple[float, Event]] = field(default_factory=list)

    def hear(self, event: Event) -> None:
        self.events.append((time.perf_counter(), event))
        if isinstance(event, Accepted):
            self.request, self.gateway = event.request_id, event.gateway

    @property
    def tokens(self) -> int:
        return sum(len(e.token_ids) for _, e in self.events if isinstance(e, Delta))

    @property
    def ended(self) -> bool:
        return bool(self.error) or any(isinstance(e, Finished) for _, e in self.events)

    def faults(self) -> Faults:
        """Hold every delivery against the expected ids."""
        seen = [0] * len(self.expected)
        changed = disordered = 0
        at = 0
        for _, event in self.events:
            if not isinstance(event, Delta):
                continue
            disordered += event.position != at
            for position, token in enumerate(event.token_ids, event.position):
                if position >= len(self.expected) or token != self.expected[position]:
                    changed += 1
                else:
                    seen[position] += 1
            at = event.position + len(event.token_ids)
        final = [e.choice.token_ids for _, e in self.events if isinstance(e, Finished)]
        return Faults(
            lost=seen.count(0),
            doubled=sum(count - 1 for count in seen if count > 1),
            changed=changed,
            disordered=disordered,
            unfinished=int(final != [self.expected]),
        )

    def recovered_s(self, since: float) -> float | None:
        """From ``since`` to the first token that a run placed after it made; None without one."""
        placed = False
        for at, event in self.events:
            if at < since:
                continue
            placed = placed or (isinstance(event, Notice) and event.kind != "swap_failed")
            if placed and isinstance(event, Delta):
                return at - since
        return None

    def next_token_s(self, since: float) -> float | None:
        """From ``since`` to the next token; None if none came."""
        return next((at - since for at, e in self.events if at >= since and _is_token(e)), None)

    def paused_s(self, since: float) -> float:
        """The longest time without a token from ``since`` on."""
        times = [since, *(at for at, e in self.events if _is_token(e) and at >= since)]
        return max((b - a for a, b in pairwise(times)), default=0.0)

    def intervals_s(self, begin: float, end: float) -> list[float]:
        """Times between tokens that follow each other within [begin, end], in seconds a token.

        Only of one run: across a swap or a move, waiting would be counted.
        """
        found: list[float] = []
        before: float | None = None
        for at, event in self.events:
            if isinstance(event, Notice):
                before = None
            elif isinstance(event, Delta):
                if before is not None and begin <= at <= end:
                    found.append((at - before) / max(1, len(event.token_ids)))
                before = at
        return found

    def marks(self, since: float) -> list[tuple[int, str]]:
        """(milliseconds from ``since``, what came): "." for tokens, a notice's kind, or "end"."""
        found: list[tuple[int, str]] = []
        for at, event in self.events:
            what = "." if _is_token(event) else ""
            what = event.kind if isinstance(event, Notice) else what
            what = "end" if isinstance(event, Finished) else what
            mark = (round((at - since) * 1e3), what)
            if what and (not found or found[-1] != mark):
                found.append(mark)
        return found

    def count(self, name: str) -> int:
        """A count of ``SwapStats``, as its gateway had it at the end."""
        ends = [e.choice.swaps for _, e in self.events if isinstance(e, Finished)]
        return sum(getattr(end, name) for end in ends)

    @property
    def swaps(self) -> int:
        return self.count("swaps")


def _is_token(event: Event) -> bool:
    return isinstance(event, Delta)


@dataclass(frozen=True, slots=True)
class Faults:
    """What must not happen, counted."""

    lost: int = 0
    doubled: int = 0
    changed: int = 0
    disordered: int = 0
    unfinished: int = 0

    def __add__(self, other: Faults) -> Faults:
        return Faults(
            self.lost + other.lost,
            self.doubled + other.doubled,
            self.changed + other.changed,
            self.disordered + other.disordered,
            self.unfinished + other.unfinished,
        )
