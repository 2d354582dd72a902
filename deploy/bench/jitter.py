"""`deepinfer bench jitter`: how evenly tokens come, with and without swaps.

The same streams are sent twice: into a pool that holds them all, and into one that does not, so
that whole requests are swapped out and come back. Every time between two tokens of a stream is
kept, with what happened in it. A swapped stream's stall is told apart from its copies: the rest is
waiting for room.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from deepinfer.client import AsyncClient, Delta, Event, Notice
from deepinfer.deploy.bench import jitter_report
from deepinfer.deploy.bench.hosts import CPU, Host
from deepinfer.deploy.bench.plots import check_plots
from deepinfer.deploy.bench.prompts import make_prompts, read_text
from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.bench.steps import counted
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig, ConfigError, check_kv_dtypes
from deepinfer.deploy.generate import get_model
from deepinfer.deploy.watch import Watched, watch

BLOCK_SIZE = 16
POOLS = ("roomy", "pressed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of both pools.

    Raises:
        ConfigError: a number out of range, or an unknown KV dtype.
    """

    streams: int = 8
    prompt_tokens: int = 64
    max_tokens: int = 64
    rounds: int = 2
    share: float = 0.55
    """The pressed pool, as a share of what all streams come to need at once."""
    threads: int = 1
    kv_cache_dtype: str = "fp16"
    host: Host = CPU

    def __post_init__(self) -> None:
        check_kv_dtypes((self.kv_cache_dtype,))
        for name, least in (
            ("streams", 2),
            ("prompt_tokens", 1),
            ("max_tokens", 2),
            ("rounds", 1),
            ("threads", 1),
        ):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name} = {value}: must be {least} or more")
        if not 0 < self.share < 1:
            raise ConfigError(f"share = {self.share}: must be above 0 and below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Between two tokens of a stream."""

    seconds: float
    swapped: bool
    """The stream was swapped out, or came back, in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRun:
    """One stream of one round; times in seconds."""

    token_ids: tuple[int, ...]
    intervals: tuple[Interval, ...]
    swaps: int
    resumes: int
    stall_s: float
    """Last token before a swap to first token after it, summed."""
    copy_out_s: float
    copy_in_s: float

    @property
    def wait_s(self) -> float:
        """The part of the stall that is no copy."""
        return max(0.0, self.stall_s - self.copy_out_s - self.copy_in_s)


@dataclass(slots=True)
class Clock:
    """Notes the intervals of one stream from its events."""

    intervals: list[Interval] = field(default_factory=list)
    _last_s: float | None = None
    _swapped: bool = False

    def hear(self, event: Event, now_s: float) -> None:
        """Take the next event. Tokens that came in one message have 0 between them."""
        if isinstance(event, Notice) and event.kind in ("swapped_out", "resumed"):
            self._swapped = True
        if not (isinstance(event, Delta) and event.token_ids):
            return
        extra = len(event.token_ids)
        if self._last_s is not None:
            self.intervals.append(Interval(seconds=now_s - self._last_s, swapped=self._swapped))
        # A swap before the first token delays no token after another.
        self.intervals += [Interval(seconds=0.0, swapped=False)] * (extra - 1)
        self._last_s, self._swapped = now_s, False


def run_jitter(
    *, model: str, load: Load, text: Path | None, output: Path, console: Console
) -> bool:
    """Measure; True if swaps happened and changed no token.

    Writes ``jitter.json`` and ``.png``, or ``jitter_<card>``. On a card a token may differ because
    another number of streams was in its step, for rounding differs with that: then it is only told
    how many do.

    Raises:
        ConfigError: matplotlib is missing, or ``text`` cannot be read.
    """
    check_plots()
    words = read_text(text)
    path = get_model(model, console=console)
    with counted(console, load.rounds * len(POOLS)) as steps:
        runs, blocks = measure(path, load, words, steps.tell, steps.advance)
    figures = jitter_report.figures(load, blocks, runs)
    stem = load.host.stem("jitter")
    write_result(output / f"{stem}.json", command_of(model, load, text), figures)
    jitter_report.plot(figures, runs, output / f"{stem}.png")
    console.print(jitter_report.table(figures))
    console.print(jitter_report.sentence(figures), highlight=False)
    swaps: int = figures["pools"]["pressed"]["swaps"]
    same: bool = figures["same_tokens"] == figures["tokens"]
    return swaps > 0 and (same or load.host.device == "cuda")


def command_of(model: str, load: Load, text: Path | None) -> str:
    """The command line that measures this again."""
    parts = [
        f"deepinfer bench jitter --model {model} --device {load.host.device}",
        f"--streams {load.streams}",
        f"--prompt-tokens {load.prompt_tokens} --max-tokens {load.max_tokens}",
        f"--rounds {load.rounds} --share {load.share} --threads {load.threads}",
        f"--kv-cache-dtype {load.kv_cache_dtype}",
    ]
    return " ".join(parts + ([] if text is None else [f"--text {text}"]))


def pool_blocks(load: Load, prompts: Sequence[Sequence[int]]) -> dict[str, int]:
    """Blocks of either pool. The pressed one still holds the largest request."""
    needs = [-(-(len(prompt) + load.max_tokens) // BLOCK_SIZE) for prompt in prompts]
    return {
        "roomy": sum(needs) + len(needs),
        "pressed": max(*needs, round(load.share * sum(needs))),
    }


def measure(
    model: Path,
    load: Load,
    text: str,
    tell: Callable[[str], None],
    advance: Callable[[], None],
) -> tuple[dict[str, list[list[StreamRun]]], dict[str, int]]:
    """Runs of every stream, by pool and round, and the pools' sizes in blocks."""
    from deepinfer.text.load import load_tokenizer

    prompts = make_prompts(load_tokenizer(model), load.streams, load.prompt_tokens, text)
    blocks = pool_blocks(load, prompts)
    runs: dict[str, list[list[StreamRun]]] = {}
    for pool in POOLS:
        tell(f"{pool} pool: starting a cluster")
        config = ClusterConfig(
            model=str(model),
            workers=1,
            device=load.host.device,
            kv_cache_dtype=load.kv_cache_dtype,
            kv_quality="off",  # speed is what is measured, also of random weights
            block_size=BLOCK_SIZE,
            max_cache=f"{blocks[pool]} blocks",
            threads=load.threads,
            prefix_cache=False,
            port=0,
        )
        with Cluster(config) as cluster:
            tell(f"{pool} pool of {blocks[pool]} blocks")
            runs[pool] = asyncio.run(_rounds(cluster, load, prompts, advance))
    return runs, blocks


async def _rounds(
    cluster: Cluster,
    load: Load,
    prompts: Sequence[tuple[int, ...]],
    advance: Callable[[], None],
) -> list[list[StreamRun]]:
    async with AsyncClient(list(cluster.endpoints), token=cluster.token) as client:
        await _stream(client, prompts[0], 2)  # What is done once is not measured.
        done = []
        for _ in range(load.rounds):
            streams = [_stream(client, prompt, load.max_tokens) for prompt in prompts]
            done.append(list(await asyncio.gather(*streams)))
            advance()
        return done


async def _stream(client: AsyncClient, prompt: tuple[int, ...], max_tokens: int) -> StreamRun:
    clock = Clock()
    stream = client.stream(
        prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, include_events=True
    )
    async with stream:
        choice = await watch(
            stream,
            Watched("stream"),
            lambda _, event: clock.hear(event, time.perf_counter()),
        )
    return StreamRun(
        token_ids=choice.token_ids,
        intervals=tuple(clock.intervals),
        swaps=choice.swaps.swaps,
        resumes=choice.swaps.resumes,
        stall_s=choice.swaps.stall_s,
        copy_out_s=choice.swaps.offload_s,
        copy_in_s=choice.swaps.reload_s,
    )
