"""Swaps through a whole cluster: they change no token, lose no work and leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from deepinfer.client import AsyncClient, Delta, ResourceExhausted
from deepinfer.deploy.cluster import Cluster
from support.cluster import Oracle, tiny_cluster, tiny_model
from support.cluster_stories import (
    BLOCK_SIZE,
    BLOCKS,
    GREEDY,
    OUTPUT,
    SEEDED,
    Ask,
    assert_computed_once,
    assert_right,
    counting,
    prompt,
    story,
)


@dataclass(frozen=True, slots=True)
class Pressed:
    """A cluster of one worker whose pool has three blocks, and its oracle."""

    cluster: Cluster
    oracle: Oracle


@pytest.fixture(
    scope="module",
    params=[
        ("fp16", "memfd"),
        ("int8", "grpc"),
        ("fp8", "memfd"),
        ("fp8_e5m2", "grpc"),
        ("k16v8", "auto"),
        *(
            pytest.param(pair, marks=pytest.mark.slow)
            for pair in (("fp16", "grpc"), ("int8", "memfd"), ("fp8", "grpc"), ("k16v8", "grpc"))
        ),
    ],
    ids="-".join,
)
def pressed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pressed]:
    dtype, path = request.param
    folder = tmp_path_factory.mktemp("cluster")
    with tiny_cluster(
        folder,
        kv_cache_dtype=dtype,
        store_path=path,
        block_size=BLOCK_SIZE,
        max_cache=f"{BLOCKS} blocks",
        prefill_chunk_tokens=1,
    ) as cluster:
        yield Pressed(cluster, Oracle(tiny_model(folder), dtype))


def test_one_forced_swap_and_one_resume_a_round(pressed: Pressed) -> None:
    """Three rounds, greedy and drawn: the same ids as alone, and no token computed twice."""
    for number, sampling in enumerate((GREEDY, SEEDED, GREEDY)):
        asks = [
            Ask(prompt(2 * number + i), {**sampling, "max_tokens": OUTPUT - i}) for i in range(2)
        ]
        seen, counted = story(pressed.cluster, asks)
        assert_right(pressed.oracle, asks, seen)
        assert [one.choice.swaps.swaps for one in seen] == [1, 0]
        assert [one.choice.swaps.resumes for one in seen] == [1, 0]
        assert counted["requests_swapped_total"] == counted["requests_resumed_total"] == 1
        assert counted["kv_cpu_offload_blocks_total"] == counted["kv_cpu_reload_blocks_total"] > 0
        assert counted["kv_cpu_offload_bytes_total"] == seen[0].choice.swaps.offload_bytes > 0
        assert_computed_once(asks, counted)


def test_prefill_goes_on_in_the_middle_of_its_prompt(pressed: Pressed) -> None:
    asks = [
        Ask(prompt(20, 150), {**GREEDY, "max_tokens": 20}),
        Ask(prompt(21), {**SEEDED, "max_tokens": 20}),
    ]
    seen, counted = story(pressed.cluster, asks, when="placed")
    assert_right(pressed.oracle, asks, seen)
    first = seen[0]
    assert first.first("swapped_out") < first.first("resumed") < first.first(Delta), first.events
    assert first.choice.swaps.swaps == first.choice.swaps.resumes == 1
    assert_computed_once(asks, counted)


def test_request_that_no_pool_can_hold_is_refused_with_both_numbers(pressed: Pressed) -> None:
    async def ask(client: AsyncClient) -> None:
        with pytest.raises(ResourceExhausted, match=r"needs 5 KV blocks.* largest pool has 3"):
            await client.generate(prompt(30), max_tokens=BLOCKS * BLOCK_SIZE)

    _, counted = counting(pressed.cluster, ask)
    assert counted["deepinfer_controller_requests_rejected_total"] == 1
