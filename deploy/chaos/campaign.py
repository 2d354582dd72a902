"""A campaign: so many trials of one target, spread over clusters that run beside each other."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from deepinfer.deploy.chaos.job import Broken, Found, JobSpec, Missed, Next, Ready, run_job
from deepinfer.deploy.chaos.journal import Journal
from deepinfer.deploy.chaos.load import questions
from deepinfer.deploy.chaos.points import OPENED, Target, points_of
from deepinfer.deploy.chaos.rows import Trial
from deepinfer.deploy.config import ConfigError, Device
from deepinfer.deploy.oracle import Answer, Question, unpressed
from deepinfer.proto.failpoints import Place

QUESTIONS = 16
STAGGER_S = 1.5
"""Between the starts of clusters: two Rays that start at once may choose the same port."""
END_PATIENCE_S = 15.0
"""How long jobs may take to stop their clusters, once nothing is wanted of them."""
COMPUTING = ("ONEDNN_MAX_CPU_ISA",)
"""What of the environment says how a CPU worker computes."""
SAVE_S = 10.0
"""At most so often are figures written while trials come in."""
RETRIES = 3
"""How often a trial in which nobody parked is run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """What is asked for. Checked on construction.

    Raises:
        ConfigError: the target has no such point, or a number that cannot work.
    """

    target: Target
    point: str = "any"
    path: str = "memfd"
    kills: int = 40
    seed: int = 0
    pauses_s: tuple[float, ...] = ()
    model: str = "demo"
    device: Device = "cpu"
    workers: int = 2
    gateways: int = 2
    streams: int | None = None
    """Of a load that makes workers swap; None: two a worker, and one."""
    tokens: int = 32
    """Of every answer."""
    jobs: int = 1
    budget_s: float | None = None
    deterministic: bool = False
    """Of workers and of the answers that theirs are held against."""

    def __post_init__(self) -> None:
        points_of(self.target, self.point)
        if self.path not in ("memfd", "grpc"):
            raise ConfigError(f"path = {self.path!r}: must be memfd or grpc")
        if self.target == "node" and self.path == "memfd":
            raise ConfigError("path = 'memfd': must be grpc for nodes, who cannot share memory")
        if self.target == "node" and self.workers < 2:
            raise ConfigError(f"workers = {self.workers}: must be 2 or more to kill a node")
        if self.point == "mid_resume" and self.gateways < 2:
            raise ConfigError("gateways = 1: must be 2 or more for mid_resume")
        if any(pause <= 0 for pause in self.pauses_s):
            raise ConfigError(f"pause = {self.pauses_s}: must be above 0")
        if self.pauses_s and self.point in OPENED:
            raise ConfigError(f"point = {self.point!r}: must be killed, not paused")

    @property
    def points(self) -> tuple[Place, ...]:
        """In turn, one a trial."""
        places = points_of(self.target, self.point)
        if self.pauses_s:  # whoever has to die for it cannot be paused
            places = tuple(p for p in places if p not in OPENED)
        return places

    def place(self, number: int) -> Place:
        """Where trial ``number`` stops its victim."""
        return self.points[number % len(self.points)]

    @property
    def load(self) -> int:
        return self.streams if self.streams is not None else 2 * self.workers + 1

    def command(self, output: Path) -> str:
        """What runs this again. Folders are left out: they are of one machine."""
        options: dict[str, object] = {
            "target": self.target,
            "point": self.point,
            "path": self.path,
            "kills": self.kills,
            "seed": self.seed,
            "pause": ",".join(f"{pause:g}" for pause in self.pauses_s),
            "model": Path(self.model).name,
            "device": self.device,
            "workers": self.workers,
            "gateways": self.gateways,
            "streams": self.load,
            "tokens": self.tokens,
            "deterministic": self.deterministic,
            "jobs": self.jobs,
            "output": output.name,
        }
        given = [
            f"--{name}" if value is True else f"--{name} {value}"
            for name, value in options.items()
            if value != "" and value is not False
        ]
        chosen = [f"{name}={os.environ[name]}" for name in COMPUTING if name in os.environ]
        return " ".join([*chosen, "deepinfer chaos", *given])

    def header(self) -> dict[str, Any]:
        """What all trials of one journal have in common."""
        return {
            "target": self.target,
            "point": self.point,
            "path": self.path,
            "seed": self.seed,
            "pause_s": list(self.pauses_s),
            "model": Path(self.model).name,
            "device": self.device,
            "workers": self.workers,
            "gateways": self.gateways,
            "streams": self.load,
            "tokens": self.tokens,
            "deterministic": self.deterministic,
        }


@dataclass(slots=True)
class _Job:
    process: BaseProcess
    pipe: Connection
    number: int | None = None
    """The trial that it runs."""
    ended: bool = False


@dataclass(slots=True)
class Runner:
    """Runs a campaign's trials. ``say`` is told of each."""

    campaign: Campaign
    journal: Journal
    model: Path
    vocabulary: int
    faults: Path
    say: Callable[[str], None]
    save: Callable[[Runner], None] = field(default=lambda _: None)
    """Called now and then while trials come in, and at the end."""
    starts_s: list[float] = field(default_factory=list)
    """What clusters' starts took."""
    broken: list[str] = field(default_factory=list)
    """Clusters that could not be started or not go on, a sentence each."""
    unreached: list[int] = field(default_factory=list)
    """Trials that were given up: nobody came to their points."""
    _tries: Counter[int] = field(default_factory=Counter)
    _saved_s: float = 0.0

    def run(self) -> None:
        """Until every trial is through, or the budget is spent, or no cluster is left."""
        campaign = self.campaign
        began = time.monotonic()
        deadline = math.inf if campaign.budget_s is None else began + campaign.budget_s
        todo = deque(self.journal.left(campaign.kills))
        if not todo:
            self.save(self)
            return
        self.say("computing the unpressed answers")
        asked = questions(QUESTIONS, campaign.tokens, self.vocabulary)
        answers = unpressed(
            self.model,
            asked,
            kv_cache_dtype="auto",
            device=campaign.device,
            deterministic=campaign.deterministic,
        )
        spawn = multiprocessing.get_context("spawn")
        jobs: list[_Job] = []
        try:
            for number in range(min(campaign.jobs, len(todo))):
                spec = self._spec(number, list(zip(asked, answers, strict=True)))
                ours, theirs = spawn.Pipe()
                process = spawn.Process(target=run_job, args=(spec, theirs))
                process.start()
                theirs.close()
                jobs.append(_Job(process, ours))
                self._serve(jobs, todo, deadline, until=time.monotonic() + STAGGER_S)
            self._serve(jobs, todo, deadline, until=math.inf)
        finally:
            for job in jobs:
                job.pipe.close()
            for job in jobs:
                job.process.join(END_PATIENCE_S)
                if job.process.is_alive():
                    job.process.terminate()
            self.save(self)

    def _serve(self, jobs: list[_Job], todo: deque[int], deadline: float, *, until: float) -> None:
        """Give trials to whoever asks, and keep what they found."""
        while time.monotonic() < until:
            pipes = {job.pipe: job for job in jobs if not job.ended}
            if not pipes:
                return
            patience = min(1.0, max(0.0, until - time.monotonic()))
            for ready in wait(list(pipes), timeout=patience):
                assert isinstance(ready, Connection)
                self._hear(pipes[ready], todo, deadline)

    def _hear(self, job: _Job, todo: deque[int], deadline: float) -> None:
        try:
            said = job.pipe.recv()
        except (EOFError, OSError):
            job.ended = True
            if job.number is not None:
                self.broken.append(f"the process that ran trial {job.number} has died")
                self._void(job, job.number, self.broken[-1], todo)
            return
        match said:
            case Ready(start_s):
                if start_s:
                    self.starts_s.append(start_s)
                over = time.monotonic() >= deadline
                job.number = None if over or not todo else todo.popleft()
                if job.number is None:
                    job.pipe.send(None)
                    return
                job.pipe.send(Next(job.number, self.campaign.place(job.number)))
            case Found(trial):
                self.journal.add(trial)
                if trial.number == job.number:
                    job.number = None
                self.say(_line(trial, len(self.journal.counted), self.campaign.kills))
                if time.monotonic() - self._saved_s > SAVE_S:
                    self.save(self)
                    self._saved_s = time.monotonic()
            case Missed(number) | Broken(int(number)):
                why = said.why if isinstance(said, Broken) else "nobody parked"
                if isinstance(said, Broken):
                    self.broken.append(said.why)
                self._void(job, number, why, todo)
            case Broken():
                self.broken.append(said.why)
                self.say(said.why)

    def _void(self, job: _Job, number: int, why: str, todo: deque[int]) -> None:
        """Run a trial again, unless that has been done too often."""
        job.number = None
        self.journal.miss(number, why)
        self._tries[number] += 1
        if self._tries[number] > RETRIES:
            self.unreached.append(number)
        else:
            todo.append(number)
        self.say(f"trial {number} at {self.campaign.place(number)} is void: {why}")

    def _spec(self, number: int, asked: list[tuple[Question, Answer]]) -> JobSpec:
        campaign = self.campaign
        answers = [answer for _, answer in asked]
        config: dict[str, Any] = {
            "model": str(self.model),
            "device": campaign.device,
            "workers": campaign.workers,
            "gateways": campaign.gateways,
            "store_path": campaign.path,
            "metrics_port": 0,
            "max_cpu_offload_mb": 256,
            "max_cache": f"{tight_blocks(answers, campaign.tokens)} blocks",
        }
        if campaign.device == "cuda":
            config |= {"gpu_probe": False}
        if campaign.deterministic:
            config |= {"deterministic": True}
        return JobSpec(
            job=number,
            target=campaign.target,
            path=campaign.path,
            seed=campaign.seed,
            streams=campaign.load,
            pauses_s=campaign.pauses_s,
            config=config,
            asked=tuple(asked),
            faults=self.faults,
            card=_card(number) if campaign.device == "cuda" else None,
        )


def _card(job: int) -> str | None:
    """The card of a job, as CUDA_VISIBLE_DEVICES names it; None if there is none."""
    from deepinfer.workers.gpu.card import count_cards

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = named.split(",") if named else [str(i) for i in range(count_cards())]
    return cards[job % len(cards)] if cards else None


def tight_blocks(answers: list[Answer], max_tokens: int, block_size: int = 16) -> int:
    """Blocks of a pool that holds the largest request and one block more: two do not fit."""
    needs = [math.ceil((len(a.prompt_ids) + max_tokens) / block_size) for a in answers]
    return max(needs) + 1


def _line(trial: Trial, done: int, of: int) -> str:
    how = f"paused {trial.pause_s:g} s" if trial.pause_s else "killed"
    verdict = "right" if trial.right else f"WRONG: {trial.faults} {trial.errors} {trial.left_over}"
    recovered = f", next token after {max(trial.recovered_s):.2f} s" if trial.recovered_s else ""
    return (
        f"{done}/{of} {trial.victim or 'nobody'} {how} at {trial.point} (cluster {trial.job}): "
        f"{trial.tokens} tokens {verdict}{recovered}"
    )
