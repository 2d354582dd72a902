"""Stories of the line: who is placed where, who has to wait for whom, and who is refused."""

from __future__ import annotations

import pytest

from deepinfer.controller.core.config import ConfigError, ControllerConfig
from deepinfer.controller.core.events import Members, Reply, Tick
from deepinfer.kvstore.core.ids import GatewayId, WorkerId
from deepinfer.kvstore.core.messages import Admit, Departure, SwapOut
from support.controller_cluster import Cluster
from support.controller_peers import BLOCK_SIZE, seq


def cluster_of(*pools: int, config: ControllerConfig | None = None) -> Cluster:
    cluster = Cluster(config)
    for index, blocks in enumerate(pools):
        cluster.worker(f"w{index}", blocks)
    cluster.store()
    cluster.gateway()
    cluster.start()
    return cluster


def test_a_request_goes_where_most_is_free() -> None:
    cluster = cluster_of(4, 9, 6)
    cluster.submit("r", prompt=10, max_tokens=10)
    cluster.round()
    assert [order.seq for order in cluster.workers[WorkerId("w1")].orders] == [seq("r")]


def test_first_come_first_served() -> None:
    cluster = cluster_of(3, config=ControllerConfig(cpu_offload=False))
    names = [cluster.submit(f"r{index}", prompt=20, max_tokens=20) for index in range(5)]
    gateway = cluster.gateways[GatewayId("gw")]
    cluster.run(lambda: len(gateway.finished) == 5)
    assert gateway.finished == names


def test_a_head_that_a_small_worker_can_never_hold_does_not_block_it() -> None:
    """The large worker is busy and its next guest waits; small requests pass on the small one."""
    cluster = cluster_of(3, 12, config=ControllerConfig(cpu_offload=False))
    cluster.submit("large", prompt=150, max_tokens=40)
    cluster.round()
    cluster.submit("large too", prompt=150, max_tokens=40)
    cluster.round()
    small = cluster.submit("small", prompt=20, max_tokens=20)
    cluster.round()
    assert small in cluster.workers[WorkerId("w0")].runs
    assert cluster.state(seq("large too")) == "waiting"


def test_a_small_request_does_not_overtake_a_head_that_waits_for_the_same_worker() -> None:
    cluster = cluster_of(12, config=ControllerConfig(cpu_offload=False))
    cluster.submit("large", prompt=130, max_tokens=40)
    cluster.round()
    head = cluster.submit("head", prompt=130, max_tokens=40)
    cluster.round()
    small = cluster.submit("small", prompt=1, max_tokens=2)
    for _ in range(5):
        cluster.round()
        assert small not in cluster.workers[WorkerId("w0")].runs
    gateway = cluster.gateways[GatewayId("gw")]
    cluster.run(lambda: len(gateway.finished) == 3)
    admitted = [order.seq for order in cluster.sent(Admit)]
    assert admitted == [seq("large"), head, small]


def test_the_growth_reserve_is_kept_for_residents_and_waived_on_an_empty_worker() -> None:
    config = ControllerConfig(cpu_offload=False)
    cluster = cluster_of(3, config=config)
    worker = cluster.workers[WorkerId("w0")]
    whole = cluster.submit("whole", prompt=BLOCK_SIZE * 2 + 1, max_tokens=8)
    cluster.round(steps=0)
    assert whole in worker.runs  # three blocks of three, although a resident may want to grow
    cluster.run(lambda: not worker.runs)
    cluster.submit("a", prompt=BLOCK_SIZE, max_tokens=16)
    cluster.round(steps=0)
    beside = cluster.submit("b", prompt=BLOCK_SIZE, max_tokens=16)
    for _ in range(3):
        cluster.round(steps=0)
    assert beside in worker.runs  # one block, one kept for a
    third = cluster.submit("c", prompt=BLOCK_SIZE, max_tokens=16)
    for _ in range(3):
        cluster.round(steps=0)
    assert third not in worker.runs  # the last block is kept for a and b


def test_what_no_pool_can_hold_is_refused_with_both_numbers() -> None:
    cluster = cluster_of(3, 8)
    cluster.submit("r", prompt=100, max_tokens=BLOCK_SIZE * 8 - 99)
    cluster.round()
    assert cluster.gateways[GatewayId("gw")].rejected == {seq("r"): (9, 8)}
    assert not cluster.sent(Admit)
    assert cluster.core.counters.requests_rejected_total == 1
    cluster.round()
    assert cluster.status()["sequences"] == []


def test_a_refusal_is_repeated_until_the_gateway_has_heard_it() -> None:
    cluster = cluster_of(3)
    cluster.submit("r", prompt=100, max_tokens=100)
    cluster.carry = lambda message: not isinstance(message, Reply)
    for _ in range(3):
        cluster.round()
    cluster.carry = lambda message: True
    cluster.round()
    assert cluster.gateways[GatewayId("gw")].rejected == {seq("r"): (13, 3)}


def test_a_queued_request_fails_when_the_largest_pool_leaves() -> None:
    cluster = cluster_of(3, 8, config=ControllerConfig(cpu_offload=False))
    large = cluster.workers[WorkerId("w1")]
    cluster.submit("running", prompt=100, max_tokens=20)
    cluster.round()
    cluster.submit("queued", prompt=100, max_tokens=20)
    cluster.round()
    gateway = cluster.gateways[GatewayId("gw")]
    cluster.kill(large)
    cluster.round()
    assert gateway.rejected == {}  # it is still expected back
    del cluster.workers[large.id]
    cluster.start()
    assert gateway.rejected == {seq("queued"): (8, 3)}
    # What had begun gets longer to find a place.
    for _ in range(cluster.config.dead_ms // 50 + 2):
        cluster.round()
    assert gateway.rejected == {seq("queued"): (8, 3), seq("running"): (8, 3)}


def test_a_late_refusal_puts_the_request_back_at_the_head() -> None:
    """The worker's last report was too kind; nobody passes the request meanwhile."""
    cluster = cluster_of(6, config=ControllerConfig(cpu_offload=False))
    worker = cluster.workers[WorkerId("w0")]
    cluster.submit("a", prompt=BLOCK_SIZE * 3, max_tokens=BLOCK_SIZE)
    cluster.round()
    report = worker.report()
    worker.runs[seq("a")].blocks += 2  # grown since it reported
    head = cluster.submit("head", prompt=20, max_tokens=10)
    cluster.tell(cluster.gateways[GatewayId("gw")].report())
    small = cluster.submit("small", prompt=1, max_tokens=2)
    cluster.tell(report)
    (said,) = worker.departed.values()
    assert (said.seq, said.why) == (head, Departure.REFUSED)
    worker.runs[seq("a")].blocks -= 2
    cluster.run(lambda: len(cluster.gateways[GatewayId("gw")].finished) == 3)
    assert cluster.core.counters.requests_refused_late_total == 1
    first_runs = {order.seq: order.run for order in reversed(cluster.sent(Admit))}
    assert first_runs[head] < first_runs[small]


def test_nobody_is_placed_before_everyone_has_reported() -> None:
    cluster = Cluster()
    cluster.worker("w0", 8)
    absent = cluster.worker("w1", 8)
    absent.alive = False
    cluster.gateway()
    cluster.submit("r", prompt=10, max_tokens=10)
    cluster.start()
    for _ in range(5):
        cluster.round()
    assert not cluster.effects or not cluster.sent(Admit)
    absent.alive = True
    cluster.round()
    assert len(cluster.sent(Admit)) == 1


def test_the_wait_for_a_silent_member_ends() -> None:
    cluster = Cluster()
    cluster.worker("w0", 8)
    cluster.worker("w1", 8).alive = False
    cluster.gateway()
    cluster.submit("r", prompt=10, max_tokens=10)
    cluster.start()
    rounds = cluster.run(lambda: bool(cluster.sent(Admit)), rounds=100)
    assert rounds * 50 >= cluster.config.startup_grace_ms - 100


def test_placement_prefers_swapped_requests_to_new_ones() -> None:
    cluster = cluster_of(3)
    gateway = cluster.gateways[GatewayId("gw")]
    first = cluster.submit("first", prompt=20, max_tokens=28)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    second = cluster.submit("second", prompt=20, max_tokens=28)
    cluster.run(lambda: bool(cluster.sent(SwapOut)))
    third = cluster.submit("third", prompt=20, max_tokens=28)
    cluster.run(lambda: len(gateway.finished) == 3)
    assert gateway.finished.index(second) == 0
    placed = [order.seq for order in cluster.sent(Admit)]
    assert placed == [first, second, third]


def test_a_silent_worker_gets_nothing_new() -> None:
    cluster = cluster_of(8, 3)
    quiet = cluster.workers[WorkerId("w0")]
    quiet.alive = False
    for _ in range(cluster.config.suspect_ms // 50 + 1):
        cluster.round()
    cluster.submit("r", prompt=10, max_tokens=10)
    cluster.round()
    assert seq("r") in cluster.workers[WorkerId("w1")].runs
    assert cluster.status()["workers"]["w0"]["state"] == "suspected"


def test_a_member_that_left_does_not_count_as_a_pool() -> None:
    cluster = cluster_of(8)
    worker = cluster.workers.pop(WorkerId("w0"))
    cluster.kill(worker)
    cluster.tell(Members(workers={}, stores={}, gateways={GatewayId("gw"): None}))
    cluster.submit("r", prompt=10, max_tokens=10)
    cluster.round()
    cluster.tell(Tick())
    assert cluster.status()["workers"] == {}
    assert cluster.gateways[GatewayId("gw")].rejected == {}  # there is no number to refuse it with


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"victims": "oldest"}, "victims"),
        ({"reserve": "half"}, "reserve"),
        ({"max_swapped_requests": -1}, "max_swapped_requests"),
        ({"growth_reserve_blocks": -1}, "growth_reserve_blocks"),
        ({"order_timeout_ms": 0}, "order_timeout_ms"),
        ({"dead_ms": 2000}, "dead_ms"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, object], name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} = .*: must be ") as caught:
        ControllerConfig(**settings)  # type: ignore[arg-type]
    assert caught.value.name == name
