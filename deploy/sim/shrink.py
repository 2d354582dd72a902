"""Of everything that happens in a failing case, what it takes to fail.

Delta debugging (Zeller and Hildebrandt, 2002) on lists - strikes, mishaps of messages, clients,
processes - and one attempt each at the plain value of every other draw, round after round, until
nothing can be left out any more. A smaller case counts if it fails in the same way (``kind_of``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from deepinfer.deploy.sim.case import Case, kind_of
from deepinfer.deploy.sim.faults import Mishap

T = TypeVar("T")

_PLAIN: dict[str, Any] = {
    "noisy": False,
    "tight": False,
    "patient": False,
    "prefix_cache": False,
    "clock_skew_ms": 0,
    "late_start_ms": 0,
    "prefetch_blocks": 0,
    "w8a8_rows": 0,
    "precision": "fp16",
    "policy": "lru",
    "reserve_full": False,
    "max_swapped_requests": None,
    "min_residency_tokens": 0,
    "growth_reserve_blocks": 0,
}
"""Values that make a plan simpler to understand."""
_PLAIN_CLIENT: dict[str, Any] = {
    "choices": 1,
    "stop_ids": (),
    "stop_pair": None,
    "min_tokens": 0,
    "deadline_after_ms": None,
    "read_ms": 0,
    "abort_after_ms": None,
    "vanish_after_ms": None,
    "cut_after_ms": (),
    "priority": 0,
    "exact": False,
}


class NoFailureError(ValueError):
    """There is nothing to shrink: the case passes."""


@dataclass(slots=True)
class Shrunk:
    """What is left of a failing case."""

    case: Case
    kind: str
    error: str = ""
    runs: int = 0
    """Cases tried."""
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    """How many strikes, mishaps, clients and processes there were and are."""


class _Shrinker:
    def __init__(self, case: Case, budget_s: float) -> None:
        self._until_s = time.monotonic() + budget_s
        self.runs = 0
        found = self._fails(case)
        if found is None:
            raise NoFailureError("the case passes: there is nothing to shrink")
        self.kind, self.error, mishaps, failed_ms = found
        strikes = tuple(s for s in case.plan.strikes if s.at_ms <= failed_ms)
        self.case = Case(case.plan, frozenset(mishaps))
        self._try(strikes=strikes)

    def _fails(self, case: Case) -> tuple[str, str, list[Mishap], int] | None:
        self.runs += 1
        world = case.world()
        try:
            world.run()
        except Exception as error:  # noqa: BLE001  # whatever a core raises is what we look for
            text = f"{type(error).__name__}: {error}"
            return kind_of(error), text, world.weather.mishaps, world.engine.now_ms
        return None

    def _keep(self, case: Case) -> bool:
        """Go on with a smaller case if it fails in the same way."""
        if time.monotonic() > self._until_s:
            return False
        found = self._fails(case)
        if found is None or found[0] != self.kind:
            return False
        self.case, self.error = case, found[1]
        return True

    def _try(self, **changes: Any) -> bool:
        return self._keep(Case(replace(self.case.plan, **changes), self.case.mishaps))

    def shrink(self) -> None:
        """Leave out what can be, until a whole round changes nothing."""
        while time.monotonic() < self._until_s:
            before = self.case
            self._lists()
            self._values()
            if self.case == before:
                return

    def _lists(self) -> None:
        plan = self.case.plan
        _minimize(plan.strikes, lambda some: self._try(strikes=tuple(some)))
        mishaps = sorted(self.case.mishaps or ())
        _minimize(mishaps, lambda some: self._keep(Case(self.case.plan, frozenset(some))))
        _minimize(plan.clients, lambda some: bool(some) and self._try(clients=tuple(some)))
        _minimize(plan.stores, lambda some: self._try(stores=tuple(some)))
        _minimize(plan.gateways, lambda some: bool(some) and self._try(gateways=tuple(some)))
        _minimize(plan.workers, lambda some: bool(some) and self._try(workers=tuple(some)))

    def _values(self) -> None:
        for name, value in _PLAIN.items():
            if getattr(self.case.plan, name) != value:
                self._try(**{name: value})
        for index in range(len(self.case.plan.clients)):
            for name, value in _PLAIN_CLIENT.items():
                clients = list(self.case.plan.clients)
                if getattr(clients[index], name) != value:
                    clients[index] = replace(clients[index], **{name: value})
                    self._try(clients=tuple(clients))


def _minimize(items: Sequence[T], fails: Callable[[list[T]], bool]) -> list[T]:
    """A part of ``items`` that ``fails`` accepts, without any one that could be left out."""
    left = list(items)
    if not left or fails([]):
        return []
    parts = 2
    while len(left) >= 2:
        size = -(-len(left) // parts)
        for rest in _without_each(left, size):
            if fails(rest):
                left, parts = rest, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(len(left), 2 * parts)
    return left


def _without_each(items: list[T], size: int) -> Iterator[list[T]]:
    for start in range(0, len(items), size):
        yield items[:start] + items[start + size :]


def _sizes(case: Case, mishaps: int) -> dict[str, int]:
    plan = case.plan
    return {
        "strikes": len(plan.strikes),
        "mishaps": mishaps,
        "clients": len(plan.clients),
        "processes": 1 + len(plan.workers) + len(plan.stores) + len(plan.gateways),
    }


def shrink(case: Case, *, budget_s: float = 60.0) -> Shrunk:
    """Reduce a failing case within about ``budget_s``. Raises NoFailureError if it passes."""
    shrinker = _Shrinker(case, budget_s)
    before = _sizes(case, len(shrinker.case.mishaps or ()))
    shrinker.shrink()
    left = shrinker.case
    return Shrunk(
        left,
        shrinker.kind,
        shrinker.error,
        shrinker.runs,
        before,
        _sizes(left, len(left.mishaps or ())),
    )
