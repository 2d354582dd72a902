"""`deepinfer bench soak`: a cluster under load for hours, and whether anything in it grows.

Pools too small for a burst of requests, so that swaps never cease. Between two bursts nothing is
asked: then every block has to be free and the store and the gateway empty, again and again. Every
process is sampled all the while, and the trend of each figure is judged at the end.

The next burst waits while there have been as many swaps as were asked for: a machine that does
other work as well is not filled by it. SIGTERM and SIGINT end it early, with its result written.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from rich.console import Console

from deepinfer.deploy.bench import soak_report
from deepinfer.deploy.bench.footprints import Held, held_by_all
from deepinfer.deploy.bench.holdings import counts, held, lives
from deepinfer.deploy.bench.known import Known, Lengths, make_known
from deepinfer.deploy.bench.plots import check_plots
from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.bench.soak_load import Load, Tally
from deepinfer.deploy.bench.steps import counted
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig, ConfigError
from deepinfer.deploy.generate import get_model

BLOCK_SIZE = 4
LENGTHS = Lengths(prompt=(6, 20), answer=(12, 36))
"""Answers longer than prompts: a pool that holds the prompts is short soon after."""
SPARE_BLOCKS = 2
"""In a worker's pool, beside the longest request."""
REQUESTS = 40
"""Different ones, of which each burst draws some."""
QUIET_EVERY_S = 30.0
"""Between two looks at whether all is free."""
QUIET_PATIENCE_S = 10.0
POLL_S = 0.05
WRITE_EVERY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked for.

    Raises:
        ConfigError: a number out of range.
    """

    seconds: float = 7200.0
    workers: int = 1
    burst: int = 5
    """Requests at once and worker, at most."""
    swaps_per_s: float = 1.2
    """No burst begins while there have been more; 0: one burst after the other."""
    every_s: float = 30.0
    """Between two samples of all processes; the bench keeps them, a few KiB each."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("burst", 2), ("seconds", 1), ("every_s", 0.1)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name} = {value}: must be {least} or more")
        if self.swaps_per_s < 0:
            raise ConfigError(f"swaps_per_s = {self.swaps_per_s}: must be 0 or more")


@dataclass(frozen=True, slots=True)
class Sample:
    """Everything at one moment."""

    at_s: float
    """Since the load began."""
    processes: dict[str, Held]
    counts: dict[str, float]
    """What the controller, the store and the gateway say that they hold."""
    swaps: int


@dataclass(slots=True)
class Soak:
    """What was seen; ``soak_report`` judges it."""

    plan: Plan
    model: Path
    pool_blocks: int
    tally: Tally = field(default_factory=Tally)
    samples: list[Sample] = field(default_factory=list)
    quiet_s: list[float] = field(default_factory=list)
    """How long after a burst's last stream nothing was held any more."""
    leaks: list[str] = field(default_factory=list)
    """What was still held after ``QUIET_PATIENCE_S``."""
    bursts: int = 0
    restarts: list[str] = field(default_factory=list)
    """Processes that are in another life than at the start."""
    seconds: float = 0.0
    stopped: bool = False
    """A signal ended it before its time."""
    complete: bool = False
    """Nothing more will come; otherwise this is what there is so far."""


def run_soak(*, model: str, plan: Plan, output: Path, console: Console) -> bool:
    """Run it; write ``soak.json`` and ``.png``; True if all was right and flat.

    The JSON is written every minute, with ``"complete": false``.

    Raises:
        ConfigError: matplotlib is missing, or the model's context is too short.
    """
    check_plots()
    path = get_model(model, console=console)
    config = config_for(path, plan)
    with counted(console, round(plan.seconds)) as steps:
        steps.tell("computing the right answers")
        known = make_known(
            path,
            LENGTHS,
            count=REQUESTS,
            seed=plan.seed,
            kv_cache_dtype=config.kv_cache_dtype,
            block_size=BLOCK_SIZE,
        )
        soak = Soak(plan=plan, model=path, pool_blocks=int(config.max_cache.split()[0]))

        def write() -> None:
            write_result(output / "soak.json", command_of(model, plan), soak_report.figures(soak))

        with Cluster(config, say=steps.tell) as cluster:
            steps.tell("load")
            asyncio.run(_Run(cluster, soak, known, write, steps.advance).run())
        write()
    figures = soak_report.figures(soak)
    soak_report.plot(soak, output / "soak.png")
    console.print(soak_report.table(figures))
    console.print(soak_report.sentence(figures), highlight=False)
    return bool(figures["as_it_should_be"])


def config_for(model: Path, plan: Plan) -> ClusterConfig:
    """A cluster whose pools hold the longest request and little more."""
    blocks = -(-LENGTHS.longest // BLOCK_SIZE) + SPARE_BLOCKS
    return ClusterConfig(
        model=str(model),
        workers=plan.workers,
        device="cpu",
        kv_cache_dtype="fp16",
        block_size=BLOCK_SIZE,
        max_cache=f"{blocks} blocks",
        min_residency=4,
        prefix_cache=False,  # blocks that it keeps are held by nobody, and yet not free
        port=0,
    )


def command_of(model: str, plan: Plan) -> str:
    """The command line that measures this again."""
    return (
        f"deepinfer bench soak --model {model} --duration {plan.seconds:g} "
        f"--workers {plan.workers} --burst {plan.burst} --swaps-per-s {plan.swaps_per_s:g} "
        f"--every {plan.every_s:g} --seed {plan.seed}"
    )


class _Run:
    """The load, the samples beside it, and the looks at whether all is free."""

    def __init__(
        self,
        cluster: Cluster,
        soak: Soak,
        known: list[Known],
        write: Callable[[], None],
        advance: Callable[[int], None],
    ) -> None:
        self._cluster = cluster
        self._soak = soak
        self._known = known
        self._write = write
        self._advance = advance
        self._shown_s = 0
        self._stop = asyncio.Event()
        self._names: dict[int, str] = {}

    async def run(self) -> None:
        """Until the time is over, or a signal comes."""
        plan, soak, cluster = self._soak.plan, self._soak, self._cluster
        self._names = {
            await asyncio.to_thread(cluster.pid, actor): actor for actor in cluster.actors
        }
        load = Load(cluster.endpoints, cluster.token, self._known, Random(plan.seed))
        soak.tally = load.tally
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end_early)
        try:
            await load.burst(plan.burst)  # what is done once is not sampled
            before = lives(await load.client.status())
            self._began_s = time.monotonic()
            timer = loop.call_later(plan.seconds, self._stop.set)
            sampling = asyncio.create_task(self._sample(load))
            try:
                await self._bursts(load)
            finally:
                timer.cancel()
                self._stop.set()
                await sampling
            after = lives(await load.client.status())
            soak.restarts = sorted(name for name in before if after.get(name) != before[name])
            soak.seconds, soak.complete = self._now_s(), True
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
            await load.close()

    def _end_early(self) -> None:
        self._soak.stopped = True
        self._stop.set()

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    async def _bursts(self, load: Load) -> None:
        plan, soak = self._soak.plan, self._soak
        draw = Random(f"bursts {plan.seed}")
        swaps_before = load.tally.swaps
        look_s = 0.0
        while not self._stop.is_set():
            await load.burst(draw.randint(2, plan.burst * plan.workers))
            soak.bursts += 1
            if self._now_s() >= look_s:
                await self._look(load)
                look_s = self._now_s() + QUIET_EVERY_S
            while (
                not self._stop.is_set()
                and load.tally.swaps - swaps_before > plan.swaps_per_s * self._now_s() > 0
            ):
                await self._pause(POLL_S)

    async def _look(self, load: Load) -> None:
        """Wait until nothing is held, and note how long that took, or what still is."""
        began_s = time.monotonic()
        while left := held(await load.client.status()):
            if time.monotonic() - began_s > QUIET_PATIENCE_S:
                self._soak.leaks.append(f"after {self._now_s():.0f} s: {', '.join(left)}")
                return
            await asyncio.sleep(POLL_S)
        self._soak.quiet_s.append(time.monotonic() - began_s)

    async def _sample(self, load: Load) -> None:
        """Take a sample now and then, until the load ends; and write what there is."""
        write_s = WRITE_EVERY_S
        while not self._stop.is_set():
            status = await load.client.status()
            processes = await asyncio.to_thread(held_by_all, os.getpid(), self._names)
            now_s = self._now_s()
            self._soak.samples.append(Sample(now_s, processes, counts(status), load.tally.swaps))
            self._soak.seconds = now_s
            self._advance(int(now_s) - self._shown_s)
            self._shown_s = int(now_s)
            if now_s >= write_s:
                await asyncio.to_thread(self._write)
                write_s = now_s + WRITE_EVERY_S
            await self._pause(self._soak.plan.every_s)

    async def _pause(self, seconds: float) -> None:
        """So long, or until it is over."""
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            return
