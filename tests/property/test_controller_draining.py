"""Workers emptied and restarted one after the other, under load and with losses: nobody notices."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.events import WorkerGone
from support.controller_cluster import Cluster


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    pools=st.lists(st.sampled_from([4, 6, 12]), min_size=1, max_size=3),
    lost=st.sampled_from([0.0, 0.2]),
    grace_ms=st.sampled_from([0, 500, 5000]),
    budget_blocks=st.sampled_from([0, 4, 10_000]),
    offload=st.booleans(),
)
def test_a_rolling_restart_ends_and_loses_nothing(
    seed: int, pools: list[int], lost: float, grace_ms: int, budget_blocks: int, offload: bool
) -> None:
    random = Random(seed)
    cluster = Cluster(ControllerConfig(cpu_offload=offload))
    for index, blocks in enumerate(pools):
        cluster.worker(f"w{index}", blocks)
    cluster.store(budget_bytes=budget_blocks * 1000)
    gateway = cluster.gateway()
    cluster.start()
    cluster.carry = lambda message: random.random() >= lost
    submitted = 0
    most = 16 * max(pools)

    def load() -> None:
        nonlocal submitted
        if submitted < 30 and random.random() < 0.15:
            prompt = random.randrange(1, most // 2)
            cluster.submit(f"r{submitted}", prompt, random.randrange(1, most // 2))
            submitted += 1

    for worker in list(cluster.workers.values()):
        # The grace, a swap that hangs for as long as orders are hoped for, and what was lost.
        for _ in range((grace_ms + 40_000) // 50):
            cluster.drain(worker.id, grace_ms)
            load()
            cluster.round(steps=random.randrange(0, 3))
            if cluster.drained(worker.id):
                break
        assert cluster.drained(worker.id), worker.runs
        assert not worker.runs, "it would be killed with these"
        cluster.kill(worker, announced=False)
        cluster.tell(WorkerGone(worker.ref))
        for _ in range(random.randrange(0, 30)):
            load()
            cluster.round()
        worker.restart()
    cluster.carry = lambda message: True
    cluster.run(lambda: not gateway.requests, rounds=3000)
    assert len(gateway.finished) == submitted
    assert not gateway.rejected
