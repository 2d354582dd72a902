"""`deepinfer demo`: the main job on this machine, on a real model, with its answers checked.

Several chats at once through the SDK, into pools made too small on purpose. Requests are swapped
out and come back while their text streams; every answer must equal the one of a run with room.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from deepinfer.client import AsyncClient, Choice, Event, Notice
from deepinfer.deploy.bench.hosts import find_host
from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.board import Board, Lane, Outcome, outcome_table
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig, Device, check_kv_dtypes
from deepinfer.deploy.generate import get_model
from deepinfer.deploy.oracle import Answer, Question, unpressed
from deepinfer.deploy.starting import Starting
from deepinfer.deploy.status import mib
from deepinfer.deploy.watch import Watched, watch

WORKERS = 2
BLOCK_SIZE = 16
QUESTIONS = (
    "Why is the sky blue?",
    "Tell me a short story about a fox and a crow.",
    "What is the capital of France, and what is it known for?",
    "Explain what a hash table is.",
    "Give me three tips for learning to swim.",
    "Write a haiku about autumn rain.",
    "How does a bicycle stay upright?",
    "What should I cook with rice and tomatoes?",
)


def run_demo(
    *,
    requests: int,
    max_tokens: int,
    kv_cache_dtype: str,
    device: str = "cpu",
    deterministic: bool = False,
    output: Path | None,
    console: Console,
) -> bool:
    """Run it; True if every request finished with the right answer and swaps did happen.

    On a card (``device`` cuda, or auto where there is one) an answer may part from the one that
    was computed alone, for rounding differs with the batch: then it is only told how many do, but
    with ``deterministic`` all must be equal there too.
    """
    check_kv_dtypes((kv_cache_dtype,))
    host = find_host(device, console.print)
    model = get_model("demo", console=console)
    questions = [
        Question(
            prompt=({"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]},),
            # Every other one draws its tokens: a swap must not disturb the draw either.
            sampling={"max_tokens": max_tokens, "temperature": 0.0 if i % 2 == 0 else 0.8},
            seed=i,
        )
        for i in range(requests)
    ]
    with console.status("the same questions with room for all of them, for comparison"):
        expected = unpressed(
            model,
            questions,
            kv_cache_dtype=kv_cache_dtype,
            device=host.device,
            deterministic=deterministic,
        )
    config = _too_small(
        expected, max_tokens, str(model), kv_cache_dtype, host.device, deterministic
    )
    view = Starting(console)
    with contextlib.ExitStack() as stack:
        with view:
            cluster = stack.enter_context(Cluster(config, say=view.say, loading=view.loading))
        console.print(
            f"{WORKERS} workers with {config.max_cache} of {BLOCK_SIZE} tokens each, "
            f"{requests} chats of up to {max_tokens} tokens at once",
            highlight=False,
        )
        outcomes = asyncio.run(_ask(cluster, questions, expected, console))
        status = asyncio.run(_settled(cluster))
    console.print(outcome_table(outcomes))
    swaps = sum(row.swaps for row in outcomes)
    resumes = sum(row.resumes for row in outcomes)
    same = sum(row.same for row in outcomes)
    left = _left_over(status)
    console.print(
        f"{same} of {len(outcomes)} answers equal those of a run with room; {swaps} swaps out, "
        f"{resumes} back, {mib(sum(row.payload_bytes for row in outcomes))} moved; "
        f"left behind: {left or 'nothing'}; the cluster is down",
        highlight=False,
    )
    if output is not None:
        figures = {"requests": [asdict(row) for row in outcomes]}
        mode = " --deterministic" if deterministic else ""
        write_result(output, f"deepinfer demo --device {host.device}{mode}", host.facts() | figures)
    right = same == len(outcomes) or (host.device == "cuda" and not deterministic)
    return right and swaps > 0 and swaps == resumes and not left


def _too_small(
    expected: list[Answer],
    max_tokens: int,
    model: str,
    kv_cache_dtype: str,
    device: Device,
    deterministic: bool,
) -> ClusterConfig:
    """Pools that hold the largest request, but not a worker's share of them all."""
    needs = [math.ceil((len(a.prompt_ids) + max_tokens) / BLOCK_SIZE) for a in expected]
    blocks = max(*needs, round(0.55 * sum(needs) / WORKERS))
    return ClusterConfig(
        model=model,
        workers=WORKERS,
        device=device,  # the answers to compare with come from there
        kv_cache_dtype=kv_cache_dtype,
        deterministic=deterministic,
        block_size=BLOCK_SIZE,
        max_cache=f"{blocks} blocks",
        port=0,
    )


async def _ask(
    cluster: Cluster, questions: list[Question], expected: list[Answer], console: Console
) -> list[Outcome]:
    titles = [str(q.prompt[0]["content"]) for q in questions if isinstance(q.prompt[0], dict)]
    async with AsyncClient(list(cluster.endpoints), token=cluster.token) as client:
        with Board(console, titles) as board:
            watched = [Watched(f"chat {i + 1}") for i in range(len(questions))]

            async def one(i: int) -> Choice:
                def tell(seen: Watched, event: Event) -> None:
                    _show(board, board.lanes[i], seen, event)

                question = questions[i]
                stream = client.stream(
                    question.prompt, include_events=True, seed=question.seed, **question.sampling
                )
                async with stream:
                    return await watch(stream, watched[i], tell)

            choices = await asyncio.gather(*(one(i) for i in range(len(questions))))
    return [
        outcome(w, choice, expected[i].token_ids)
        for i, (w, choice) in enumerate(zip(watched, choices, strict=True))
    ]


def outcome(seen: Watched, choice: Choice, right: tuple[int, ...]) -> Outcome:
    """One request's row: the gateway's swap accounts beside the client's times."""
    return Outcome(
        name=seen.name,
        tokens=len(choice.token_ids),
        ttft_s=choice.timings.ttft_s,
        tpot_s=choice.timings.tpot_s,
        swaps=choice.swaps.swaps,
        resumes=choice.swaps.resumes,
        recomputes=choice.swaps.recomputes,
        payload_bytes=choice.swaps.offload_bytes,
        copy_out_s=choice.swaps.offload_s,
        copy_in_s=choice.swaps.reload_s,
        stall_s=choice.swaps.stall_s,
        same=choice.token_ids == right,
        path=[place.replace("worker-", "w").replace("store-local", "store") for place in seen.path],
    )


def _show(board: Board, lane: Lane, seen: Watched, event: Event) -> None:
    lane.text = seen.text
    if seen.choice is not None:
        lane.state, lane.where = "finished", ""
    elif isinstance(event, Notice):
        if event.kind == "swapped_out":
            lane.state, lane.where = "swapped", f"in {event.store}"
            board.tell(
                f"{seen.name}: {event.worker} > {event.store}, {event.blocks} blocks, "
                f"{mib(event.payload_bytes)} in {event.copy_s * 1e3:.1f} ms"
            )
        elif event.kind == "resumed":
            lane.state, lane.where = "running", f"on {event.worker}"
            board.tell(
                f"{seen.name}: {event.store} > {event.worker}, {event.blocks} blocks, "
                f"{mib(event.payload_bytes)} in {event.copy_s * 1e3:.1f} ms"
            )
        elif event.kind == "swap_failed":
            board.tell(f"{seen.name}: stays on {event.worker}, the swap did not go through")
        else:
            lane.state, lane.where = "running", f"on {event.worker}"
    board.refresh()


async def _settled(cluster: Cluster, patience_s: float = 5.0) -> dict[str, Any]:
    """The status once nothing is held any more, or as it is when patience ends."""
    async with AsyncClient(list(cluster.endpoints), token=cluster.token) as client:
        for _ in range(int(patience_s / 0.1)):
            status = await client.status()
            if not _left_over(status):
                break
            await asyncio.sleep(0.1)
        return status


def _left_over(status: dict[str, Any]) -> str:
    """Blocks, tickets and requests that should be gone, in words; empty if they are."""
    found = []
    for name, worker in sorted(status["workers"].items()):
        if worker["blocks_free"] != worker["blocks_total"]:
            found.append(f"{worker['blocks_total'] - worker['blocks_free']} blocks on {name}")
    for name, store in sorted(status["stores"].items()):
        if store["used_bytes"] or store["tickets"]:
            found.append(f"{store['used_bytes']} bytes in {name}")
    return ", ".join(found)
