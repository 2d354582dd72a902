"""What an unpressed run answers: one worker in one process, a pool that is never short.

Runs in a process of its own, so that the model's memory is gone when the cluster starts.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from deepinfer.deploy.errors import LaunchError

if TYPE_CHECKING:
    from deepinfer.deploy.config import Device
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
    model: Path,
    questions: Sequence[Question],
    *,
    kv_cache_dtype: str,
    block_size: int = 16,
    device: Device = "cpu",
    deterministic: bool = False,
) -> list[Answer]:
    """Answer every question, one after another, with room for all of it.

    Raises:
        LaunchError: the process has died.
        OSError, ValueError: the model cannot be opened on ``device``, or a question not be asked.
    """
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(
        target=_answer_into,
        args=(sending, model, tuple(questions), kv_cache_dtype, block_size, device, deterministic),
    )
    process.start()
    sending.close()
    try:
        answers: list[Answer] | Exception = receiving.recv()
    except EOFError as error:
        process.join()
        raise LaunchError(
            f"the process that computes the answers for comparison has died (exit code "
            f"{process.exitcode}): is there enough memory?"
        ) from error
    finally:
        process.kill()  # at an interrupt it is in the middle of its work
        process.join()
        receiving.close()
    if isinstance(answers, Exception):
        raise answers
    return answers


def _answer_into(
    sending: Connection,
    model: Path,
    questions: Sequence[Question],
    kv_cache_dtype: str,
    block_size: int,
    device: Device,
    deterministic: bool,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for who started this, who ends it
    try:
        answers: list[Answer] | Exception = _answer(
            model, questions, kv_cache_dtype, block_size, device, deterministic
        )
    except (OSError, ValueError) as error:
        answers = error
    sending.send(answers)


def _answer(
    model: Path,
    questions: Sequence[Question],
    kv_cache_dtype: str,
    block_size: int,
    device: Device,
    deterministic: bool,
) -> list[Answer]:
    from deepinfer.kvstore.core.layout import resolve_kv_dtype
    from deepinfer.kvstore.core.requests import SamplingParams
    from deepinfer.proto.failpoints import Failpoints
    from deepinfer.text.load import load_tokenizer
    from deepinfer.workers.actor import WorkerSettings
    from deepinfer.workers.assembly import open_device
    from deepinfer.workers.core.config import WorkerConfig
    from deepinfer.workers.gpu.settings import GpuSettings
    from deepinfer.workers.local import LocalEngine
    from deepinfer.workers.model.decoder import kv_layout
    from deepinfer.workers.model.load import load_model

    layout = kv_layout(load_model(model).config, resolve_kv_dtype(kv_cache_dtype), block_size)
    tokenizer = load_tokenizer(model)
    answers = []
    prompts = [_ids(tokenizer, question.prompt) for question in questions]
    params = [SamplingParams(**question.sampling) for question in questions]
    blocks = max(
        layout.blocks_for(len(ids) + p.max_tokens) for ids, p in zip(prompts, params, strict=True)
    )
    config = WorkerConfig(
        blocks_total=blocks,
        block_size=block_size,
        block_bytes=layout.block_bytes,
        prefix_cache=False,
    )
    settings = WorkerSettings(
        worker="oracle",
        node="local",
        model_path=str(model),
        kv_cache_dtype=kv_cache_dtype,
        gpu=GpuSettings(fill_card=False, probe=False, deterministic=deterministic)
        if device == "cuda"
        else None,
        deterministic=deterministic,
        token="of nobody",
        config=config,
    )
    opened = open_device(settings, Failpoints())
    for ids, sampling, question in zip(prompts, params, questions, strict=True):
        engine = LocalEngine(opened.engine, config)
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
