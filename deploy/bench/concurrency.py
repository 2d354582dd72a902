"""`deepinfer bench concurrency`: how speed changes with the number of streams.

One worker. For each level as many streams as it says are sent at once through the SDK, and every
one asks for the same number of tokens. Beside it, in the same run and on the same thread count or
card: the bare engine loop, and transformers serving the same prompts in each of its ways. The peers
and the cluster take turns, round by round, and ratios are taken within a round, so that a machine
that becomes slower or faster meanwhile favours nobody.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rich.console import Console

from deepinfer.client import AsyncClient
from deepinfer.deploy.bench import concurrency_report
from deepinfer.deploy.bench.hosts import CPU, Host
from deepinfer.deploy.bench.plots import check_plots
from deepinfer.deploy.bench.prompts import make_prompts, read_text
from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.bench.steps import counted
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig, ConfigError, check_kv_dtypes
from deepinfer.deploy.generate import get_model

if TYPE_CHECKING:
    from deepinfer.deploy.bench.peers import PeerProcess
    from deepinfer.deploy.bench.transformers_peer import Way

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked for; the same of everybody.

    Raises:
        ConfigError: a number below 1, no level, or an unknown KV dtype.
    """

    levels: tuple[int, ...] = (1, 2, 4, 8)
    prompt_tokens: int = 64
    max_tokens: int = 32
    rounds: int = 3
    threads: int = 1
    kv_cache_dtypes: tuple[str, ...] = ("fp16",)
    peers: bool = True
    """Whether transformers runs, too; the bare engine loop always does."""
    host: Host = CPU

    def __post_init__(self) -> None:
        check_kv_dtypes(self.kv_cache_dtypes)
        if not self.levels or min(self.levels) < 1 or len(set(self.levels)) < len(self.levels):
            raise ConfigError(
                f"levels = {list(self.levels)}: must be different numbers of streams from 1"
            )
        for name, least in (("prompt_tokens", 1), ("max_tokens", 2), ("rounds", 1), ("threads", 1)):
            if (value := getattr(self, name)) < least:
                raise ConfigError(f"{name} = {value}: must be {least} or more")

    @property
    def streams_max(self) -> int:
        return max(self.levels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One level of one round, of whoever served it.

    The times of each stream (in seconds) are empty where the server does not tell them.
    """

    seconds: float
    """From the first request's sending to the last token of all."""
    token_ids: tuple[tuple[int, ...], ...]
    ttfts_s: tuple[float, ...] = ()
    intervals_s: tuple[tuple[float, ...], ...] = ()
    """Between each token of a stream and the one before it."""

    @property
    def tpots_s(self) -> tuple[float, ...]:
        """Mean interval of each stream."""
        return tuple(sum(times) / len(times) for times in self.intervals_s)

    @property
    def tokens_per_s(self) -> float:
        return sum(len(ids) for ids in self.token_ids) / self.seconds


SERVERS = ("cluster", "engine", "one_by_one", "padded_batch")
"""Who serves a level: we, our engine alone, and transformers in two ways."""

CARD_SERVERS = ("cluster", "engine", "padded_batch", "static", "continuous")
"""The same on a card, where transformers has others worth a try."""

WAYS: dict[str, Way] = {"static": "static", "continuous": "continuous"}
"""Of transformers, where it is not the padded batch."""

Measured: TypeAlias = dict[tuple[str, str, int], list[Run]]
"""By server, KV dtype and level: one run a round."""


def run_concurrency(
    *, model: str, load: Load, text: Path | None, output: Path, console: Console
) -> None:
    """Measure and write ``concurrency.json`` and ``.png``, or ``concurrency_<card>``.

    Raises:
        ConfigError: matplotlib or transformers is missing, or ``text`` cannot be read.
    """
    check_plots()
    if load.peers and importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            "transformers is not installed: pip install 'deepinfer-cluster[bench]', or --no-peers"
        )
    words = read_text(text)
    path = get_model(model, console=console)
    with counted(console, steps_of(load)) as steps:
        measured, prompts = measure(path, load, words, steps.tell, steps.advance)
    figures = concurrency_report.figures(load, [len(prompt) for prompt in prompts], measured)
    stem = load.host.stem("concurrency")
    write_result(output / f"{stem}.json", command_of(model, load, text), figures)
    concurrency_report.plot(figures, output / f"{stem}.png")
    console.print(concurrency_report.table(figures))


def parse_levels(text: str, field: str = "levels") -> tuple[int, ...]:
    """Numbers separated by commas, as the option ``field`` takes them.

    Raises:
        ConfigError: something else stands between the commas.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{field} = {text!r}: must be numbers separated by commas") from error


def command_of(model: str, load: Load, text: Path | None) -> str:
    """The command line that measures this again."""
    parts = ["deepinfer bench concurrency", f"--model {model}", f"--device {load.host.device}"]
    parts += [f"--levels {','.join(map(str, load.levels))}"]
    parts += [f"--kv-cache-dtype {dtype}" for dtype in load.kv_cache_dtypes]
    parts += [f"--prompt-tokens {load.prompt_tokens}", f"--max-tokens {load.max_tokens}"]
    parts += [f"--rounds {load.rounds}", f"--threads {load.threads}"]
    parts += [] if load.peers else ["--no-peers"]
    parts += [] if text is None else [f"--text {text}"]
    return " ".join(parts)


def servers_of(load: Load) -> tuple[str, ...]:
    """Who takes part."""
    servers = SERVERS if load.host.device == "cpu" else CARD_SERVERS
    return servers if load.peers else servers[:2]


def steps_of(load: Load) -> int:
    """How often ``measure`` reports progress."""
    runs = load.rounds * len(load.levels) * len(servers_of(load))
    return runs * len(load.kv_cache_dtypes)


def measure(
    model: Path,
    load: Load,
    text: str,
    tell: Callable[[str], None],
    advance: Callable[[], None],
) -> tuple[Measured, list[tuple[int, ...]]]:
    """Run every round of every dtype; also returns the prompts."""
    from deepinfer.deploy.bench.peers import PeerProcess, PeerSettings
    from deepinfer.text.load import load_tokenizer

    prompts = make_prompts(load_tokenizer(model), load.streams_max, load.prompt_tokens, text)
    blocks = sum(-(-(len(p) + load.max_tokens) // BLOCK_SIZE) for p in prompts) + load.streams_max
    settings = PeerSettings(
        model_path=str(model),
        kv_cache_dtypes=load.kv_cache_dtypes,
        blocks=blocks,
        threads=load.threads,
        transformers=load.peers,
        device=load.host.device,
    )
    measured: Measured = {}
    with PeerProcess(settings) as peers:
        for dtype in load.kv_cache_dtypes:
            tell(f"{dtype}: starting a cluster")
            config = ClusterConfig(
                model=str(model),
                workers=1,
                device=load.host.device,
                kv_cache_dtype=dtype,
                kv_quality="off",  # speed is what is measured, also of random weights
                block_size=BLOCK_SIZE,
                max_cache=f"{blocks} blocks",
                threads=load.threads,
                # Every round sends the same prompts: a cached prefix would be the cluster's alone.
                prefix_cache=False,
                port=0,
            )
            with Cluster(config) as cluster:
                turns = _Turns(cluster, peers, dtype, load, prompts, measured, tell, advance)
                asyncio.run(turns.run())
    return measured, prompts


@dataclass(slots=True)
class _Turns:
    """The rounds of one KV dtype: the cluster and its peers take turns."""

    cluster: Cluster
    peers: PeerProcess
    dtype: str
    load: Load
    prompts: Sequence[tuple[int, ...]]
    measured: Measured
    tell: Callable[[str], None]
    advance: Callable[[], None]

    async def run(self) -> None:
        servers = servers_of(self.load)
        async with AsyncClient(list(self.cluster.endpoints), token=self.cluster.token) as client:
            self.tell(f"{self.dtype}: warming up")
            for server in servers:
                await self._warm_up(client, server)
            for number in range(self.load.rounds):
                self.tell(f"{self.dtype}: round {number + 1} of {self.load.rounds}")
                alone: list[Run] = []
                for level in sorted(self.load.levels):
                    # Whoever goes first in one round goes last in the next.
                    turned = number % len(servers)
                    for server in servers[turned:] + servers[:turned]:
                        await self._take_turn(client, server, level, alone)
                        self.advance()

    async def _warm_up(self, client: AsyncClient, server: str) -> None:
        if server != "static":
            await self._serve(client, server, self.prompts[:1], 2)
            return
        # It compiles for numbers of rows, and for a cache as long as the longest it has had.
        for level in sorted(self.load.levels, reverse=True):
            await self._serve(client, server, self.prompts[:level], self.load.max_tokens)

    async def _take_turn(
        self, client: AsyncClient, server: str, level: int, alone: list[Run]
    ) -> None:
        """Serve one level; ``alone`` are the prompts that transformers has served this round."""
        if server == "one_by_one":
            # What it takes for a level holds what it took for the level before.
            alone += [
                await self._serve(client, server, [prompt], self.load.max_tokens)
                for prompt in self.prompts[len(alone) : level]
            ]
            run = joined(alone)
        else:
            run = await self._serve(client, server, self.prompts[:level], self.load.max_tokens)
        self.measured.setdefault((server, self.dtype, level), []).append(run)

    async def _serve(
        self, client: AsyncClient, server: str, prompts: Sequence[tuple[int, ...]], tokens: int
    ) -> Run:
        if server == "cluster":
            return await _ask(client, prompts, tokens)
        if server == "engine":
            timed = await asyncio.to_thread(self.peers.engine, self.dtype, prompts, tokens)
        else:
            timed = await asyncio.to_thread(
                self.peers.transformers, prompts, tokens, WAYS.get(server, "padded_batch")
            )
        return Run(
            seconds=timed.seconds,
            ttfts_s=tuple(times[0] for times in timed.token_times_s),
            intervals_s=tuple(
                tuple(after - before for before, after in pairwise(times))
                for times in timed.token_times_s
            ),
            token_ids=timed.token_ids,
        )


async def _ask(client: AsyncClient, prompts: Sequence[tuple[int, ...]], tokens: int) -> Run:
    """Send all prompts at once and wait for the last token."""
    start = time.perf_counter()
    done = await asyncio.gather(
        *(
            client.generate(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True)
            for prompt in prompts
        )
    )
    seconds = time.perf_counter() - start
    timings = [completion.timings for completion in done]
    return Run(
        seconds=seconds,
        ttfts_s=tuple(t.ttft_s for t in timings if t.ttft_s is not None),
        intervals_s=tuple(t.intervals_s for t in timings),
        token_ids=tuple(completion.token_ids for completion in done),
    )


def joined(runs: Sequence[Run]) -> Run:
    """Runs one after another, as one."""
    return Run(
        seconds=sum(run.seconds for run in runs),
        token_ids=tuple(ids for run in runs for ids in run.token_ids),
    )
