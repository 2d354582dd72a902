"""`deepinfer bench cancels`: requests cancelled in every state, and how soon all they held is free.

A pool too small for the streams of a round. In most rounds a failpoint holds one request in the
middle of a state that passes quickly; then the states of all are read, every stream is aborted at
once, and the process goes on a moment later. Others are cancelled at a random moment, or while
their worker, which was killed, has no successor yet.

A cancel's time is from the call of ``abort`` until *nothing at all* is held: no block, no byte or
ticket in the store, no sequence at the controller, no live request or stream at the gateway. It
counts what the others of its round held as well, so it is an upper bound.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from deepinfer.client import Aborted, AsyncClient, AsyncStream, DeepInferError, Delta, Finished
from deepinfer.deploy.bench import cancels_report
from deepinfer.deploy.bench.cancels_report import LIMIT_S
from deepinfer.deploy.bench.holdings import held, lives
from deepinfer.deploy.bench.known import Heard, Known, Lengths, make_known
from deepinfer.deploy.bench.plots import check_plots
from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.bench.steps import counted
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig
from deepinfer.deploy.generate import get_model
from deepinfer.proto.failpoints import FOLDER_VARIABLE, WorkerPlace

WORKER = "worker-0"
BLOCK_SIZE = 16
LENGTHS = Lengths(prompt=(8, 60), answer=(150, 300))
"""Answers so long that few end before they are cancelled."""
CHUNK_TOKENS = 16
"""So that a prompt takes some steps."""
SPARE_BLOCKS = 2
REQUESTS = 24
STREAMS = (10, 18)
"""Of a round; more than the pool holds."""
RELEASE_S = 0.1
"""A parked process goes on within so long after the cancels."""
RANDOM_S = 0.6
DEAD_S = 1.5
"""After a kill the cancels come within so long; a worker's start takes longer."""
ARRIVE_PATIENCE_S = 20.0
FREE_PATIENCE_S = 10.0
BACK_PATIENCE_S = 120.0
POLL_S = 0.002

PLACES: dict[str, tuple[WorkerPlace, ...]] = {
    "prefill": ("mid_prefill",),
    "decode": ("mid_decode",),
    "swapping_out": (
        "before_reserve",
        "mid_copy",
        "before_commit",
        "after_commit_before_free",
    ),
    "swapping_in": ("mid_fetch", "after_fetch_before_report"),
}
"""Where a request is held in a state."""
ROUNDS = (
    *("swapping_out", "swapping_in", "prefill", "swapping_out", "swapped", "waiting"),
    *("swapping_out", "swapping_in", "decode", "random", "swapping_out", "recovering"),
)
"""What the rounds aim at, over and over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """One cancel and what came of it."""

    state: str
    """What the controller said of the request just before; "arriving": nothing yet."""
    aim: str
    place: str
    """Where a process was parked meanwhile; "" if none was."""
    free_s: float | None
    """Until nothing was held; None: something still was after ``FREE_PATIENCE_S``."""


@dataclass(slots=True)
class Seen:
    """All rounds so far."""

    cancels: list[Cancel] = field(default_factory=list)
    ended: int = 0
    """Streams that had ended by themselves before their cancel: they do not count."""
    rounds: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    """Rounds that did not come to the state they aimed at."""
    faults: list[str] = field(default_factory=list)
    """Wrong tokens, other ends than a cancel's, and what was never freed."""
    late: list[str] = field(default_factory=list)
    """What was held a second after a round's cancels."""
    kills: int = 0


def run_cancels(*, model: str, cancels: int, seed: int, output: Path, console: Console) -> bool:
    """Run until so many cancels count; write ``cancels.json`` and ``.png``.

    True if every one of them freed everything within a second.

    Raises:
        ConfigError: matplotlib is missing, or the model's context is too short.
    """
    check_plots()
    path = get_model(model, console=console)
    blocks = -(-LENGTHS.longest // BLOCK_SIZE) + SPARE_BLOCKS
    config = ClusterConfig(
        model=str(path),
        workers=1,
        device="cpu",
        kv_cache_dtype="fp16",
        block_size=BLOCK_SIZE,
        prefill_chunk_tokens=CHUNK_TOKENS,
        max_cache=f"{blocks} blocks",
        min_residency=4,
        prefix_cache=False,  # blocks that it keeps are held by nobody, and yet not free
        port=0,
    )
    seen = Seen()
    command = f"deepinfer bench cancels --model {model} --cancels {cancels} --seed {seed}"

    def write() -> dict[str, Any]:
        found = cancels_report.figures(seen, path.name, blocks, cancels)
        write_result(output / "cancels.json", command, found)
        return found

    with (
        tempfile.TemporaryDirectory(prefix="deepinfer-cancels-") as folder,
        counted(console, cancels) as steps,
    ):
        steps.tell("computing the right answers")
        known = make_known(
            path,
            LENGTHS,
            count=REQUESTS,
            seed=seed,
            kv_cache_dtype=config.kv_cache_dtype,
            block_size=BLOCK_SIZE,
        )
        environment = {FOLDER_VARIABLE: folder}
        with Cluster(config, say=steps.tell, worker_env=environment) as cluster:
            rounds = _Rounds(cluster, Path(folder), known, Random(seed), seen)
            asyncio.run(rounds.run(cancels, steps.tell, steps.advance, write))
    found = write()
    cancels_report.plot(seen, output / "cancels.png")
    console.print(cancels_report.table(found))
    console.print(cancels_report.sentence(found), highlight=False)
    return bool(found["as_it_should_be"])


@dataclass(slots=True)
class _Asked:
    """One stream of a round."""

    stream: AsyncStream
    heard: Heard
    end: str = ""
    """"aborted", "finished" or an error."""

    async def read(self) -> None:
        try:
            async for event in self.stream:
                if isinstance(event, Delta):
                    self.heard.hear(event.position, event.token_ids)
                elif isinstance(event, Finished):
                    self.heard.end(len(self.heard.right))
                    self.end = "finished"
        except Aborted:
            self.end = "aborted"
        except DeepInferError as error:
            self.end = f"{type(error).__name__}: {error}"


class _Rounds:
    def __init__(
        self, cluster: Cluster, folder: Path, known: Sequence[Known], draw: Random, seen: Seen
    ) -> None:
        self._cluster = cluster
        self._folder = folder
        self._known = known
        self._draw = draw
        self._seen = seen

    async def run(
        self,
        cancels: int,
        tell: Callable[[str], None],
        advance: Callable[[int], None],
        write: Callable[[], object],
    ) -> None:
        """Round after round until so many cancels count."""
        endpoints = list(self._cluster.endpoints)
        async with AsyncClient(endpoints, token=self._cluster.token) as client:
            turn = 0
            while len(self._seen.cancels) < cancels:
                aim = ROUNDS[turn % len(ROUNDS)]
                before = len(self._seen.cancels)
                tell(aim)
                await self._round(client, aim, turn // len(ROUNDS), cancels - before)
                advance(len(self._seen.cancels) - before)
                turn += 1
                if turn % len(ROUNDS) == 0:
                    await asyncio.to_thread(write)

    async def _round(self, client: AsyncClient, aim: str, cycle: int, most: int) -> None:
        self._seen.rounds[aim] += 1
        place = ""
        if places := PLACES.get(aim):
            place = places[self._draw.randrange(len(places))]
            (self._folder / place).touch()
        asked = [self._ask(client) for _ in range(self._draw.randint(*STREAMS))]
        tasks = [asyncio.create_task(one.read()) for one in asked]
        before = lives(await client.status())
        if aim == "recovering":
            met = await self._kill(client)
        elif aim == "random":
            await asyncio.sleep(self._draw.uniform(0, RANDOM_S))
            met = True
        else:
            met = await self._until(client, aim, place, tasks)
        if not met:
            self._seen.missed[aim] += 1
        status = await client.status()
        states = {row["request"]: row["state"] for row in status["sequences"]}
        self._draw.shuffle(asked)
        came = []
        for one in asked:
            if one.end:
                self._seen.ended += 1
                continue
            came.append((one, states.get(one.stream.request_id, "arriving"), time.monotonic()))
            one.stream.abort()
        if place:
            await asyncio.sleep(self._draw.uniform(0, RELEASE_S))
            self._release(place)
        free_at, left = await self._free(client, f"{aim} {place}".strip())
        await asyncio.gather(*tasks)
        self._seen.faults += [f"{aim} {place}: held: {', '.join(left)}"] if left else []
        for one, state, at in came[:most]:
            if one.end == "finished":  # its last token was on its way
                self._seen.ended += 1
                continue
            free_s = None if left else free_at - at
            self._seen.cancels.append(Cancel(state=state, aim=aim, place=place, free_s=free_s))
            if one.end != "aborted":
                self._seen.faults.append(f"{aim} {place}: a cancelled stream ended: {one.end}")
        self._seen.faults += [f"{aim}: {one.heard.wrong}" for one in asked if one.heard.wrong]
        if aim == "recovering":
            await self._back(client, before[WORKER])

    def _ask(self, client: AsyncClient) -> _Asked:
        known = self._draw.choice(self._known)
        stream = client.stream(known.prompt_ids, **known.options)
        return _Asked(stream, Heard(known.token_ids))

    async def _until(
        self, client: AsyncClient, aim: str, place: str, tasks: Sequence[asyncio.Task[None]]
    ) -> bool:
        """Wait until a request is held at the place, or seen in the state."""
        deadline = time.monotonic() + ARRIVE_PATIENCE_S
        while time.monotonic() < deadline and not all(task.done() for task in tasks):
            if place:
                if not (self._folder / place).exists():
                    return True
            else:
                rows = (await client.status())["sequences"]
                if any(row["state"] == aim for row in rows):
                    return True
            await asyncio.sleep(POLL_S)
        return False

    def _release(self, place: str) -> None:
        (self._folder / place).unlink(missing_ok=True)
        for taken in self._folder.glob(f"{place}.*"):
            taken.unlink()

    async def _kill(self, client: AsyncClient) -> bool:
        """Kill the worker; True once its requests are known to have lost their KV."""
        await asyncio.sleep(self._draw.uniform(0.05, RANDOM_S))
        pid = await asyncio.to_thread(self._cluster.pid, WORKER)
        os.kill(pid, signal.SIGKILL)
        self._seen.kills += 1
        deadline = time.monotonic() + ARRIVE_PATIENCE_S
        while time.monotonic() < deadline:
            rows = (await client.status())["sequences"]
            if any(row["state"] == "recovering" for row in rows):
                await asyncio.sleep(self._draw.uniform(0, DEAD_S))
                return True
            await asyncio.sleep(POLL_S)
        return False

    async def _free(self, client: AsyncClient, what: str) -> tuple[float, list[str]]:
        """When nothing was held any more, or what still is; notes what is after ``LIMIT_S``."""
        began = time.monotonic()
        late = False
        while True:
            left = held(await client.status())
            now = time.monotonic()
            if left and now > began + LIMIT_S and not late:
                late = True
                self._seen.late.append(f"{what}: {', '.join(left)}")
            if not left or now > began + FREE_PATIENCE_S:
                return now, left
            await asyncio.sleep(POLL_S)

    async def _back(self, client: AsyncClient, before: int) -> None:
        """Wait for the killed worker's successor; nothing may be held by it."""
        deadline = time.monotonic() + BACK_PATIENCE_S
        while time.monotonic() < deadline:
            status = await client.status()
            worker = status["workers"].get(WORKER)
            if worker and worker["state"] == "serving" and worker["incarnation"] > before:
                if left := held(status):
                    self._seen.faults.append(f"after a restart: held: {', '.join(left)}")
                return
            await asyncio.sleep(0.05)
        self._seen.faults.append(f"{WORKER} was not back after {BACK_PATIENCE_S:g} s")
