"""Many seeds over many processes, with a file of what is done: run again, it goes on.

Worker processes take chunks of seeds; this process adds up what they found and writes it down every
few seconds. What other code has found does not count: the file names the cores' sources by a hash,
and is begun anew when they have changed.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path

from deepinfer.deploy.sim.simulate import Failed, Tally, sweep

CHUNK = 50
"""Seeds a process takes at once: about a second."""
_SAVE_EVERY_S = 5.0
_ROOT = Path(__file__).resolve().parents[2]
_AREAS = ("controller", "workers", "kvstore", "gateway", "client")


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """A range of seeds and how to run it. Raises ValueError for numbers that cannot be."""

    seeds: int
    start: int = 0
    jobs: int = 1
    failures_max: int = 10
    """Stop after so many failing seeds."""
    budget_s: float | None = None
    """Stop after so long; None: when all is done."""
    progress: Path | None = None
    """Where to write down what is done; None: nowhere."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("seeds", self.seeds, 1),
            ("start", self.start, 0),
            ("jobs", self.jobs, 1),
            ("failures_max", self.failures_max, 1),
        ):
            if value < least:
                raise ValueError(f"{name} = {value}: must be {least} or more")
        if self.budget_s is not None and self.budget_s <= 0:
            raise ValueError(f"budget_s = {self.budget_s}: must be positive")


class Progress:
    """What is done of a campaign, in memory and in its file."""

    def __init__(self, campaign: Campaign) -> None:
        self.campaign = campaign
        self.tally = Tally()
        self.done: list[list[int]] = []
        """Ranges of seeds that have been run: [first, one behind the last], in order."""
        self.wall_s = 0.0
        """Of all parts so far."""
        self.parts = 1
        """How often the campaign was started."""
        self.resumed = False
        self._sources = fingerprint()
        self._load()

    def _identity(self) -> dict[str, object]:
        c = self.campaign
        return {"seeds": c.seeds, "start": c.start, "sources": self._sources}

    def _load(self) -> None:
        path = self.campaign.progress
        if path is None or not path.is_file():
            return
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if raw["campaign"] != self._identity():
                return
            self.tally = Tally(
                seeds=raw["tally"]["seeds"],
                acts=raw["tally"]["acts"],
                simulated_ms=raw["tally"]["simulated_ms"],
                failures=[
                    Failed(**failed | {"last_events": tuple(failed["last_events"])})
                    for failed in raw["tally"]["failures"]
                ],
                coverage=Counter(raw["tally"]["coverage"]),
            )
            self.done, self.wall_s = raw["done"], raw["wall_s"]
            self.parts, self.resumed = raw["parts"] + 1, True
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no progress of a simulation: {error}") from error

    def save(self, wall_s: float) -> None:
        """Write it down; the file is whole at any time."""
        path = self.campaign.progress
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(path.name + ".part")
        state = {
            "campaign": self._identity(),
            "done": self.done,
            "wall_s": self.wall_s + wall_s,
            "parts": self.parts,
            "tally": {
                "seeds": self.tally.seeds,
                "acts": self.tally.acts,
                "simulated_ms": self.tally.simulated_ms,
                "failures": [asdict(failed) for failed in self.tally.failures],
                "coverage": self.tally.coverage,
            },
        }
        scratch.write_text(json.dumps(state), encoding="utf-8")
        scratch.replace(path)

    def forget(self) -> None:
        """The campaign has ended: the next one of these seeds begins anew."""
        if self.campaign.progress is not None:
            self.campaign.progress.unlink(missing_ok=True)

    def add(self, first: int, tally: Tally) -> None:
        """A chunk is done."""
        self.tally.add(tally)
        self.done = _joined([*self.done, [first, first + tally.seeds]])

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(first, count) of what is left."""
        first, end = self.campaign.start, self.campaign.start + self.campaign.seeds
        for done_from, done_to in [*self.done, [end, end]]:
            while first < done_from:
                count = min(CHUNK, done_from - first)
                yield first, count
                first += count
            first = done_to

    @property
    def complete(self) -> bool:
        """Whether every seed has been run."""
        return self.tally.seeds >= self.campaign.seeds


def _joined(ranges: list[list[int]]) -> list[list[int]]:
    joined: list[list[int]] = []
    for first, end in sorted(ranges):
        if joined and joined[-1][1] == first:
            joined[-1][1] = end
        else:
            joined.append([first, end])
    return joined


def fingerprint() -> str:
    """A hash of the five cores' and the simulator's sources."""
    digest = blake2b(digest_size=16)
    folders = [*(_ROOT / area / "core" for area in _AREAS), _ROOT / "deploy" / "sim"]
    for path in [path for folder in folders for path in sorted(folder.glob("*.py"))]:
        digest.update(f"{path.relative_to(_ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _leave_signals_alone() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children


def _chunk(first: int, count: int) -> Tally:
    return sweep(count, first, failures_max=count)


def cores_here() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def conduct(
    campaign: Campaign, *, watch: Callable[[Progress], None] = lambda _: None
) -> tuple[Progress, float]:
    """Run a campaign, or what is left of it; return its progress and the wall time in s (of all
    its parts). ``watch`` is called with every chunk. An interrupt leaves the file as it is.
    """
    progress = Progress(campaign)
    began = saved = time.monotonic()
    end = None if campaign.budget_s is None else began + campaign.budget_s
    watch(progress)
    for first, tally in _results(progress, end):
        progress.add(first, tally)
        watch(progress)
        now = time.monotonic()
        if now - saved >= _SAVE_EVERY_S:
            progress.save(now - began)
            saved = now
    wall_s = time.monotonic() - began
    if progress.complete or len(progress.tally.failures) >= campaign.failures_max:
        progress.forget()
    else:
        progress.save(wall_s)
    return progress, progress.wall_s + wall_s


def _results(progress: Progress, end: float | None) -> Iterator[tuple[int, Tally]]:
    """Run what is left until ``end``, or until too much has failed."""
    campaign = progress.campaign
    chunks = progress.chunks()

    def over() -> bool:
        late = end is not None and time.monotonic() >= end
        return late or len(progress.tally.failures) >= campaign.failures_max

    if campaign.jobs == 1:
        for first, count in chunks:
            if over():
                return
            yield first, _chunk(first, count)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(
        campaign.jobs, mp_context=context, initializer=_leave_signals_alone
    ) as pool:
        running: dict[Future[Tally], int] = {}
        try:
            while True:
                while len(running) < 2 * campaign.jobs and not over():
                    chunk = next(chunks, None)
                    if chunk is None:
                        break
                    running[pool.submit(_chunk, *chunk)] = chunk[0]
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
