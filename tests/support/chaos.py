"""Kills real processes of a running cluster while streams flow, and checks what clients received.

A worker is killed where a failpoint has parked it; a trial that does not park does not count. After
each kill every stream must have brought exactly the ids of an unpressed run, each position once
and in order, and the cluster must be whole and empty again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer.client import AsyncClient, Unavailable
from deepinfer.deploy.bench.results import percentile
from deepinfer.deploy.chaos.history import Faults, History
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig
from deepinfer.deploy.oracle import Answer, Question
from deepinfer.proto.failpoints import FOLDER_VARIABLE, Place

log = logging.getLogger(__name__)

POLL_S = 0.005
PARK_PATIENCE_S = 30.0
STREAM_PATIENCE_S = 120.0
SETTLE_PATIENCE_S = 60.0
TRIES = 4
"""How often a trial's load is sent until its failpoint is reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill that counts."""

    victim: str
    """The actor (or actors) that was killed."""
    place: str
    """Where it was parked, or what it was doing."""
    streams: int
    tokens: int
    faults: Faults
    recovered_s: tuple[float, ...]
    """For each stream that a killed worker was running: from the kill to its next token."""
    paused_s: float
    """The longest time that any stream went without a token, from the kill on."""
    whole_s: float
    """From the kill until every process is back, every block free and the store empty."""
    reconnects: int
    swaps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Storm:
    """Kills that came before the cluster had got over the last one."""

    killed: dict[str, int]
    """How often each actor was."""
    streams: int
    tokens: int
    faults: Faults
    reconnects: int


@dataclass(slots=True)
class Load:
    """Streams that run at the same time."""

    histories: list[History]
    tasks: list[asyncio.Task[int]]

    @property
    def running(self) -> bool:
        return not all(task.done() for task in self.tasks)

    async def until(self, tokens: int) -> None:
        """Wait until every stream has brought that many tokens, or has ended."""
        while any(h.tokens < tokens and not h.ended for h in self.histories):
            for task in self.tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(POLL_S)

    async def end(self) -> int:
        """Wait for every stream; returns how often they reconnected. Raises what the SDK raises."""
        async with asyncio.timeout(STREAM_PATIENCE_S):
            return sum(await asyncio.gather(*self.tasks))


class Chaos:
    """A cluster that is being killed, piece by piece, and the load it has to serve meanwhile."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        questions: Sequence[Question],
        answers: Sequence[Answer],
        *,
        seed: int = 0,
    ) -> None:
        self.kills: list[Kill] = []
        self._cluster = cluster
        self._folder = folder
        self._load = list(zip(questions, answers, strict=True))
        self._random = random.Random(seed)

    def kill_worker(self, place: Place) -> Kill:
        """Let a worker park at ``place`` under load, kill it there, and check everything.

        Raises:
            AssertionError: nobody came there in several tries, or the cluster was not whole again.
        """
        return asyncio.run(self._kill_worker(place))

    def kill_actors(self, *actors: str) -> Kill:
        """Kill actors at once when every stream has brought a few tokens, and check everything.

        Raises:
            AssertionError: all streams had ended, or the cluster was not whole again.
        """
        return asyncio.run(self._kill_actors(actors))

    def storm(self, actors: Sequence[str], kills: int, *, waves: int = 2) -> Storm:
        """Kill one of the actors every 0.5 to 3 s, while ``waves`` loads follow each other.

        Raises:
            AssertionError: the cluster was not whole again in the end.
        """
        return asyncio.run(self._storm(actors, kills, waves))

    async def _storm(self, actors: Sequence[str], kills: int, waves: int) -> Storm:
        from ray.exceptions import ActorUnavailableError  # how Ray starts is for the launcher

        histories: list[History] = []
        killed = dict.fromkeys(actors, 0)
        async with self._client() as client:

            async def wave() -> int:
                reconnects = 0
                while sum(killed.values()) < kills:
                    load = self._start(client)
                    histories.extend(load.histories)
                    reconnects += await load.end()
                return reconnects

            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(wave()) for _ in range(waves)]
                while sum(killed.values()) < kills:
                    await asyncio.sleep(self._random.uniform(0.5, 3.0))
                    actor = self._random.choice(actors)
                    with contextlib.suppress(ActorUnavailableError, ProcessLookupError):
                        _kill([await asyncio.to_thread(self._cluster.pid, actor)])
                        killed[actor] += 1
            await self._whole(client, {})
        storm = Storm(
            killed=killed,
            streams=len(histories),
            tokens=sum(history.tokens for history in histories),
            faults=sum((history.faults() for history in histories), Faults()),
            reconnects=sum(task.result() for task in running),
        )
        log.info("%s", storm)
        return storm

    async def _kill_worker(self, place: Place) -> Kill:
        pids = {self._cluster.pid(name): name for name in self._workers()}
        async with self._client() as client:
            for _ in range(TRIES):
                before = await client.status()
                # A prompt is computed at once, most of what else can be reached again and again.
                latest_s = 0.0 if place == "mid_prefill" else 0.3
                load = self._start(client)
                await asyncio.sleep(self._random.uniform(0.0, latest_s))
                pid = await self._parked(place, load)
                if pid is None:
                    await load.end()
                    await self._whole(client, {})
                    continue
                held = await self._held_by(client, pids[pid], load)
                killed = _kill([pid])
                reconnects = await load.end()
                await self._whole(client, _lives(before, [pids[pid]]))
                return self._note(pids[pid], place, load, held, killed, reconnects)
        raise AssertionError(f"no worker came to {place} in {TRIES} tries")

    async def _kill_actors(self, actors: Sequence[str]) -> Kill:
        pids = [self._cluster.pid(actor) for actor in actors]
        async with self._client() as client:
            before = await client.status()
            load = self._start(client)
            await load.until(self._random.randint(1, 8))
            assert load.running, "all streams ended before the kill"
            held: list[History] = []
            for actor in actors:
                held += await self._held_by(client, actor, load)
            killed = _kill(pids)
            reconnects = await load.end()
            await self._whole(client, _lives(before, actors))
        return self._note(" + ".join(actors), "streaming", load, held, killed, reconnects)

    def _note(
        self,
        victim: str,
        place: str,
        load: Load,
        held: list[History],
        killed: float,
        reconnects: int,
    ) -> Kill:
        whole_s = time.perf_counter() - killed
        found = [history.recovered_s(killed) for history in held]
        kill = Kill(
            victim=victim,
            place=place,
            streams=len(load.histories),
            tokens=sum(history.tokens for history in load.histories),
            faults=sum((history.faults() for history in load.histories), Faults()),
            recovered_s=tuple(s for s in found if s is not None),
            paused_s=max(history.paused_s(killed) for history in load.histories),
            whole_s=whole_s,
            reconnects=reconnects,
            swaps=sum(history.swaps for history in load.histories),
        )
        self.kills.append(kill)
        log.info("%s", kill)
        return kill

    def _workers(self) -> list[str]:
        return [f"worker-{i}" for i in range(self._cluster.config.workers)]

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[AsyncClient]:
        endpoints = list(self._cluster.endpoints)
        async with AsyncClient(endpoints, token=self._cluster.token) as client:
            yield client

    def _start(self, client: AsyncClient) -> Load:
        histories = [History(answer.token_ids) for _, answer in self._load]

        async def one(question: Question, history: History) -> int:
            stream = client.stream(
                question.prompt, include_events=True, seed=question.seed, **question.sampling
            )
            async with stream:
                async for event in stream:
                    history.hear(event)
                return (await stream.completion()).timings.reconnects

        questions = [question for question, _ in self._load]
        tasks = [
            asyncio.create_task(one(question, history))
            for question, history in zip(questions, histories, strict=True)
        ]
        return Load(histories, tasks)

    async def _parked(self, place: Place, load: Load) -> int | None:
        """Choose the place and wait for a process to park there; None if nobody came."""
        chosen = self._folder / place
        chosen.touch()
        for _ in range(round(PARK_PATIENCE_S / POLL_S)):
            if not (load.running and chosen.exists()):
                break
            await asyncio.sleep(POLL_S)
        chosen.unlink(missing_ok=True)
        for taken in self._folder.glob(f"{place}.*"):
            taken.unlink()
            return int(taken.suffix[1:])
        return None

    async def _held_by(self, client: AsyncClient, worker: str, load: Load) -> list[History]:
        """The streams whose sequences are placed on the worker."""
        status = await client.status()
        placed = {row["request"] for row in status["sequences"] if row["worker"] == worker}
        return [h for h in load.histories if h.request in placed and not h.ended]

    async def _whole(self, client: AsyncClient, before: dict[str, int]) -> None:
        """Wait until every process serves, those in ``before`` in a later life, and holds nothing.

        Raises:
            AssertionError: patience ended; says what is left.
        """
        deadline = time.monotonic() + SETTLE_PATIENCE_S
        left = ["no status"]
        while left and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
            with contextlib.suppress(Unavailable):
                left = list(self._left_over(await client.status(), before))
        assert not left, "; ".join(left)

    def _left_over(self, status: dict[str, Any], before: dict[str, int]) -> Iterator[str]:
        if not (status["ready"] and status["all_reported"]):
            yield "the controller has not heard from everyone"
        if "controller" in before and status["epoch"] <= before["controller"]:
            yield "the controller is the old one"
        peers = {**status["workers"], **status["stores"], **status["gateways"]}
        config = self._cluster.config
        if len(peers) != config.workers + 1 + config.gateways:
            yield f"known are only {sorted(peers)}"
        for name, peer in peers.items():
            if peer["incarnation"] <= before.get(name, -1):
                yield f"{name} is not back"
        for name, worker in status["workers"].items():
            if worker["state"] != "serving":
                yield f"{name} is {worker['state']}"
            if worker["blocks_free"] != worker["blocks_total"] or worker["residents"]:
                yield f"{name} has {worker['blocks_free']} of {worker['blocks_total']} blocks free"
        for name, store in status["stores"].items():
            if not store["alive"]:
                yield f"{name} is gone"
            if store["used_bytes"] or store["tickets"]:
                yield f"{name} holds {store['used_bytes']} bytes, {store['tickets']} tickets"
        if status["sequences"]:
            yield f"{len(status['sequences'])} sequences are known"


def chaos_folder(base: Path) -> tuple[Path, dict[str, str]]:
    """A folder for failpoints, and the environment that makes workers look there."""
    folder = base / "failpoints"
    folder.mkdir()
    return folder, {FOLDER_VARIABLE: str(folder)}


def tight_pool(answers: Iterable[Answer], max_tokens: int, config: ClusterConfig) -> str:
    """``max_cache`` that holds the largest request, but half of a worker's share of them all."""
    size = config.block_size
    needs = [math.ceil((len(a.prompt_ids) + max_tokens) / size) for a in answers]
    return f"{max(max(needs) + 1, round(0.5 * sum(needs) / config.workers))} blocks"


def summary(kills: Sequence[Kill]) -> dict[str, Any]:
    """The figures of a campaign, plain values."""
    faults = sum((kill.faults for kill in kills), Faults())
    recovered = [s for kill in kills for s in kill.recovered_s]
    return {
        "kills": len(kills),
        "by_place": {
            place: sum(kill.place == place for kill in kills)
            for place in sorted({kill.place for kill in kills})
        },
        "streams": sum(kill.streams for kill in kills),
        "swaps": sum(kill.swaps for kill in kills),
        "tokens": sum(kill.tokens for kill in kills),
        "lost": faults.lost,
        "doubled": faults.doubled,
        "changed": faults.changed,
        "disordered": faults.disordered,
        "unfinished": faults.unfinished,
        "victims": len(recovered),
        "recovered_p50_s": percentile(recovered, 0.5) if recovered else None,
        "recovered_max_s": max(recovered, default=None),
        "paused_max_s": max((kill.paused_s for kill in kills), default=None),
        "whole_max_s": max((kill.whole_s for kill in kills), default=None),
    }


def _kill(pids: Iterable[int]) -> float:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return time.perf_counter()


def _lives(status: dict[str, Any], actors: Iterable[str]) -> dict[str, int]:
    """Which life of each actor the status shows."""
    lives = {"controller": status["epoch"]}
    for kind in ("workers", "stores", "gateways"):
        lives |= {name: peer["incarnation"] for name, peer in status[kind].items()}
    return {actor: lives[actor] for actor in actors}
