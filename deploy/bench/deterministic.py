"""`deepinfer bench deterministic`: streams of a cluster in distress beside each request alone.

Requests of unlike length run in batches of whoever is there, on workers whose pools hold a part of
them: they are swapped out, come back somewhere else, and workers are killed with SIGKILL meanwhile.
Every round is another cluster, whose steps cut prompts at other places. A stream is identical if
its tokens are those that the request gives alone, in a process with room for it; every fourth asks
for log-probabilities, which must be the same numbers. Last, a part of it without the mode, and what
the mode costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from rich.console import Console

from deepinfer.client import AsyncClient, Choice, DeepInferError, Event
from deepinfer.deploy.bench import deterministic_report as report
from deepinfer.deploy.bench.alone import (
    Answered,
    Asked,
    Machine,
    answer_alone,
    as_sent,
    measure_speed,
)
from deepinfer.deploy.bench.hosts import CPU, Host
from deepinfer.deploy.bench.prompts import TEXT, make_prompts
from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.bench.steps import Steps, counted
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig, ConfigError, check_kv_dtypes
from deepinfer.deploy.generate import get_model
from deepinfer.deploy.watch import Watched, watch
from deepinfer.workers.core.sequence import common_prefix

BLOCK_SIZE: Final = 16
CUTS: Final = ((256, 512), (32, 96), (7, 64), (100, 160))
"""Tokens of a prompt in one step, and of a step, at most: one pair a round, by turns."""
PROMPT_TOKENS: Final = 48
"""Mean length of a prompt."""
ANSWER_TOKENS: Final = (12, 40)
SHARED_TOKENS: Final = 36
"""Every third prompt begins with the same ones: two blocks of the prefix cache and a bit."""
ROOM: Final = 0.3
"""What the pools hold of all that runs at once, about."""
SEQUENCES_AT_ONCE: Final = 12
"""For each worker."""
ORDINARY_SHARE: Final = 8
"""A stream without the mode for so many with it."""
BUDGET_SHARE: Final = 0.8
"""Of the budget, until the last stream with the mode has begun."""
WRITE_EVERY: Final = 50
"""Streams between two writes of the result."""
RESTART_POLL_S: Final = 0.5
SAMPLINGS: Final = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.7, "repetition_penalty": 1.1, "logprobs": 2},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked for.

    Raises:
        ConfigError: a number out of range.
    """

    streams: int = 2000
    requests: int = 500
    """Different ones; each runs several times, never beside the same others."""
    workers: int = 2
    rounds: int = 4
    kills: int = 20
    """Of workers, over all rounds."""
    processes: int = 1
    """That compute what the requests answer alone."""
    speed_rounds: int = 3
    """Of the measurement of speed; 0: none."""
    seed: int = 0
    budget_s: float | None = None
    """No stream begins after so long."""

    def __post_init__(self) -> None:
        for name, least in (
            ("streams", 1),
            ("requests", 1),
            ("workers", 1),
            ("rounds", 1),
            ("kills", 0),
            ("processes", 1),
            ("speed_rounds", 0),
        ):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name} = {value}: must be {least} or more")
        if self.kills and self.workers < 2:
            raise ConfigError(f"workers = {self.workers}: must be 2 or more with kills, one stays")

    def command(self, model: str, device: str, kv_cache_dtype: str) -> str:
        """What repeats it."""
        budget = "" if self.budget_s is None else f" --budget {self.budget_s:g}"
        return (
            f"deepinfer bench deterministic --model {model} --device {device} --kv-cache-dtype "
            f"{kv_cache_dtype} --streams {self.streams} --requests {self.requests} --workers "
            f"{self.workers} --rounds {self.rounds} --kills {self.kills} --processes "
            f"{self.processes} --speed-rounds {self.speed_rounds} --seed {self.seed}{budget}"
        )


@dataclass(slots=True)
class Stream:
    """How one stream ended."""

    request: int
    identical: bool
    numbers: bool
    """Log-probabilities were compared too."""
    swaps: int = 0
    resumes: int = 0
    moves: int = 0
    """It went on with another worker than it was swapped out of."""
    recomputes: int = 0
    placed_again: int = 0
    """It was given to another worker without its KV: the one it had was killed."""
    tokens: int = 0
    cached_tokens: int = 0
    wrong: str = ""
    """What differs, or how it failed."""


@dataclass(slots=True)
class Mode:
    """All streams with the mode, or without it."""

    deterministic: bool
    streams: list[Stream] = field(default_factory=list)
    kills: int = 0
    seconds: float = 0.0
    """Of streams, without the clusters' starts."""


def run_deterministic(
    *,
    model: str,
    kv_cache_dtype: str = "fp16",
    plan: Plan,
    output: Path,
    console: Console,
    host: Host = CPU,
) -> bool:
    """Run it; True if all were identical.

    Writes ``deterministic.json``, or ``deterministic_<card>.json``: as streams end, with
    ``"complete": false`` until the end. What the file has of other seeds is kept and counted too.

    Raises:
        ConfigError: no such KV dtype, the model's context is too short, or the file is of another
            model, KV dtype or device.
        LaunchError: a cluster does not come up, or a process has died.
    """
    check_kv_dtypes((kv_cache_dtype,))
    path = get_model(model, console=console)
    asked = make_requests(path, plan)
    file = output / f"{host.stem('deterministic')}.json"
    subject = {"model": path.name, "kv_cache_dtype": kv_cache_dtype} | host.facts()
    before = report.others(file, subject, plan.seed)
    began = time.monotonic()
    modes = [Mode(True), Mode(False)]
    speeds: list[dict[str, float]] = []

    def machine(deterministic: bool) -> Machine:
        return Machine(
            model=path,
            kv_cache_dtype=kv_cache_dtype,
            block_size=BLOCK_SIZE,
            device=host.device,
            deterministic=deterministic,
        )

    def write(complete: bool = False) -> dict[str, Any]:
        now = report.portion(plan, modes, speeds, complete=complete)
        figures = subject | report.figures([*before, now])
        write_result(file, plan.command(model, host.device, kv_cache_dtype), figures)
        return figures

    ordinary = max(1, plan.streams // ORDINARY_SHARE)
    with counted(console, plan.streams + ordinary) as steps:
        if plan.speed_rounds:
            steps.tell("measuring speed")
            speeds += measure_speed([machine(False), machine(True)], plan.speed_rounds)
        for mode in modes:
            wanted = plan.streams if mode.deterministic else ordinary
            count = min(wanted, len(asked))
            steps.tell(f"{count} requests alone, {report.name_of(mode)}")
            right = answer_alone(machine(mode.deterministic), asked[:count], plan.processes)
            rounds = plan.rounds if mode.deterministic else 1
            share = BUDGET_SHARE if mode.deterministic else 1.0
            deadline = None if plan.budget_s is None else began + share * plan.budget_s
            for turn in range(rounds):
                numbers = [i % count for i in range(turn, wanted, rounds)]
                Random(plan.seed * 1000 + turn).shuffle(numbers)
                config = cluster_config(path, kv_cache_dtype, plan, asked, mode, turn, host)
                kills = plan.kills * (turn + 1) // rounds - plan.kills * turn // rounds
                steps.tell(f"round {turn + 1} of {rounds}, {report.name_of(mode)}")
                with Cluster(config) as cluster:
                    one = _Round(cluster, asked, right, mode, deadline, plan.seed + turn, steps)
                    asyncio.run(one.run(numbers, kills if mode.deterministic else 0, write))
                write()
    figures = write(complete=True)
    console.print(report.table(figures))
    console.print(report.sentence(figures), highlight=False)
    return bool(figures["as_it_should_be"])


def make_requests(model: Path, plan: Plan) -> list[Asked]:
    """Draw the requests; every third has the same beginning.

    Raises:
        ConfigError: the model's context is too short for them.
    """
    from deepinfer.text.load import load_tokenizer
    from deepinfer.workers.model.load import load_model

    tokenizer, chance = load_tokenizer(model), Random(plan.seed)
    prompts = make_prompts(tokenizer, plan.requests, PROMPT_TOKENS)
    [shared] = make_prompts(tokenizer, 1, SHARED_TOKENS, TEXT[::-1])
    asked = []
    for number, prompt in enumerate(prompts):
        sampling = {
            "max_tokens": chance.randint(*ANSWER_TOKENS),
            "ignore_eos": True,
            **SAMPLINGS[number % len(SAMPLINGS)],
        }
        ids = (*shared, *prompt) if number % 3 == 0 else prompt
        asked.append(Asked(prompt_ids=ids, sampling=sampling, seed=number))
    longest, context = max(each.tokens for each in asked), load_model(model).config.max_positions
    if longest > context:
        raise ConfigError(
            f"model {model.name} has a context of {context} tokens: must be {longest} or more"
        )
    return asked


def cluster_config(
    model: Path,
    kv_cache_dtype: str,
    plan: Plan,
    asked: Sequence[Asked],
    mode: Mode,
    turn: int,
    host: Host,
) -> ClusterConfig:
    """A round's cluster: pools for a part of what runs at once, but for each request."""
    needs = [-(-each.tokens // BLOCK_SIZE) for each in asked]
    blocks = max(*needs, 2, round(ROOM * SEQUENCES_AT_ONCE * sum(needs) / len(needs)))
    chunk, step = CUTS[turn % len(CUTS)]
    return ClusterConfig(
        model=str(model),
        workers=plan.workers,
        device=host.device,
        kv_cache_dtype=kv_cache_dtype,
        kv_quality="off",  # what is measured is whether bits are the same
        deterministic=mode.deterministic,
        block_size=BLOCK_SIZE,
        max_cache=f"{blocks} blocks",
        prefill_chunk_tokens=chunk,
        max_batch_tokens=step,
        min_residency=4,
        port=0,
        metrics_port=0,
    )


class _Round:
    """One cluster's streams."""

    def __init__(
        self,
        cluster: Cluster,
        asked: Sequence[Asked],
        right: Sequence[Answered],
        mode: Mode,
        deadline: float | None,
        seed: int,
        steps: Steps,
    ) -> None:
        self._cluster = cluster
        self._asked = asked
        self._right = right
        self._mode = mode
        self._deadline = deadline
        self._chance = Random(seed)
        self._steps = steps
        self._ended = 0
        self._marks: dict[int, asyncio.Event] = {}
        """Set when so many streams have ended: a worker is killed then."""

    async def run(self, numbers: Sequence[int], kills: int, write: Callable[[], Any]) -> None:
        """Stream all of ``numbers``, as many at once as the workers have seats for."""
        began = time.monotonic()
        waiting = iter(numbers)
        for nth in range(kills):
            self._marks.setdefault((nth + 1) * len(numbers) // (kills + 1), asyncio.Event())
        killer = asyncio.create_task(self._kill(tuple(self._marks.values())))
        workers = self._cluster.config.workers
        async with AsyncClient(list(self._cluster.endpoints), token=self._cluster.token) as client:
            takers = (
                self._take(client, waiting, write) for _ in range(SEQUENCES_AT_ONCE * workers)
            )
            await asyncio.gather(*takers)
        killer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await killer
        self._mode.seconds += time.monotonic() - began

    async def _take(
        self, client: AsyncClient, waiting: Iterator[int], write: Callable[[], Any]
    ) -> None:
        for number in waiting:
            if self._deadline is not None and time.monotonic() > self._deadline:
                return
            self._mode.streams.append(await self._stream(client, number))
            self._ended += 1
            if self._ended in self._marks:
                self._marks[self._ended].set()
            self._steps.advance()
            if len(self._mode.streams) % WRITE_EVERY == 0:
                write()

    async def _stream(self, client: AsyncClient, number: int) -> Stream:
        asked, right = self._asked[number], self._right[number]
        numbers = "logprobs" in asked.sampling
        seen = Watched(f"request {number}")
        stream = client.stream(
            asked.prompt_ids, include_events=True, seed=asked.seed, **asked.sampling
        )
        try:
            async with stream:
                choice = await watch(stream, seen, _nothing)
        except DeepInferError as error:
            return Stream(number, False, numbers, wrong=f"{type(error).__name__}: {error}")
        return Stream(
            number,
            identical=not (wrong := difference(choice, right)),
            numbers=numbers,
            swaps=choice.swaps.swaps,
            resumes=choice.swaps.resumes,
            moves=moves(seen),
            recomputes=choice.swaps.recomputes,
            placed_again=max(0, sum(each.kind == "placed" for each in seen.notices) - 1),
            tokens=len(choice.token_ids),
            cached_tokens=choice.usage.cached_tokens,
            wrong=wrong,
        )

    async def _kill(self, marks: Sequence[asyncio.Event]) -> None:
        """Kill workers, spread over the streams; the one before has come back by then."""
        for reached in marks:
            await reached.wait()
            pids = await self._workers()
            os.kill(self._chance.choice(pids), signal.SIGKILL)
            self._mode.kills += 1

    async def _workers(self) -> list[int]:
        """The processes of all workers, once each has one that serves."""
        from ray.exceptions import RayError  # how Ray starts is for the launcher

        names = sorted(name for name in self._cluster.actors if name.startswith("worker-"))
        while True:
            try:
                return [await asyncio.to_thread(self._cluster.pid, name) for name in names]
            except RayError:
                await asyncio.sleep(RESTART_POLL_S)


def _nothing(_: Watched, __: Event) -> None:
    """Events are looked at when the stream has ended."""


def moves(seen: Watched) -> int:
    """How often a stream went on with another worker than it was swapped out of."""
    found, left = 0, ""
    for notice in seen.notices:
        if notice.kind == "swapped_out":
            left = notice.worker
        elif notice.kind == "resumed":
            found += notice.worker != left
    return found


def difference(choice: Choice, right: Answered) -> str:
    """What of an answer is not what the request gives alone; "" if nothing is."""
    if choice.finish_reason != "length":
        return f"ended by {choice.finish_reason}: {choice.message}"
    if choice.token_ids != right.token_ids:
        at = common_prefix(choice.token_ids, right.token_ids)
        return f"token {at} of {len(right.token_ids)}"
    numbers: list[float] = []
    for each in choice.logprobs:
        numbers += (each.logprob, *(one.logprob for one in each.top))
    if as_sent(numbers) != right.logprobs:
        return "log-probabilities"
    return ""
