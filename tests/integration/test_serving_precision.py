"""Nested weights from the SDK through gateway, controller and worker: modes, shares, exact."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from deepinfer.client import Completion
from deepinfer.controller.core.config import ControllerConfig
from deepinfer.kvstore.core.precision import Policy, PrecisionSettings
from support.local_cluster import LocalCluster, local_cluster, run_on
from support.tiny_model import write_tiny_llama

PROMPT = "a prompt of several blocks"
ASK: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
NONE = {"fp16": 0.0, "mixed": 0.0, "fp8": 0.0, "w8a8": 0.0}
ALL_FP16 = NONE | {"fp16": 1.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    # As nested weights have them: those of 32 bits would be rounded.
    file = folder / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file)
    return folder


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def told(policy: str, level_max: int = 5) -> ControllerConfig:
    settings = PrecisionSettings(policy=Policy(policy), level_max=level_max)
    return ControllerConfig(min_residency_tokens=2, precision=settings)


def said(completion: Completion) -> list[tuple[int, float]]:
    return [(entry.token_id, entry.logprob) for entry in completion.choices[0].logprobs]


async def ask(cluster: LocalCluster, **options: Any) -> Completion:
    async with cluster.client() as client:
        return await client.generate(PROMPT, **ASK, **options)


async def until_told(cluster: LocalCluster) -> None:
    """Wait until the worker has heard the controller's rule."""
    deadline = time.monotonic() + 20.0
    shell = await cluster.workers["worker-0"]._ready()
    while shell.core._roster.rule is None:
        assert time.monotonic() < deadline, "no rule has come"
        await asyncio.sleep(0.01)


def test_modes_shares_and_exact_requests(model: Path, runner: asyncio.Runner) -> None:
    async def test() -> None:
        async with local_cluster(model, blocks=96) as cluster:
            plain = await ask(cluster)
            pool = (await cluster.status())["workers"]["worker-0"]
        assert plain.precision_shares == ALL_FP16
        assert pool["precision"] is None
        nested = local_cluster(
            model, blocks=96, prefix_cache=True, weights="nested", controller=told("fp8")
        )
        async with nested as cluster:
            await until_told(cluster)
            reduced = await ask(cluster)
            exact = await ask(cluster, exact=True)
            again = await ask(cluster)
            together = await asyncio.gather(ask(cluster, exact=True), ask(cluster))
            await cluster.until_free()
            pool = (await cluster.status())["workers"]["worker-0"]
            counters = (await cluster.workers["worker-0"]._ready()).counters()
        assert reduced.precision_shares == NONE | {"fp8": 1.0}
        assert said(reduced) != said(plain)
        assert exact.precision_shares == ALL_FP16
        assert said(exact) == said(plain), "to the bit, with FP8's blocks in the prefix cache"
        assert exact.usage.cached_tokens == 0
        assert again.precision_shares["fp8"] == 1.0
        assert again.usage.cached_tokens > 0, "of those that the exact one has left"
        assert said(together[0]) == said(plain)
        assert together[1].usage.fp8_tokens < 24, "it went along with the exact one"
        assert together[1].usage.total_tokens == plain.usage.total_tokens
        shown = pool["precision"]
        assert (shown["levels"], shown["remark"]) == (2, "")
        fp8 = sum(done.usage.fp8_tokens for done in (reduced, exact, again, *together))
        assert list(shown["tokens"]) == [5 * 24 - fp8, 0, fp8, 0]
        name = 'deepinfer_worker_precision_tokens_total{precision="fp8"}'
        assert counters[name] == fp8
        assert counters["deepinfer_worker_precision_switches_total"] >= 2

    run_on(runner, test)


def test_levels_between_are_mixed_and_survive_swaps(model: Path, runner: asyncio.Runner) -> None:
    async def test() -> None:
        options: dict[str, Any] = {"weights": "nested", "precision_levels": 3}
        async with local_cluster(
            model, blocks=96, **options, controller=told("fp8", level_max=1)
        ) as cluster:
            await until_told(cluster)
            alone = await ask(cluster)
        async with local_cluster(
            model, blocks=28, **options, controller=told("fp8", level_max=1)
        ) as cluster:
            await until_told(cluster)
            pressed = await asyncio.gather(*(ask(cluster) for _ in range(4)))
            await cluster.until_free()
        assert alone.precision_shares == NONE | {"mixed": 1.0}
        assert sum(done.swaps.swaps for done in pressed) > 0
        for done in pressed:
            assert said(done) == said(alone)
            assert done.precision_shares == alone.precision_shares

    run_on(runner, test)


def test_a_long_prompt_is_w8a8_and_its_answer_fp8(model: Path, runner: asyncio.Runner) -> None:
    async def test() -> None:
        options: dict[str, Any] = {"weights": "nested", "fp8_products": "w8a8"}
        async with local_cluster(
            model, blocks=96, **options, prefix_cache=True, controller=told("fp8")
        ) as cluster:
            await until_told(cluster)
            async with cluster.client() as client:
                prompt = [1 + at % 200 for at in range(140)]
                long = await client.generate(prompt, **ASK)
                exact = await client.generate(prompt, exact=True, **ASK)
                short = await client.generate(prompt[:90], **ASK)
            await cluster.until_free()
            shown = (await cluster.status())["workers"]["worker-0"]["precision"]
        assert long.precision_shares == NONE | {"w8a8": 1 / 24, "fp8": 23 / 24}
        assert exact.precision_shares == ALL_FP16
        assert exact.usage.cached_tokens == 0, "W8A8's blocks are not for it"
        assert short.precision_shares == NONE | {"fp8": 1.0}
        assert short.usage.cached_tokens > 0
        assert list(shown["tokens"]) == [24, 0, 47, 1]
        assert long.choices[0].token_ids != exact.choices[0].token_ids

    run_on(runner, test)


def test_slo_stays_where_fp8_is_no_faster_and_says_why(model: Path, runner: asyncio.Runner) -> None:
    async def test() -> None:
        settings = PrecisionSettings(tpot_target_ms=0.001)
        async with local_cluster(
            model, blocks=96, weights="nested", controller=ControllerConfig(precision=settings)
        ) as cluster:
            await until_told(cluster)
            done = await ask(cluster)
            shown = (await cluster.status())["workers"]["worker-0"]["precision"]
        assert done.precision_shares == ALL_FP16
        assert "no faster" in shown["remark"]

    run_on(runner, test)
