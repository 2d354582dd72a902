"""Who is told to fetch whose payload ahead, and that a hint ends with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.controller.core import placement, prefetch
from deepinfer.controller.core.config import ConfigError, ControllerConfig
from deepinfer.controller.core.events import SendOrder
from deepinfer.kvstore.core.ids import Seq
from deepinfer.kvstore.core.messages import Prefetch, SwapIn, SwapOut
from support.controller_cluster import Cluster
from support.controller_peers import BLOCK_BYTES, FakeGateway, FakeWorker

WHOLE: dict[str, Any] = {"prompt": 20, "max_tokens": 28}
"""Three blocks, the whole of each pool here."""


def hints(cluster: Cluster) -> list[tuple[str, str | None]]:
    """Each hint in order: the worker, and the request whose payload it is; None: hold nothing."""
    found = [e for e in cluster.effects if isinstance(e, SendOrder)]
    return [
        (str(e.worker.worker), None if e.order.ticket is None else str(e.order.seq.request))
        for e in found
        if isinstance(e.order, Prefetch)
    ]


def swapped_out(
    config: ControllerConfig | None = None, *, node: str = "b", max_tokens: int = 28
) -> tuple[Cluster, FakeGateway, Seq]:
    """``first`` is swapped out of ``w0`` on node ``a`` and waits; ``w1`` will have room first."""
    cluster = Cluster(config)
    cluster.worker("w0", 3, node="a")
    cluster.worker("w1", 3, node=node)
    cluster.store("store-a", node="a")
    cluster.store("store-b", node="b")
    gateway = cluster.gateway()
    cluster.start()
    first = cluster.submit("first", **WHOLE)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    second = cluster.submit("second", prompt=20, max_tokens=max_tokens)
    cluster.run(lambda: gateway.requests[second].held >= 1)
    cluster.submit("third", **WHOLE)
    cluster.run(lambda: bool(cluster.sent(SwapOut)))
    assert cluster.sent(SwapOut)[0].seq == first
    cluster.run(lambda: cluster.state(first) == "swapped")
    return cluster, gateway, first


def settle(cluster: Cluster, rounds: int = 4) -> None:
    for _ in range(rounds):
        cluster.round()


def test_the_next_to_resume_is_fetched_where_room_comes_first() -> None:
    cluster, gateway, first = swapped_out()
    settle(cluster)
    assert hints(cluster) == [("w1", "first")]
    [order] = cluster.sent(Prefetch)
    held = next(iter(cluster.stores.values())).tickets
    assert (order.ticket, order.store) == (next(iter(held)), "store-a")
    assert order.blocks == held[next(iter(held))].blocks
    cluster.run(lambda: len(gateway.finished) == 3)
    [resume] = cluster.sent(SwapIn)
    assert resume.seq == first
    assert resume in cluster.workers[next(w for w in cluster.workers if w == "w1")].orders
    assert hints(cluster) == [("w1", "first")], "the resume ends it: nothing is to be called off"


def test_nothing_is_fetched_ahead_from_the_workers_own_node() -> None:
    cluster, gateway, _ = swapped_out(node="a")
    cluster.run(lambda: len(gateway.finished) == 3)
    assert cluster.sent(SwapIn)
    assert hints(cluster) == []


def test_where_no_store_is_mapped_the_own_nodes_is_as_far_as_any() -> None:
    cluster, gateway, _ = swapped_out(ControllerConfig(stores_are_mapped=False), node="a")
    cluster.run(lambda: len(gateway.finished) == 3)
    assert hints(cluster) == [("w1", "first")]


@pytest.mark.parametrize("limit", [0, BLOCK_BYTES])
def test_a_payload_beyond_the_limit_is_not(limit: int) -> None:
    cluster, gateway, _ = swapped_out(ControllerConfig(prefetch_bytes_max=limit))
    cluster.run(lambda: len(gateway.finished) == 3)
    assert hints(cluster) == []


def test_a_hint_is_repeated_while_it_holds_and_no_more_often() -> None:
    config = ControllerConfig(prefetch_renew_ms=200)
    cluster, _, first = swapped_out(config)
    for worker in cluster.workers.values():
        worker.step = lambda: None  # type: ignore[method-assign]
    settle(cluster, 20)  # a second
    sent = cluster.sent(Prefetch)
    assert {order.seq for order in sent} == {first}
    assert len(sent) in (5, 6)
    assert len({order.order for order in sent}) == len(sent), "or the worker takes it for doubled"
    assert cluster.core.counters.orders_resent_total == len(sent) - 1


def test_an_aborted_requests_hint_is_called_off() -> None:
    cluster, gateway, first = swapped_out()
    settle(cluster, 2)
    assert hints(cluster) == [("w1", "first")]
    gateway.requests[first].cancelled = True
    settle(cluster, 2)
    assert hints(cluster) == [("w1", "first"), ("w1", None)]
    cluster.run(lambda: len(gateway.finished) == 2)
    assert len(hints(cluster)) == 2


def test_a_hint_for_a_payload_that_is_lost_is_called_off() -> None:
    cluster, _, _ = swapped_out()
    settle(cluster, 2)
    cluster.lose_store(next(iter(cluster.stores.values())))
    settle(cluster, 2)
    assert hints(cluster)[:2] == [("w1", "first"), ("w1", None)]


def test_a_request_that_resumes_elsewhere_leaves_nothing_behind() -> None:
    cluster, gateway, first = swapped_out()
    settle(cluster, 2)
    third = next(name for name in gateway.requests if name.request == "third")
    gateway.requests[third].cancelled = True  # w0, of all, has room now
    cluster.run(lambda: bool(cluster.sent(SwapIn)))
    assert cluster.sent(SwapIn)[0].seq == first
    assert _of(cluster, "w0").orders.count(cluster.sent(SwapIn)[0]) == 1
    assert hints(cluster) == [("w1", "first"), ("w1", None)]


@pytest.mark.parametrize(("open_tokens", "taken"), [(48, "w1"), (32, "w1"), (16, "w0")])
def test_the_worker_that_has_the_payload_is_taken_if_it_has_room(
    open_tokens: int, taken: str
) -> None:
    """Home has more, and would be taken if nothing had been fetched ahead."""
    cluster, _, first = swapped_out()
    settle(cluster, 2)
    world = cluster.core._world
    home, ahead = (world.pools.workers[_of(cluster, name).id] for name in ("w0", "w1"))
    home.open_posted, ahead.open_posted = 48, open_tokens
    assert placement._preferred(world, world.sequences[first], home).id == taken
    prefetch.over(world, world.sequences[first])
    assert placement._preferred(world, world.sequences[first], home).id == "w0"


def test_a_hint_to_a_worker_that_dies_is_forgotten_with_it() -> None:
    cluster, gateway, _ = swapped_out()
    settle(cluster, 2)
    cluster.kill(_of(cluster, "w1"))
    settle(cluster, 4)
    assert hints(cluster) == [("w1", "first")]
    cluster.run(lambda: len(gateway.finished) == 3)


def test_the_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="prefetch_bytes_max = -1: must be at least 0"):
        ControllerConfig(prefetch_bytes_max=-1)
    with pytest.raises(ConfigError, match="prefetch_renew_ms = 0: must be at least 1"):
        ControllerConfig(prefetch_renew_ms=0)


def _of(cluster: Cluster, name: str) -> FakeWorker:
    return next(worker for worker in cluster.workers.values() if worker.id == name)
