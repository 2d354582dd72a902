"""The card's memory: what is left for KV, and refusals with both numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.workers.gpu.budget import MIB, MemoryBudget, blocks_that_fit, check_fits
from deepinfer.workers.gpu.card import GpuMemoryError
from deepinfer.workers.gpu.settings import GpuSettings

LAYOUT = KvLayout(resolve_kv_dtype("fp16"), 36, 2, 128, 16)
"""Qwen2.5-3B's: 589,824 bytes a block."""

BUDGET = MemoryBudget(
    card=12_000 * MIB,
    utilization=0.9,
    context=500 * MIB,
    weights=6000 * MIB,
    scratch=300 * MIB,
    graphs=168 * MIB,
    swaps=32 * MIB,
)


def test_the_pool_takes_what_utilization_leaves() -> None:
    blocks = blocks_that_fit(BUDGET, LAYOUT, 1)
    room = 12_000 * 0.9 - 7000  # MiB
    assert blocks == int(room * MIB) // LAYOUT.block_bytes
    assert blocks * LAYOUT.block_bytes <= room * MIB < (blocks + 1) * LAYOUT.block_bytes


def test_too_small_a_card_is_refused_with_both_numbers() -> None:
    with pytest.raises(GpuMemoryError, match=r"leaves 3,800 MiB for KV, 9000 blocks.*5,062\.5 MiB"):
        blocks_that_fit(BUDGET, LAYOUT, 9000)


def test_a_pool_larger_than_the_card_is_refused_with_both_numbers() -> None:
    fits = 5000 * MIB // LAYOUT.block_bytes
    check_fits(BUDGET, LAYOUT, fits)
    with pytest.raises(
        GpuMemoryError,
        match=r"max_cache = 10000 blocks needs 5,625 MiB, the card has 5,000 MiB left of 12,000: "
        r".*weights 6,000",
    ):
        check_fits(BUDGET, LAYOUT, 10_000)


def test_on_a_shared_card_a_worker_counts_itself_and_sees_what_others_took() -> None:
    shared = replace(BUDGET, utilization=0.7, others=3000 * MIB)
    assert shared.room() == 1400 * MIB  # 8,400 less its own 7,000
    assert replace(shared, others=4900 * MIB).room() == 100 * MIB  # all that is left


def test_the_table_adds_up_to_the_card() -> None:
    lines = BUDGET.lines()
    sizes = [int(line[24:34].replace(",", "")) for line in lines]
    assert sum(sizes[:-1]) == sizes[-1] == 12_000
    assert lines[-1].endswith("100.0%")


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01])
def test_an_impossible_share_is_named(share: float) -> None:
    with pytest.raises(ValueError, match=f"memory_utilization = {share}"):
        GpuSettings(memory_utilization=share)
