"""The real model through the whole cluster: golden ids, and the same ids under forced swaps.

The model comes from the cache that `deepinfer model get` fills; without it the tests skip.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from deepinfer.client import AsyncClient, Client, Completion
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig
from deepinfer.deploy.oracle import Question, unpressed

MARGIN_MIN = 0.01
"""Log-probability error of the CPU backend against float32, doubled: it was seen to be 0.004."""
MAX_TOKENS = 40
BLOCK_SIZE = 16
PROMPTS = (
    "Why is the sky blue?",
    "Write one sentence about the sea.",
    "List three colours.",
)


async def ask_all(cluster: Cluster, questions: list[Question]) -> list[Completion]:
    async with AsyncClient(list(cluster.endpoints), token=cluster.token) as client:
        return list(
            await asyncio.gather(*(client.generate(q.prompt, **q.sampling) for q in questions))
        )


@pytest.mark.parametrize(
    "dtype",
    ["fp16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("int8", "fp8", "fp8_e5m2"))],
)
def test_forced_swaps_change_no_id(
    demo_model: Path, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    sampling = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}
    questions = [
        Question(prompt=({"role": "user", "content": text},), sampling=sampling) for text in PROMPTS
    ]
    right = unpressed(demo_model, questions, kv_cache_dtype=dtype, block_size=BLOCK_SIZE)
    # The pool holds the longest request and one block more: two at a time never fit to the end.
    longest = max(len(answer.prompt_ids) for answer in right) + MAX_TOKENS
    config = ClusterConfig(
        model=str(demo_model),
        kv_cache_dtype=dtype,
        kv_quality="off" if dtype != "int8" else "strict",
        block_size=BLOCK_SIZE,
        max_cache=f"{-(-longest // BLOCK_SIZE) + 1} blocks",
        port=0,
    )
    with Cluster(config) as cluster:
        answers = asyncio.run(ask_all(cluster, questions))
        with Client(list(cluster.endpoints), token=cluster.token) as client:
            quality = client.status()["kv_quality"]
    assert set(quality) == ({"worker-0"} if dtype == "int8" else set()), "where it was looked at"
    assert all(0 < found["kl_nats"] < 0.005 for found in quality.values())
    assert [a.token_ids for a in answers] == [r.token_ids for r in right]
    assert sum(a.swaps.swaps for a in answers) > 0
    assert sum(a.swaps.swaps for a in answers) == sum(a.swaps.resumes for a in answers)


def test_golden_ids_through_the_cluster(
    demo_model: Path, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    cases = json.loads((shared_data / "goldens.json").read_text())["smollm2"]["cases"]
    questions = [
        Question(
            prompt=tuple(case["prompt_ids"]),
            sampling={
                "max_tokens": len(case["output_ids"]),
                "temperature": 0.0,
                "ignore_eos": True,
            },
        )
        for case in cases
    ]
    longest = max(len(case["prompt_ids"]) + len(case["output_ids"]) for case in cases)
    config = ClusterConfig(
        model=str(demo_model), max_cache=f"{-(-longest // BLOCK_SIZE) + 1} blocks", port=0
    )
    with Cluster(config) as cluster:
        answers = asyncio.run(ask_all(cluster, questions))
    assert sum(a.swaps.swaps for a in answers) > 0
    for case, answer in zip(cases, answers, strict=True):
        sure = next(
            (i for i, margin in enumerate(case["margins"]) if margin < MARGIN_MIN),
            len(case["output_ids"]),
        )
        assert sure > 10
        assert list(answer.token_ids[:sure]) == case["output_ids"][:sure]
