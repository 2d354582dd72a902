"""Lower planes make way for KV in a running cluster, and come back with nothing lost."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepinfer.client import Completion, ResourceExhausted
from deepinfer.controller.core.config import ControllerConfig
from support.local_cluster import LocalCluster, local_cluster, run_on
from support.tiny_model import write_tiny_llama

PROMPT = "a prompt of several blocks"
ASK: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "logprobs": 0}
BLOCKS = 14
"""Of 4 tokens: the exact request's 38 fit, the long one's do not."""
LONG = 150


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def config(**changes: Any) -> ControllerConfig:
    return ControllerConfig(min_residency_tokens=2, shed_dwell_ms=100, shed_calm_ms=100, **changes)


async def ask(cluster: LocalCluster, tokens: int, *, exact: bool = False) -> Completion:
    async with cluster.client() as client:
        return await client.generate(PROMPT, max_tokens=tokens, exact=exact, **ASK)


def said(completion: Completion) -> list[tuple[int, float]]:
    return [(entry.token_id, entry.logprob) for entry in completion.choices[0].logprobs]


async def until(cluster: LocalCluster, state: str, timeout_s: float = 20.0) -> dict[str, Any]:
    """Wait until the controller knows the planes in a state."""
    deadline = time.monotonic() + timeout_s
    while True:
        worker = (await cluster.status())["workers"].get("worker-0")
        planes: dict[str, Any] | None = worker and worker["planes"]
        if planes is not None and planes["state"] == state:
            return planes
        assert time.monotonic() < deadline, f"planes are {planes}, not {state}"
        await asyncio.sleep(0.005)


def test_a_request_that_did_not_fit_runs_and_fp16_comes_back(
    model: Path, runner: asyncio.Runner
) -> None:
    async def test() -> None:
        nested: dict[str, Any] = {"blocks": BLOCKS, "weights": "nested"}
        async with local_cluster(model, **nested, controller=config()) as cluster:
            unpressed = await ask(cluster, 12, exact=True)
            with pytest.raises(ResourceExhausted, match=f"the largest pool has {BLOCKS}"):
                await ask(cluster, LONG)
        async with local_cluster(model, **nested, shed=True, controller=config()) as cluster:
            before = await until(cluster, "held")
            assert before["blocks_gained"] == 0
            long = asyncio.create_task(ask(cluster, LONG))
            opened = await until(cluster, "open")
            assert opened["blocks_gained"] == before["blocks_to_gain"] > 0
            alone = await long
            assert alone.usage.completion_tokens == LONG
            assert alone.precision_shares["fp8"] > 0
            await until(cluster, "held")

            exact = await ask(cluster, 12, exact=True)
            assert said(exact) == said(unpressed), "to the bit, as if nothing had ever left"

            long = asyncio.create_task(ask(cluster, LONG))
            await until(cluster, "open")
            exact = await ask(cluster, 12, exact=True)
            assert said(exact) == said(unpressed), "it waited for the planes"
            assert exact.precision_shares["fp16"] == 1.0
            assert (await long).usage.completion_tokens == LONG
            await until(cluster, "held")
            await cluster.until_free()
            counters = (await cluster.workers["worker-0"]._ready()).counters()
        assert counters["deepinfer_worker_sheds_total"] >= 2
        assert counters["deepinfer_worker_planes_returns_total"] >= 2
        assert counters["deepinfer_worker_planes_return_failures_total"] == 0

    run_on(runner, test)


def test_without_planes_from_the_start_exact_requests_are_refused(
    model: Path, runner: asyncio.Runner
) -> None:
    async def test() -> None:
        async with local_cluster(
            model, blocks=BLOCKS, weights="nested", start_shed=True, controller=config()
        ) as cluster:
            answer = await ask(cluster, 8)
            assert answer.precision_shares["fp8"] == 1.0
            says = "the request is exact, and no card has the weights' lower planes"
            with pytest.raises(ResourceExhausted, match=re.escape(says)):
                await ask(cluster, 8, exact=True)
            await until(cluster, "locked")

    run_on(runner, test)
