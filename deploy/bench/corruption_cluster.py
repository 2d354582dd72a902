"""Payloads of a real cluster, damaged in the store's memory: the request is computed anew.

A store's slabs are memfds, which another process of the same user can map through ``/proc``. A pool
of three blocks and two requests that need three each: the first is swapped out, exponents all over
the store's memory change, and the first comes back. Had it used that KV, it had other tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from deepinfer.client import AsyncClient, Choice, Delta, Event, Notice
from deepinfer.deploy.bench.offload import BLOCK_SIZE, BLOCKS, questions_of
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig
from deepinfer.deploy.oracle import Answer, Question, unpressed
from deepinfer.deploy.watch import Watched, watch

REFUSED: Final = 'deepinfer_worker_payloads_refused_total{reason="bytes"}'
STRIDE: Final = 64
"""Bytes of which one changes."""
STORE_MB: Final = 16
"""Little, for all of it has to be damaged before the request comes back."""
METRICS_PATIENCE_S: Final = 5.0
"""Until a count has travelled in a report."""


@dataclass(slots=True)
class Seen:
    """What the rounds came to."""

    rounds: int = 0
    damaged: int = 0
    """The store's memory was changed when a client had heard that its request was swapped out."""
    recomputed: int = 0
    resumed: int = 0
    """The request was on its way back by then."""
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
                "max_cpu_offload_mb": STORE_MB,
                "port": 0,
            }
        )
        telling = console.status(f"a cluster whose payloads are damaged, over {path}")
        with telling, Cluster(config) as cluster:
            refused += asyncio.run(_rounds(cluster, questions, right, count, seen))
    in_time = 0 < rounds <= 2 * seen.recomputed
    good = in_time and seen.damaged == rounds and seen.right == 2 * rounds
    return {
        "rounds": seen.rounds,
        "damaged": seen.damaged,
        "recomputed": seen.recomputed,
        "too_late": seen.resumed,
        "right": seen.right,
        "answers": 2 * seen.rounds,
        "counted_as_refused": refused,
        "as_it_should_be": good and refused == seen.recomputed,
    }


async def _rounds(
    cluster: Cluster, questions: list[Question], right: list[Answer], count: int, seen: Seen
) -> float:
    """Returns how many payloads the workers say that they have refused for their bytes."""
    (store,) = (name for name in cluster.actors if name.startswith("store-"))
    slabs, before = Slabs(cluster.pid(store)), seen.recomputed
    with contextlib.closing(slabs):
        async with AsyncClient(list(cluster.endpoints), token=cluster.token) as client:
            for _ in range(count):
                await _round(client, slabs, questions, right, seen)
            for _ in range(int(METRICS_PATIENCE_S / 0.1)):
                refused = float((await client.status())["counters"].get(REFUSED, 0.0))
                if refused >= seen.recomputed - before:
                    break
                await asyncio.sleep(0.1)
            return refused


async def _round(
    client: AsyncClient, slabs: Slabs, questions: list[Question], right: list[Answer], seen: Seen
) -> None:
    started = asyncio.Event()

    def on_event(_: Watched, event: Event) -> None:
        if isinstance(event, Delta):
            started.set()
        elif isinstance(event, Notice):
            if event.kind == "swapped_out":
                slabs.damage()
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


class Slabs:
    """The memory of a store's process, mapped from here as far as it is there."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}/fd")
        self._known: dict[tuple[int, int], mmap.mmap] = {}

    def close(self) -> None:
        """Unmap all of it."""
        for slab in self._known.values():
            slab.close()

    def damage(self) -> int:
        """Turn a high bit of one byte in ``STRIDE``; returns how many.

        Raises OSError: the process is gone, or another user's.
        """
        turned = 0
        for slab in self._all():
            some = np.frombuffer(slab, np.uint8)[1::STRIDE]
            some ^= 0x40
            turned += some.size
            del some  # or the map could not be closed
        return turned

    def _all(self) -> list[mmap.mmap]:
        for entry in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if "/memfd:kv-" not in os.readlink(entry):
                    continue
                found = entry.stat()
                if (key := (found.st_dev, found.st_ino)) not in self._known:
                    with entry.open("r+b") as file:
                        self._known[key] = mmap.mmap(file.fileno(), 0)
        return list(self._known.values())
