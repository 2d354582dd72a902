"""One trial: load, a process that parks at a point, a signal, and what the clients received.

A trial in which nobody parked does not count (but what its streams brought is checked as well).
What a trial finds is a fact about the cluster, never an exception; those are for a cluster that
cannot be used any more.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from deepinfer.client import AsyncClient
from deepinfer.deploy.chaos.history import Faults, History
from deepinfer.deploy.chaos.load import Load
from deepinfer.deploy.chaos.points import KINDS, OPENED, Target
from deepinfer.deploy.chaos.rows import Others, Trial
from deepinfer.deploy.chaos.site import (
    POLL_S,
    RETURN_PATIENCE_S,
    Site,
    Status,
    is_back,
    is_gone,
    lives_of,
    send,
)
from deepinfer.deploy.oracle import Answer, Question
from deepinfer.proto.failpoints import Place

PARK_PATIENCE_S = 30.0
DETECT_PATIENCE_S = 20.0
LOADS = 4
"""How many loads are sent until a process parks."""
BEFORE_S = 5.0
AFTER_S = 2.0
"""How far before and after a kill the other streams' intervals are looked at."""
ROOMY: tuple[Place, ...] = ("mid_prefill", "mid_decode")
"""Reached without swaps: the load leaves a worker and blocks to spare, and recovery is measured."""
EARLY: tuple[Place, ...] = ("mid_prefill", "after_accept")
"""Reached once a stream, and at once: chosen before the load is sent."""
LATEST_S = 0.3
"""Most between the load's start and the choice of the point: most points come again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all trials of one campaign have in common."""

    target: Target
    path: str
    seed: int
    streams: int
    """Of a load that makes workers swap."""
    pauses_s: tuple[float, ...] = ()
    """SIGSTOP for so long, in turn; (): SIGKILL."""
    keep_spare: bool = True
    """Wait for two workers before a trial, so that one of them is spare."""

    def pause_s(self, number: int) -> float:
        """How long a trial's victim stands still; 0: it is killed."""
        return self.pauses_s[number % len(self.pauses_s)] if self.pauses_s else 0.0


@dataclass(slots=True, kw_only=True)
class _Parked:
    """Somebody who stands at the point."""

    name: str
    pid: int
    taken: Path
    parked_s: float
    lives: dict[str, int]
    """Of the victim, and of everybody who goes with it."""
    opened: float | None
    """When another was killed for it."""


@dataclass(slots=True)
class Trials:
    """Runs trials on one cluster. ``emit`` is given each that counts, perhaps a little later.

    Belongs to one event loop; ``finish`` ends it.
    """

    site: Site
    plan: Plan
    asked: Sequence[tuple[Question, Answer]]
    emit: Callable[[Trial], None]
    job: int = 0
    _returning: set[asyncio.Task[None]] = field(default_factory=set)
    _away: dict[str, int] = field(default_factory=dict)
    """The killed lives of those who are still on their way back."""
    _load_s: float = 1.0
    """How long the last load took."""

    async def run(self, number: int, point: Place, client: AsyncClient) -> Trial | None:
        """Send loads until one process parks at ``point``; stop it there, and check everything.

        Returns:
            The trial, which may lack its ``restarted_s``; None if nobody came.

        Raises:
            AssertionError: the cluster is not whole again, so that no trial can begin.
        """
        draw = random.Random(f"{self.plan.seed}/{number}")
        for loads in range(1, LOADS + 1):
            status = await self.site.serving(2 if self.plan.keep_spare else 1)
            # Now: who stands still at its point may not answer.
            pids = await self.site.pids(self._serving(status))
            if point in EARLY:
                _choose(self.site.folder / point)
            load = self._start(draw, point, status, client)
            began = time.perf_counter()
            parked = await self._parked(draw, point, status, pids, load)
            if parked is None:
                await self._uncounted(number, point, loads, load)
                self._load_s = time.perf_counter() - began
                continue
            return await self._stop(number, point, loads, load, parked, client)
        return None

    async def finish(self) -> None:
        """Wait for those who are still on their way back."""
        await asyncio.gather(*self._returning)

    def _start(
        self, draw: random.Random, point: Place, status: Status, client: AsyncClient
    ) -> Load:
        workers = sum(w["state"] == "serving" for w in status["workers"].values())
        count = max(1, workers - 1) if point in ROOMY else self.plan.streams
        return Load.start(client, draw.sample(self.asked, min(count, len(self.asked))))

    # ---- to the point ----------------------------------------------------------------------

    async def _parked(
        self, draw: random.Random, point: Place, status: Status, pids: dict[int, str], load: Load
    ) -> _Parked | None:
        chosen = self.site.folder / point
        opened: tuple[str, float] | None = None
        if point in OPENED:
            await load.until(1)
            _choose(chosen)
            pid, name = draw.choice(sorted(pids.items()))
            del pids[pid]
            opened = (name, send([pid], signal.SIGKILL))
        elif point not in EARLY:
            await asyncio.sleep(draw.uniform(0.0, min(LATEST_S, 0.3 * self._load_s)))
            _choose(chosen)
        chose = time.perf_counter()
        taken = await self._taken(chosen, load)
        if taken is None:
            return None
        pid = int(taken.suffix[1:])
        name = pids.get(pid) or (opened[0] if opened else "")
        if not name:  # one that came back between the look at the pids and now
            status = await self.site.serving(1)
            unknown = set(self._serving(status)) - set(pids.values())
            found = await self.site.pids(unknown)  # whose event loop is parked does not answer
            silent = unknown - set(found.values())
            name = found.get(pid) or (silent.pop() if len(silent) == 1 else "")
            assert name, f"process {pid} parked at {point} and is nobody's"
        away = self.site.away(name) | ({opened[0]} if opened else set())
        return _Parked(
            name=name,
            pid=pid,
            taken=taken,
            parked_s=time.perf_counter() - chose,
            lives=lives_of(status, away),
            opened=opened[1] if opened else None,
        )

    def _serving(self, status: Status) -> list[str]:
        """The actors of the target's kind that can be asked for their process ids."""
        names = self.site.named(KINDS[self.plan.target].prefix)
        starting = {n for n, w in status["workers"].items() if w["state"] != "serving"}
        return [name for name in names if name not in starting]

    async def _taken(self, chosen: Path, load: Load) -> Path | None:
        """Wait for a process to take the file; None if nobody came."""
        for _ in range(round(PARK_PATIENCE_S / POLL_S)):
            if not (load.running and _exists(chosen)):
                break
            await asyncio.sleep(POLL_S)
        return _withdrawn(chosen)

    async def _uncounted(self, number: int, point: Place, loads: int, load: Load) -> None:
        """Nobody came: the streams must be right all the same."""
        ended = time.perf_counter()
        reconnects = await load.end()
        left = await self.site.settled(self._away)
        trial = Trial(
            number=number,
            counted=False,
            job=self.job,
            target=self.plan.target,
            point=point,
            path=self.plan.path,
            victim="",
            kills=0,
            parked_s=0.0,
            loads=loads,
            streams=len(load.histories),
            on_victim=0,
            tokens=sum(h.tokens for h in load.histories),
            faults=_faults(load),
            errors=load.errors,
            left_over=tuple(left),
            paused_s=0.0,
            settled_s=time.perf_counter() - ended,
            reconnects=reconnects,
        )
        if not trial.right:
            self.emit(trial)

    # ---- and past it -----------------------------------------------------------------------

    async def _stop(
        self,
        number: int,
        point: Place,
        loads: int,
        load: Load,
        parked: _Parked,
        client: AsyncClient,
    ) -> Trial:
        site, plan = self.site, self.plan
        held = await self._on_victim(parked, load)
        pause_s = plan.pause_s(number)
        doomed = site.doomed(parked.name, parked.pid)
        stopped = send(doomed, signal.SIGSTOP if pause_s else signal.SIGKILL)
        parked.taken.unlink()
        since = stopped if parked.opened is None else parked.opened
        later = self._admit(load, client)
        patience_s = pause_s or DETECT_PATIENCE_S
        watching = asyncio.create_task(self._detected(parked, stopped, patience_s))
        quarantined = 0
        restarted_s: float | None = None
        if pause_s:
            quarantined = await self._stand_still(stopped + pause_s)
            resumed = send(doomed, signal.SIGCONT)
            await site.serving(len(site.workers))
            restarted_s = time.perf_counter() - resumed
        reconnects = await load.end()
        self._load_s = max(0.1, stopped - load.began)
        left = await site.settled(self._away if pause_s else self._away | parked.lives)
        settled_s = time.perf_counter() - stopped
        others = [h for h in load.histories if h not in held and h is not later]
        recovered = [
            h.recovered_s(stopped) if plan.target in ("worker", "node") else h.next_token_s(stopped)
            for h in held
        ]
        trial = Trial(
            number=number,
            job=self.job,
            target=plan.target,
            point=point,
            path=plan.path,
            victim=parked.name,
            kills=0 if pause_s else 1 + (parked.opened is not None),
            pause_s=pause_s,
            parked_s=parked.parked_s,
            loads=loads,
            streams=len(load.histories),
            on_victim=len(held),
            roomy=point in ROOMY,
            tokens=sum(h.tokens for h in load.histories),
            faults=_faults(load),
            errors=load.errors,
            left_over=tuple(left),
            recovered_s=tuple(s for s in recovered if s is not None),
            admitted_s=later.next_token_s(stopped) if later is not None else None,
            detected_s=await watching,
            paused_s=max(h.paused_s(stopped) for h in load.histories),
            settled_s=settled_s,
            restarted_s=restarted_s,
            quarantined_pages=quarantined,
            others=_others(others, stopped),
            swaps=sum(h.count("swaps") for h in load.histories),
            resumes=sum(h.count("resumes") for h in load.histories),
            recomputes=sum(h.count("recomputes") for h in load.histories),
            reconnects=reconnects,
            timeline=tuple(tuple(h.marks(since)) for h in load.histories),
        )
        if pause_s:
            self.emit(trial)
        else:
            self._await_return(trial, parked, stopped)
        return trial

    async def _on_victim(self, parked: _Parked, load: Load) -> list[History]:
        """The streams that run, or whose payload lies, on the victim."""
        running = [h for h in load.histories if not h.ended]
        if self.plan.target == "controller":
            return []
        if self.plan.target == "gateway":
            return [h for h in running if h.gateway == parked.name]
        status = await self.site.status()
        if status is None:
            return []
        away = self.site.away(parked.name)
        found = {
            row["request"]
            for row in status["sequences"]
            if row["worker"] in away or (row["worker"] is None and row["store"] in away)
        }
        return [h for h in running if h.request in found]

    def _admit(self, load: Load, client: AsyncClient) -> History | None:
        """Where it is to be known how soon anybody is admitted again: one more request."""
        if self.plan.target != "controller":
            return None
        more = Load.start(client, [self.asked[-1]])
        load.histories += more.histories
        load.tasks += more.tasks
        return more.histories[0]

    async def _detected(self, parked: _Parked, stopped: float, patience_s: float) -> float | None:
        """From the signal until the controller's status shows that it has noticed."""
        if parked.opened is not None:
            return None
        while (waited := time.perf_counter() - stopped) < patience_s:
            status = await self.site.status()
            if status is not None and is_gone(status, parked.lives):
                return waited
            await asyncio.sleep(POLL_S)
        return None

    async def _stand_still(self, until: float) -> int:
        """Wait; returns the most pages that stores kept in quarantine meanwhile."""
        most = 0
        while (left := until - time.perf_counter()) > 0:
            if self.plan.target == "worker":
                most = max(most, (await self.site.pages())[1])
            await asyncio.sleep(min(0.1, max(0.0, left)))
        return most

    def _await_return(self, trial: Trial, parked: _Parked, stopped: float) -> None:
        """Emit the trial once its victim serves again, while the next one may be under way."""
        if set(parked.lives) <= self.site.lost:
            self.emit(trial)
            return

        self._away |= parked.lives

        async def wait() -> None:
            deadline = stopped + RETURN_PATIENCE_S
            while time.perf_counter() < deadline:
                status = await self.site.status()
                if status is not None and is_back(status, parked.lives):
                    back_s = time.perf_counter() - stopped
                    for name, life in parked.lives.items():
                        if self._away.get(name) == life:
                            del self._away[name]
                    self.emit(replace(trial, restarted_s=back_s))
                    return
                await asyncio.sleep(0.02)
            missing = f"{parked.name} is not back after {RETURN_PATIENCE_S:g} s"
            self.emit(replace(trial, left_over=(*trial.left_over, missing)))

        task = asyncio.create_task(wait())
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)


def _choose(point: Path) -> None:
    point.touch()


def _exists(file: Path) -> bool:
    return file.exists()


def _withdrawn(chosen: Path) -> Path | None:
    """Choose the point no longer; returns the file if a process has taken it."""
    chosen.unlink(missing_ok=True)
    return next(iter(chosen.parent.glob(f"{chosen.name}.*")), None)


def _faults(load: Load) -> Faults:
    return sum((history.faults() for history in load.histories), Faults())


def _others(histories: Sequence[History], stopped: float) -> Others:
    before = [s for h in histories for s in h.intervals_s(stopped - BEFORE_S, stopped)]
    after = [s for h in histories for s in h.intervals_s(stopped, stopped + AFTER_S)]
    if not before or not after:
        return Others()
    return Others(
        before_s=sum(before) / len(before),
        after_s=sum(after) / len(after),
        longest_s=max(after),
    )
