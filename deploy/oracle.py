"""What an unpressed run answers: one worker in one process, a pool that is never short.

Runs in a process of its own, so that the model's memory is gone when the cluster starts.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from deepinfer.text.tokenizer import Tokenizer

Prompt: TypeAlias = str | tuple[int, ...] | tuple[dict[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request: chat messages, text or token ids, and its sampling parameters."""

    prompt: Prompt
    sampling: dict[str, Any]
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The prompt's ids and the generated ones."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


def unpressed(
    model: Path, questions: Sequence[Question], *, kv_cache_dtype: str, block_size: int = 16
) -> list[Answer]:
    """Answer every question, one after another, with room for all of it."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(_answer, model, tuple(questions), kv_cache_dtype, block_size).result()


def _answer(
    model: Path, questions: Sequence[Question], kv_cache_dtype: str, block_size: int
) -> list[Answer]:
    import torch

    from deepinfer.kvstore.core.layout import resolve_kv_dtype
    from deepinfer.kvstore.core.requests import SamplingParams
    from deepinfer.text.load import load_tokenizer
    from deepinfer.workers.backends.cpu import CpuBackend
    from deepinfer.workers.core.config import WorkerConfig
    from deepinfer.workers.engine import Engine
    from deepinfer.workers.local import LocalEngine
    from deepinfer.workers.model.decoder import kv_layout
    from deepinfer.workers.model.load import load_model
    from deepinfer.workers.model.runner import ModelRunner
    from deepinfer.workers.pool import PagedPool

    loaded = load_model(model)
    tokenizer = load_tokenizer(model)
    layout = kv_layout(loaded.config, resolve_kv_dtype(kv_cache_dtype), block_size)
    answers = []
    prompts = [_ids(tokenizer, question.prompt) for question in questions]
    params = [SamplingParams(**question.sampling) for question in questions]
    blocks = max(
        layout.blocks_for(len(ids) + p.max_tokens) for ids, p in zip(prompts, params, strict=True)
    )
    runner = ModelRunner(loaded, PagedPool(layout, blocks, torch.device("cpu")), CpuBackend())
    config = WorkerConfig(
        blocks_total=blocks,
        block_size=block_size,
        block_bytes=layout.block_bytes,
        prefix_cache=False,
    )
    for ids, sampling, question in zip(prompts, params, questions, strict=True):
        engine = LocalEngine(Engine(runner), config)
        [done] = engine.generate(
            [ids], sampling, seed=question.seed, stop_token_ids=tuple(tokenizer.eos_ids)
        )
        answers.append(Answer(prompt_ids=tuple(ids), token_ids=tuple(done.token_ids)))
    return answers


def _ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    messages = [part for part in prompt if isinstance(part, dict)]
    if messages:
        return tokenizer.encode_chat(messages)
    return [part for part in prompt if isinstance(part, int)]
