"""Two Ray nodes on one machine: one store each, a swap that crosses them, and a node that dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deepinfer.client import AsyncClient, Delta, Notice
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig
from deepinfer.deploy.rays import RunningRay
from support.cluster import Oracle, controller_status, tiny_model, worker_statuses
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
    one_after_another,
    prompt,
    story,
)

NODES = ("127.0.0.2", "127.0.0.3")
"""Ray replaces 127.0.0.1 by the machine's own address; these it takes as they are."""
RAY_BYTES = 80 * 2**20


@dataclass(frozen=True, slots=True)
class TwoNodes:
    """A cluster with one worker on each of two nodes; each pool holds one of the requests here."""

    ray: Any
    """``ray.cluster_utils.Cluster``."""
    nodes: dict[str, Any]
    """Ray's handle of each node, by address."""
    cluster: Cluster
    oracle: Oracle

    def actors_of(self, node: str) -> list[str]:
        """The actors of a node that is not the head."""
        document = asyncio.run(controller_status(self.cluster))
        kinds = document["workers"] | document["stores"]
        return [name for name, member in kinds.items() if member["node"] == node]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    folder = tmp_path_factory.mktemp("nodes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        # As the launcher does, and for good: this process has read them once Ray is imported.
        for name, value in (
            ("RAY_AUTH_MODE", "token"),
            ("RAY_worker_niceness", "0"),
            ("RAY_USAGE_STATS_ENABLED", "0"),
        ):
            os.environ.setdefault(name, value)
        subprocess.run(
            [Path(sys.executable).parent / "ray", "get-auth-token", "--generate"],
            check=True,
            capture_output=True,
        )
        from ray.cluster_utils import Cluster as RayCluster

        ray_cluster: Any = RayCluster()
        try:
            nodes = {
                address: ray_cluster.add_node(
                    node_ip_address=address,
                    node_name=address,
                    num_cpus=1,
                    include_dashboard=False,
                    object_store_memory=RAY_BYTES,
                )
                for address in NODES
            }
            config = ClusterConfig(
                model=str(tiny_model(folder)),
                port=0,
                metrics_port=0,
                block_size=BLOCK_SIZE,
                max_cache=f"{BLOCKS} blocks",
                prefill_chunk_tokens=1,
                max_cpu_offload_mb=64,
            )
            with Cluster(config, ray=RunningRay(2, address=ray_cluster.address)) as cluster:
                oracle = Oracle(tiny_model(folder), "auto")
                yield TwoNodes(ray_cluster, nodes, cluster, oracle)
        finally:
            ray_cluster.shutdown()


def test_each_node_has_a_store_and_its_workers(two: TwoNodes) -> None:
    document = asyncio.run(controller_status(two.cluster))
    assert {n: w["node"] for n, w in document["workers"].items()} == {
        "worker-0": NODES[0],
        "worker-1": NODES[1],
    }
    assert {n: s["node"] for n, s in document["stores"].items()} == {
        f"store-{node}": node for node in NODES
    }
    import ray

    for node in NODES:
        address = ray.get(two.cluster.actors[f"store-{node}"].address.remote())
        assert address.startswith(f"{node}:")


def asks_for_three(seed: int) -> list[Ask]:
    """To be sent as soon as the one before is placed: the third needs all of a pool, each of the
    others most of one, and of these whoever stays ends long before the third.
    """
    return [
        Ask(prompt(seed), {**GREEDY, "max_tokens": 50}),
        Ask(prompt(seed + 1), {**SEEDED, "max_tokens": 50}),
        Ask(prompt(seed + 2, 2 * BLOCK_SIZE + 2), {**GREEDY, "max_tokens": 62}),
    ]


def test_a_request_swapped_out_on_one_node_resumes_on_the_other(two: TwoNodes) -> None:
    """Both workers are busy when the third comes. Whoever gives way returns where room comes first:
    on the other node, whose request began earlier than the third. Its payload is there by then.
    """
    asks = asks_for_three(1)
    seen, counted = story(two.cluster, asks, "placed")
    assert_right(two.oracle, asks, seen)
    assert sum(one.choice.swaps.swaps for one in seen) == 1
    assert sum(one.choice.swaps.resumes for one in seen) == 1
    assert counted["kv_cpu_offload_blocks_total"] == counted["kv_cpu_reload_blocks_total"] > 0
    assert_computed_once(asks, counted)
    for name in ("", "_used"):
        assert counted[f"deepinfer_worker_prefetches{name}_total"] == 1, "it had come ahead"
    workers = asyncio.run(worker_statuses(two.cluster))
    [left] = [n for n, w in workers.items() if w["requests_swapped_total"]]
    [came] = [n for n, w in workers.items() if w["requests_resumed_total"]]
    assert left != came
    homes = dict(zip(("worker-0", "worker-1"), NODES, strict=True))
    assert _slabs_of(two.cluster.pid(left)) == {f"store-{homes[left]}"}, "not over shared memory"
    assert _slabs_of(two.cluster.pid(came)) == set(), "it was to come over gRPC"


def test_a_request_that_is_aborted_while_its_payload_comes_ahead_leaves_nothing(
    two: TwoNodes,
) -> None:
    asks = asks_for_three(11)
    name = "deepinfer_worker_prefetches_total"

    async def follow(
        client: AsyncClient, ask: Ask, ready: asyncio.Event, hinted: float
    ) -> list[int]:
        """The answer; of the request that is swapped out, what came before it was aborted."""
        token_ids: list[int] = []
        async with client.stream(ask.prompt, include_events=True, **ask.sampling) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    token_ids += event.token_ids
                elif isinstance(event, Notice) and event.kind == "placed":
                    ready.set()
                elif isinstance(event, Notice) and event.kind == "swapped_out":
                    await _counted(two.cluster, name, hinted)
                    break  # leaving the stream aborts it
        return token_ids

    async def tell(client: AsyncClient) -> list[list[int]]:
        hinted = (await controller_status(two.cluster))["counters"][name] + 1
        running = []
        for ask in asks:
            ready = asyncio.Event()
            running.append(asyncio.create_task(follow(client, ask, ready, hinted)))
            await ready.wait()
        return list(await asyncio.gather(*running))

    answers, counted = counting(two.cluster, tell)
    right = [list(two.oracle.answer(ask.prompt, **ask.sampling)) for ask in asks]
    assert [len(a) < len(b) for a, b in zip(answers, right, strict=True)].count(True) == 1
    assert all(b[: len(a)] == a for a, b in zip(answers, right, strict=True))
    assert counted[name] == counted["deepinfer_worker_prefetches_wasted_total"] == 1
    assert counted["requests_swapped_total"] == 1
    assert counted["requests_resumed_total"] == 0


async def _counted(cluster: Cluster, name: str, count: float) -> None:
    """Return when the controller has heard of so many."""
    for _ in range(1000):
        if (await controller_status(cluster))["counters"][name] >= count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{name} is still below {count:g}")


def _slabs_of(pid: int) -> set[str]:
    """The stores whose memory a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    names = [line.split("/memfd:kv-")[1].split()[0] for line in lines if "/memfd:kv-" in line]
    return {name.rpartition("-")[0] for name in names}  # behind it: which of its slabs


def test_a_node_that_dies_costs_no_token(two: TwoNodes) -> None:
    """Both run; the second node is killed, raylet, worker and store; its request goes on."""
    asks = [
        Ask(prompt(4), {**GREEDY, "max_tokens": OUTPUT}),
        Ask(prompt(5), {**SEEDED, "max_tokens": OUTPUT}),
    ]
    doomed = NODES[1]
    pids = [two.cluster.pid(name) for name in two.actors_of(doomed)]
    assert len(pids) == 2
    raylet = two.nodes[doomed].all_processes["raylet"][0].process.pid

    async def run() -> list[Any]:
        async with AsyncClient(list(two.cluster.endpoints), token=two.cluster.token) as client:
            running = asyncio.create_task(one_after_another(client, asks, Delta))
            while True:
                document = await controller_status(two.cluster)
                if all(worker["residents"] for worker in document["workers"].values()):
                    break
                assert not running.done()
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)  # in the middle of it
            for pid in (raylet, *pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return await asyncio.wait_for(running, 60)

    seen = asyncio.run(run())
    assert_right(two.oracle, asks, seen)
    document = asyncio.run(_settled(two.cluster))
    assert document["workers"]["worker-0"]["blocks_free"] == BLOCKS
    assert document["workers"]["worker-1"]["state"] == "gone"
    assert document["stores"][f"store-{doomed}"]["alive"] is False
    assert document["stores"][f"store-{NODES[0]}"]["used_bytes"] == 0
    # and the rest of the cluster swaps as before
    asks = [Ask(prompt(6 + i), {**GREEDY, "max_tokens": OUTPUT - i}) for i in range(2)]

    async def again() -> list[Any]:
        async with AsyncClient(list(two.cluster.endpoints), token=two.cluster.token) as client:
            return await asyncio.wait_for(one_after_another(client, asks, Delta), 60)

    seen = asyncio.run(again())
    assert_right(two.oracle, asks, seen)
    assert [one.choice.swaps.swaps for one in seen] == [1, 0]


async def _settled(cluster: Cluster) -> dict[str, Any]:
    """The controller's document once it knows of no request."""
    for _ in range(400):
        document = await controller_status(cluster)
        if not document["sequences"]:
            return document
        await asyncio.sleep(0.05)
    raise AssertionError(document["sequences"])
