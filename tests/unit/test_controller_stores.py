"""Which of several stores takes a payload: the nearest, or else one that has room."""

from __future__ import annotations

from typing import Any, TypeVar

from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.events import CallStore
from deepinfer.kvstore.core.messages import Release, Reserve, SwapIn, SwapOut
from support.controller_cluster import Cluster
from support.controller_peers import BLOCK_BYTES, FakeGateway, FakeStore

_C = TypeVar("_C", Reserve, Release)

REQUEST: dict[str, Any] = {"prompt": 20, "max_tokens": 28}
"""Three blocks, the whole of each pool here."""


def calls(cluster: Cluster, kind: type[_C]) -> list[str]:
    """Whom the controller has called, in order."""
    found = [e for e in cluster.effects if isinstance(e, CallStore)]
    return [str(e.store) for e in found if isinstance(e.call, kind)]


def two_nodes(
    near_bytes: int, far_bytes: int, config: ControllerConfig | None = None
) -> tuple[Cluster, FakeStore, FakeStore, FakeGateway]:
    """One worker on node ``a``; a store there, and one on node ``b`` whose id comes first."""
    cluster = Cluster(config)
    cluster.worker("w", 3, node="a")
    near = cluster.store("store-near", near_bytes, node="a")
    far = cluster.store("store-far", far_bytes, node="b")
    gateway = cluster.gateway()
    cluster.start()
    return cluster, near, far, gateway


def swap_one(cluster: Cluster, gateway: FakeGateway) -> None:
    """Two requests for a pool that holds one, until both are done."""
    first = cluster.submit("first", **REQUEST)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    cluster.submit("second", **REQUEST)
    cluster.run(lambda: len(gateway.finished) == 2)


def test_the_nearest_store_is_asked_though_another_has_more_room() -> None:
    cluster, near, far, gateway = two_nodes(10 * BLOCK_BYTES, 1000 * BLOCK_BYTES)
    swap_one(cluster, gateway)
    assert calls(cluster, Reserve) == [near.id]
    cluster.run(lambda: not near.tickets and not far.tickets, rounds=40)


def test_a_payload_that_the_nearest_cannot_hold_goes_to_another_and_comes_back_from_there() -> None:
    cluster, near, far, gateway = two_nodes(2 * BLOCK_BYTES, 10 * BLOCK_BYTES)
    swap_one(cluster, gateway)
    assert calls(cluster, Reserve) == [far.id]
    assert [order.store for order in cluster.sent(SwapOut)] == [far.id]
    assert [order.store for order in cluster.sent(SwapIn)] == [far.id]
    assert cluster.core.counters.kv_cpu_offload_rejected_total == 0
    assert cluster.core.counters.resumes_seen_total == 1
    cluster.run(lambda: not near.tickets and not far.tickets, rounds=40)
    assert set(calls(cluster, Release)) == {far.id}


def test_the_roomiest_of_the_others_is_asked() -> None:
    cluster = Cluster()
    cluster.worker("w", 3, node="a")
    cluster.store("store-a", 0, node="a")
    cluster.store("store-b", 10 * BLOCK_BYTES, node="b")
    cluster.store("store-c", 20 * BLOCK_BYTES, node="c")
    gateway = cluster.gateway()
    cluster.start()
    swap_one(cluster, gateway)
    assert calls(cluster, Reserve) == ["store-c"]


def test_when_the_nearest_refuses_unexpectedly_another_is_asked_at_once() -> None:
    cluster, near, far, gateway = two_nodes(10 * BLOCK_BYTES, 10 * BLOCK_BYTES)
    first = cluster.submit("first", **REQUEST)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    near.budget_bytes = 0  # its last report said otherwise
    cluster.submit("second", **REQUEST)
    cluster.run(lambda: bool(cluster.sent(SwapOut)), rounds=2)
    assert calls(cluster, Reserve) == [near.id, far.id]
    assert cluster.core.counters.kv_cpu_offload_rejected_total == 1
    cluster.run(lambda: len(gateway.finished) == 2)


def test_where_nobody_has_room_only_the_nearest_is_asked() -> None:
    cluster, near, _, gateway = two_nodes(2 * BLOCK_BYTES, BLOCK_BYTES)
    first = cluster.submit("first", **REQUEST)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    cluster.submit("second", **REQUEST)
    for _ in range(10):  # half a second
        cluster.round()
    assert calls(cluster, Reserve) == [near.id]
    assert cluster.core.counters.kv_cpu_offload_rejected_total == 1
    cluster.run(lambda: len(gateway.finished) == 2)
    assert not cluster.sent(SwapOut)


def test_the_bound_on_swapped_requests_is_not_asked_of_each_store() -> None:
    config = ControllerConfig(max_swapped_requests=0)
    cluster, _, _, gateway = two_nodes(10 * BLOCK_BYTES, 10 * BLOCK_BYTES, config)
    first = cluster.submit("first", **REQUEST)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    cluster.submit("second", **REQUEST)
    for _ in range(10):
        cluster.round()
    assert cluster.core.counters.kv_cpu_offload_rejected_total == 1
    assert calls(cluster, Reserve) == []


def test_a_worker_whose_store_is_gone_uses_another_nodes() -> None:
    cluster, near, far, gateway = two_nodes(10 * BLOCK_BYTES, 10 * BLOCK_BYTES)
    cluster.lose_store(near)
    cluster.carry = lambda message: getattr(message, "store", None) != near.id
    swap_one(cluster, gateway)
    assert calls(cluster, Reserve) == [far.id]
