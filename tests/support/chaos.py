"""A cluster that tests kill piece by piece: single trials of ``deploy.chaos``, and what it has not.

Several actors at once, and kills that come before the cluster has got over the last one, have no
point at which they park: they only have to leave every stream right and nothing held.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deepinfer.client import AsyncClient
from deepinfer.deploy.chaos.campaign import tight_blocks
from deepinfer.deploy.chaos.history import Faults
from deepinfer.deploy.chaos.load import Load
from deepinfer.deploy.chaos.points import Target
from deepinfer.deploy.chaos.rows import Trial
from deepinfer.deploy.chaos.site import Site, failpoint_folder, lives_of, send
from deepinfer.deploy.chaos.trial import Plan, Trials
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig
from deepinfer.deploy.oracle import Answer, Question
from deepinfer.proto.failpoints import Place


@dataclass(slots=True)
class Chaos:
    """A cluster, and what its load is asked and must be answered."""

    site: Site
    asked: list[tuple[Question, Answer]]
    path: str
    seed: int = 0
    trials: list[Trial] = field(default_factory=list)

    def trial(self, target: Target, point: Place, *, pause_s: float = 0.0) -> Trial:
        """Stop a process of a kind at a point, and wait until it serves again.

        Raises:
            AssertionError: nobody came there, or the cluster cannot go on.
        """

        async def run() -> Trial:
            plan = Plan(
                target=target,
                path=self.path,
                seed=self.seed,
                streams=len(self.asked),
                pauses_s=(pause_s,) if pause_s else (),
            )
            found: list[Trial] = []
            trials = Trials(self.site, plan, self.asked, found.append)
            async with self.client() as client:
                done = await trials.run(len(self.trials), point, client)
                await trials.finish()
            assert done is not None, f"nobody came to {point}"
            [trial] = found
            return trial

        trial = asyncio.run(run())
        self.trials.append(trial)
        return trial

    def kill_together(self, *actors: str) -> list[str]:
        """Kill actors at once when every stream has brought a few tokens.

        Returns:
            What was wrong, a sentence each.
        """

        async def run() -> list[str]:
            status = await self.site.serving(2)
            pids = await self.site.pids(actors)
            assert sorted(pids.values()) == sorted(actors)
            async with self.client() as client:
                load = Load.start(client, self.asked)
                await load.until(random.Random(self.seed).randint(1, 8))
                assert load.running, "all streams ended before the kill"
                send(pids, signal.SIGKILL)
                await load.end()
            left = await self.site.settled(lives_of(status, actors))
            await self.site.serving(2)
            return [*_wrong(load), *left]

        return asyncio.run(run())

    def storm(self, actors: Sequence[str], kills: int, *, waves: int = 2) -> list[str]:
        """Kill one of the actors every 0.5 to 3 s, while ``waves`` loads follow each other.

        Returns:
            What was wrong, a sentence each.
        """
        draw = random.Random(self.seed)
        wrong: list[str] = []
        killed = 0

        async def wave(client: AsyncClient) -> None:
            while killed < kills:
                load = Load.start(client, self.asked)
                await load.end()
                wrong.extend(_wrong(load))

        async def run() -> None:
            nonlocal killed
            async with self.client() as client, asyncio.TaskGroup() as tasks:
                for _ in range(waves):
                    tasks.create_task(wave(client))
                while killed < kills:
                    await asyncio.sleep(draw.uniform(0.5, 3.0))
                    pids = await self.site.pids([draw.choice(actors)])
                    send(pids, signal.SIGKILL)
                    killed += len(pids)
            await self.site.serving(2)
            wrong.extend(await self.site.settled({}))

        asyncio.run(run())
        return wrong

    def client(self) -> AsyncClient:
        cluster = self.site.cluster
        return AsyncClient(list(cluster.endpoints), token=cluster.token)


def _wrong(load: Load) -> list[str]:
    faults = [history.faults() for history in load.histories]
    return [*load.errors, *(str(fault) for fault in faults if fault != Faults())]


@contextlib.contextmanager
def chaos_cluster(
    folder: Path, config: ClusterConfig, asked: list[tuple[Question, Answer]], *, seed: int = 0
) -> Iterator[Chaos]:
    """A cluster whose processes have failpoints and whose pools are too small for what is asked."""
    failpoints, environment = failpoint_folder(folder)
    blocks = tight_blocks([answer for _, answer in asked], asked[0][0].sampling["max_tokens"])
    tight = config.model_copy(update={"max_cache": f"{blocks} blocks"})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():  # Ray's processes inherit it
            patch.setenv(name, value)
        with Cluster(tight) as cluster:
            yield Chaos(Site(cluster, failpoints), asked, config.store_path, seed)
