"""One seed, and a range of them: run, watched, and judged."""

from __future__ import annotations

import gc
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TextIO

from deepinfer.deploy.sim.case import Case, kind_of
from deepinfer.deploy.sim.coverage import of_moves, of_world, watched_moves
from deepinfer.deploy.sim.plan import draw
from deepinfer.deploy.sim.world import World

LAST_EVENTS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """One seed that broke a promise."""

    seed: int
    error: str
    kind: str
    """The error without names and numbers: what failures have in common."""
    last_events: tuple[str, ...]

    @property
    def replay(self) -> str:
        """The command that shows it again."""
        return f"deepinfer simulate --seeds 1 --start {self.seed} --trace"

    @property
    def shrink(self) -> str:
        """The command that finds out what it takes."""
        return f"deepinfer simulate --seeds 1 --start {self.seed} --shrink"


@dataclass(slots=True)
class Tally:
    """What some seeds came to. Tallies add up."""

    seeds: int = 0
    acts: int = 0
    """Simulated events."""
    simulated_ms: int = 0
    failures: list[Failed] = field(default_factory=list)
    coverage: Counter[str] = field(default_factory=Counter)

    def add(self, other: Tally) -> None:
        """Add another's numbers."""
        self.seeds += other.seeds
        self.acts += other.acts
        self.simulated_ms += other.simulated_ms
        self.failures += other.failures
        self.coverage.update(other.coverage)


class Tape:
    """Writes every event as one line; keeps the last ones and a hash of all."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.last: deque[str] = deque(maxlen=LAST_EVENTS)
        self._hash = blake2b(digest_size=16)
        self._out = out

    def __call__(self, now_ms: int, sign: str, source: str, target: str, message: object) -> None:
        line = f"{now_ms:6d} {source} {sign} {target} {message!r}"
        self._hash.update(line.encode())
        self.last.append(line)
        if self._out is not None:
            self._out.write(line + "\n")

    def digest(self) -> str:
        """Hash of every line so far."""
        return self._hash.hexdigest()


def run_seed(seed: int, tape: Tape | None = None) -> World:
    """Run one seed to its end. Raises whatever breaks."""
    world = Case(draw(seed)).world(tape)
    world.run()
    return world


def trace_digest(seed: int) -> str:
    """The hash of everything that happens in a seed."""
    tape = Tape()
    run_seed(seed, tape)
    return tape.digest()


def _try_seed(seed: int, tally: Tally) -> None:
    world = Case(draw(seed)).world()
    try:
        world.run()
    except Exception as error:  # noqa: BLE001  # whatever a core raises is what we look for
        text = f"{type(error).__name__}: {error}"
        tape = Tape()
        with suppress(Exception):
            run_seed(seed, tape)  # once more, on tape this time
        failed = Failed(seed=seed, error=text, kind=kind_of(error), last_events=tuple(tape.last))
        tally.failures.append(failed)
    tally.seeds += 1
    tally.acts += world.engine.acts
    tally.simulated_ms += world.engine.now_ms
    tally.coverage.update(of_world(world))


def sweep(seeds: int, start: int = 0, *, failures_max: int = 10) -> Tally:
    """Run ``seeds`` seeds from ``start`` on, here and now; stop after ``failures_max``."""
    for name, value, least in (("seeds", seeds, 1), ("start", start, 0)):
        if value < least:
            raise ValueError(f"{name} = {value}: must be {least} or more")
    tally = Tally()
    thresholds = gc.get_threshold()
    gc.set_threshold(200_000, *thresholds[1:])  # a world is a few cycles: many die at once
    try:
        with watched_moves() as moves:
            for seed in range(start, start + seeds):
                _try_seed(seed, tally)
                if len(tally.failures) >= failures_max:
                    break
            tally.coverage.update(of_moves(moves))
    finally:
        gc.set_threshold(*thresholds)
    return tally
