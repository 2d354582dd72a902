"""What steps take on this card at each level, measured at start-up: see ``StepCost``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from deepinfer.kvstore.core.precision import StepCost, with_w8a8
from deepinfer.workers.gpu.decoder import GpuDecoder
from deepinfer.workers.gpu.graphs import ROW_BUCKETS
from deepinfer.workers.gpu.runner import GpuRunner
from deepinfer.workers.gpu.weights import linears
from deepinfer.workers.model.runner import SequenceSlice

LIMIT_S: Final = 1.5
"""Larger steps are left out where measuring would take longer."""

CONTEXT_TOKENS: Final = 2048
CONTEXT_ROWS: Final = 8
"""What the cost of context is measured with: up to so many sequences of so many tokens."""

_REPEATS: Final = 3
_ROUNDS: Final = 2
"""The fastest round counts: what disturbs a step makes it longer."""

Timer = Callable[[Callable[[], object], int], float]
"""Seconds that one of so many calls takes on the card, launched one behind the other."""


def measure_costs(
    runner: GpuRunner, timer: Timer | None = None, limit_s: float = LIMIT_S
) -> tuple[StepCost, ...]:
    """Time steps of up to all rows at the first and the last level; () for a model with one.

    Steps write KV into the runner's spare blocks only. Levels between the two are taken to cost
    what their share of weights in FP8 says. At the last one, steps of as many rows are W8A8 as the
    runner has it for.
    """
    ends = (0, runner.levels - 1)
    if runner.levels == 1 or runner.level_min > 0 or not runner.spares:
        return ()
    clock = timer or on_card_s
    deadline = time.monotonic() + limit_s
    rows: list[int] = []
    us: dict[int, list[float]] = {level: [] for level in ends}

    def step_us(slices: Sequence[SequenceSlice], level: int) -> float:
        def step() -> None:
            runner.forward(slices, level)

        step()  # the first one in a while is slower
        return 1e6 * min(clock(step, _REPEATS) for _ in range(_ROUNDS))

    for slices in _steps(runner):
        began = time.monotonic()
        count = sum(len(part.token_ids) for part in slices)
        for level in ends:
            planned = with_w8a8(level, runner.levels, count, runner.w8a8_rows)
            us[level].append(step_us(slices, planned))
        rows.append(count)
        now = time.monotonic()
        if now + 2 * (now - began) > deadline:
            break
    most = min(CONTEXT_ROWS, runner.limits.sequences)
    at = max(place for place, count in enumerate(rows) if count <= most)
    with_context = _with_context(runner, rows[at])
    tokens = sum(part.start for part in with_context)
    costs = []
    for level in ends:
        more = step_us(with_context, level) - us[level][at]
        costs.append(StepCost(tuple(rows), tuple(us[level]), max(0.0, more) / max(1, tokens)))
    runner.forget()
    return _between(costs[0], costs[1], runner.decoder)


def _steps(runner: GpuRunner) -> Iterator[list[SequenceSlice]]:
    """Steps without context, of more and more rows: of single tokens, then of a prompt's."""
    limits, spares = runner.limits, runner.spares
    for rows in ROW_BUCKETS:
        if rows > limits.sequences:
            break
        yield [SequenceSlice((0,), 0, (spares[at],), True) for at in range(rows)]
    rows = 2 * limits.sequences
    blocks = runner.pool.layout.blocks_for(limits.rows)
    while rows < 2 * limits.rows:
        tokens = min(rows, limits.rows, limits.context)
        if tokens <= limits.sequences:
            return
        table = tuple(spares[at % len(spares)] for at in range(blocks))
        yield [SequenceSlice([0] * tokens, 0, table, True)]
        if tokens < rows:
            return
        rows *= 2


def _with_context(runner: GpuRunner, rows: int) -> list[SequenceSlice]:
    """A step of single tokens that attend to whatever the pool holds."""
    limits, spares, layout = runner.limits, runner.spares, runner.pool.layout
    own = min(spares)
    whole = min(CONTEXT_TOKENS, limits.context) // layout.block_size - 1
    places = iter(range(rows * whole))
    return [
        SequenceSlice(
            (0,),
            whole * layout.block_size,
            (*(next(places) % own for _ in range(whole)), spares[at]),
            True,
        )
        for at in range(rows)
    ]


def _between(first: StepCost, last: StepCost, decoder: GpuDecoder) -> tuple[StepCost, ...]:
    head = decoder.weights.head
    layers = sum(each.rows * each.columns for each in linears(decoder.weights))
    whole = layers + head.rows * head.columns

    def mix(low: float, high: float, share: float) -> float:
        return low + share * (high - low)

    costs = [first]
    for level in range(1, decoder.levels.last):
        share = decoder.levels.in_fp8(level) / decoder.levels.layers * layers / whole
        us = tuple(mix(low, high, share) for low, high in zip(first.us, last.us, strict=True))
        context = mix(first.us_per_context_token, last.us_per_context_token, share)
        costs.append(StepCost(first.rows, us, context))
    return (*costs, last)


def on_card_s(call: Callable[[], object], times: int) -> float:
    """See ``Timer``: between two events."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times
