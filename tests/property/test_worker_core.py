"""The worker's core against a world that reorders, repeats, loses, breaks and gives up."""

from __future__ import annotations

from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepinfer.workers.core.config import WorkerConfig
from support.worker_havoc import Havoc
from support.worker_world import make_request


def make_world(rng: Random) -> Havoc:
    block_size = rng.choice([1, 2, 4])
    longest = rng.randint(6, 30)
    config = WorkerConfig(
        blocks_total=-(-(longest + 40) // block_size) + rng.choice([0, 1, 2, 4, 30]),
        block_size=block_size,
        block_bytes=64,
        max_batch_tokens=rng.choice([4, 9, 64]),
        max_batch_seqs=rng.choice([1, 2, 4]),
        prefill_chunk_tokens=rng.choice([1, 3, 16]),
        prefix_cache=rng.random() < 0.8,
        unreachable_ms=3000,
        put_timeout_ms=800,
        commit_timeout_ms=400,
        resolve_timeout_ms=400,
        fetch_timeout_ms=800,
        ended_max=10_000,
    )
    shared = [rng.randrange(2, 40) for _ in range(longest)]
    requests = []
    for i in range(rng.randint(1, 5)):
        own = [rng.randrange(2, 40) for _ in range(rng.randint(0, 4))]
        prompt = [*shared[: rng.randint(1, longest)], *own][:longest]
        requests.append(make_request(f"r{i}", prompt, rng.randint(1, 40), f"g{i % 2}"))
    return Havoc(rng, config, requests)


@given(seed=st.integers(0, 2**32), events=st.integers(0, 400))
@settings(max_examples=120)
@example(seed=0, events=400)
def test_no_foreign_kv_no_changed_token_and_everyone_finishes(seed: int, events: int) -> None:
    world = make_world(Random(seed))
    for _ in range(events):
        world.havoc()
    world.settle(rounds=4000)
    blocks = world.core._roster.blocks
    assert blocks.available == blocks.blocks_total
    assert world.core._roster.promised == 0
    for request in world.requests.values():
        assert request.finished is not None
        limit = request.record.sampling.max_tokens
        stopped = request.held[-1] in request.record.stop_token_ids
        assert stopped or len(request.held) == limit
