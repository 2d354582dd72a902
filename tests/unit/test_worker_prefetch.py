"""The worker's core and the one payload that it has ahead of a swap-in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deepinfer.kvstore.core.ids import Run, StoreId, Ticket
from deepinfer.kvstore.core.messages import Admit, Cancel, Drop, Prefetch, StoreStatus, SwapIn
from deepinfer.workers.core.config import WorkerConfigError
from deepinfer.workers.core.events import (
    CancelFetch,
    CancelPrefetch,
    FetchDone,
    FetchPayload,
    FromGateway,
    PrefetchPayload,
    StartDrain,
    StoreGone,
)
from support.worker_bench import Bench, G, request
from support.worker_world import STORE, Request

TOKENS = 7
BLOCKS = 4


@pytest.fixture
def bench() -> Bench:
    return Bench()


def elsewhere(bench: Bench, r: Request) -> Ticket:
    """The ticket of a payload that another worker has put."""
    return Ticket(r.seq, bench.mint(), bench.mint())


def hint(bench: Bench, ticket: Ticket | None, r: Request, *, order: Run | None = None) -> Run:
    number = order or bench.mint()
    store, blocks = (None, 0) if ticket is None else (STORE, BLOCKS)
    bench.do(Prefetch(number, r.seq, ticket, store, blocks))
    return number


def counts(bench: Bench) -> tuple[float, float, float]:
    """Begun, used, wasted."""
    metrics = bench.core.metrics()
    return (
        metrics["prefetches"],
        metrics["prefetches_used"],
        metrics["prefetches_wasted"],
    )


def payload_of(r: Request) -> tuple[int, ...]:
    return (*r.record.prompt_ids, 40, 41)


def test_a_swap_in_takes_what_was_fetched_ahead(bench: Bench) -> None:
    r = request()
    ticket = elsewhere(bench, r)
    hint(bench, ticket, r)
    assert bench.only(PrefetchPayload) == PrefetchPayload(ticket, STORE, BLOCKS)
    assert counts(bench) == (1, 0, 0)
    run = bench.swap_in(r, ticket, TOKENS)
    bench.attached(r, run, [40, 41])
    assert bench.only(FetchPayload).ahead
    bench.do(FetchDone(ticket, run, StoreStatus.OK, payload_of(r), BLOCKS, 7, ahead=True))
    assert counts(bench) == (1, 1, 0)
    assert bench.core.metrics()["requests_resumed_total"] == 1
    assert bench.none(CancelPrefetch), "the fetch has ended it"


@pytest.mark.parametrize("status", [StoreStatus.OK, StoreStatus.BAD_PAYLOAD])
def test_one_that_was_of_no_use_is_counted_as_wasted(bench: Bench, status: StoreStatus) -> None:
    r = request()
    ticket = elsewhere(bench, r)
    hint(bench, ticket, r)
    run = bench.swap_in(r, ticket, TOKENS)
    bench.attached(r, run, [40, 41])
    bench.do(FetchDone(ticket, run, status, payload_of(r), BLOCKS, 7, ahead=False))
    assert counts(bench) == (1, 0, 1)


def test_without_a_hint_nothing_is_ahead(bench: Bench) -> None:
    r = request()
    ticket = elsewhere(bench, r)
    run = bench.swap_in(r, ticket, TOKENS)
    bench.attached(r, run, [40, 41])
    assert not bench.only(FetchPayload).ahead
    bench.do(FetchDone(ticket, run, StoreStatus.OK, payload_of(r), BLOCKS, 7))
    assert counts(bench) == (0, 0, 0)


def test_a_payload_of_another_run_is_not_taken(bench: Bench) -> None:
    """The request has run since, and was swapped out anew: what is held is older."""
    r = request()
    old, new = elsewhere(bench, r), elsewhere(bench, r)
    hint(bench, old, r)
    run = bench.swap_in(r, new, TOKENS)
    assert bench.only(CancelPrefetch).ticket == old
    bench.attached(r, run, [40, 41])
    assert not bench.only(FetchPayload).ahead
    assert counts(bench) == (1, 0, 1)


def test_the_next_hint_supersedes_and_an_empty_one_ends(bench: Bench) -> None:
    r, s = request("r"), request("s")
    first, second = elsewhere(bench, r), elsewhere(bench, s)
    hint(bench, first, r)
    hint(bench, second, s)
    assert bench.only(CancelPrefetch).ticket == first
    assert bench.only(PrefetchPayload).ticket == second
    hint(bench, None, s)
    assert bench.only(CancelPrefetch).ticket == second
    assert bench.none(PrefetchPayload)
    assert counts(bench) == (2, 0, 2)


def test_a_late_or_doubled_hint_changes_nothing(bench: Bench) -> None:
    r, s = request("r"), request("s")
    first, second = elsewhere(bench, r), elsewhere(bench, s)
    early = bench.mint()
    number = hint(bench, second, s)
    hint(bench, first, r, order=early)
    hint(bench, second, s, order=number)
    assert bench.none(CancelPrefetch)
    assert bench.none(PrefetchPayload)
    hint(bench, None, s)
    hint(bench, second, s, order=number)
    assert bench.none(PrefetchPayload)
    assert bench.core.counters.orders_ignored == 3


def test_a_hint_that_its_swap_in_has_overtaken_is_late(bench: Bench) -> None:
    r = request()
    ticket = elsewhere(bench, r)
    early = bench.mint()
    run = bench.swap_in(r, ticket, TOKENS)
    hint(bench, ticket, r, order=early)
    assert bench.none(PrefetchPayload)
    bench.do(FromGateway(G, Drop(r.seq, run)))
    hint(bench, ticket, r, order=Run(early.epoch, early.counter))
    assert bench.none(PrefetchPayload), "also when the run has left again"


def test_a_replaced_controllers_hint_is_refused(bench: Bench) -> None:
    r = request()
    ticket = elsewhere(bench, r)
    hint(bench, None, r, order=bench.mint(epoch=2))
    hint(bench, ticket, r, order=bench.mint(epoch=1))
    assert bench.none(PrefetchPayload)
    assert bench.core.counters.orders_refused == 1


def test_a_hint_for_what_is_being_fetched_already_does_nothing(bench: Bench) -> None:
    r = request()
    ticket = elsewhere(bench, r)
    bench.swap_in(r, ticket, TOKENS)
    hint(bench, ticket, r)
    assert bench.none(PrefetchPayload)


def _cancelled(bench: Bench, r: Request, ticket: Ticket) -> None:
    bench.do(Cancel(bench.mint(), r.seq, ticket.run))


def _computed_instead(bench: Bench, r: Request, _: Ticket) -> None:
    run = bench.mint()
    bench.do(Admit(run, r.seq, run, G, TOKENS, TOKENS + 4))


def _store_gone(bench: Bench, _: Request, __: Ticket) -> None:
    bench.do(StoreGone(STORE))


def _drained(bench: Bench, _: Request, __: Ticket) -> None:
    bench.do(StartDrain())


def _silence(bench: Bench, r: Request, ticket: Ticket) -> None:
    bench.wait(bench.config.prefetch_keep_ms - 1)
    hint(bench, ticket, r)
    assert bench.none(PrefetchPayload), "told again of what it holds"
    bench.wait(bench.config.prefetch_keep_ms - 1)
    assert bench.none(CancelPrefetch)
    bench.wait(1)


@pytest.mark.parametrize("how", [_cancelled, _computed_instead, _store_gone, _drained, _silence])
def test_what_ends_the_reason_ends_the_hint(
    bench: Bench, how: Callable[[Bench, Request, Ticket], None]
) -> None:
    r = request()
    ticket = elsewhere(bench, r)
    hint(bench, ticket, r)
    how(bench, r, ticket)
    assert bench.only(CancelPrefetch).ticket == ticket
    assert counts(bench) == (1, 0, 1)


def test_another_stores_end_and_another_requests_cancel_do_not(bench: Bench) -> None:
    r, s = request("r"), request("s")
    hint(bench, elsewhere(bench, r), r)
    bench.do(StoreGone(StoreId("another")))
    bench.do(Cancel(bench.mint(), s.seq, bench.mint()))
    assert bench.none(CancelPrefetch)
    assert counts(bench) == (1, 0, 0)


def test_a_draining_worker_takes_no_hint(bench: Bench) -> None:
    r = request()
    bench.do(StartDrain())
    hint(bench, elsewhere(bench, r), r)
    assert bench.none(PrefetchPayload)


def test_a_run_that_ends_before_its_fetch_lets_go(bench: Bench) -> None:
    r = request()
    ticket = elsewhere(bench, r)
    hint(bench, ticket, r)
    run = bench.swap_in(r, ticket, TOKENS)
    bench.do(Cancel(bench.mint(), r.seq, run))
    assert bench.only(CancelPrefetch).ticket == ticket
    assert counts(bench) == (1, 0, 1)


def test_a_run_that_ends_in_its_fetch_ends_both_with_it(bench: Bench) -> None:
    r = request()
    ticket = elsewhere(bench, r)
    hint(bench, ticket, r)
    run = bench.swap_in(r, ticket, TOKENS)
    bench.attached(r, run, [40, 41])
    bench.do(Cancel(bench.mint(), r.seq, run))
    assert bench.only(CancelFetch).ticket == ticket
    assert bench.none(CancelPrefetch)
    bench.do(FetchDone(ticket, run, StoreStatus.OK, payload_of(r), BLOCKS, 7, ahead=True))
    assert counts(bench) == (1, 0, 1)


def test_a_refused_swap_in_keeps_it_for_the_next(bench: Bench) -> None:
    r, big = request("r"), request("b", prompt=13, max_tokens=2)
    bench.running(big)
    ticket = elsewhere(bench, r)
    hint(bench, ticket, r)
    bench.swap_in(r, ticket, TOKENS)
    assert r.seq not in bench.core.residents
    assert bench.none(CancelPrefetch)
    assert counts(bench) == (1, 0, 0)


@pytest.mark.parametrize("limit", [0, BLOCKS * 10 - 1])
def test_a_payload_beyond_the_limit_is_not_fetched_ahead(limit: int) -> None:
    bench, r = Bench(prefetch_bytes_max=limit), request()
    ticket = elsewhere(bench, r)
    hint(bench, ticket, r)
    assert bench.none(PrefetchPayload)
    run = bench.swap_in(r, ticket, TOKENS)
    bench.attached(r, run, [40, 41])
    assert not bench.only(FetchPayload).ahead


def test_another_hint_may_come_while_the_first_is_claimed(bench: Bench) -> None:
    r, s = request("r"), request("s")
    first, second = elsewhere(bench, r), elsewhere(bench, s)
    hint(bench, first, r)
    run = bench.swap_in(r, first, TOKENS)
    hint(bench, second, s)
    assert bench.none(CancelPrefetch)
    assert bench.only(PrefetchPayload).ticket == second
    bench.attached(r, run, [40, 41])
    assert bench.only(FetchPayload).ahead


def test_the_settings_are_checked() -> None:
    with pytest.raises(WorkerConfigError, match="prefetch_bytes_max = -1: must be 0 or more"):
        Bench(prefetch_bytes_max=-1)
    with pytest.raises(WorkerConfigError, match="prefetch_keep_ms = 0: must be 1 or more"):
        Bench(prefetch_keep_ms=0)


def test_a_swap_in_of_somebody_else_does_not_end_it(bench: Bench) -> None:
    r, s = request("r"), request("s")
    mine, theirs = elsewhere(bench, r), elsewhere(bench, s)
    hint(bench, mine, r)
    run = bench.mint()
    bench.do(SwapIn(run, s.seq, run, G, theirs, STORE, 2, 1, 6))
    assert bench.none(CancelPrefetch)
    assert counts(bench) == (1, 0, 0)
