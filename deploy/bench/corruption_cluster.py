"""Payloads of a real cluster, damaged in the store's memory: the request is computed anew.

A store's slabs are memfds, which another process of the same user can map through ``/proc``. A pool
of three blocks and two requests that need three each: the first is swapped out, every page of the
store loses a bit, and the first comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from deepinfer.client import AsyncClient, Choice, Delta, Event, Notice
from deepinfer.deploy.bench.offload import BLOCK_SIZE, BLOCKS, questions_of
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig
from deepinfer.deploy.oracle import Answer, Question, unpressed
from deepinfer.deploy.watch import Watched, watch

REFUSED: Final = 'deepinfer_worker_payloads_refused_total{reason="bytes"}'
METRICS_PATIENCE_S: Final = 5.0
"""Until a count has travelled in a report."""


@dataclass(slots=True)
class Seen:
    """What the rounds came to."""

    rounds: int = 0
    damaged: int = 0
    """Pages of the store lost a bit while the first request was swapped out."""
    recomputed: int = 0
    resumed: int = 0
    right: int = 0
    """Answers, two a round."""


def run_clusters(model: Path, rounds: int, console: Console) -> dict[str, Any]:
    """Damage every payload of ``rounds`` swaps, half of them behind each path.

    Raises:
        LaunchError: the cluster does not come up.
    """
    questions = questions_of(model)
    right = unpressed(model, questions, kv_cache_dtype="fp16", block_size=BLOCK_SIZE)
    seen, refused = Seen(), 0.0
    for path, count in (("memfd", rounds - rounds // 2), ("grpc", rounds // 2)):
        if not count:
            continue
        config = ClusterConfig.model_validate(
            {
                "model": str(model),
                "workers": 1,
                "device": "cpu",
                "kv_cache_dtype": "fp16",
                "block_size": BLOCK_SIZE,
                "max_cache": f"{BLOCKS} blocks",
                "prefix_cache": False,
                "store_path": path,
                "port": 0,
            }
        )
        telling = console.status(f"a cluster whose payloads are damaged, over {path}")
        with telling, Cluster(config) as cluster:
            refused += asyncio.run(_rounds(cluster, questions, right, count, seen))
    good = seen.damaged == seen.recomputed == rounds and seen.right == 2 * rounds
    return {
        "rounds": seen.rounds,
        "damaged": seen.damaged,
        "recomputed": seen.recomputed,
        "resumed_from_damaged": seen.resumed,
        "right": seen.right,
        "answers": 2 * seen.rounds,
        "counted_as_refused": refused,
        "as_it_should_be": good and refused == seen.damaged,
    }


async def _rounds(
    cluster: Cluster, questions: list[Question], right: list[Answer], count: int, seen: Seen
) -> float:
    """Returns how many payloads the workers say that they have refused for their bytes."""
    (store,) = (name for name in cluster.actors if name.startswith("store-"))
    pid = cluster.pid(store)
    async with AsyncClient(list(cluster.endpoints), token=cluster.token) as client:
        before = seen.damaged
        for _ in range(count):
            await _round(client, pid, questions, right, seen)
        for _ in range(int(METRICS_PATIENCE_S / 0.1)):
            refused = float((await client.status())["counters"].get(REFUSED, 0.0))
            if refused >= seen.damaged - before:
                break
            await asyncio.sleep(0.1)
        return refused


async def _round(
    client: AsyncClient, store: int, questions: list[Question], right: list[Answer], seen: Seen
) -> None:
    started = asyncio.Event()

    def on_event(_: Watched, event: Event) -> None:
        if isinstance(event, Delta):
            started.set()
        elif isinstance(event, Notice):
            if event.kind == "swapped_out":
                damage(store)
                seen.damaged += 1
            seen.recomputed += event.kind == "recomputed"
            seen.resumed += event.kind == "resumed"

    async def ask(number: int) -> Choice:
        question = questions[number]
        stream = client.stream(question.prompt, include_events=True, **question.sampling)
        async with stream:
            return await watch(stream, Watched(f"request {number}"), on_event)

    first = asyncio.create_task(ask(0))
    token = asyncio.create_task(started.wait())
    await asyncio.wait((first, token), return_when=asyncio.FIRST_COMPLETED)
    token.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await token
    choices = await asyncio.gather(first, ask(1))
    seen.rounds += 1
    seen.right += sum(
        choice.token_ids == answer.token_ids for choice, answer in zip(choices, right, strict=True)
    )


def damage(pid: int) -> int:
    """Turn a bit of every 4 KiB of a store's slabs; returns how many.

    Raises OSError: the process is gone, or another user's.
    """
    turned = 0
    folder = Path(f"/proc/{pid}/fd")
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if "/memfd:kv-" not in os.readlink(entry):
                continue
            with entry.open("r+b") as file, mmap.mmap(file.fileno(), 0) as slab:
                for at in range(0, len(slab), mmap.PAGESIZE):
                    slab[at] ^= 1
                    turned += 1
    return turned
