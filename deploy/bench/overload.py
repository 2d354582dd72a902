"""`deepinfer bench overload`: ten times the load that a cluster can bear, and how it takes that.

First the best: as many requests at once as are served fastest, each followed by the next. Then
requests come at ten times the rate that was served at best, whatever becomes of them, from
processes of their own; some are read slowly and some not at all. The cluster must go on at the
best's speed, refuse what it cannot keep with RESOURCE_EXHAUSTED and the bound's name, hold no more
memory after minutes than after the first, and be as it was when it is over.

Speed is what workers have generated for accepted requests, as the gateway counts it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from deepinfer.client import AsyncClient
from deepinfer.deploy.bench import overload_report
from deepinfer.deploy.bench.footprints import Held, held_by_all
from deepinfer.deploy.bench.holdings import held, lives
from deepinfer.deploy.bench.known import Heard, Known, Lengths, make_known
from deepinfer.deploy.bench.overload_load import Orders
from deepinfer.deploy.bench.plots import check_plots
from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.bench.steps import counted
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig, ConfigError
from deepinfer.deploy.generate import get_model

BLOCK_SIZE = 16
LENGTHS = Lengths(prompt=(8, 48), answer=(32, 64))
REQUESTS = 48
POOL_REQUESTS = 24
"""Longest requests that a worker's pool holds at once: full batches, and swaps beyond."""
WARM_UP_S = 3.0
SETTLE_PATIENCE_S = 60.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked for.

    Raises:
        ConfigError: a number out of range.
    """

    seconds: float = 300.0
    factor: float = 10.0
    """Times the requests a second that were served at best."""
    workers: int = 1
    processes: int = 2
    """Of clients."""
    levels: tuple[int, ...] = (8, 16, 32, 64)
    """Requests at once and worker, of which the best is taken."""
    best_seconds: float = 15.0
    """Of each level."""
    max_live_requests: int = 1024
    every_s: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (
            ("seconds", 5),
            ("factor", 1),
            ("workers", 1),
            ("processes", 1),
            ("best_seconds", 1),
            ("max_live_requests", 1),
            ("every_s", 0.1),
        ):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name} = {value}: must be {least} or more")


@dataclass(frozen=True, slots=True)
class Sample:
    """Everything at one moment of the overload."""

    at_s: float
    tokens: int
    """Generated since the gateway's start."""
    complete: int
    """Requests that have ended well since then."""
    live: int
    kept: int
    streams: int
    processes: dict[str, Held]


@dataclass(frozen=True, slots=True)
class Level:
    """The unloaded cluster with so many requests at once."""

    streams: int
    tokens_per_s: float
    requests_per_s: float
    cores: dict[str, float]
    """CPU seconds a second of each process."""


@dataclass(slots=True)
class Seen:
    """What was seen; ``overload_report`` judges it."""

    plan: Plan
    model: Path
    levels: list[Level] = field(default_factory=list)
    rate: float = 0.0
    """Requests a second that were sent."""
    before: dict[str, Held] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    clients: list[dict[str, Any]] = field(default_factory=list)
    """What each process of clients says."""
    refused_by_gateway: dict[str, float] = field(default_factory=dict)
    swaps: int = 0
    restarts: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """What was held when it was long over."""
    free_after_s: float = 0.0
    after: str = ""
    """What was wrong with a request after all of it."""

    @property
    def best(self) -> Level:
        """The level with the most tokens a second."""
        return max(self.levels, key=lambda level: level.tokens_per_s)


def run_overload(*, model: str, plan: Plan, output: Path, console: Console) -> bool:
    """Run it; write ``overload.json`` and ``.png``; True if all was as it should be.

    Raises:
        ConfigError: matplotlib is missing, or the model's context is too short.
    """
    check_plots()
    path = get_model(model, console=console)
    blocks = POOL_REQUESTS * -(-LENGTHS.longest // BLOCK_SIZE)
    config = ClusterConfig(
        model=str(path),
        workers=plan.workers,
        device="cpu",
        kv_cache_dtype="fp16",
        block_size=BLOCK_SIZE,
        max_cache=f"{blocks} blocks",
        prefix_cache=False,  # blocks that it keeps are held by nobody, and yet not free
        max_live_requests=plan.max_live_requests,
        port=0,
    )
    seen = Seen(plan=plan, model=path)
    with counted(console, len(plan.levels) + 1) as steps:
        steps.tell("computing the right answers")
        known = make_known(
            path,
            LENGTHS,
            count=REQUESTS,
            seed=plan.seed,
            kv_cache_dtype=config.kv_cache_dtype,
            block_size=BLOCK_SIZE,
        )
        with Cluster(config, say=steps.tell) as cluster:
            asyncio.run(_Run(cluster, seen, known, steps.tell, steps.advance).run())
    found = overload_report.figures(seen, blocks)
    write_result(output / "overload.json", command_of(model, plan), found)
    overload_report.plot(seen, output / "overload.png")
    console.print(overload_report.table(found))
    console.print(overload_report.sentence(found), highlight=False)
    return bool(found["as_it_should_be"])


def command_of(model: str, plan: Plan) -> str:
    """The command line that measures this again."""
    levels = ",".join(str(level) for level in plan.levels)
    return (
        f"deepinfer bench overload --model {model} --duration {plan.seconds:g} "
        f"--factor {plan.factor:g} --workers {plan.workers} --processes {plan.processes} "
        f"--levels {levels} --max-live-requests {plan.max_live_requests} --seed {plan.seed}"
    )


class _Run:
    def __init__(
        self,
        cluster: Cluster,
        seen: Seen,
        known: Sequence[Known],
        tell: Callable[[str], None],
        advance: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._seen = seen
        self._known = known
        self._tell = tell
        self._advance = advance
        self._names: dict[int, str] = {}

    async def run(self) -> None:
        """The levels, the overload, and what is left of it."""
        cluster, seen, plan = self._cluster, self._seen, self._seen.plan
        self._names = {
            await asyncio.to_thread(cluster.pid, actor): actor for actor in cluster.actors
        }
        async with AsyncClient(list(cluster.endpoints), token=cluster.token) as client:
            before = lives(await client.status())
            for streams in plan.levels:
                self._tell(f"{streams} requests at once and worker")
                seen.levels.append(await self._level(client, streams * plan.workers))
                self._advance()
            seen.before = await asyncio.to_thread(held_by_all, os.getpid(), self._names)
            seen.rate = plan.factor * seen.best.requests_per_s
            self._tell(f"{seen.rate:.0f} requests a second")
            swaps = await _swaps(client)
            await self._overload(client)
            self._advance()
            seen.swaps = await _swaps(client) - swaps
            await self._settle(client)
            await self._one_more(client)
            status = await client.status()
            after = lives(status)
            seen.restarts = sorted(name for name in before if after.get(name) != before[name])
            seen.refused_by_gateway = {
                name: value
                for name, value in status["gateway"]["counters"].items()
                if "refused" in name and value
            }

    async def _level(self, client: AsyncClient, streams: int) -> Level:
        plan = self._seen.plan
        seconds = WARM_UP_S + plan.best_seconds + 1.0
        crowd = [
            await self._start(i, seconds, rate=0.0, streams=share)
            for i, share in enumerate(_shares(streams, plan.processes))
            if share
        ]
        try:
            await asyncio.gather(*(_line(process) for process in crowd))
            await asyncio.sleep(WARM_UP_S)
            before = await asyncio.to_thread(held_by_all, os.getpid(), self._names)
            began_s, first = time.perf_counter(), await _generated(client)
            await asyncio.sleep(plan.best_seconds)
            took_s, last = time.perf_counter() - began_s, await _generated(client)
            after = await asyncio.to_thread(held_by_all, os.getpid(), self._names)
            ended = [json.loads(await _line(process)) for process in crowd]
        finally:
            await _end(crowd)
        self._check(ended)
        await self._settle(client)
        tokens, complete = last[0] - first[0], last[1] - first[1]
        used = overload_report.cores(before, after, took_s)
        return Level(streams, tokens / took_s, complete / took_s, used)

    async def _overload(self, client: AsyncClient) -> None:
        seen, plan = self._seen, self._seen.plan
        rate = seen.rate / plan.processes
        crowd = [
            await self._start(100 + i, plan.seconds, rate=rate, streams=0)
            for i in range(plan.processes)
        ]
        try:
            await asyncio.gather(*(_line(process) for process in crowd))
            began_s = time.perf_counter()
            while (now_s := time.perf_counter() - began_s) < plan.seconds:
                status = await client.status()
                tokens, complete = _counted(status)
                processes = await asyncio.to_thread(held_by_all, os.getpid(), self._names)
                gateway = status["gateway"]
                seen.samples.append(
                    Sample(
                        time.perf_counter() - began_s,
                        tokens,
                        complete,
                        gateway["live_requests"],
                        gateway["kept_requests"],
                        gateway["streams"],
                        processes,
                    )
                )
                await asyncio.sleep(min(plan.every_s, plan.seconds - now_s))
            seen.clients = [json.loads(await _line(process)) for process in crowd]
        finally:
            await _end(crowd)
        self._check(seen.clients)

    def _check(self, ended: Sequence[dict[str, Any]]) -> None:
        for said in ended:
            if said["wrong"]:
                self._seen.after = self._seen.after or f"a stream: {said['wrong'][0]}"

    async def _start(self, number: int, seconds: float, *, rate: float, streams: int) -> Process:
        orders = Orders(
            endpoint=self._cluster.endpoints[0],
            token=self._cluster.token,
            requests=[
                {
                    "prompt_ids": known.prompt_ids,
                    "token_ids": known.token_ids,
                    "max_tokens": known.options["max_tokens"],
                    "temperature": known.options["temperature"],
                    "seed": known.options["seed"],
                }
                for known in self._known
            ],
            seconds=seconds,
            rate=rate,
            streams=streams,
            seed=1000 * self._seen.plan.seed + number,
            all_plain=not rate,
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "deepinfer.deploy.bench.overload_load",
            stdin=PIPE,
            stdout=PIPE,
            limit=2**24,
        )
        assert process.stdin is not None, "it was asked for"
        process.stdin.write(json.dumps(asdict(orders)).encode() + b"\n")
        await process.stdin.drain()
        return process

    async def _settle(self, client: AsyncClient) -> None:
        """Wait until nothing is held, and note what is after ``SETTLE_PATIENCE_S``."""
        began_s = time.perf_counter()
        while left := held(await client.status()):
            if time.perf_counter() - began_s > SETTLE_PATIENCE_S:
                self._seen.left = left
                break
            await asyncio.sleep(POLL_S)
        self._seen.free_after_s = time.perf_counter() - began_s

    async def _one_more(self, client: AsyncClient) -> None:
        """A request like any other: its answer must be the right one."""
        known = self._known[0]
        done = await client.generate(known.prompt_ids, **known.options)
        heard = Heard(known.token_ids)
        heard.hear(0, done.token_ids)
        heard.end(len(known.token_ids))
        if heard.wrong:
            self._seen.after = f"the request after it: {heard.wrong}"


def _shares(streams: int, processes: int) -> list[int]:
    share, rest = divmod(streams, processes)
    return [share + (i < rest) for i in range(processes)]


async def _generated(client: AsyncClient) -> tuple[int, int]:
    return _counted(await client.status())


def _counted(status: dict[str, Any]) -> tuple[int, int]:
    """Tokens that the gateway has taken, and requests that have ended by their length."""
    counters = status["gateway"]["counters"]
    return (
        int(counters["deepinfer_generation_tokens_total"]),
        int(counters['deepinfer_requests_finished_total{reason="length"}']),
    )


async def _swaps(client: AsyncClient) -> int:
    """Seen by the controller since its start."""
    return int((await client.status())["counters"]["deepinfer_controller_swaps_seen_total"])


async def _line(process: Process) -> bytes:
    assert process.stdout is not None, "it was asked for"
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of clients has ended with code {await process.wait()}")
    return line


async def _end(crowd: Sequence[Process]) -> None:
    for process in crowd:
        if process.returncode is None:
            process.kill()
        await process.wait()
