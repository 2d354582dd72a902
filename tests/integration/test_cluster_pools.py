"""Pools that are too small, in a cluster each: where requests wait, and where they go."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

from deepinfer.client import AsyncClient, Delta, Finished
from support.cluster import Oracle, tiny_cluster, tiny_model
from support.cluster_stories import (
    BLOCK_SIZE,
    BLOCKS,
    GREEDY,
    OUTPUT,
    SEEDED,
    Ask,
    Seen,
    assert_computed_once,
    assert_right,
    counting,
    one_after_another,
    prompt,
    story,
)


def test_resumes_on_another_worker(tmp_path: Path) -> None:
    """Two workers are full; the third request takes one's place until the other ends first."""
    asks = [Ask(prompt(40 + i), {**GREEDY, "max_tokens": OUTPUT}) for i in range(2)]
    asks.append(Ask(prompt(42), {**SEEDED, "max_tokens": OUTPUT + 20}))
    with tiny_cluster(
        tmp_path, workers=2, block_size=BLOCK_SIZE, max_cache=f"{BLOCKS} blocks", store_path="grpc"
    ) as cluster:
        seen, counted = story(cluster, asks)
    assert_right(Oracle(tiny_model(tmp_path), "fp16"), asks, seen)
    [moved] = [one for one in seen if one.choice.swaps.swaps]
    left, store, came_back = moved.watched.path
    assert {left, came_back} == {"worker-0", "worker-1"}
    assert store == "store-local"
    assert_computed_once(asks, counted)


def test_shared_prefix_that_no_longer_fits_stays_swapped_then_finishes(tmp_path: Path) -> None:
    """Two share four blocks of their prompt. Whoever leaves takes copies of them along, and can
    come back only when the other has gone: with blocks of its own it needs more than is free.
    """
    shared = prompt(50, 64)
    asks = [
        Ask((*shared, *prompt(51 + i, 2)), {**GREEDY, "max_tokens": 100 - 10 * i}) for i in range(2)
    ]
    shown: list[dict[str, Any]] = []

    async def tell(client: AsyncClient) -> list[Seen]:
        running = asyncio.create_task(one_after_another(client, asks, Delta))
        while not running.done():
            shown.append(await client.status())
            await asyncio.sleep(0.01)
        return await running

    with tiny_cluster(tmp_path, block_size=16, max_cache="11 blocks") as cluster:
        seen, counted = counting(cluster, tell)
    assert_right(Oracle(tiny_model(tmp_path), "fp16"), asks, seen)
    assert counted["prefix_hit_tokens"] == len(shared)
    [left] = [one for one in seen if one.choice.swaps.swaps]
    [stayed] = [one for one in seen if one is not left]
    assert left.choice.swaps.swaps == left.choice.swaps.resumes == 1
    assert left.first("swapped_out") < stayed.first(Finished) < left.first("resumed")
    away = [document for document in shown if document["swapped"]]
    assert away
    assert all(d["cpu_offload"]["payload_bytes"] == left.choice.swaps.offload_bytes for d in away)
    assert counted["tokens_computed"] == len(shared) + 2 * 2 + 100 + 90 - 2


def test_budget_zero_refuses_the_swap_and_both_complete(tmp_path: Path) -> None:
    asks = [Ask(prompt(60 + i), {**GREEDY, "max_tokens": OUTPUT}) for i in range(2)]
    with tiny_cluster(
        tmp_path, block_size=BLOCK_SIZE, max_cache=f"{BLOCKS} blocks", max_cpu_offload_mb=0
    ) as cluster:
        seen, counted = story(cluster, asks)
    assert_right(Oracle(tiny_model(tmp_path), "fp16"), asks, seen)
    assert counted["kv_cpu_offload_rejected_total"] >= 1
    assert counted["requests_swapped_total"] == counted["kv_cpu_offload_failed_total"] == 0
    assert [one.choice.swaps.swaps for one in seen] == [0, 0]
    assert_computed_once(asks, counted)


def test_full_reserve_never_runs_short(tmp_path: Path) -> None:
    """What a request may come to need is set aside at its admission: nobody is in the way."""
    asks = [Ask(prompt(70 + i, 20), {**GREEDY, "max_tokens": OUTPUT}) for i in range(3)]
    with tiny_cluster(
        tmp_path,
        block_size=BLOCK_SIZE,
        max_cache=f"{BLOCKS} blocks",
        reserve="full",
        max_cpu_offload_mb=0,
    ) as cluster:
        seen, counted = story(cluster, asks)
    assert_right(Oracle(tiny_model(tmp_path), "fp16"), asks, seen)
    assert counted["deepinfer_controller_requests_preempted_total"] == 0
    assert counted["deepinfer_controller_requests_refused_late_total"] == 0
    # Two blocks each in a pool of three: one at a time, though all three prompts would fit.
    for earlier, later in itertools.pairwise(seen):
        assert earlier.first(Finished) < later.first(Delta)
    assert_computed_once(asks, counted)
