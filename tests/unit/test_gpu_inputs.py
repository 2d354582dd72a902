"""What a step tells the card: whatever steps came before, the step's own tables and rows arrive."""

from __future__ import annotations

import random

import pytest
import torch

from deepinfer.workers.gpu.graphs import Bucket, buckets, context_bucket, row_bucket
from deepinfer.workers.gpu.inputs import InputShape, StepInputs
from deepinfer.workers.model.runner import SequenceSlice

BLOCK_SIZE = 16
CPU = torch.device("cpu")


def part(tokens: list[int], start: int, table: tuple[int, ...], logits: bool) -> SequenceSlice:
    return SequenceSlice(tokens, start, table, logits)


def test_rows_and_padding_are_where_a_step_expects_them() -> None:
    inputs = StepInputs(8, 4, 3, blocks=50, device=CPU)
    slices = [
        part([11, 12, 13], 16, (7, 8, 9), logits=True),
        part([21], 40, (1, 2, 3, 4), logits=False),
        part([31], 5, (6,), logits=True),
    ]
    views = inputs.write(slices, [1, 2, 0], InputShape(rows=8, sequences=4, columns=3))
    assert views.token_ids.tolist() == [21, 31, 11, 12, 13, 0, 0, 0]
    assert views.positions.tolist() == [40, 5, 16, 17, 18, -1, -1, -1]
    assert views.sequences.tolist()[:5] == [0, 1, 2, 2, 2]
    assert views.lens.tolist() == [41, 6, 0, 0]  # of single tokens
    assert views.last_rows.tolist()[:2] == [4, 1]  # in the order of the slices
    assert views.block_tables[0].tolist() == [1, 2, 3]
    assert views.block_tables[1, :1].tolist() == [6]
    assert views.block_tables[2].tolist() == [7, 8, 9]


def test_tables_that_grow_move_and_return_are_never_stale() -> None:
    """Two hundred steps of changing batches and shapes, against tables written afresh."""
    rng = random.Random(0)
    inputs = StepInputs(8, 8, 16, blocks=1000, device=CPU)
    live = [[rng.randrange(1000)] for _ in range(8)]
    for _ in range(200):
        rng.choice(live).append(rng.randrange(1000))
        if rng.random() < 0.2:
            live[rng.randrange(8)] = [rng.randrange(1000) for _ in range(rng.randrange(1, 5))]
        if rng.random() < 0.1:
            rng.shuffle(live)
        count = rng.choice((1, 2, 4, 8))
        columns = rng.choice((8, 16))
        tables = [table[-columns:] for table in live[:count]]
        slices = [part([3], len(t) * BLOCK_SIZE - 1, tuple(t), logits=True) for t in tables]
        views = inputs.write(slices, range(count), InputShape(count, count, columns))
        found = [views.block_tables[i, : len(t)].tolist() for i, t in enumerate(tables)]
        assert found == tables
        assert views.token_ids.tolist() == [3] * count


def test_a_block_outside_the_pool_is_named_with_its_slice() -> None:
    inputs = StepInputs(4, 4, 4, blocks=10, device=CPU)
    slices = [part([1], 0, (9,), logits=True), part([1], 0, (10,), logits=True)]
    with pytest.raises(ValueError, match=r"slice 1: block ids must be in 0\.\.9, got 10\.\.10"):
        inputs.write(slices, [0, 1], InputShape(4, 4, 4))


def test_every_step_has_a_bucket_that_was_captured() -> None:
    for rows_max, context_max in ((1, 300), (20, 2048), (64, 40_960), (200, 5000)):
        captured = set(buckets(rows_max, context_max))
        for rows in range(1, min(rows_max, 128) + 1):
            for tokens in (1, 511, 512, 513, 2048, context_max):
                if tokens > context_max:
                    continue
                bucket = Bucket(row_bucket(rows) or 0, context_bucket(tokens, context_max))
                assert bucket.rows >= rows
                assert bucket.context >= tokens
                assert bucket in captured
    assert row_bucket(129) is None
