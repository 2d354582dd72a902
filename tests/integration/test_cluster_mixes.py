"""Random mixes of clients against pools that are too small: right answers, and nothing left.

``DEEPINFER_MIXES`` says how many mixes (20), ``DEEPINFER_MIX_SEED`` with which seed they begin: a
mix that fails is run again by ``DEEPINFER_MIX_SEED=<its seed> DEEPINFER_MIXES=1``.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator

import pytest

from deepinfer.client import AsyncClient
from deepinfer.client.channels import Channels
from deepinfer.deploy.cluster import Cluster, LaunchError
from support.cluster import Oracle, assert_nothing_left, tiny_cluster, tiny_model
from support.cluster_mixes import Got, Mix

MIXES = int(os.environ.get("DEEPINFER_MIXES", "20"))
FIRST_SEED = int(os.environ.get("DEEPINFER_MIX_SEED", "0"))
ORPHAN_GRACE_S = 0.4
PATIENCE_S = 15.0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Oracle]]:
    """Two workers, each with room for the largest request and little more; two gateways."""
    folder = tmp_path_factory.mktemp("cluster")
    with tiny_cluster(
        folder,
        workers=2,
        gateways=2,
        block_size=16,
        max_cache="12 blocks",
        prefill_chunk_tokens=32,
        orphan_grace=ORPHAN_GRACE_S,
    ) as cluster:
        yield cluster, Oracle(tiny_model(folder), "fp16")


def test_second_cluster_of_a_process_is_refused_and_the_first_serves_on(
    world: tuple[Cluster, Oracle],
) -> None:
    cluster, oracle = world
    with pytest.raises(LaunchError, match="already uses Ray"):
        Cluster(cluster.config).__enter__()

    async def ask() -> tuple[int, ...]:
        async with AsyncClient(cluster.endpoints, token=cluster.token) as client:
            done = await client.generate([1, 2, 3], temperature=0.0, max_tokens=4)
        return done.token_ids

    assert asyncio.run(ask()) == oracle.answer([1, 2, 3], temperature=0.0, max_tokens=4)


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + MIXES))
def test_mix(world: tuple[Cluster, Oracle], seed: int) -> None:
    cluster, oracle = world
    print(f"mix {seed}")  # noqa: T201  # shown with a failure
    for got in asyncio.run(_mix(cluster, seed)):
        got.check(oracle.choices(got.prompt, **got.sampling))


async def _mix(cluster: Cluster, seed: int) -> list[Got]:
    channels = Channels(cluster.endpoints, cluster.token)
    try:
        async with AsyncClient(cluster.endpoints, token=cluster.token) as client:
            mix = Mix(random.Random(seed), client, channels, ORPHAN_GRACE_S)
            got = await mix.run()
            await assert_nothing_left(cluster, PATIENCE_S)
    finally:
        await channels.close()
    return got
