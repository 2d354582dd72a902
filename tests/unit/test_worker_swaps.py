"""The worker's core while it swaps out and in, one schedule at a time."""

from __future__ import annotations

import pytest

from deepinfer.kvstore.core.ids import Run, Ticket
from deepinfer.kvstore.core.messages import (
    Ack,
    Cancel,
    Departure,
    Notice,
    NoticeKind,
    StoreStatus,
    SwapOut,
    Tokens,
)
from deepinfer.kvstore.core.requests import Token
from deepinfer.kvstore.core.states import State
from deepinfer.workers.core.events import (
    AbortPut,
    CancelFetch,
    Commit,
    CommitReply,
    FetchDone,
    FetchPayload,
    FromGateway,
    PutDone,
    PutPayload,
    Resolve,
    ResolveReply,
    RunStep,
    StoreGone,
)
from support.worker_bench import Bench, G, request
from support.worker_world import STORE, Request, make_request


@pytest.fixture
def bench() -> Bench:
    return Bench()


# ---- swap out ------------------------------------------------------------------------------


def test_a_swap_frees_only_after_the_commit(bench: Bench) -> None:
    r = request()
    run = bench.running(r, 40, 41)
    ticket = bench.swap_out(r, run)
    assert bench.none(PutPayload), "it is in the running step"
    assert bench.state(r) is State.SWAPPING_OUT
    bench.step(42)
    put = bench.only(PutPayload)
    assert put.token_ids == (*r.record.prompt_ids, 40, 41)
    assert len(put.block_ids) == 4
    assert put.state is State.DECODE
    assert bench.said(Tokens) == [Tokens(r.seq, run, 2, (Token(42),), None)]
    bench.do(PutDone(ticket, True, 40, 1500))
    assert bench.only(Commit) == Commit(ticket, STORE)
    assert bench.core.snapshot()["blocks_held"] == 4
    bench.now_ms += 2
    bench.do(CommitReply(ticket, StoreStatus.OK))
    assert bench.report is not None
    assert bench.report.departed[0][2:] == (Departure.SWAPPED, ticket, 4, 40)
    assert bench.report.blocks_free == 8
    (notice,) = bench.said(Notice)
    assert (notice.kind, notice.blocks, notice.payload_bytes, notice.copy_us) == (
        NoticeKind.SWAPPED_OUT,
        4,
        40,
        3500,
    )
    metrics = bench.core.metrics()
    assert metrics["cpu_offload_seconds"] == 0.0035
    assert metrics["requests_swapped_total"] == 1
    assert metrics["kv_cpu_offload_blocks_total"] == 4
    assert metrics["kv_cpu_offload_bytes_total"] == 40


def test_a_swap_in_the_middle_of_a_prompt_resumes_there(bench: Bench) -> None:
    r = request(prompt=9, max_tokens=2)
    run = bench.admit(r)
    bench.attached(r, run)
    ticket = bench.swap_out(r, run)
    bench.step()
    put = bench.only(PutPayload)
    assert (put.token_ids, put.state) == (r.record.prompt_ids[:4], State.PREFILL)
    bench.do(PutDone(ticket, True, 20, 1))
    bench.do(CommitReply(ticket, StoreStatus.OK))
    run = bench.swap_in(r, ticket, 4)
    bench.attached(r, run)
    bench.do(FetchDone(ticket, run, StoreStatus.OK, put.token_ids, 2, 9))
    assert bench.state(r) is State.PREFILL
    assert bench.said(Notice)[0].kind is NoticeKind.RESUMED
    assert bench.only(RunStep).plan.chunks[0].start == 4


def test_a_swap_of_a_request_that_finishes_meanwhile_is_dropped(bench: Bench) -> None:
    r = request(max_tokens=2)
    run = bench.running(r, 40)
    bench.swap_out(r, run)
    bench.step(41)
    assert bench.none(PutPayload)
    assert bench.state(r) is State.FINISHED


def test_a_swap_out_twice_copies_once(bench: Bench) -> None:
    r = request()
    run = bench.running(r, 40)
    ticket = bench.swap_out(r, run)
    bench.do(SwapOut(ticket.order, r.seq, run, ticket, STORE))
    bench.step(41)
    bench.only(PutPayload)
    bench.do(PutDone(ticket, False, 0, 0))
    assert bench.state(r) is State.DECODE
    bench.do(SwapOut(ticket.order, r.seq, run, ticket, STORE))
    assert bench.state(r) is State.DECODE, "the same order does not start it again"


@pytest.mark.parametrize("how", ["put", "commit", "put_timeout", "store_gone", "sealed"])
def test_a_failed_swap_leaves_the_request_where_it_was(bench: Bench, how: str) -> None:
    r = request()
    run = bench.running(r, 40)
    ticket = bench.swap_out(r, run)
    bench.step(41)
    if how == "put":
        bench.do(PutDone(ticket, False, 0, 0, "refused"))
    elif how == "put_timeout":
        bench.wait(499)
        assert bench.state(r) is State.SWAPPING_OUT
        bench.wait(1)
        assert bench.only(AbortPut) == AbortPut(ticket, STORE)
    elif how == "store_gone":
        bench.do(StoreGone(STORE))
    else:
        bench.do(PutDone(ticket, True, 30, 5))
        status = StoreStatus.BAD_PAYLOAD if how == "commit" else StoreStatus.UNREACHABLE
        bench.do(CommitReply(ticket, status))
        if how == "sealed":
            assert bench.only(Resolve) == Resolve(ticket, STORE)
            bench.do(ResolveReply(ticket, StoreStatus.SEALED))
    assert bench.state(r) is State.DECODE
    assert bench.said(Notice)[0].kind is NoticeKind.SWAP_FAILED
    assert bench.report is not None
    assert bench.report.residents[0].swap_failures == 1
    chunk = bench.only(RunStep).plan.chunks[0]
    assert (chunk.start, chunk.token_ids) == (6, (41,)), "nothing is computed again"
    bench.do(CommitReply(ticket, StoreStatus.COMMITTED))
    assert bench.state(r) is State.DECODE, "what comes after the decision changes nothing"


def test_a_lost_commit_reply_is_resolved(bench: Bench) -> None:
    r = request()
    run = bench.running(r, 40)
    ticket = bench.swap_out(r, run)
    bench.step(41)
    bench.do(PutDone(ticket, True, 30, 5))
    bench.wait(300)
    assert bench.only(Resolve) == Resolve(ticket, STORE)
    bench.do(ResolveReply(ticket, StoreStatus.UNREACHABLE))
    assert bench.state(r) is State.SWAPPING_OUT
    bench.do(ResolveReply(ticket, StoreStatus.COMMITTED))
    assert bench.departed() == [(r.seq, Departure.SWAPPED)]


def test_a_resolve_that_is_never_answered_keeps_the_blocks(bench: Bench) -> None:
    r = request()
    run = bench.running(r, 40)
    ticket = bench.swap_out(r, run)
    bench.step(41)
    bench.do(PutDone(ticket, True, 30, 5))
    bench.wait(300)
    bench.wait(200)
    assert bench.state(r) is State.DECODE


def test_a_cancel_during_the_copy_waits_for_it_with_the_blocks(bench: Bench) -> None:
    r = request()
    run = bench.running(r, 40)
    ticket = bench.swap_out(r, run)
    bench.step(41)
    bench.do(Cancel(bench.mint(), r.seq, run))
    assert bench.only(AbortPut) == AbortPut(ticket, STORE)
    assert bench.departed() == [(r.seq, Departure.DROPPED)]
    assert bench.core.snapshot()["blocks_quarantined"] == 3
    bench.do(PutDone(ticket, False, 0, 0))
    assert bench.core.snapshot()["blocks_free"] == 8
    assert bench.none(Commit)


def test_shared_blocks_are_copied_but_only_private_ones_counted() -> None:
    bench = Bench(blocks_total=10)
    one, two = (make_request(name, range(10, 15), 6, "g") for name in "ab")
    bench.running(one, 40)
    run = bench.admit(two)
    bench.attached(two, run)
    bench.step(41)
    chunks = bench.only(RunStep).plan.chunks
    assert [chunk.start for chunk in chunks if chunk.seq == two.seq] == [4], "4 tokens are shared"
    bench.wait(100)
    assert bench.report is not None
    assert {u.seq: u.private_blocks for u in bench.report.usage} == {one.seq: 2, two.seq: 1}
    bench.swap_out(two, run)
    bench.step(42, 50)
    put = bench.only(PutPayload)
    assert len(put.block_ids) == 3
    bench.do(PutDone(put.ticket, True, 30, 5))
    bench.do(CommitReply(put.ticket, StoreStatus.OK))
    assert bench.core.snapshot()["blocks_held"] == 4, "the other still holds the shared ones"


def test_a_resident_without_kv_cannot_be_swapped(bench: Bench) -> None:
    r = request()
    run = bench.admit(r)
    bench.swap_out(r, run)
    assert bench.state(r) is State.WAITING
    assert bench.report is not None
    assert bench.report.residents[0].swap_failures == 1


# ---- swap in -------------------------------------------------------------------------------


def swapped(bench: Bench, r: Request, *tokens: int) -> tuple[Ticket, tuple[int, ...]]:
    run = bench.running(r, *tokens[:-1])
    bench.swap_out(r, run)
    bench.step(tokens[-1])
    put = bench.only(PutPayload)
    bench.do(PutDone(put.ticket, True, 10 * len(put.block_ids), 5))
    bench.do(CommitReply(put.ticket, StoreStatus.OK))
    return put.ticket, put.token_ids


def test_a_resume_attaches_fetches_and_goes_on(bench: Bench) -> None:
    r = request()
    ticket, token_ids = swapped(bench, r, 40, 41, 42)
    run = bench.swap_in(r, ticket, len(token_ids))
    assert bench.state(r) is State.SWAPPING_IN
    assert bench.none(FetchPayload), "not before the gateway has agreed"
    bench.attached(r, run, [40, 41, 42])
    fetch = bench.only(FetchPayload)
    assert len(fetch.block_ids) == 4
    bench.do(FetchDone(ticket, run, StoreStatus.OK, token_ids, 4, 7))
    chunk = bench.only(RunStep).plan.chunks[0]
    assert (chunk.start, chunk.token_ids, chunk.index) == (7, (42,), 3)
    assert bench.state(r) is State.DECODE
    assert bench.report is not None
    assert bench.report.residents[0].ticket is None
    metrics = bench.core.metrics()
    assert metrics["cpu_reload_seconds"] == 7e-6
    assert metrics["cpu_offload_seconds"] == pytest.approx(5e-6)
    assert metrics["requests_resumed_total"] == 1
    assert metrics["kv_cpu_reload_blocks_total"] == 4


def test_a_payload_counts_only_up_to_the_gateways_tokens(bench: Bench) -> None:
    r = request()
    ticket, token_ids = swapped(bench, r, 40, 41, 42)
    run = bench.swap_in(r, ticket, len(token_ids))
    bench.attached(r, run, [40])
    bench.do(FetchDone(ticket, run, StoreStatus.OK, token_ids, 4, 7))
    chunk = bench.only(RunStep).plan.chunks[0]
    assert (chunk.start, chunk.token_ids, chunk.index) == (5, (40,), 1)


def test_a_bad_fetch_recomputes_in_the_same_blocks() -> None:
    bench = Bench(prefix_cache=False)
    r = request()
    ticket, token_ids = swapped(bench, r, 40, 41)
    run = bench.swap_in(r, ticket, len(token_ids))
    bench.attached(r, run, [40, 41])
    fetch = bench.only(FetchPayload)
    bench.do(FetchDone(ticket, run, StoreStatus.BAD_PAYLOAD, (), 0, 0))
    assert bench.said(Notice)[0].kind is NoticeKind.RECOMPUTED
    chunk = bench.only(RunStep).plan.chunks[0]
    assert chunk.start == 0
    assert set(fetch.block_ids) <= set(chunk.block_table)
    assert bench.core.counters.recomputed == 1
    assert bench.core.metrics()["requests_resumed_total"] == 0


def test_a_bad_fetch_takes_what_the_prefix_cache_still_has(bench: Bench) -> None:
    r = request()
    ticket, token_ids = swapped(bench, r, 40, 41)
    run = bench.swap_in(r, ticket, len(token_ids))
    bench.attached(r, run, [40, 41])
    fetch = bench.only(FetchPayload)
    bench.do(FetchDone(ticket, run, StoreStatus.BAD_PAYLOAD, (), 0, 0))
    chunk = bench.only(RunStep).plan.chunks[0]
    assert (chunk.start, chunk.token_ids) == (6, (41,))
    assert not set(fetch.block_ids) & set(chunk.block_table[:3])


@pytest.mark.parametrize("how", ["deadline", "store_gone"])
def test_a_fetch_without_an_end_is_left_and_its_blocks_wait(bench: Bench, how: str) -> None:
    r = request()
    ticket, token_ids = swapped(bench, r, 40, 41)
    run = bench.swap_in(r, ticket, len(token_ids))
    bench.attached(r, run, [40, 41])
    fetch = bench.only(FetchPayload)
    if how == "deadline":
        bench.wait(500)
    else:
        bench.do(StoreGone(STORE))
    assert bench.only(CancelFetch) == CancelFetch(ticket, run)
    chunk = bench.only(RunStep).plan.chunks[0]
    assert chunk.start == 0
    assert not set(fetch.block_ids) & set(chunk.block_table), "the copy may still write there"
    bench.do(FetchDone(ticket, run, StoreStatus.OK, token_ids, 3, 1))
    assert bench.core.residents[r.seq].computed == 0, "what came too late is not used"
    assert bench.core.snapshot()["blocks_quarantined"] == 0


def test_a_cancel_during_a_fetch_waits_for_it_with_the_blocks(bench: Bench) -> None:
    r = request()
    ticket, token_ids = swapped(bench, r, 40, 41)
    run = bench.swap_in(r, ticket, len(token_ids))
    bench.attached(r, run, [40, 41])
    bench.do(Cancel(bench.mint(), r.seq, run))
    assert bench.only(CancelFetch) == CancelFetch(ticket, run)
    assert bench.core.snapshot()["blocks_quarantined"] == 3
    bench.do(FetchDone(ticket, run, StoreStatus.UNREACHABLE, (), 0, 0))
    assert bench.core.snapshot()["blocks_free"] == 8


def test_fetched_blocks_are_never_shared(bench: Bench) -> None:
    r = request()
    ticket, token_ids = swapped(bench, r, 40, 41)
    # Others have taken every block since, so that nothing of it is cached here any more.
    other = make_request("z", range(500, 515), 1, "g")
    bench.attached(other, bench.admit(other))
    for _ in range(3):
        bench.step()
    bench.step(3)
    bench.do(FromGateway(G, Ack(other.seq, Run(1, bench.counter), 1, True)))
    run = bench.swap_in(r, ticket, len(token_ids))
    bench.attached(r, run, [40, 41])
    bench.do(FetchDone(ticket, run, StoreStatus.OK, token_ids, 3, 1))
    bench.step(42)
    twin = make_request("q", [*r.record.prompt_ids, 40, 9], 1, "g")
    bench.attached(twin, bench.admit(twin))
    assert bench.core.residents[twin.seq].computed == 0
