"""The loop: change an input, give it to the target, see what comes of it.

Inputs that show something new are kept and changed further: a line of ours that no input has
reached before (where the interpreter can tell without being slowed down: ``sys.monitoring``, from
Python 3.12 on), or an error in words not seen before.

A fault is an error that the target does not name, a case that takes longer than ``HANG_S`` of
processor time (or ``WAIT_S`` on the clock), or one that grows the process by ``GROWTH_BYTES_MAX``.
"""

from __future__ import annotations

import contextlib
import logging
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any, Final

import structlog

from deepinfer.deploy.fuzz.target import Case, Target

HANG_S: Final = 1.0
WAIT_S: Final = 20.0
GROWTH_BYTES_MAX: Final = 256 << 20
POOL_MAX: Final = 512
CALM_CASES: Final = 64
"""Cases between two looks at the clock for the budget."""
_VARIABLE = re.compile(r"0x[0-9a-f]+|[0-9]+|'[^']*'|b?\"[^\"]*\"|<[^>]*>")
_OURS = "deepinfer"


class HangError(BaseException):
    """A case took too long. No Exception, so that nothing on the way takes it for its own."""


@dataclass(frozen=True, slots=True)
class Crash:
    """An input and what it did."""

    target: str
    data: bytes
    kind: str
    """The error's type, ``hang`` or ``memory``."""
    detail: str

    @property
    def place(self) -> str:
        """What tells one fault from another: the kind and the innermost line of ours."""
        lines = [
            line.strip() for line in self.detail.splitlines() if line.strip().startswith("File ")
        ]
        ours = [line for line in lines if _OURS in line and "/fuzz/loop.py" not in line]
        return f"{self.kind} {(ours or lines or [''])[-1]}"


@dataclass(slots=True)
class Tally:
    """What a run came to."""

    target: str
    cases: int = 0
    refused: int = 0
    """Cases that ended with one of the errors that the target names."""
    kept: int = 0
    """Inputs that showed something new."""
    crashes: list[Crash] = field(default_factory=list)
    slowest_s: float = 0.0
    """Processor time of the slowest case."""
    seconds: float = 0.0


class News:
    """Whether something happened that had not happened before."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._new = False

    def error(self, error: Exception) -> None:
        """Take note of an error's words, its numbers and quotations aside."""
        words = f"{type(error).__name__}: {_VARIABLE.sub('#', str(error)[:160])}"
        if words not in self._seen and len(self._seen) < POOL_MAX:
            self._seen.add(words)
            self._new = True

    def line(self, code: CodeType, _: int) -> Any:
        """A line that runs for the first time; the interpreter does not tell of it again."""
        if _OURS in code.co_filename:
            self._new = True
        return sys.monitoring.DISABLE  # type: ignore[attr-defined]  # from 3.12 on

    def take(self) -> bool:
        """Whether there was any since it was asked last."""
        new, self._new = self._new, False
        return new

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hear of lines, where the interpreter can tell."""
        monitoring: Any = getattr(sys, "monitoring", None)
        if monitoring is None:
            yield
            return
        tool = monitoring.COVERAGE_ID
        monitoring.use_tool_id(tool, "deepinfer fuzz")
        monitoring.register_callback(tool, monitoring.events.LINE, self.line)
        monitoring.set_events(tool, monitoring.events.LINE)
        try:
            yield
        finally:
            monitoring.set_events(tool, 0)
            monitoring.register_callback(tool, monitoring.events.LINE, None)
            monitoring.free_tool_id(tool)
            monitoring.restart_events()


def fuzz(
    target: Target,
    folder: Path,
    *,
    cases: int,
    seed: str,
    deadline_s: float | None = None,
    about_to: Callable[[bytes], None] = lambda _: None,
    crashes_max: int = 20,
) -> Tally:
    """Run up to ``cases`` cases, the same ones for the same seed.

    Args:
        target: what gets them.
        folder: where it may write.
        cases: how many.
        seed: of the choices.
        deadline_s: of the monotonic clock, after which no case is begun.
        about_to: is given each input before the target is, for the case that ends the process.
        crashes_max: after so many faults the run ends.
    """
    rng = Random(f"{target.name} {seed}")
    seeds = list(target.seeds())
    pool = list(seeds)
    tally, news = Tally(target.name), News()
    began = time.monotonic()
    with watched(), news.watching():
        opened = target.open(folder)
        case = opened.__enter__()
        try:
            while tally.cases < cases and len(tally.crashes) < crashes_max:
                looks = deadline_s is not None and tally.cases % CALM_CASES == 0
                if looks and time.monotonic() >= (deadline_s or 0):
                    break
                data = _next(target, tally.cases, seeds, pool, rng)
                about_to(data)
                error, crash, took_s = run_case(target, case, data)
                tally.cases += 1
                tally.slowest_s = max(tally.slowest_s, took_s)
                if crash is not None:
                    tally.crashes.append(crash)
                    if crash.kind == "hang":  # whatever it was in the midst of
                        opened.__exit__(None, None, None)
                        opened = target.open(folder)
                        case = opened.__enter__()
                    continue
                if error is not None:
                    tally.refused += 1
                    news.error(error)
                if news.take():
                    tally.kept += 1
                    if len(pool) < POOL_MAX:
                        pool.append(data)
                    else:
                        pool[rng.randrange(len(seeds), POOL_MAX)] = data
        finally:
            opened.__exit__(None, None, None)
    tally.seconds = time.monotonic() - began
    return tally


def _next(
    target: Target, number: int, seeds: Sequence[bytes], pool: Sequence[bytes], rng: Random
) -> bytes:
    if number < len(seeds):
        return seeds[number]
    return target.shape.mutate(rng.choice(pool), rng, pool)[: target.input_bytes_max]


def run_case(
    target: Target, case: Case, data: bytes
) -> tuple[Exception | None, Crash | None, float]:
    """Give the target one input; return what it said, what is wrong, and the seconds it took."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error: Exception | None = None
    kind = detail = ""
    began = time.thread_time()
    signal.setitimer(signal.ITIMER_PROF, HANG_S)
    signal.setitimer(signal.ITIMER_REAL, WAIT_S)
    try:
        case(data)
    except target.errors as raised:
        error = raised
    except HangError:
        kind, detail = "hang", traceback.format_exc()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as raised:  # noqa: BLE001 - the fault may be any: pyo3's panics are no Exception
        kind, detail = type(raised).__name__, traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    took_s = time.thread_time() - began
    if not kind and took_s > HANG_S:
        kind, detail = "hang", f"{took_s:.2f} s"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if not kind and grown > GROWTH_BYTES_MAX:
        kind, detail = "memory", f"grew by {grown >> 20} MiB"
    return error, Crash(target.name, data, kind, detail) if kind else None, took_s


@contextmanager
def watched() -> Iterator[None]:
    """Let the timers of ``run_case`` interrupt the main thread, and nothing be logged."""

    def late(_: int, __: FrameType | None) -> None:
        raise HangError

    before = [(number, signal.signal(number, late)) for number in (signal.SIGPROF, signal.SIGALRM)]
    with contextlib.suppress(OSError):  # the peak so far would hide a case's growth below it
        Path("/proc/self/clear_refs").write_text("5")
    logs = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.CRITICAL)  # a million refusals would each be a line
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        structlog.configure(**logs)
        for number, handler in before:
            signal.signal(number, handler)
