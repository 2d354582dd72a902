"""Whole steps of a model on the card: decode from the graphs that serve, chunks of prompts."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch

from deepinfer.deploy.bench.kernel_timing import fill_with_numbers, warm_up
from deepinfer.deploy.bench.random_w4 import random_w4_model
from deepinfer.deploy.bench.random_weights import random_model
from deepinfer.kernels.linear import F16Weight, NestedWeight, Weight
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.kvstore.core.requests import SamplingParams
from deepinfer.workers.gpu.card import Card
from deepinfer.workers.gpu.opening import OpenedGpu, StepSizes, open_gpu
from deepinfer.workers.gpu.runner import GpuRunner
from deepinfer.workers.gpu.settings import GpuSettings
from deepinfer.workers.gpu.weights import GpuWeights, linears
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.decoder import kv_layout
from deepinfer.workers.model.runner import SequenceSlice
from deepinfer.workers.model.weights import LoadedModel
from deepinfer.workers.sampler import SampleRow

BLOCK_SIZE: Final = 16
CHUNKS: Final = ((256, 0, 0), (512, 0, 0), (2048, 0, 0), (512, 4096, 0), (256, 1024, 32))
"""(tokens of a prompt, tokens cached before them, other requests decoding beside them)."""

MODELS: Final[dict[str, Callable[[ModelConfig], LoadedModel]]] = {
    "fp16": functools.partial(random_model, device="cuda"),
    "w4a16": functools.partial(random_w4_model, device="cuda"),
}

_STEPS: Final = 24
_UNTIMED: Final = 4
_REPEATS: Final = 20
_ROUNDS: Final = 5
GREEDY: Final = SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True)
_ROWS: Final = 2048


def time_model(
    config: ModelConfig,
    card: Card,
    weights: str,
    dtype: str,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    chunks: Sequence[tuple[int, int, int]],
) -> dict[str, Any]:
    """Open random ``weights`` with a pool of ``dtype`` as a worker does, and time its steps.

    Cells that the card has no room for are left out.
    """
    config = replace(config, max_positions=max(contexts))
    layout = kv_layout(config, resolve_kv_dtype(dtype), BLOCK_SIZE)
    wanted = max(b * c for b in batches for c in contexts) // BLOCK_SIZE + 64
    model = MODELS[weights](config)
    blocks = min(wanted, int(0.6 * torch.cuda.mem_get_info()[0]) // layout.block_bytes)
    opened = open_gpu(
        card,
        model,
        layout,
        GpuSettings(fill_card=False, probe=False),
        StepSizes(rows=_ROWS, sequences=max(batches)),
        blocks,
    )
    try:
        fill_with_numbers(opened.pool.storage)
        warm_up()
        cells = [(b, c) for c in contexts for b in batches if b * c // BLOCK_SIZE <= blocks]
        return {
            "weights": weights,
            "kv_cache_dtype": dtype,
            "weight_bytes": weight_bytes(opened.runner.decoder.weights),
            "kv_bytes_a_token": layout.block_bytes / BLOCK_SIZE,
            "notes": list(opened.notes),
            "decode": [decode_cell(opened.runner, batch, context) for batch, context in cells],
            "chunks": [
                found for chunk in chunks if (found := _chunk(opened, config, *chunk)) is not None
            ],
        }
    finally:
        del opened
        let_go()


def let_go() -> None:
    """Free what a runner that nobody holds any more had on the card."""
    gc.unfreeze()  # a runner keeps what it made at its start from the collector
    gc.collect()
    torch.cuda.empty_cache()


def weight_bytes(weights: GpuWeights, *, fp8: bool = False) -> int:
    """What one decode step reads of a model's weights: all linears and the head, once.

    With ``fp8`` nothing of nested weights' lower planes.
    """
    return sum(_bytes(each, fp8) for each in (*linears(weights), weights.head))


def _bytes(weight: Weight, fp8: bool) -> int:
    if isinstance(weight, F16Weight):
        return weight.weight.nbytes
    if isinstance(weight, NestedWeight):
        skipped = (weight.lower if fp8 else None, weight.bias)
        return weight.nbytes - sum(tensor.nbytes for tensor in skipped if tensor is not None)
    zeros = 0 if weight.zeros is None else weight.zeros.nbytes
    return weight.codes.nbytes + weight.scales.nbytes + zeros


def decode_cell(runner: GpuRunner, batch: int, context: int, level: int = 0) -> dict[str, Any]:
    """Steps of ``batch`` sequences whose last one has ``context`` tokens, at one level."""
    first = context - _STEPS - 1
    blocks = context // BLOCK_SIZE
    tables = [tuple(range(at * blocks, (at + 1) * blocks)) for at in range(batch)]
    rows = [SampleRow(params=GREEDY, seed=0, index=0)] * batch
    counters = runner.counters
    ids, seconds, prepared = [1] * batch, [], []
    begun = counters.launches, counters.replays
    for step in range(_STEPS):
        began, before = time.perf_counter(), counters.prepare_ns
        slices = [SequenceSlice((ids[at],), first + step, tables[at], True) for at in range(batch)]
        tokens = runner.backend.sample(runner.forward(slices, level), rows)
        ids = [token.id for token in tokens]
        if step >= _UNTIMED:
            seconds.append(time.perf_counter() - began)
            prepared.append(counters.prepare_ns - before)
    kernels = (counters.launches - begun[0]) / max(1, counters.replays - begun[1])
    loop = statistics.median(seconds)
    graph = _back_to_back(runner, ids, context - 1, tables, level)
    return {
        "batch": batch,
        "context": context,
        "step_ms": graph * 1e3,
        "tokens_per_s": batch / graph,
        "loop_step_ms": loop * 1e3,
        "loop_tokens_per_s": batch / loop,
        "host_us": statistics.median(prepared) / 1e3,
        "kernels": kernels,
    }


def _back_to_back(
    runner: GpuRunner,
    ids: Sequence[int],
    position: int,
    tables: Sequence[tuple[int, ...]],
    level: int,
) -> float:
    """Seconds a step on the card when the next one is always there: the host is ahead."""
    slices = [
        SequenceSlice((token,), position, table, True)
        for token, table in zip(ids, tables, strict=True)
    ]
    times: list[float] = []
    for _ in range(_ROUNDS):
        runner.forward(slices, level)
        begin, end = _event(), _event()
        begin.record()
        for _ in range(_REPEATS):
            runner.forward(slices, level)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / _REPEATS)
    return statistics.median(times)


def _chunk(
    opened: OpenedGpu, config: ModelConfig, rows: int, start: int, decodes: int
) -> dict[str, Any] | None:
    """A step with a part of a prompt in it, beside requests that decode at 1,000 tokens."""
    own = -(-(start + rows) // BLOCK_SIZE)
    each = -(-1024 // BLOCK_SIZE)
    if start + rows > config.max_positions or own + decodes * each > opened.blocks:
        return None
    table = tuple(range(own))
    others = [tuple(range(own + at * each, own + (at + 1) * each)) for at in range(decodes)]
    slices = [
        *(SequenceSlice((1,), 1000, other, True) for other in others),
        SequenceSlice([1] * rows, start, table, True),
    ]
    times, launches = [], []
    for _ in range(_ROUNDS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        opened.runner.forward(slices)
        launches.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    seconds = statistics.median(times[1:])
    return {
        "tokens": rows,
        "cached": start,
        "decodes": decodes,
        "step_ms": seconds * 1e3,
        "host_ms": statistics.median(launches[1:]) * 1e3,
        "prompt_tokens_per_s": rows / seconds,
    }


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
