"""`deepinfer bench offload`: what one forced swap costs.

One worker whose pool has exactly 3 blocks; two requests that need 3 each; the second is sent after
the first's first token. The first is swapped out, the second runs, the first comes back. A round
counts as it should be if both finish with the right answer after one swap and one resume.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from deepinfer.client import AsyncClient, Choice, Delta, Event
from deepinfer.deploy.bench.hosts import CPU, Host
from deepinfer.deploy.bench.plots import axes_in_a_row, check_plots, write_plot
from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig, check_kv_dtypes
from deepinfer.deploy.generate import get_model
from deepinfer.deploy.oracle import Answer, Question, unpressed
from deepinfer.deploy.watch import Watched, watch

BLOCK_SIZE = 16
BLOCKS = 3
PROMPT_TOKENS = 20
OUTPUT_TOKENS = 26
PROMPTS = (
    "The little boat left the harbour at dawn. The old sailor sang a song about the sea and the "
    "gulls that followed them.",
    "In the middle of the forest there stood a house with a red roof. Nobody knew who had built "
    "it, or why it was empty.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFigures:
    """One request of a round; times in milliseconds, as the client saw them (0: no token came)."""

    completed: bool
    right: bool
    swaps: int
    resumes: int
    ttft_ms: float
    tpot_ms: float
    payload_bytes: int
    offload_copy_ms: float
    reload_copy_ms: float
    stall_ms: float
    stall_beside_copies_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The two requests of a round, in the order in which they were sent."""

    first: RequestFigures
    second: RequestFigures

    @property
    def as_it_should_be(self) -> bool:
        both = (self.first, self.second)
        return (
            all(r.completed and r.right for r in both)
            and sum(r.swaps for r in both) == 1
            and sum(r.resumes for r in both) == 1
        )


def run_offload(
    *,
    model: str,
    dtypes: tuple[str, ...],
    rounds: int,
    output: Path,
    console: Console,
    host: Host = CPU,
) -> bool:
    """Run every dtype; True if every round was right.

    Writes ``offload.json`` and ``.png``, or ``offload_<card>``.
    """
    check_kv_dtypes(dtypes)
    check_plots()
    path = get_model(model, console=console)
    results: dict[str, list[Round]] = {}
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console
    ) as progress:
        for dtype in dtypes:
            task = progress.add_task(f"{dtype}", total=rounds)
            results[dtype] = _run_dtype(
                path, dtype, rounds, host, lambda t=task: progress.advance(t)
            )
    names = " ".join(f"--kv-cache-dtype {dtype}" for dtype in dtypes)
    write_result(
        output / f"{host.stem('offload')}.json",
        f"deepinfer bench offload --model {model} --device {host.device} --rounds {rounds} {names}",
        {
            **host.facts(),
            "pool_blocks": BLOCKS,
            "block_size": BLOCK_SIZE,
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "results": {
                dtype: {"summary": _summary(done), "rounds": [asdict(r) for r in done]}
                for dtype, done in results.items()
            },
        },
    )
    _plot(results, output / f"{host.stem('offload')}.png")
    console.print(_table(results))
    return all(r.as_it_should_be for done in results.values() for r in done)


def _run_dtype(model: Path, dtype: str, rounds: int, host: Host, advance: Any) -> list[Round]:
    questions = questions_of(model)
    # One request runs at a time, here as there: on a card, too, not a bit may differ.
    right = unpressed(
        model, questions, kv_cache_dtype=dtype, block_size=BLOCK_SIZE, device=host.device
    )
    config = ClusterConfig(
        model=str(model),
        workers=1,
        device=host.device,
        kv_cache_dtype=dtype,
        kv_quality="off",  # speed is what is measured, also of random weights
        block_size=BLOCK_SIZE,
        max_cache=f"{BLOCKS} blocks",
        port=0,
    )
    with Cluster(config) as cluster:
        return asyncio.run(_rounds(cluster, questions, right, rounds, advance))


def questions_of(model: Path) -> list[Question]:
    """Two requests that need three blocks each."""
    from deepinfer.text.load import load_tokenizer

    tokenizer = load_tokenizer(model)
    sampling = {"max_tokens": OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True}
    found = []
    for text in PROMPTS:
        ids = tuple(tokenizer.encode(text))[:PROMPT_TOKENS]
        found.append(Question(prompt=ids, sampling=sampling))
    return found


async def _rounds(
    cluster: Cluster, questions: list[Question], right: list[Answer], rounds: int, advance: Any
) -> list[Round]:
    done = []
    async with AsyncClient(list(cluster.endpoints), token=cluster.token) as client:
        for _ in range(rounds):
            done.append(await _round(client, questions, right))
            advance()
    return done


async def _round(client: AsyncClient, questions: list[Question], right: list[Answer]) -> Round:
    started = asyncio.Event()

    def on_event(_: Watched, event: Event) -> None:
        if isinstance(event, Delta):
            started.set()

    async def ask(i: int) -> RequestFigures:
        question = questions[i]
        stream = client.stream(question.prompt, include_events=True, **question.sampling)
        async with stream:
            choice = await watch(stream, Watched(f"request {i}"), on_event)
        return _figures(choice, right[i])

    first = asyncio.create_task(ask(0))
    token = asyncio.create_task(started.wait())
    # A first request that fails must end the bench, not leave it waiting for a token.
    await asyncio.wait((first, token), return_when=asyncio.FIRST_COMPLETED)
    token.cancel()
    second = asyncio.create_task(ask(1))
    return Round(first=await first, second=await second)


def _figures(choice: Choice, right: Answer) -> RequestFigures:
    swaps, timings = choice.swaps, choice.timings
    copies_ms = (swaps.offload_s + swaps.reload_s) * 1e3
    return RequestFigures(
        completed=choice.finish_reason == "length",
        right=choice.token_ids == right.token_ids,
        swaps=swaps.swaps,
        resumes=swaps.resumes,
        ttft_ms=(timings.ttft_s or 0.0) * 1e3,
        tpot_ms=(timings.tpot_s or 0.0) * 1e3,
        payload_bytes=swaps.offload_bytes,
        offload_copy_ms=swaps.offload_s * 1e3,
        reload_copy_ms=swaps.reload_s * 1e3,
        stall_ms=swaps.stall_s * 1e3,
        stall_beside_copies_ms=max(0.0, swaps.stall_s * 1e3 - copies_ms),
    )


def _summary(done: list[Round]) -> dict[str, Any]:
    both = [r for one in done for r in (one.first, one.second)]
    swapped = [r for r in both if r.swaps]
    return {
        "rounds": len(done),
        "rounds_as_they_should_be": sum(r.as_it_should_be for r in done),
        "requests": len(both),
        "completed": sum(r.completed for r in both),
        "right": sum(r.right for r in both),
        "swaps": sum(r.swaps for r in both),
        "resumes": sum(r.resumes for r in both),
        "payload_bytes_median": median([r.payload_bytes for r in swapped] or [0]),
        "offload_copy_ms_median": median([r.offload_copy_ms for r in swapped] or [0.0]),
        "reload_copy_ms_median": median([r.reload_copy_ms for r in swapped] or [0.0]),
        "stall_ms_median": median([r.stall_ms for r in swapped] or [0.0]),
        "ttft_ms_median": [
            median([r.first.ttft_ms for r in done]),
            median([r.second.ttft_ms for r in done]),
        ],
        "tpot_ms_median": [
            median([r.first.tpot_ms for r in done]),
            median([r.second.tpot_ms for r in done]),
        ],
    }


def _table(results: dict[str, list[Round]]) -> Table:
    table = Table(title="forced swap: medians, times in ms", padding=(0, 1, 0, 0))
    table.add_column("dtype", no_wrap=True)
    columns = ("done", "right", "swaps", "resumes", "KiB", "out", "in", "stall", "TTFT", "TPOT")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for dtype, done in results.items():
        s = _summary(done)
        table.add_row(
            dtype,
            f"{s['completed']}/{s['requests']}",
            f"{s['right']}/{s['requests']}",
            str(s["swaps"]),
            str(s["resumes"]),
            f"{s['payload_bytes_median'] / 1024:.0f}",
            f"{s['offload_copy_ms_median']:.1f}",
            f"{s['reload_copy_ms_median']:.1f}",
            f"{s['stall_ms_median']:.0f}",
            " ".join(f"{t:.0f}" for t in s["ttft_ms_median"]),
            " ".join(f"{t:.0f}" for t in s["tpot_ms_median"]),
        )
    return table


def _plot(results: dict[str, list[Round]], path: Path) -> None:
    figure, (copies, stalls) = axes_in_a_row(2, (10, 4))
    names = list(results)
    summaries = [_summary(results[name]) for name in names]
    places = range(len(names))
    width = 0.38
    for key, side, label in (
        ("offload_copy_ms_median", -1, "out"),
        ("reload_copy_ms_median", 1, "in"),
    ):
        middles = [place + side * width / 2 for place in places]
        copies.bar(middles, [s[key] for s in summaries], width, label=label)
    copies.set_title("copy, hash and store calls, median")
    copies.legend()
    for name, done in results.items():
        stalls.plot(
            range(1, len(done) + 1),
            [max(r.first.stall_ms, r.second.stall_ms) for r in done],
            marker="o",
            label=name,
        )
    stalls.set_title("stall of the swapped request")
    stalls.set_xlabel("round")
    stalls.set_xticks(range(1, max(len(done) for done in results.values()) + 1))
    stalls.legend()
    copies.set_xticks(list(places), names)
    for axis in (copies, stalls):
        axis.set_ylabel("ms")
        axis.set_ylim(bottom=0)
        axis.grid(axis="y", alpha=0.3)
    figure.suptitle("One forced swap a round: 3 blocks, two requests that need 3 each")
    write_plot(figure, path)
