"""Stories of memory that runs out: who gives way, for whom, and what happens when nobody can."""

from __future__ import annotations

import pytest

from deepinfer.controller.core.config import ControllerConfig
from deepinfer.kvstore.core.ids import StoreId
from deepinfer.kvstore.core.messages import Admit, Preempt, SwapIn, SwapOut
from deepinfer.kvstore.core.states import State
from support.controller_cluster import Cluster
from support.controller_peers import BLOCK_SIZE, FakeGateway, FakeWorker


def cluster_of(
    blocks: int, config: ControllerConfig | None = None, *, budget_bytes: int = 10**9
) -> tuple[Cluster, FakeWorker, FakeGateway]:
    cluster = Cluster(config)
    worker = cluster.worker("w", blocks)
    cluster.store(budget_bytes=budget_bytes)
    gateway = cluster.gateway()
    cluster.start()
    return cluster, worker, gateway


def tokens(blocks: int) -> int:
    return blocks * BLOCK_SIZE


def test_two_requests_in_a_pool_for_one_swap_exactly_once() -> None:
    """A pool of 3 blocks, two requests that need 3 each: one swap-out, one resume, both finish."""
    cluster, _, gateway = cluster_of(3)
    first = cluster.submit("first", prompt=20, max_tokens=28)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    second = cluster.submit("second", prompt=20, max_tokens=28)
    cluster.run(lambda: len(gateway.finished) == 2)
    assert [type(order) for order in cluster.sent(Admit, SwapOut, SwapIn)] == [
        Admit,
        SwapOut,
        Admit,
        SwapIn,
    ]
    assert gateway.finished == [second, first]
    counters = cluster.core.counters
    assert counters.swaps_seen_total == counters.resumes_seen_total == 1
    cluster.run(lambda: not cluster.stores[StoreId("store")].tickets, rounds=40)


def test_the_status_says_of_each_request_where_its_kv_is_and_how_often_it_left() -> None:
    cluster, _, gateway = cluster_of(3)
    first = cluster.submit("first", prompt=20, max_tokens=28)
    cluster.run(lambda: gateway.requests[first].held >= 1)

    def row() -> dict[str, object]:
        return next(r for r in cluster.status()["sequences"] if r["request"] == first.request)

    assert (row()["worker"], row()["store"], row()["swaps"]) == ("w", None, 0)
    assert row()["prompt_tokens"] == 20
    cluster.submit("second", prompt=20, max_tokens=28)
    cluster.run(lambda: row()["store"] is not None and row()["state"] == "swapped")
    assert (row()["worker"], row()["store"], row()["swaps"]) == (None, "store", 1)
    cluster.run(lambda: row()["worker"] is not None and row()["store"] is None)
    assert row()["swaps"] == 1


def test_room_made_for_a_newcomer_is_not_given_to_its_victim() -> None:
    """After the swap-out the victim is first in line and fits; the newcomer gets the room."""
    cluster, worker, gateway = cluster_of(4)
    first = cluster.submit("first", prompt=tokens(1), max_tokens=40)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    second = cluster.submit("second", prompt=tokens(3), max_tokens=tokens(1))
    cluster.run(lambda: second in worker.runs)
    assert len(cluster.sent(SwapOut)) == 1
    assert not cluster.sent(SwapIn)
    cluster.run(lambda: len(gateway.finished) == 2)
    assert gateway.finished == [second, first]


def test_nothing_is_swapped_for_a_newcomer_while_someone_is_swapped_out() -> None:
    cluster, _, gateway = cluster_of(3)
    first = cluster.submit("a", prompt=20, max_tokens=28)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    for name in ("b", "c", "d"):
        cluster.submit(name, prompt=20, max_tokens=28)
    for _ in range(400):
        cluster.round()
        assert cluster.status()["swapped"] <= 1
        if len(gateway.finished) == 4:
            break
    assert len(gateway.finished) == 4


def test_a_budget_of_zero_refuses_and_the_request_goes_on() -> None:
    """S7: the victim is not disturbed, the newcomer waits for it, each refusal is counted."""
    cluster, worker, gateway = cluster_of(3, budget_bytes=0)
    first = cluster.submit("first", prompt=20, max_tokens=28)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    second = cluster.submit("second", prompt=20, max_tokens=28)
    run = worker.runs[first].run
    cluster.run(lambda: first in gateway.finished)
    assert cluster.core.counters.kv_cpu_offload_rejected_total >= 1
    assert not cluster.sent(SwapOut)
    assert run == cluster.sent(Admit)[0].run
    cluster.run(lambda: second in gateway.finished)


def test_a_refused_store_is_not_asked_again_at_once() -> None:
    cluster, _, gateway = cluster_of(3, budget_bytes=0)
    first = cluster.submit("first", prompt=20, max_tokens=28)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    cluster.submit("second", prompt=20, max_tokens=28)
    for _ in range(10):  # half a second
        cluster.round()
    assert cluster.core.counters.kv_cpu_offload_rejected_total == 1


def test_the_bound_on_swapped_requests_counts_as_a_refusal() -> None:
    config = ControllerConfig(max_swapped_requests=0)
    cluster, _, gateway = cluster_of(3, config)
    first = cluster.submit("first", prompt=20, max_tokens=28)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    cluster.submit("second", prompt=20, max_tokens=28)
    cluster.run(lambda: len(gateway.finished) == 2)
    assert not cluster.sent(SwapOut)
    assert cluster.core.counters.kv_cpu_offload_rejected_total >= 1


def test_offload_switched_off_swaps_nothing() -> None:
    cluster, _, gateway = cluster_of(3, ControllerConfig(cpu_offload=False))
    first = cluster.submit("first", prompt=20, max_tokens=28)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    cluster.submit("second", prompt=20, max_tokens=28)
    cluster.run(lambda: len(gateway.finished) == 2)
    assert not cluster.sent(SwapOut)
    assert cluster.core.counters.kv_cpu_offload_rejected_total == 0


def test_a_failed_swap_leaves_everything_as_it_was() -> None:
    cluster, worker, gateway = cluster_of(3)
    worker.breaks_swaps = True
    first = cluster.submit("first", prompt=20, max_tokens=28)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    cluster.submit("second", prompt=20, max_tokens=28)
    cluster.run(lambda: first in gateway.finished)
    assert cluster.core.counters.swaps_abandoned_total >= 1
    assert cluster.core.counters.swaps_seen_total == 0
    cluster.run(lambda: len(gateway.finished) == 2)
    cluster.run(lambda: not cluster.stores[StoreId("store")].tickets, rounds=40)


def test_residents_that_cannot_grow_are_relieved() -> None:
    """Three residents of one block each and two blocks left over: somebody is swapped out."""
    cluster, _, gateway = cluster_of(5)
    for name in ("a", "b", "c"):
        cluster.submit(name, prompt=2, max_tokens=40)
    cluster.run(lambda: len(gateway.finished) == 3)
    counters = cluster.core.counters
    assert counters.swaps_seen_total == counters.resumes_seen_total >= 1
    assert counters.requests_preempted_total == 0


def test_the_last_resort_recomputes_the_youngest() -> None:
    """Nobody can grow and the store takes nothing: the latest arrival gives way, and comes back."""
    cluster, _, gateway = cluster_of(4, budget_bytes=0)
    old = cluster.submit("old", prompt=14, max_tokens=40)
    cluster.round()
    young = cluster.submit("young", prompt=14, max_tokens=40)
    cluster.run(lambda: len(gateway.finished) == 2)
    preempted = cluster.sent(Preempt)
    assert [order.seq for order in preempted] == [young]
    assert gateway.finished == [old, young]
    assert cluster.core.counters.requests_preempted_total == 1


def test_a_resumed_request_is_left_alone_for_some_tokens() -> None:
    """Newcomers cannot push it out again before it has advanced by ``min_residency_tokens``."""
    cluster, worker, gateway = cluster_of(3)
    first = cluster.submit("first", prompt=17, max_tokens=31)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    second = cluster.submit("second", prompt=17, max_tokens=10)
    cluster.run(lambda: second in gateway.finished)
    cluster.run(lambda: first in worker.runs and worker.runs[first].advanced >= 1)
    cluster.submit("third", prompt=17, max_tokens=10)
    advanced = 0
    while len(cluster.sent(SwapOut)) == 1:
        advanced = worker.runs[first].advanced
        cluster.round()
    assert advanced >= cluster.config.min_residency_tokens - 1
    cluster.run(lambda: len(gateway.finished) == 3)


def test_a_lost_reserve_call_is_repeated_under_the_same_ticket() -> None:
    cluster, _, gateway = cluster_of(3)
    store = cluster.stores[StoreId("store")]
    first = cluster.submit("first", prompt=20, max_tokens=28)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    store.answers = False
    cluster.submit("second", prompt=20, max_tokens=28)
    for _ in range(5):
        cluster.round(steps=0)
    store.answers = True
    for _ in range(30):
        cluster.round(steps=0)
    cluster.run(lambda: len(gateway.finished) == 2)
    reserved = {order.ticket for order in cluster.sent(SwapOut)}
    assert len(reserved) == 1
    assert cluster.core.counters.swaps_seen_total == 1


def test_payloads_of_a_lost_store_are_computed_again() -> None:
    cluster, worker, gateway = cluster_of(3)
    first = cluster.submit("first", prompt=20, max_tokens=28)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    second = cluster.submit("second", prompt=20, max_tokens=28)
    cluster.run(lambda: second in worker.runs)
    cluster.lose_store(cluster.stores[StoreId("store")])
    cluster.run(lambda: len(gateway.finished) == 2)
    assert not cluster.sent(SwapIn)
    assert cluster.core.counters.requests_recovered_total == 1


def test_full_reserve_never_needs_relief() -> None:
    """Every block a request may need is set aside, so nobody is ever short."""
    cluster, worker, gateway = cluster_of(7, ControllerConfig(reserve="full"))
    for name in ("a", "b", "c", "d"):
        cluster.submit(name, prompt=10, max_tokens=30)
    short = 0
    while len(gateway.finished) < 4:
        cluster.round()
        short += worker.short
        assert len(worker.runs) <= 2  # 3 blocks each
    assert short == 0


def test_drain_moves_everything_to_another_worker() -> None:
    cluster, worker, gateway = cluster_of(8)
    names = [cluster.submit(name, prompt=20, max_tokens=40) for name in ("a", "b")]
    cluster.run(lambda: all(name in worker.runs for name in names))
    other = cluster.worker("spare", 8)
    cluster.start()
    cluster.drain("w")
    cluster.run(lambda: all(name in other.runs for name in names), rounds=60)
    assert not worker.runs
    assert {type(order) for order in other.orders} == {SwapIn}
    late = cluster.submit("late", prompt=20, max_tokens=10)
    cluster.run(lambda: len(gateway.finished) == 3)
    assert all(order.seq != late for order in worker.orders)


def test_a_sole_resident_that_outgrew_its_pool_is_moved_to_a_larger_one() -> None:
    cluster, worker, gateway = cluster_of(8)
    name = cluster.submit("r", prompt=20, max_tokens=80)
    cluster.run(lambda: name in worker.runs)
    worker.blocks_total = 3
    larger = cluster.worker("larger", 9)
    cluster.start()
    cluster.run(lambda: name in larger.runs)
    assert [type(order) for order in cluster.sent(SwapOut, SwapIn, Preempt)] == [SwapOut, SwapIn]
    cluster.run(lambda: gateway.finished == [name])


@pytest.mark.parametrize("policy", ["lru", "youngest", "cost"])
def test_every_policy_gets_everyone_through(policy: str) -> None:
    cluster, _, gateway = cluster_of(6, ControllerConfig(victims=policy))
    for index in range(8):
        cluster.submit(f"r{index}", prompt=10 + 3 * index, max_tokens=30)
        cluster.round()
    cluster.run(lambda: len(gateway.finished) == 8)


def test_status_shows_pools_swaps_and_the_budget() -> None:
    cluster, worker, gateway = cluster_of(3)
    first = cluster.submit("first", prompt=20, max_tokens=28)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    second = cluster.submit("second", prompt=20, max_tokens=28)
    cluster.run(lambda: second in worker.runs)
    cluster.round()
    status = cluster.status()
    assert status["swapped"] == 1
    assert status["cpu_offload"] == {
        "enabled": True,
        "payload_bytes": 2000,
        "budget_bytes": 10**9,
        "max_swapped_requests": None,
    }
    pool = status["workers"]["w"]
    assert (pool["blocks_total"], pool["blocks_free"], pool["residents"]) == (3, 1, 1)
    requests = status["requests"]
    assert requests[State.SWAPPED.value] == requests[State.DECODE.value] == 1
    counters = status["counters"]
    assert counters["swapped_requests"] == 1
    assert counters["cpu_offload_bytes"] == 2000
    assert counters["cpu_offload_enabled"] == 1
