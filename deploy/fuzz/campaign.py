"""Many cases of many targets, over several processes.

Cases come in chunks; the cases of a chunk are a function of target, seed and chunk number alone,
however many processes there are. A process that a case ends, or that does not come to its next case
for ``STUCK_S``, leaves its input behind in shared memory: it is a fault like any other, and another
process takes its place.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.fuzz import corpus
from deepinfer.deploy.fuzz.loop import Crash, Tally, fuzz

CHUNK_CASES: Final = 5_000
STUCK_S: Final = 60.0
POLL_S: Final = 0.5
WRITE_S: Final = 10.0
_BOX_BYTES: Final = 1 << 17
_HEAD_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run."""

    targets: Sequence[str]
    cases: int
    """Of each target."""
    seed: int
    jobs: int
    budget_s: float | None
    """After which no chunk is begun; None: until all is done."""
    folder: Path
    """Where inputs that break something are kept."""


@dataclass(slots=True)
class Total:
    """What came of one target."""

    cases: int = 0
    refused: int = 0
    kept: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    crashes: Counter[str] = field(default_factory=Counter)
    """By what tells faults apart."""

    def add(self, tally: Tally) -> None:
        """Take in what a chunk came to, its crashes aside."""
        self.cases += tally.cases
        self.refused += tally.refused
        self.kept += tally.kept
        self.seconds += tally.seconds
        self.slowest_s = max(self.slowest_s, tally.slowest_s)


class Campaign:
    """Runs a plan. ``output``: written as it goes, and gone on with if it is there already."""

    def __init__(
        self,
        plan: Plan,
        *,
        command: str,
        output: Path | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._plan = plan
        self._command = command
        self._output = output
        self._say = say
        self.totals = {name: Total() for name in plan.targets}
        self._seconds = 0.0
        self._resume()

    def run(self) -> bool:
        """Run; return whether nothing broke."""
        began = time.monotonic()
        before = self._seconds
        deadline = None if self._plan.budget_s is None else began + self._plan.budget_s
        waiting = self._chunks()
        written = began
        with contextlib.ExitStack() as stack:
            workers = [stack.enter_context(_Worker(deadline)) for _ in range(self._plan.jobs)]
            while True:
                for worker in workers:
                    late = deadline is not None and time.monotonic() >= deadline
                    if worker.idle and not late and (chunk := next(waiting, None)) is not None:
                        worker.begin(*chunk)
                busy = [worker for worker in workers if not worker.idle]
                if not busy:
                    break
                for worker in _ready(busy):
                    self._take(worker)
                self._seconds = before + time.monotonic() - began
                if time.monotonic() - written >= WRITE_S:
                    written = time.monotonic()
                    self._write()
        self._seconds = before + time.monotonic() - began
        self._write()
        return not any(total.crashes for total in self.totals.values())

    def _chunks(self) -> Iterator[tuple[str, str, int]]:
        """Target, seed and cases of each chunk; all targets come forward together."""
        places = {name: total.cases for name, total in self.totals.items()}
        while left := [name for name in places if places[name] < self._plan.cases]:
            for name in left:
                count = min(CHUNK_CASES, self._plan.cases - places[name])
                yield name, f"{self._plan.seed}:{places[name]}", count
                places[name] += count

    def _take(self, worker: _Worker) -> None:
        tally = worker.result()
        total = self.totals[tally.target]
        total.add(tally)
        for crash in tally.crashes:
            total.crashes[crash.place] += 1
            if total.crashes[crash.place] <= corpus.EACH_MAX:
                path = corpus.keep(self._plan.folder, crash)
                self._say(f"{tally.target}: {crash.place}\n  {path}")

    def figures(self) -> dict[str, Any]:
        """What the file says."""
        return {
            "seed": self._plan.seed,
            "jobs": self._plan.jobs,
            "seconds": round(self._seconds, 1),
            "cases": sum(total.cases for total in self.totals.values()),
            "crashes": sum(sum(total.crashes.values()) for total in self.totals.values()),
            "targets": {
                name: {
                    "cases": total.cases,
                    "refused": total.refused,
                    "kept": total.kept,
                    "crashes": sum(total.crashes.values()),
                    "faults": sorted(total.crashes),
                    "slowest_ms": round(total.slowest_s * 1000, 2),
                    "cases_per_s": round(total.cases / total.seconds) if total.seconds else 0,
                    "cpu_s": round(total.seconds, 1),
                }
                for name, total in self.totals.items()
            },
        }

    def _write(self) -> None:
        if self._output is not None:
            write_result(self._output, self._command, self.figures())

    def _resume(self) -> None:
        """Go on where the file says that an earlier run of the same seed ended."""
        if self._output is None or not self._output.exists():
            return
        said: Mapping[str, Any] = json.loads(self._output.read_text(encoding="utf-8"))
        if said.get("seed") != self._plan.seed:
            return
        self._seconds = float(said["seconds"])
        for name, figures in said["targets"].items():
            if name in self.totals:
                self.totals[name] = Total(
                    cases=figures["cases"] // CHUNK_CASES * CHUNK_CASES,
                    refused=figures["refused"],
                    kept=figures["kept"],
                    seconds=figures["cpu_s"],
                    slowest_s=figures["slowest_ms"] / 1000,
                    crashes=Counter(dict.fromkeys(figures["faults"], 1)),
                )


def _ready(workers: Sequence[_Worker]) -> list[_Worker]:
    """Those that have ended their chunk, in whatever way."""
    answered = multiprocessing.connection.wait([w.pipe for w in workers], timeout=POLL_S)
    return [worker for worker in workers if worker.pipe in answered or worker.stuck()]


class _Worker:
    """A process that runs chunks, and what it was at when it ended."""

    def __init__(self, deadline: float | None) -> None:
        self._deadline = deadline
        self._box = mmap.mmap(-1, _BOX_BYTES)  # shared with the child that is forked
        self._chunk = ("", "", 0)
        self._seen = (-1, 0.0)
        self.idle = True
        self._start()

    def _start(self) -> None:
        # Forked, so that a new one has the imports already; nothing here has threads or gRPC.
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._box, self._deadline), daemon=True
        )
        self._process.start()
        theirs.close()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.pipe.close()

    def begin(self, target: str, seed: str, cases: int) -> None:
        """Give it a chunk."""
        self._chunk = target, seed, cases
        self._seen = -1, time.monotonic()
        self._box[:_HEAD_BYTES] = bytes(_HEAD_BYTES)
        self.idle = False
        self.pipe.send(self._chunk)

    def stuck(self) -> bool:
        """Whether it has been at one case for too long."""
        done = int.from_bytes(self._box[:8], "little")
        now = time.monotonic()
        if done != self._seen[0]:
            self._seen = done, now
        return now - self._seen[1] > STUCK_S

    def result(self) -> Tally:
        """What it came to; if it is dead or stuck, with the case that did it, and a new process."""
        self.idle = True
        if self.pipe.poll():
            with contextlib.suppress(EOFError, OSError):
                tally: Tally = self.pipe.recv()
                return tally
        alive = self._process.is_alive()
        if alive:
            self._process.kill()
        self._process.join()
        self.pipe.close()
        done = int.from_bytes(self._box[:8], "little")
        size = int.from_bytes(self._box[8:_HEAD_BYTES], "little")
        data = self._box[_HEAD_BYTES : _HEAD_BYTES + size]
        kind = "stuck" if alive else "died"
        detail = f"{self._chunk[0]}: {kind} (exit code {self._process.exitcode})"
        self._start()
        crash = Crash(self._chunk[0], data, kind, detail)
        return Tally(self._chunk[0], cases=done, crashes=[crash])


def _serve(
    pipe: multiprocessing.connection.Connection, box: mmap.mmap, deadline: float | None
) -> None:
    """Run chunks until told to end."""
    from deepinfer.deploy.fuzz.registry import TARGETS

    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None

    done = 0

    def about_to(data: bytes) -> None:
        nonlocal done
        done += 1
        part = data[: _BOX_BYTES - _HEAD_BYTES]
        box[8:_HEAD_BYTES] = len(part).to_bytes(8, "little")
        box[_HEAD_BYTES : _HEAD_BYTES + len(part)] = part
        box[:8] = done.to_bytes(8, "little")

    while (chunk := pipe.recv()) is not None:
        name, seed, cases = chunk
        done = 0
        with tempfile.TemporaryDirectory(dir=memory, prefix="deepinfer-fuzz-") as folder:
            tally = fuzz(
                TARGETS[name],
                Path(folder),
                cases=cases,
                seed=seed,
                deadline_s=deadline,
                about_to=about_to,
            )
        pipe.send(tally)
