"""Stories of what goes wrong between processes; each hole of the protocol's first draft is one."""

from __future__ import annotations

from dataclasses import replace

from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.core import ControllerCore
from deepinfer.controller.core.events import (
    CallStore,
    Effect,
    Event,
    OrderFailed,
    Reply,
    SendOrder,
    StepDown,
    Tick,
    WorkerGone,
)
from deepinfer.kvstore.core.ids import (
    GatewayId,
    Incarnation,
    Run,
    StoreId,
    Ticket,
    WorkerId,
    WorkerRef,
)
from deepinfer.kvstore.core.messages import (
    Admit,
    Cancel,
    Departed,
    Departure,
    Release,
    ResidentLevel,
    StoreReport,
    SwapIn,
    SwapOut,
    TicketLevel,
    TicketState,
)
from deepinfer.kvstore.core.states import State
from support.controller_cluster import Cluster
from support.controller_peers import FakeGateway, FakeWorker, seq


def cluster_of(*pools: int) -> tuple[Cluster, list[FakeWorker], FakeGateway]:
    cluster = Cluster()
    workers = [cluster.worker(f"w{index}", blocks) for index, blocks in enumerate(pools)]
    cluster.store()
    gateway = cluster.gateway()
    cluster.start()
    return cluster, workers, gateway


def running(cluster: Cluster, gateway: FakeGateway, name: str = "r", max_tokens: int = 60) -> Run:
    """Submit a request and let it begin; return its run."""
    made = cluster.submit(name, prompt=20, max_tokens=max_tokens)
    cluster.run(lambda: gateway.requests[made].held >= 2)
    return next(order.run for order in cluster.sent(Admit) if order.seq == made)


def swap_out(cluster: Cluster, gateway: FakeGateway) -> None:
    """Two requests in a pool of three blocks: the first ends up swapped out."""
    first = cluster.submit("first", prompt=20, max_tokens=28)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    cluster.submit("second", prompt=20, max_tokens=28)
    cluster.run(lambda: cluster.state(first) == "swapped")


def releases(cluster: Cluster) -> int:
    return sum(isinstance(e, CallStore) and isinstance(e.call, Release) for e in cluster.effects)


def test_a_lost_order_is_sent_again_under_the_same_number() -> None:
    cluster, (worker,), gateway = cluster_of(8)
    cluster.carry = lambda message: not isinstance(message, SendOrder)
    cluster.submit("r", prompt=20, max_tokens=10)
    for _ in range(5):
        cluster.round()
    cluster.carry = lambda message: True
    rounds = cluster.run(lambda: seq("r") in worker.runs, rounds=40)
    assert rounds * 50 <= cluster.config.order_timeout_ms
    assert len(cluster.sent(Admit)) == 1  # distinct ones
    assert cluster.core.counters.orders_resent_total == 1
    cluster.run(lambda: len(gateway.finished) == 1)


def test_a_call_known_to_have_failed_is_sent_again_sooner() -> None:
    cluster, (worker,), _ = cluster_of(8)
    cluster.carry = lambda message: not isinstance(message, SendOrder)
    cluster.submit("r", prompt=20, max_tokens=10)
    cluster.round()
    cluster.carry = lambda message: True
    cluster.tell(OrderFailed(worker.ref, cluster.sent(Admit)[0].order))
    rounds = cluster.run(lambda: seq("r") in worker.runs, rounds=40)
    assert rounds * 50 <= cluster.config.settle_ms


def test_a_worker_that_never_confirms_loses_the_request_to_another() -> None:
    """And if the order gets there after all, the old run is stopped."""
    cluster, (deaf, _), gateway = cluster_of(9, 8)
    lost = [True]

    def carry(message: object) -> bool:
        return not (lost[0] and isinstance(message, SendOrder) and message.worker == deaf.ref)

    cluster.carry = carry
    cluster.submit("r", prompt=20, max_tokens=90)
    cluster.run(lambda: gateway.requests[seq("r")].held > 0, rounds=400)
    first, second = cluster.sent(Admit)
    assert first.run < second.run
    lost[0] = False
    deaf.seen.clear()
    deaf.order(first)
    cluster.tell(deaf.report())
    cluster.run(lambda: not deaf.runs, rounds=10)
    assert any(isinstance(order, Cancel) for order in deaf.orders)
    cluster.run(lambda: len(gateway.finished) == 1)


def test_a_killed_workers_requests_go_on_elsewhere_with_what_they_had() -> None:
    cluster, (worker, spare), gateway = cluster_of(9, 8)
    run = running(cluster, gateway)
    held = gateway.requests[seq("r")].held
    cluster.kill(worker)
    assert seq("r") in spare.runs
    assert spare.runs[seq("r")].run > run
    assert cluster.sent(Admit)[-1].tokens >= 20 + held - 1
    cluster.run(lambda: len(gateway.finished) == 1)
    assert cluster.core.counters.requests_recovered_total == 1


def test_a_silent_worker_is_taken_for_dead_and_its_old_run_stopped_when_it_comes_back() -> None:
    cluster, (worker, spare), gateway = cluster_of(9, 8)
    run = running(cluster, gateway, max_tokens=100)
    worker.alive = False
    cluster.run(lambda: seq("r") in spare.runs, rounds=cluster.config.dead_ms // 50 + 10)
    worker.alive = True
    cluster.round()
    cancel = cluster.sent(Cancel)[-1]
    assert (cancel.seq, cancel.run) == (seq("r"), run)
    cluster.run(lambda: not worker.runs, rounds=5)
    assert seq("r") in spare.runs


def test_a_worker_that_comes_back_in_time_keeps_its_run() -> None:
    """Nothing else could hold the request meanwhile, so its KV is not thrown away."""
    cluster, (worker,), gateway = cluster_of(9)
    run = running(cluster, gateway)
    worker.alive = False
    for _ in range(cluster.config.dead_ms // 50 + 10):
        cluster.round()
    assert cluster.state(seq("r")) == "recovering"
    worker.alive = True
    cluster.round()
    assert worker.runs[seq("r")].run == run
    cluster.run(lambda: len(gateway.finished) == 1)
    assert not cluster.sent(Cancel)


def test_a_restarted_worker_is_a_new_life() -> None:
    cluster, (worker,), gateway = cluster_of(9)
    run = running(cluster, gateway)
    worker.restart()
    cluster.round()
    assert worker.runs[seq("r")].run > run
    cluster.run(lambda: len(gateway.finished) == 1)


def test_a_report_from_an_earlier_life_is_ignored() -> None:
    cluster, (worker,), gateway = cluster_of(9)
    running(cluster, gateway)
    old = worker.report()
    worker.restart()
    cluster.round()
    before = cluster.status()["workers"]
    assert cluster.core.handle(old, cluster.now_ms) == []
    assert cluster.status()["workers"] == before


def test_a_late_report_of_a_killed_worker_does_not_bring_it_back() -> None:
    cluster, (worker, _), gateway = cluster_of(9, 8)
    running(cluster, gateway)
    late = worker.report()
    cluster.kill(worker)
    assert cluster.core.handle(late, cluster.now_ms) == []
    assert cluster.status()["workers"]["w0"]["state"] == "gone"


def test_a_missed_report_is_asked_for_again() -> None:
    cluster, (worker,), _ = cluster_of(9)
    missed = worker.report()
    delta = replace(worker.report(), complete=False)
    (reply,) = cluster.core.handle(delta, cluster.now_ms)
    assert isinstance(reply, Reply)
    assert reply.reply.resync
    (again,) = cluster.core.handle(missed, cluster.now_ms)
    assert isinstance(again, Reply)
    assert not again.reply.resync


def test_a_payload_outlives_the_worker_that_made_it() -> None:
    cluster, (worker,), gateway = cluster_of(3)
    swap_out(cluster, gateway)
    cluster.kill(worker)
    worker.restart()
    cluster.run(lambda: len(gateway.finished) == 2)
    assert cluster.sent(SwapIn)[0].seq == seq("first")
    assert cluster.recomputed == 0


def test_a_worker_killed_after_commit_before_it_said_so() -> None:
    """Only the store knows that the payload is whole; it is resumed from all the same."""
    cluster, (worker,), gateway = cluster_of(3)
    first = cluster.submit("first", prompt=20, max_tokens=28)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    cluster.submit("second", prompt=20, max_tokens=28)
    cluster.run(lambda: bool(cluster.sent(SwapOut)))
    worker.step()  # it copies and commits, and is killed before its next report
    assert first not in worker.runs
    cluster.kill(worker)
    worker.restart()
    cluster.run(lambda: len(gateway.finished) == 2)
    assert [order.seq for order in cluster.sent(SwapIn)] == [first]


def test_a_store_that_dies_before_it_has_reported_a_payload() -> None:
    """The worker says swapped; the store that took it is gone: it is computed again at once."""
    cluster, _, gateway = cluster_of(3)
    first = cluster.submit("first", prompt=20, max_tokens=28)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    store = cluster.stores[StoreId("store")]
    cluster.carry = lambda message: not isinstance(message, StoreReport)
    second = cluster.submit("second", prompt=20, max_tokens=28)
    cluster.run(lambda: cluster.state(first) == "swapped")
    cluster.lose_store(store)
    assert cluster.state(first) == "recovering"
    cluster.carry = lambda message: True
    cluster.run(lambda: set(gateway.finished) == {first, second})


def test_a_worker_killed_in_the_middle_of_a_resume_costs_nothing() -> None:
    cluster, (worker,), gateway = cluster_of(3)
    swap_out(cluster, gateway)
    cluster.run(lambda: bool(cluster.sent(SwapIn)))
    store = cluster.stores[StoreId("store")]
    assert len(store.tickets) == 1  # not released before the resume is reported
    cluster.kill(worker)
    worker.restart()
    cluster.run(lambda: len(gateway.finished) == 2)
    assert len(cluster.sent(SwapIn)) == 2
    assert cluster.recomputed == 0
    cluster.run(lambda: not store.tickets, rounds=40)


def test_a_new_controller_takes_over_what_runs() -> None:
    cluster, (worker,), gateway = cluster_of(9)
    run = running(cluster, gateway)
    cluster.restart_controller()
    for _ in range(3):
        cluster.round()
    assert worker.runs[seq("r")].run == run
    assert cluster.state(seq("r")) == "decode"
    cluster.run(lambda: len(gateway.finished) == 1)


def test_a_new_controller_finds_swapped_requests_by_their_payloads() -> None:
    cluster, _, gateway = cluster_of(3)
    swap_out(cluster, gateway)
    cluster.restart_controller()
    assert cluster.state(seq("first")) == "swapped"
    cluster.run(lambda: len(gateway.finished) == 2)
    assert [order.seq for order in cluster.sent(SwapIn)] == [seq("first")]
    cluster.run(lambda: not cluster.stores[StoreId("store")].tickets, rounds=40)


def test_a_new_controller_sees_a_shortage_that_the_old_one_was_told_of() -> None:
    cluster, (worker,), gateway = cluster_of(5)
    for name in ("a", "b", "c"):
        cluster.submit(name, prompt=2, max_tokens=40)
    cluster.carry = lambda message: not isinstance(message, CallStore)
    cluster.run(lambda: worker.short > 0)
    cluster.carry = lambda message: True
    cluster.restart_controller()
    cluster.run(lambda: len(gateway.finished) == 3)


def test_garbage_is_left_alone_until_everyone_has_reported() -> None:
    """The payload's gateway has not reported yet: to the new controller it looks unwanted."""
    cluster, _, gateway = cluster_of(3)
    swap_out(cluster, gateway)
    gateway.alive = False
    before = releases(cluster)
    cluster.restart_controller()
    for _ in range(200):  # past the start-up grace and the orphans' grace
        cluster.round(steps=0)
    assert releases(cluster) == before
    gateway.alive = True
    cluster.run(lambda: len(gateway.finished) == 2)
    assert cluster.recomputed == 0


def test_garbage_is_collected_when_everyone_has_reported() -> None:
    cluster, _, gateway = cluster_of(3)
    swap_out(cluster, gateway)
    gateway.requests.clear()
    cluster.restart_controller()
    store = cluster.stores[StoreId("store")]
    cluster.run(lambda: not store.tickets, rounds=cluster.config.orphan_grace_ms // 50 + 20)


def test_a_higher_claim_takes_a_running_request_over_in_place() -> None:
    cluster, (worker,), old = cluster_of(9)
    new = cluster.gateway("new")
    cluster.start()
    run = running(cluster, old)
    cluster.submit("r", prompt=20, max_tokens=60, gateway="new", claim=2)
    tokens = worker.runs[seq("r")].tokens
    cluster.run(lambda: worker.runs[seq("r")].run > run, rounds=3)
    assert worker.runs[seq("r")].tokens >= tokens  # its KV is still there
    assert worker.runs[seq("r")].gateway == new.id
    cluster.round()
    assert old.disowned == [seq("r")]
    cluster.run(lambda: new.finished == [seq("r")])
    assert not cluster.sent(Cancel)
    assert cluster.core.counters.requests_taken_over_total == 1


def test_a_lost_gateways_request_waits_for_its_successor() -> None:
    cluster, (worker,), old = cluster_of(9)
    new = cluster.gateway("new")
    cluster.start()
    run = running(cluster, old)
    cluster.lose_gateway("gw")
    for _ in range(cluster.config.orphan_grace_ms // 50 - 10):
        cluster.round()
    assert worker.runs[seq("r")].run == run
    cluster.submit("r", prompt=20, max_tokens=60, gateway="new", claim=2)
    cluster.run(lambda: new.finished == [seq("r")])
    assert not cluster.sent(Cancel)


def test_an_orphan_is_dropped_after_the_grace() -> None:
    cluster, (worker,), gateway = cluster_of(9)
    running(cluster, gateway)
    cluster.lose_gateway("gw")
    for _ in range(cluster.config.orphan_grace_ms // 50 - 2):
        cluster.round()
    assert worker.runs
    for _ in range(4):
        cluster.round()
    assert not worker.runs
    assert cluster.status()["sequences"] == []


def test_an_abort_frees_a_running_request_at_once() -> None:
    cluster, (worker,), gateway = cluster_of(9)
    running(cluster, gateway)
    gateway.requests[seq("r")].cancelled = True
    cluster.tell(gateway.report())
    assert not worker.runs
    cluster.round()
    cluster.round()
    assert cluster.status()["sequences"] == []


def test_an_abort_frees_a_swapped_request_and_its_payload() -> None:
    cluster, _, gateway = cluster_of(3)
    swap_out(cluster, gateway)
    gateway.requests[seq("first")].cancelled = True
    cluster.tell(gateway.report())
    assert not cluster.stores[StoreId("store")].tickets
    cluster.run(lambda: len(gateway.finished) == 1)
    assert not cluster.sent(SwapIn)


def test_an_abort_in_the_middle_of_a_swap_leaves_nothing() -> None:
    cluster, (worker,), gateway = cluster_of(3)
    worker.swap_ms = 400
    first = cluster.submit("first", prompt=20, max_tokens=28)
    cluster.run(lambda: gateway.requests[first].held >= 1)
    second = cluster.submit("second", prompt=20, max_tokens=28)
    cluster.run(lambda: bool(cluster.sent(SwapOut)))
    gateway.requests[first].cancelled = True
    cluster.run(lambda: gateway.finished == [second])
    cluster.run(lambda: not cluster.stores[StoreId("store")].tickets, rounds=40)
    assert not worker.runs


def test_a_finished_run_is_not_cancelled_while_its_reports_race() -> None:
    cluster, (worker,), gateway = cluster_of(9)
    running(cluster, gateway, max_tokens=3)
    cluster.tell(gateway.report())
    gateway.finish(seq("r"))
    cluster.tell(gateway.report())  # the gateway says so before the worker does
    cluster.tell(Tick())
    worker.leave(seq("r"), Departure.FINISHED)
    cluster.round()
    assert not cluster.sent(Cancel)
    assert cluster.status()["sequences"] == []


def test_a_run_that_nobody_knows_is_stopped() -> None:
    """Its gateway is there and does not list it."""
    cluster, (worker,), gateway = cluster_of(9)
    running(cluster, gateway)
    del gateway.requests[seq("r")]
    worker.runs[seq("r")].gateway = GatewayId("nobody")
    cluster.run(lambda: any(isinstance(o, Cancel) for o in worker.orders), rounds=20)


def test_a_departure_that_the_gateway_does_not_confirm_is_placed_anew() -> None:
    """The worker says finished, the gateway goes on listing it: it waits, then runs again."""
    cluster, (worker,), gateway = cluster_of(9)
    run = running(cluster, gateway)
    worker.leave(seq("r"), Departure.FINISHED)
    cluster.round()
    assert seq("r") not in worker.runs
    cluster.run(lambda: seq("r") in worker.runs, rounds=cluster.config.settle_ms // 50 + 3)
    assert worker.runs[seq("r")].run > run


def test_what_is_said_of_a_sequence_that_was_forgotten_makes_no_new_record() -> None:
    """A swap-out ends after its request: the departure is repeated, the ticket turns up late."""
    cluster, (worker,), gateway = cluster_of(3)
    swap_out(cluster, gateway)
    (out,) = [order for order in cluster.sent(SwapOut) if order.seq == seq("first")]
    gateway.requests[seq("first")].cancelled = True
    gateway.requests[seq("second")].cancelled = True
    cluster.run(lambda: cluster.status()["sequences"] == [], rounds=20)
    ticket = out.ticket
    worker.departed[seq("first"), ticket.run] = Departed(
        seq("first"), ticket.run, Departure.SWAPPED, ticket, 3, 3000
    )
    cluster.tell(worker.report())
    assert cluster.status()["sequences"] == []
    store = cluster.stores[StoreId("store")]
    store.tickets[ticket] = TicketLevel(ticket, TicketState.COMMITTED, 10, 10, 1)
    before = releases(cluster)
    cluster.tell(store.report())
    assert releases(cluster) == before + 1
    cluster.round()
    assert cluster.status()["sequences"] == []


def test_a_second_controller_is_noticed() -> None:
    cluster, (worker,), _ = cluster_of(9)
    worker.epoch_seen = 5
    assert cluster.core.handle(worker.report(), cluster.now_ms) == [StepDown(5)]
    assert cluster.core.handle(worker.report(), cluster.now_ms) == []


def test_nothing_a_peer_sends_makes_it_raise() -> None:
    """Strange but well-formed reports: of unknown runs, tickets of nobody, doubled departures."""
    cluster, (worker,), _ = cluster_of(9)
    stranger, run, ticket_store = seq("stranger"), Run(7, 7), cluster.stores[StoreId("store")]
    for why in Departure:
        worker.departed[stranger, run] = Departed(stranger, run, why, None, 3, 3000)
        cluster.tell(worker.report())
        cluster.tell(worker.report())
    level = ResidentLevel(stranger, run, State.SWAPPING_OUT, None, 2, GatewayId("nobody"))
    cluster.tell(replace(worker.report(), residents=(level,)))
    ticket = Ticket(stranger, run, Run(7, 8))
    ticket_store.tickets[ticket] = TicketLevel(ticket, TicketState.COMMITTED, 10, 10, 1)
    cluster.tell(ticket_store.report())
    cluster.tell(WorkerGone(WorkerRef(WorkerId("nobody"), Incarnation(9))))
    cluster.tell(OrderFailed(WorkerRef(WorkerId("nobody"), Incarnation(9)), Run(1, 1)))
    for _ in range(cluster.config.orphan_grace_ms // 50 + 10):
        cluster.round()
    assert cluster.status()["sequences"] == []
    assert not ticket_store.tickets


def test_the_same_events_give_the_same_effects() -> None:
    """A controller has no hidden input: told the same, another one decides the same."""
    told: list[tuple[Event, int]] = []

    class Recording(ControllerCore):
        def handle(self, event: Event, now_ms: int) -> list[Effect]:
            told.append((event, now_ms))
            return super().handle(event, now_ms)

    cluster = Cluster()
    cluster.core = Recording(1, ControllerConfig())
    cluster.worker("w0", 3)
    cluster.worker("w1", 4)
    cluster.store()
    gateway = cluster.gateway()
    cluster.start()
    for index in range(6):
        cluster.submit(f"r{index}", prompt=10 + index, max_tokens=20 + index)
        cluster.round()
    cluster.run(lambda: len(gateway.finished) == 6)
    again = ControllerCore(1, ControllerConfig())
    effects = [e for event, now_ms in told for e in again.handle(event, now_ms)]
    assert [e for e in effects if isinstance(e, SendOrder)] == [
        e for e in cluster.effects if isinstance(e, SendOrder)
    ]
