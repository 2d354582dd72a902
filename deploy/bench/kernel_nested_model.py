"""A nested model on the card beside the plain one: steps, bytes, switches, shedding, bits."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.deploy.bench.kernel_steps import (
    BLOCK_SIZE,
    GREEDY,
    decode_cell,
    let_go,
    weight_bytes,
)
from deepinfer.deploy.bench.kernel_timing import fill_with_numbers, warm_up
from deepinfer.deploy.bench.random_weights import random_model
from deepinfer.kernels.linear import F16Weight, NestedWeight, Weight
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.workers.gpu.card import Card
from deepinfer.workers.gpu.opening import OpenedGpu, StepSizes, open_gpu
from deepinfer.workers.gpu.runner import GpuRunner
from deepinfer.workers.gpu.settings import GpuSettings, NestedSettings
from deepinfer.workers.gpu.weights import GpuLayer, GpuWeights, linears
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.decoder import kv_layout
from deepinfer.workers.model.nested import nest
from deepinfer.workers.model.runner import SequenceSlice
from deepinfer.workers.sampler import SampleRow

ROWS: Final = 512
SWITCH_EVERY: Final = 3
"""Steps from one switch to the next."""

_BIT_STEPS: Final = 24
_BIT_BATCHES: Final = (1, 4, 16)
"""Up to here FP16 mode and a plain model have the same kernels, sum by sum."""
_RESTORES: Final = 3
_WARM_STEPS: Final = 100

Say = Callable[[str], None]


def time_nested_model(
    config: ModelConfig,
    card: Card,
    say: Say,
    *,
    batches: Sequence[int],
    context: int,
    switches: int,
) -> dict[str, Any]:
    """Time the plain model, then the nested one at both levels; random weights, FP16 KV.

    The plain model leaves the card before the nested one comes.
    """
    config = replace(config, max_positions=max(context, 2 * BLOCK_SIZE))
    blocks = max(batches) * context // BLOCK_SIZE + 64
    model = random_model(config, device="cuda")

    def opened(nested: NestedSettings | None) -> OpenedGpu:
        found = open_gpu(
            card,
            model if nested is None else nest(model),
            kv_layout(config, resolve_kv_dtype("fp16"), BLOCK_SIZE),
            GpuSettings(fill_card=False, probe=False),
            StepSizes(rows=ROWS, sequences=max(batches)),
            blocks,
            nested=nested,
        )
        warm_up()
        return found

    say("plain")
    plain = opened(None)
    bits = logits_of_steps(plain.runner)
    fill_with_numbers(plain.pool.storage)
    found: dict[str, Any] = {
        "context": context,
        "plain": {
            "notes": list(plain.notes),
            "bytes": plain.budget.weights,
            "tensor_bytes": tensor_bytes(plain.runner.decoder.weights),
            "step_bytes": weight_bytes(plain.runner.decoder.weights),
            "decode": [decode_cell(plain.runner, batch, context) for batch in batches],
        },
    }
    del plain
    let_go()
    say("nested")
    nested = opened(NestedSettings(shed=True))
    try:
        found["nested"] = of_nested(nested, bits, say, batches, context, switches)
    finally:
        del nested
        let_go()
    return found


def of_nested(
    opened: OpenedGpu,
    bits: list[Tensor],
    say: Say,
    batches: Sequence[int],
    context: int,
    switches: int,
) -> dict[str, Any]:
    """What a nested model is measured for; ``bits`` are those of the plain one's logits."""
    runner, planes = opened.runner, opened.planes
    found: dict[str, Any] = {
        "notes": list(opened.notes),
        "bytes": opened.budget.weights + opened.budget.lower,
        "tensor_bytes": tensor_bytes(runner.decoder.weights),
        "step_bytes": [weight_bytes(runner.decoder.weights, fp8=fp8) for fp8 in (False, True)],
        "costs": [
            {"rows": cost.rows, "us": cost.us, "us_per_context_token": cost.us_per_context_token}
            for cost in runner.costs
        ],
        "bits": _same(logits_of_steps(runner), bits),
    }
    # What lies in the tail is no KV.
    fill_with_numbers(opened.pool.storage[: opened.blocks])
    for name, level in (("fp16", 0), ("fp8", runner.levels - 1)):
        say(f"nested, {name}")
        cells = [decode_cell(runner, batch, context, level) for batch in batches]
        found[name] = {"decode": cells}
    say(f"{switches:,} switches")
    found["switches"] = time_switches(runner, switches, context)
    found["switches"]["bits"] = _same(logits_of_steps(runner), bits)
    if planes is not None:
        say("shedding")
        found["shed"] = _time_planes(opened, context)
        found["shed"]["bits"] = _same(logits_of_steps(runner), bits)
    return found


def logits_of_steps(runner: GpuRunner, level: int = 0) -> list[Tensor]:
    """Logits of some steps of up to 16 rows from their graphs, on the host; blocks are written."""
    random = torch.Generator().manual_seed(3)
    found = []
    most = max(batch for batch in _BIT_BATCHES if batch <= runner.limits.sequences)
    tables = [tuple(range(2 * at, 2 * at + 2)) for at in range(most)]
    drawn = torch.randint(0, runner.config.vocab_size, (most, _BIT_STEPS), generator=random)
    tokens = drawn.tolist()
    for batch in (each for each in _BIT_BATCHES if each <= most):
        for step in range(_BIT_STEPS):
            logits = runner.forward(
                [SequenceSlice((tokens[at][step],), step, tables[at], True) for at in range(batch)],
                level,
            )
        found.append(logits.cpu())
    runner.forget()
    return found


def tensor_bytes(weights: GpuWeights) -> int:
    """Exactly what the tensors of a model take, whatever the allocator makes of it."""
    linear = (*linears(weights), weights.head)
    total = sum(_linear_bytes(each) for each in linear)
    if not weights.config.tied_embeddings and isinstance(weights.embedding, Tensor):
        total += weights.embedding.nbytes
    norms = (weights.norm, *(norm for each in weights.layers for norm in _norms(each)))
    return total + sum(norm.nbytes for norm in norms) + weights.cos.nbytes + weights.sin.nbytes


def _norms(layer: GpuLayer) -> list[Tensor]:
    found = (layer.input_norm, layer.q_norm, layer.k_norm, layer.mlp_norm)
    return [norm for norm in found if norm is not None]


def _linear_bytes(weight: Weight) -> int:
    if isinstance(weight, NestedWeight):
        return weight.nbytes
    assert isinstance(weight, F16Weight)
    return weight.weight.nbytes + (0 if weight.bias is None else weight.bias.nbytes)


def _same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def time_switches(runner: GpuRunner, switches: int, context: int) -> dict[str, Any]:
    """Steps of one sequence whose level changes every ``SWITCH_EVERY`` steps, as announced."""
    table = tuple(range(context // BLOCK_SIZE))
    rows = [SampleRow(params=GREEDY, seed=0, index=0)]
    window = context // 2 // SWITCH_EVERY * SWITCH_EVERY
    levels = (0, runner.levels - 1)
    token, seconds = 1, []
    memory = torch.cuda.memory_allocated()
    used = runner.counters.ahead_used
    steps = SWITCH_EVERY * (switches + 1)
    for step in range(steps):
        began = time.perf_counter()
        level, coming = (levels[at // SWITCH_EVERY % 2] for at in (step, step + 1))
        slices = [SequenceSlice((token,), context - 1 - window + step % window, table, True)]
        logits = runner.forward(slices, level, coming)
        (chosen,) = runner.backend.sample(logits, rows)
        token = chosen.id
        seconds.append(time.perf_counter() - began)
    return {
        "switches": switches,
        "every": SWITCH_EVERY,
        "steps": steps,
        "ahead_used": runner.counters.ahead_used - used,
        "memory_grown": torch.cuda.memory_allocated() - memory,
        **_switch_figures(seconds, window),
    }


def _switch_figures(seconds: Sequence[float], window: int) -> dict[str, Any]:
    """How long the first steps at a level are beside the later ones.

    Every ``window`` steps the sequence begins anew, with a step that nobody foresaw.
    """
    figures: dict[str, Any] = {}
    for name, parity in (("to_fp16", 0), ("to_fp8", 1)):
        runs = [
            seconds[at : at + SWITCH_EVERY]
            for at in range(2 * SWITCH_EVERY, len(seconds), SWITCH_EVERY)
            if at // SWITCH_EVERY % 2 == parity and at % window
        ]
        steady = [each for run in runs for each in run[2:]]
        base = statistics.median(steady)
        figures[name] = {
            "steady_ms": base * 1e3,
            "steady_p99": _p99(steady) / base,
            "first": statistics.median(run[0] for run in runs) / base,
            "first_p99": _p99([run[0] for run in runs]) / base,
            "second": statistics.median(run[1] for run in runs) / base,
        }
    return figures


def _time_planes(opened: OpenedGpu, context: int) -> dict[str, Any]:
    """Shed and restore, with FP8 steps going on."""
    runner, planes, pool = opened.runner, opened.planes, opened.pool
    assert planes is not None
    top = runner.levels - 1
    found: dict[str, Any] = {
        "bytes": opened.budget.weights,
        "tensor_bytes": tensor_bytes(runner.decoder.weights) - planes.plane_bytes,
        "tail_blocks": planes.tail_blocks,
        "tail_bytes": pool.layout.payload_bytes(planes.tail_blocks),
        "restore_ms": [],
        "return_ms": planes.return_ms,
    }
    slices = [SequenceSlice((1,), context - 1, tuple(range(context // BLOCK_SIZE)), True)]

    def step_ms() -> float:
        began = time.perf_counter()
        runner.forward(slices, top)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3

    began = time.perf_counter()
    planes.shed()
    found["shed_ms"] = (time.perf_counter() - began) * 1e3
    tail = pool.storage[opened.blocks : opened.blocks + planes.tail_blocks]
    steady, beside = [step_ms() for _ in range(_WARM_STEPS)], []
    for _ in range(_RESTORES):
        planes.shed()
        tail.fill_(0x3C)
        torch.cuda.synchronize()
        done: list[float] = []

        def restore(done: list[float] = done) -> None:
            began = time.perf_counter()
            planes.restore()()
            done.append((time.perf_counter() - began) * 1e3)

        thread = threading.Thread(target=restore)
        thread.start()
        beside.append(step_ms())
        while thread.is_alive():
            beside.append(step_ms())
        thread.join()
        found["restore_ms"] += done
    found["steady_step_ms"] = statistics.median(steady)
    found["step_beside_restore_ms"] = statistics.median(beside)
    found["step_beside_restore_p99_ms"] = _p99(beside)
    return found


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]
