"""Bad input and log-probabilities through a whole cluster: processes, Ray, and a pool too small."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from deepinfer.client import AsyncClient, DeepInferError, ModelNotFound, ResourceExhausted
from deepinfer.deploy.cluster import Cluster
from support.bad_input import BAD, wrong
from support.cluster import tiny_cluster
from support.cluster_stories import counting, prompt

BLOCKS, BLOCK_SIZE = 10, 16


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with tiny_cluster(
        tmp_path_factory.mktemp("cluster"),
        kv_cache_dtype="fp16",
        block_size=BLOCK_SIZE,
        max_cache=f"{BLOCKS} blocks",
        prefill_chunk_tokens=4,
    ) as running:
        yield running


def test_bad_input_is_refused_and_leaves_nothing(cluster: Cluster) -> None:
    async def tell(client: AsyncClient) -> list[str]:
        (model,) = await client.models()
        found = []
        for bad in BAD:
            if bad.error is ModelNotFound:
                bad = replace(bad, says=f"is not served; {model.id!r} is")
            error: DeepInferError | None = None
            try:
                await client.generate(bad.prompt, **bad.options)
            except DeepInferError as caught:
                error = caught
            found.append(wrong(bad, error))
        with pytest.raises(ResourceExhausted, match=r"needs 25 KV blocks.* largest pool has 10"):
            await client.generate(prompt(1, 300), max_tokens=100)
        assert (await client.generate("Hello", max_tokens=5)).completion_tokens == 5
        return [problem for problem in found if problem]

    problems, counted = counting(cluster, tell)
    assert problems == []
    assert counted["tokens_generated"] == 5


def test_log_probabilities_under_pressure(cluster: Cluster) -> None:
    ask: dict[str, Any] = {
        "max_tokens": 40,
        "temperature": 0.75,
        "seed": 3,
        "ignore_eos": True,
        "logprobs": 2,
        "prompt_logprobs": 2,
        "logit_bias": {65: 1.5, 66: -100.0},
    }
    prompts = [prompt(seed, 60) for seed in (1, 2, 3)]

    async def tell(client: AsyncClient) -> None:
        alone = [await client.generate(p, **ask) for p in prompts]
        pressed = await asyncio.gather(*(client.generate(p, **ask) for p in prompts))
        assert sum(c.swaps.swaps for c in alone) == 0
        assert sum(c.swaps.resumes for c in pressed) >= 1
        for one, other in zip(alone, pressed, strict=True):
            assert other.token_ids == one.token_ids
            assert other.choices[0].logprobs == one.choices[0].logprobs
            assert other.prompt_logprobs == one.prompt_logprobs
            assert len(one.prompt_logprobs) == one.usage.prompt_tokens == 60

    counting(cluster, tell)
