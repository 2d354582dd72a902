"""Workers and gateways that are to be stopped: who leaves them, when, and for where."""

from __future__ import annotations

import pytest

from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.draining import DrainLevel
from deepinfer.controller.core.events import Drain
from deepinfer.kvstore.core.ids import Incarnation, StoreId, WorkerId
from deepinfer.kvstore.core.messages import Admit, DrainRule, Preempt, SwapIn, SwapOut
from support.controller_cluster import Cluster
from support.controller_peers import FakeGateway, FakeWorker


def pair(
    config: ControllerConfig | None = None, *, budget_bytes: int = 10**9
) -> tuple[Cluster, FakeWorker, FakeWorker, FakeGateway]:
    """A cluster of the workers w (8 blocks) and spare (4 blocks)."""
    cluster = Cluster(config)
    worker, spare = cluster.worker("w", 8), cluster.worker("spare", 4)
    cluster.store(budget_bytes=budget_bytes)
    gateway = cluster.gateway()
    cluster.start()
    return cluster, worker, spare, gateway


def test_what_fits_elsewhere_leaves_at_once_and_what_does_not_stays_to_its_end() -> None:
    cluster, worker, spare, gateway = pair()
    large = cluster.submit("large", prompt=20, max_tokens=100)
    cluster.run(lambda: large in worker.runs)
    small = cluster.submit("small", prompt=20, max_tokens=40)
    cluster.run(lambda: small in worker.runs)
    cluster.drain("w")
    cluster.run(lambda: small in spare.runs, rounds=40)
    assert [type(order) for order in cluster.sent(SwapOut, SwapIn, Preempt)] == [SwapOut, SwapIn]
    assert large in worker.runs
    assert not cluster.drained("w")
    late = cluster.submit("late", prompt=20, max_tokens=10)
    cluster.run(lambda: len(gateway.finished) == 3)
    assert not any(order.seq == late for order in worker.orders)
    cluster.run(lambda: cluster.drained("w"), rounds=10)


def test_once_the_grace_is_over_everybody_leaves_and_comes_back_after_the_restart() -> None:
    cluster, worker, _, gateway = pair()
    large = cluster.submit("large", prompt=20, max_tokens=100)
    cluster.run(lambda: large in worker.runs)
    cluster.drain("w", 1000)
    began_ms = cluster.now_ms
    cluster.run(lambda: cluster.drained("w"))
    assert began_ms + 1000 <= cluster.now_ms <= began_ms + 1500
    held = gateway.requests[large].held
    worker.restart()
    cluster.run(lambda: gateway.finished == [large])
    assert held > 0
    assert [type(order) for order in cluster.sent(SwapOut, SwapIn)] == [SwapOut, SwapIn]
    assert cluster.recomputed == 0


@pytest.mark.parametrize("offload", [True, False])
def test_without_room_in_the_store_they_are_computed_again(offload: bool) -> None:
    config = ControllerConfig(cpu_offload=offload)
    cluster, worker, _, gateway = pair(config, budget_bytes=0)
    large = cluster.submit("large", prompt=20, max_tokens=100)
    cluster.run(lambda: large in worker.runs)
    cluster.drain("w", 500)
    cluster.run(lambda: cluster.drained("w"), rounds=60)
    assert cluster.sent(Preempt)
    worker.restart()
    cluster.run(lambda: gateway.finished == [large])


def test_a_drain_can_only_be_brought_forward() -> None:
    cluster, worker, _, _ = pair()
    large = cluster.submit("large", prompt=20, max_tokens=100)
    cluster.run(lambda: large in worker.runs)
    for grace_ms in (1000, None, 60_000):
        cluster.drain("w", grace_ms)
    cluster.run(lambda: cluster.drained("w"), rounds=40)


def test_a_drain_of_another_life_is_none() -> None:
    cluster, worker, _, _ = pair()
    cluster.tell(Drain(WorkerId("w"), None, Incarnation(worker.incarnation + 1)))
    assert cluster.core.drain_level("w") == DrainLevel("w", Incarnation(1), True, False, False, 0)
    cluster.tell(Drain(WorkerId("w"), None, worker.incarnation))
    assert cluster.core.drain_level("w") == DrainLevel("w", Incarnation(1), False, True, False, 0)


def test_a_worker_is_drained_only_by_its_own_word() -> None:
    """An order that is still on its way would otherwise be obeyed by what is about to be killed."""
    cluster, worker, _, _ = pair()
    cluster.carry = lambda message: not isinstance(message, Admit)
    cluster.tell(Drain(WorkerId("w")))
    assert not cluster.drained("w")
    cluster.round()
    cluster.round()
    assert worker.draining
    assert cluster.drained("w")


def test_the_next_controller_goes_on_with_it() -> None:
    cluster, worker, _, gateway = pair()
    large = cluster.submit("large", prompt=20, max_tokens=100)
    cluster.run(lambda: large in worker.runs)
    cluster.drain("w", 60_000)
    cluster.round()
    cluster.restart_controller()
    cluster.round()
    status = cluster.status()
    assert status["workers"]["w"]["state"] == "draining"
    small = cluster.submit("small", prompt=20, max_tokens=10)
    cluster.run(lambda: small in gateway.finished)
    assert not any(order.seq == small for order in worker.orders)
    cluster.run(lambda: gateway.finished == [small, large])
    assert cluster.drained("w")


def test_a_restarted_worker_serves_again() -> None:
    cluster, worker, _, gateway = pair()
    cluster.drain("w")
    cluster.run(lambda: cluster.drained("w"), rounds=10)
    worker.restart()
    cluster.round()
    level = cluster.core.drain_level("w")
    assert level == DrainLevel("w", Incarnation(2), True, False, False, 0)
    large = cluster.submit("large", prompt=20, max_tokens=100)
    cluster.run(lambda: gateway.finished == [large])


def test_a_gateway_hears_how_long_its_clients_may_stay() -> None:
    cluster, _, _, gateway = pair()
    said: list[DrainRule | None] = []
    answered = gateway.answered
    gateway.answered = lambda reply: (said.append(reply.drain), answered(reply))  # type: ignore[assignment, func-returns-value]
    cluster.round()
    cluster.drain("gw", 1000)
    cluster.round()
    cluster.round()
    assert said == [None, DrainRule(950), DrainRule(900)]
    assert cluster.drained("gw") or cluster.core.drain_level("gw").draining  # type: ignore[union-attr]
    cluster.run(lambda: cluster.drained("gw"), rounds=5)
    assert cluster.status()["gateways"]["gw"] == {
        "alive": True,
        "incarnation": 1,
        "requests": 0,
        "draining": True,
        "drained": True,
    }


def test_nobody_knows_how_far_a_stranger_is() -> None:
    cluster, _, _, _ = pair()
    cluster.drain("nobody")
    assert cluster.core.drain_level("nobody") is None
    assert not cluster.stores[StoreId("store")].tickets
