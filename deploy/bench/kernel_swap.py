"""Swaps between a card and the host: how near the bus's speed, and what decode steps lose by them.

Everything is asked of a worker's own pool, beside its own steps; the host memory is a slab as the
store's, registered as a worker registers it. The store itself, and its hashing, are left out.
"""

from __future__ import annotations

import functools
import gc
import itertools
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch

from deepinfer.deploy.bench.kernel_steps import BLOCK_SIZE, GREEDY, MODELS
from deepinfer.deploy.bench.kernel_timing import fill_with_numbers, warm_up
from deepinfer.deploy.bench.results import percentile
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.kvstore.host_pool import Slab
from deepinfer.kvstore.transfers import AHEAD, step_bytes
from deepinfer.workers.gpu.card import Card
from deepinfer.workers.gpu.opening import StepSizes, open_gpu
from deepinfer.workers.gpu.runner import GpuRunner
from deepinfer.workers.gpu.settings import GpuSettings
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.decoder import kv_layout
from deepinfer.workers.model.runner import SequenceSlice
from deepinfer.workers.pool import PagedPool
from deepinfer.workers.sampler import SampleRow

LONG_BYTES: Final = 1 << 30
FEW_BLOCKS: Final = 3
SEQUENCES: Final = 4
"""That decode beside a swap."""
WAYS: Final = ("out", "in")

_CONTEXTS: Final = (512, 2048)
"""Tokens that each of them has at first, and at last before it begins again."""
_ROWS: Final = 256
_FEW_ROUNDS: Final = 200
_LONG_ROUNDS: Final = 7
_STEPS_ALONE: Final = 400
_BESIDE_S: Final = 1.5

Orders = Mapping[str, Sequence[int]]
"""Block ids of a long payload, by how they lie in the pool."""


def time_swaps(config: ModelConfig, card: Card) -> dict[str, Any]:
    """Open a model with random weights and FP16 KV as a worker does, and swap blocks of its pool.

    Takes 1 GiB of the host's memory twice over, and 2 GiB of the card's besides the model.
    """
    layout = kv_layout(config, resolve_kv_dtype("fp16"), BLOCK_SIZE)
    count = -(-LONG_BYTES // layout.block_bytes)
    decoding = SEQUENCES * _CONTEXTS[1] // BLOCK_SIZE
    opened = open_gpu(
        card,
        MODELS["fp16"](config),
        layout,
        GpuSettings(fill_card=False, probe=False),
        StepSizes(rows=_ROWS, sequences=SEQUENCES),
        decoding + 2 * count,
    )
    pool = opened.pool
    assert pool.copies is not None
    slab = Slab.create("bench-swap", layout.payload_bytes(count))
    undo = pool.copies.register(np.frombuffer(slab.view, np.uint8).ctypes.data, slab.length)
    if undo is None:
        slab.close()
        raise RuntimeError(f"{slab.length} bytes of host memory cannot be pinned")
    try:
        fill_with_numbers(pool.storage)
        warm_up()
        others = range(decoding, decoding + 2 * count)
        orders = {"adjacent": others[:count], "scattered": scattered(others, count)}
        check_round_trip(pool, slab.view, orders["scattered"], others)
        rates = memcpy_rates(pool, decoding, count)
        step = decode_step(opened.runner)
        for _ in range(_STEPS_ALONE // 4):
            step()
        return {
            "payload_bytes": slab.length,
            "block_bytes": layout.block_bytes,
            "step_bytes": step_bytes(slab.length, layout.block_bytes),
            "notes": list(opened.notes),
            "memcpy_bytes_per_s": rates,
            "few": list(few_blocks(pool, slab.view, others)),
            "long": list(long_copies(pool, slab.view, orders, rates)),
            "beside": beside(pool, slab.view, orders["scattered"], step),
        }
    finally:
        undo()
        slab.close()
        del opened, pool
        gc.unfreeze()  # a runner keeps what it made at its start from the collector
        gc.collect()
        torch.cuda.empty_cache()


def scattered(blocks: Sequence[int], count: int) -> list[int]:
    """``count`` of the blocks in an order in which hardly two are neighbours."""
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0)).tolist()
    return [blocks[at] for at in order[:count]]


def check_round_trip(
    pool: PagedPool, host: memoryview, ids: Sequence[int], others: Sequence[int]
) -> None:
    """What goes out of blocks ``ids`` must come into other blocks unchanged.

    Raises RuntimeError if it does not.
    """
    taken = set(ids)
    into = [block for block in others if block not in taken][: len(ids)]
    host = host[: pool.layout.payload_bytes(len(into))]
    ids = ids[: len(into)]
    pool.storage[into[-1]] += 1  # they are not all alike
    pool.copy_out(ids, host)
    pool.copy_in(into, host)
    for begin in range(0, len(ids), 256):
        part = slice(begin, begin + 256)
        if not torch.equal(pool.storage[ids[part]], pool.storage[into[part]]):
            raise RuntimeError(f"a block of {ids[part]} came back changed")


def memcpy_rates(pool: PagedPool, first: int, count: int) -> dict[str, float]:
    """Bytes a second of one copy of ``count`` adjacent blocks from and to pinned memory."""
    card = pool.storage[first : first + count].view(-1)
    host = torch.empty(card.numel(), dtype=torch.uint8, pin_memory=True)
    rates = {}
    for way, target, source in (("out", host, card), ("in", card, host)):
        times: list[float] = []
        for _ in range(_LONG_ROUNDS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        rates[way] = card.numel() / statistics.median(times)
    return rates


def few_blocks(
    pool: PagedPool, host: memoryview, blocks: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Microseconds from asking for a copy of three blocks until its caller has waited for it."""
    host = host[: pool.layout.payload_bytes(FEW_BLOCKS)]
    for order, ids in (
        ("adjacent", blocks[:FEW_BLOCKS]),
        ("scattered", blocks[4 * FEW_BLOCKS :: -4][:FEW_BLOCKS]),
    ):
        for way in WAYS:
            times = []
            for _ in range(_FEW_ROUNDS):
                began = time.perf_counter()
                _swap(pool, way, ids, host, step=len(host))
                times.append(time.perf_counter() - began)
            yield {
                "blocks": FEW_BLOCKS,
                "order": order,
                "way": way,
                "us": statistics.median(times) * 1e6,
                "p99_us": percentile(times, 0.99) * 1e6,
            }


def long_copies(
    pool: PagedPool, host: memoryview, orders: Orders, memcpy: Mapping[str, float]
) -> Iterator[dict[str, Any]]:
    """Bytes a second of a long payload, asked for at once and in the steps that a store's client
    takes; ``of_memcpy``: as a share of one copy of pinned memory."""
    size = len(host)
    steps = step_bytes(size, pool.layout.block_bytes)
    for order, ids in orders.items():
        for way in WAYS:
            for asked, step in (("at once", size), ("in steps", steps)):
                times = []
                for _ in range(_LONG_ROUNDS):
                    began = time.perf_counter()
                    _swap(pool, way, ids, host, step=step)
                    times.append(time.perf_counter() - began)
                rate = size / statistics.median(times[1:])
                yield {
                    "order": order,
                    "way": way,
                    "asked": asked,
                    "bytes_per_s": rate,
                    "of_memcpy": rate / memcpy[way],
                }


def beside(
    pool: PagedPool, host: memoryview, ids: Sequence[int], step: Callable[[], None]
) -> dict[str, Any]:
    """Times of decode steps alone, and while another thread swaps without a pause."""
    alone = _times(step, lambda done, _: done == _STEPS_ALONE)
    found: dict[str, Any] = {"sequences": SEQUENCES, "alone": _spread(alone)}
    steps = step_bytes(len(host), pool.layout.block_bytes)
    for way in WAYS:
        took, rate = _beside(
            step, functools.partial(_swap, pool, way, ids, host, step=steps), len(host)
        )
        found[way] = _spread(took) | {
            "median_growth": statistics.median(took) / statistics.median(alone) - 1,
            "mean_growth": statistics.fmean(took) / statistics.fmean(alone) - 1,
            "bytes_per_s": rate,
        }
    return found


def _beside(
    step: Callable[[], None], swap: Callable[[], None], size: int
) -> tuple[list[float], float]:
    """Seconds of each step, and bytes a second of the swaps beside them."""
    stop = threading.Event()

    def swaps() -> float:
        began, times = time.perf_counter(), 0
        while not stop.is_set():
            swap()
            times += 1
        return times * size / (time.perf_counter() - began)

    with ThreadPoolExecutor(1) as executor:
        swapping = executor.submit(swaps)
        try:
            took = _times(step, lambda _, seconds: seconds >= _BESIDE_S or swapping.done())
        finally:
            stop.set()
    return took, swapping.result()


def decode_step(runner: GpuRunner) -> Callable[[], None]:
    """One step after the other of a few sequences, each with its tokens on the host."""
    blocks = _CONTEXTS[1] // BLOCK_SIZE
    tables = [tuple(range(at * blocks, (at + 1) * blocks)) for at in range(SEQUENCES)]
    rows = [SampleRow(params=GREEDY, seed=0, index=0)] * SEQUENCES
    positions = itertools.cycle(range(*_CONTEXTS))
    ids = [1] * SEQUENCES

    def step() -> None:
        nonlocal ids
        at = next(positions)
        slices = [
            SequenceSlice((token,), at, table, True)
            for token, table in zip(ids, tables, strict=True)
        ]
        ids = [token.id for token in runner.backend.sample(runner.forward(slices), rows)]

    return step


def _swap(pool: PagedPool, way: str, ids: Sequence[int], host: memoryview, *, step: int) -> None:
    """Copy one way, ``step`` bytes at once, as many under way as a store's client has."""
    fence = pool.fence()
    begin = pool.begin_out if way == "out" else pool.begin_in
    block = pool.layout.block_bytes
    count = step // block
    waits: deque[Callable[[], None] | None] = deque()
    for at in range(0, len(ids), count):
        part = ids[at : at + count]
        waits.append(begin(part, host[at * block : (at + len(part)) * block], fence))
        if len(waits) > AHEAD and (wait := waits.popleft()) is not None:
            wait()
    for wait in waits:
        if wait is not None:
            wait()


def _times(step: Callable[[], None], enough: Callable[[int, float], bool]) -> list[float]:
    """Seconds of each step until it was ``enough`` steps, or seconds."""
    times: list[float] = []
    began = before = time.perf_counter()
    while not enough(len(times), before - began):
        step()
        now = time.perf_counter()
        times.append(now - before)
        before = now
    return times


def _spread(times: list[float]) -> dict[str, Any]:
    return {
        "steps": len(times),
        "median_ms": statistics.median(times) * 1e3,
        "mean_ms": statistics.fmean(times) * 1e3,
        "p99_ms": percentile(times, 0.99) * 1e3,
    }
