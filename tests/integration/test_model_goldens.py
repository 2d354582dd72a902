"""Greedy ids of two real models against recorded ones (transformers, float32), with FP16 KV.

The goldens lie beside the repository (``../shared/data``, or ``DEEPINFER_SHARED_DATA``); SmolLM2
comes from the cache of ``deepinfer model get``. Each test skips where its file is absent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.runner import ModelRunner, SequenceSlice
from deepinfer.workers.pool import PagedPool

SHARED = Path(
    os.environ.get("DEEPINFER_SHARED_DATA", Path(__file__).parents[2] / ".." / "shared" / "data")
)
MARGIN_ERROR = 0.01
"""Log-probabilities were seen to differ by up to 0.004 (FP16 KV): a margin by twice that."""


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def goldens(model: str) -> list[dict[str, Any]]:
    path = SHARED / "goldens.json"
    if not path.is_file():
        pytest.skip(f"{path.name} is not here")
    cases: list[dict[str, Any]] = json.loads(path.read_text())[model]["cases"]
    return cases


def greedy(runner: ModelRunner, prompts: list[list[int]], steps: int) -> list[list[int]]:
    """Decode all prompts together: prefilled in one step, then ``steps`` tokens each."""
    per_prompt = runner.pool.num_blocks // len(prompts)
    tables = [list(range(at * per_prompt, (at + 1) * per_prompt)) for at in range(len(prompts))]
    outputs: list[list[int]] = [[] for _ in prompts]
    slices = [
        SequenceSlice(prompt, 0, table, True) for prompt, table in zip(prompts, tables, strict=True)
    ]
    for step in range(steps):
        chosen = runner.forward(slices).argmax(-1).tolist()
        for output, token in zip(outputs, chosen, strict=True):
            output.append(token)
        slices = [
            SequenceSlice([token], len(prompt) + step, table, True)
            for token, prompt, table in zip(chosen, prompts, tables, strict=True)
        ]
    return outputs


def make_runner(path: Path, blocks: int) -> ModelRunner:
    backend = CpuBackend(threads=1)
    decoder = Decoder(load_model(path), backend)
    pool = PagedPool(decoder.kv_layout(resolve_kv_dtype("fp16"), 16), blocks)
    return ModelRunner(decoder, pool, backend)


def check(cases: list[dict[str, Any]], runner: ModelRunner, steps: int) -> None:
    outputs = greedy(runner, [case["prompt_ids"] for case in cases], steps)
    for case, output in zip(cases, outputs, strict=True):
        expected = case["output_ids"][:steps]
        margins = case.get("margins") or [case["min_top2_margin"]] * len(expected)
        unsure = (at for at, margin in enumerate(margins) if margin < MARGIN_ERROR)
        sure = min(next(unsure, steps), len(expected))
        assert sure > 10
        assert output[:sure] == expected[:sure]


def test_stories260k() -> None:
    cases = goldens("stories260k")
    folder = SHARED / "models" / "stories260k"
    check(cases, make_runner(folder, 18), steps=48)


def test_smollm2(demo_model: Path) -> None:
    check(goldens("smollm2"), make_runner(demo_model, 24), steps=32)
