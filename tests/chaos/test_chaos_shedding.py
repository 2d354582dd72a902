"""A worker is killed while its lower planes are on their way back for an exact request."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer.client import AsyncClient, Completion
from deepinfer.deploy.chaos.site import failpoint_folder
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig
from support.tiny_model import write_tiny_llama

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]

ASK: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0}
BLOCKS = 6
"""Of 16 tokens: what the long request needs is more."""


@pytest.fixture(scope="module")
def failpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shedding")


@pytest.fixture(scope="module")
def cluster(failpoints: Path) -> Iterator[Cluster]:
    config = ClusterConfig(
        model=str(write_tiny_llama(failpoints / "tiny", seed=3)),
        workers=1,
        weights="nested",
        shed=True,
        max_cache=f"{BLOCKS} blocks",
        port=0,
        token_file=str(failpoints / "token"),
    )
    _, environment = failpoint_folder(failpoints)
    with Cluster(config, worker_env=environment) as cluster:
        yield cluster


async def ask(client: AsyncClient, tokens: int, *, exact: bool = False) -> Completion:
    prompt = "a prompt that takes two blocks"
    return await client.generate(prompt, max_tokens=tokens, exact=exact, **ASK)


def said(completion: Completion) -> list[tuple[int, float]]:
    return [(entry.token_id, entry.logprob) for entry in completion.choices[0].logprobs]


async def until(client: AsyncClient, state: str) -> None:
    deadline = time.monotonic() + 60
    planes = None
    while planes is None or planes["state"] != state:
        assert time.monotonic() < deadline, f"planes are {planes}, not {state}"
        await asyncio.sleep(0.01)
        worker = (await client.status())["workers"].get("worker-0")
        planes = worker and worker["planes"]


def _taken(folder: Path) -> list[Path]:
    return list(folder.glob("mid_return.*"))


async def parked(folder: Path) -> int:
    deadline = time.monotonic() + 60
    while not (found := await asyncio.to_thread(_taken, folder)):
        assert time.monotonic() < deadline, "no planes were on their way back"
        await asyncio.sleep(0.005)
    return int(found[0].suffix[1:])


def test_a_worker_killed_while_planes_return(cluster: Cluster, failpoints: Path) -> None:
    async def test() -> None:
        async with AsyncClient(list(cluster.endpoints), token=cluster.token) as client:
            unpressed = await ask(client, 12, exact=True)
            long = asyncio.create_task(ask(client, 300))
            await until(client, "open")
            folder = failpoints / "failpoints"
            (folder / "mid_return").touch()
            exact = asyncio.create_task(ask(client, 12, exact=True))
            os.kill(await parked(folder), signal.SIGKILL)
            assert said(await exact) == said(unpressed), "of the next life, to the bit"
            assert (await long).usage.completion_tokens == 300
            await until(client, "held")

    asyncio.run(test())
