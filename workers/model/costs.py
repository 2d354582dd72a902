"""What a step takes on this machine: measured on the runner that will serve, before it does."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Final

from deepinfer.kvstore.core.precision import StepCost
from deepinfer.workers.model.runner import ModelRunner, SequenceSlice

ROWS: Final = (1, 4, 16, 64, 256)
"""Tokens of the steps that are measured."""

BUDGET_S: Final = 1.5
"""Larger steps are left out once so much time has gone."""

_REPEATS: Final = 3
_CONTEXT_TOKENS: Final = 1024


def measure_costs(
    runner: ModelRunner, *, clock: Callable[[], float] = time.perf_counter
) -> tuple[StepCost, ...]:
    """One cost for each of the runner's levels; takes about ``BUDGET_S``.

    On the CPU both forms of a weight are the same float32 matrices, so that a step takes the same
    at every level: what is measured, at level 0, is that of all.

    It overwrites the pool: nobody's KV may be in it yet.
    """
    pool, config = runner.pool, runner.config
    room = min(pool.num_blocks * pool.layout.block_size, config.max_positions)
    table = tuple(range(pool.layout.blocks_for(room)))
    began = clock()

    def time_us(rows: int, start: int, repeats: int = _REPEATS) -> float:
        part = SequenceSlice((0,) * rows, start, table, logits=True)
        taken = []
        for _ in range(repeats):
            before = clock()
            runner.forward([part])
            taken.append(clock() - before)
        return 1e6 * max(statistics.median(taken), 1e-6)

    fitting = [rows for rows in ROWS if rows <= room]
    runner.forward([SequenceSlice((0,), 0, table, logits=True)])  # the first pays for much once
    rows_us: dict[int, float] = {}
    for rows in fitting:
        # The next step takes at most as many times longer as it has more rows.
        last = max(rows_us, default=rows)
        expected_s = rows_us.get(last, 0.0) / 1e6 * rows / last
        left_s = BUDGET_S - (clock() - began)
        if rows_us and expected_s > left_s:
            break
        rows_us[rows] = time_us(rows, 0, _REPEATS if _REPEATS * expected_s <= left_s else 1)
    context = min(_CONTEXT_TOKENS, room - 1)
    slope_us = max(0.0, time_us(1, context) - rows_us[1]) / context if context else 0.0
    # A step attends to its own tokens too, which is not in the times of rows.
    us = tuple(max(us - slope_us * rows, 1.0) for rows, us in rows_us.items())
    return (StepCost(tuple(rows_us), us, slope_us),) * runner.levels
