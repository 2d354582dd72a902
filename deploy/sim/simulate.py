"""``deepinfer simulate``: many seeds, each a cluster with its own faults.

A seed that fails prints what broke, the command that replays it, and the last events before it.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from multiprocessing import get_context
from typing import TextIO

from deepinfer.deploy.sim.plan import draw
from deepinfer.deploy.sim.world import World

LAST_EVENTS = 40
_CHUNK = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """One seed that broke a promise."""

    seed: int
    error: str
    last_events: tuple[str, ...]

    @property
    def replay(self) -> str:
        """The command that shows it again."""
        return f"deepinfer simulate --seeds 1 --start {self.seed} --trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a range of seeds came to."""

    seeds: int
    failures: tuple[Failed, ...]
    acts: int
    """Simulated events, over all seeds."""
    simulated_ms: int
    wall_s: float

    @property
    def seeds_per_s(self) -> float:
        """Seeds a second of wall time."""
        return self.seeds / self.wall_s if self.wall_s > 0 else 0.0


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
    world = World(draw(seed), tape=tape)
    world.run()
    return world


def trace_digest(seed: int) -> str:
    """The hash of everything that happens in a seed."""
    tape = Tape()
    run_seed(seed, tape)
    return tape.digest()


def _try_seed(seed: int) -> tuple[int, int, Failed | None]:
    try:
        world = run_seed(seed)
    except Exception as error:  # noqa: BLE001  # whatever a core raises is what we look for
        text = f"{type(error).__name__}: {error}"
        return 0, 0, Failed(seed=seed, error=text, last_events=_last_events(seed))
    return world.engine.acts, world.engine.now_ms, None


def _last_events(seed: int) -> tuple[str, ...]:
    """Run a failing seed once more, on tape this time."""
    tape = Tape()
    with suppress(Exception):
        run_seed(seed, tape)
    return tuple(tape.last)


def _try_seeds(start: int, count: int) -> list[tuple[int, int, Failed | None]]:
    return [_try_seed(seed) for seed in range(start, start + count)]


def _results(seeds: int, start: int, jobs: int) -> Iterator[tuple[int, int, Failed | None]]:
    if jobs == 1:
        for seed in range(start, start + seeds):
            yield _try_seed(seed)
        return
    starts = range(start, start + seeds, _CHUNK)
    counts = [min(_CHUNK, start + seeds - first) for first in starts]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for chunk in pool.map(_try_seeds, starts, counts):
            yield from chunk


def sweep(seeds: int, start: int = 0, jobs: int = 1, *, failures_max: int = 10) -> Summary:
    """Run ``seeds`` seeds from ``start`` on, in ``jobs`` processes; stop after ``failures_max``."""
    for name, value, least in (("seeds", seeds, 1), ("start", start, 0), ("jobs", jobs, 1)):
        if value < least:
            raise ValueError(f"{name} = {value}: must be {least} or more")
    began = time.monotonic()
    failures: list[Failed] = []
    done = acts = simulated_ms = 0
    for seed_acts, seed_ms, failed in _results(seeds, start, jobs):
        done += 1
        acts += seed_acts
        simulated_ms += seed_ms
        if failed is not None:
            failures.append(failed)
            if len(failures) >= failures_max:
                break
    return Summary(
        seeds=done,
        failures=tuple(failures),
        acts=acts,
        simulated_ms=simulated_ms,
        wall_s=time.monotonic() - began,
    )


def run(
    seeds: int, start: int = 0, jobs: int = 1, trace: bool = False, out: TextIO = sys.stdout
) -> int:
    """The command: print to ``out`` and return the exit status (1 if a seed failed)."""
    if trace:
        return _trace(seeds, start, out)
    summary = sweep(seeds, start, jobs)
    for failed in summary.failures:
        out.write(f"seed {failed.seed}: {failed.error}\n")
        out.writelines(f"    {line[:400]}\n" for line in failed.last_events)
        out.write(f"    replay: {failed.replay}\n")
    out.write(
        f"{summary.seeds} seeds, {len(summary.failures)} failed; {summary.acts} events in"
        f" {summary.simulated_ms / 1000:.0f} simulated s; {summary.wall_s:.1f} s,"
        f" {summary.seeds_per_s:.0f} seeds/s\n"
    )
    return 1 if summary.failures else 0


def _trace(seeds: int, start: int, out: TextIO) -> int:
    status = 0
    for seed in range(start, start + seeds):
        out.write(f"seed {seed}: {draw(seed)}\n")
        tape = Tape(out)
        try:
            run_seed(seed, tape)
        except Exception as error:  # noqa: BLE001
            out.write(f"seed {seed}: {type(error).__name__}: {error}\n")
            status = 1
        else:
            out.write(f"seed {seed}: passed, trace {tape.digest()}\n")
    return status
