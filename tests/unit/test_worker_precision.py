"""The worker's part in precision: levels of steps, tags of KV and tokens, and exact requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from deepinfer.kvstore.core.ids import Run, Ticket
from deepinfer.kvstore.core.messages import ReportReply, StoreStatus, Tokens
from deepinfer.kvstore.core.precision import (
    Policy,
    Precision,
    PrecisionRule,
    PrecisionSettings,
    StepCost,
)
from deepinfer.kvstore.core.requests import Token
from deepinfer.kvstore.core.states import State
from deepinfer.workers.core.blocks import BlockManager
from deepinfer.workers.core.config import WorkerConfigError
from deepinfer.workers.core.events import (
    FetchDone,
    FetchPayload,
    PutPayload,
    ReportAnswered,
    RunStep,
    StepPlan,
)
from deepinfer.workers.core.purity import Purity
from deepinfer.workers.core.valve import note
from support.worker_bench import Bench, request
from support.worker_world import Request, make_request

FP16, MIXED, FP8, W8A8 = Precision


def nested(levels: int = 2, **changes: Any) -> Bench:
    """A worker with nested weights, told of no policy yet."""
    return Bench(levels=levels, **changes)


def rule(bench: Bench, policy: str = "fp8", number: int = 1, **settings: Any) -> None:
    """The controller answers a report."""
    if bench.report is None:
        bench.wait(0)
    said = PrecisionRule(settings=PrecisionSettings(policy=Policy(policy), **settings))
    bench.do(ReportAnswered(ReportReply(epoch=1, number=number, resync=False, precision=said)))


def exact(name: str = "x", prompt: int = 5) -> Request:
    made = request(name, prompt)
    made.record = replace(made.record, exact=True)
    return made


def alike(name: str, prompt: Sequence[int], *, is_exact: bool = False) -> Request:
    """A request with a given prompt."""
    made = make_request(name, prompt, 6, "g")
    made.record = replace(made.record, exact=is_exact)
    return made


def in_flight(bench: Bench) -> StepPlan:
    plan = bench.core._steps.in_flight
    assert plan is not None
    return plan


def tags(bench: Bench) -> list[Precision]:
    """Of the tokens sent after the last event."""
    return [token.precision for said in bench.said(Tokens) for token in said.tokens]


# ---- the level of a step -------------------------------------------------------------------


def test_without_a_rule_nothing_gives_way() -> None:
    bench = nested()
    bench.running(request(), 40)
    assert tags(bench) == [FP16]
    assert in_flight(bench).level == 0


def test_the_rule_counts_from_the_next_step_on_that_was_not_foreseen() -> None:
    bench = nested(3, blocks_total=16)
    bench.running(request(max_tokens=20), 40)
    rule(bench, level_max=1)
    assert in_flight(bench).level == 0, "this step was planned before"
    found = []
    for token in range(41, 50):
        bench.step(token)
        plan = in_flight(bench)
        found.append((tags(bench), plan.level, plan.next_level))
        if token == 43:
            rule(bench)
        elif token == 46:
            rule(bench, "fp16")
    assert found == [
        ([FP16], 0, 1),  # may be computed already, at the old level: the new one is announced
        ([FP16], 1, 1),
        ([MIXED], 1, 1),
        ([MIXED], 1, 2),
        ([MIXED], 2, 2),
        ([FP8], 2, 2),
        ([FP8], 2, 0),
        ([FP8], 0, 0),
        ([FP16], 0, 0),
    ]


def test_a_step_with_a_prompt_in_it_changes_levels_at_once() -> None:
    bench = nested(blocks_total=16)
    bench.running(request("a", max_tokens=20), 40)
    rule(bench)
    late = request("b")
    run = bench.admit(late)
    bench.attached(late, run)
    bench.step(41)
    plan = in_flight(bench)
    assert any(len(chunk.token_ids) > 1 for chunk in plan.chunks)
    assert (plan.level, plan.next_level) == (1, 1)


def test_what_was_announced_may_be_taken_back() -> None:
    bench = nested(blocks_total=16)
    bench.running(request(max_tokens=20), 40)
    rule(bench)
    bench.step(41)
    assert in_flight(bench).next_level == 1
    rule(bench, "fp16")
    for token in (42, 43):
        bench.step(token)
        assert (in_flight(bench).level, in_flight(bench).next_level) == (0, 0)
    assert bench.core.metrics()["precision_switches"] == 0


def test_a_replaced_controller_is_not_obeyed() -> None:
    bench = nested()
    bench.running(request(), 40)
    bench.do(ReportAnswered(ReportReply(epoch=5, number=1, resync=False)))
    rule(bench)
    bench.step(41)
    assert in_flight(bench).level == 0


def test_weights_that_are_not_nested_have_one_level() -> None:
    bench = Bench()
    rule(bench)
    bench.running(request(), 40)
    assert in_flight(bench).level == 0
    assert bench.report is not None
    assert bench.report.precision is None
    assert not any(name.startswith("precision") for name in bench.core.metrics())


def test_a_step_with_an_exact_request_is_exact() -> None:
    bench = nested()
    rule(bench)
    plain = request("p", 2)
    bench.running(plain, 40)
    assert in_flight(bench).level == 1
    r = exact("x", 2)
    bench.attached(r, bench.admit(r))
    bench.step(41)
    assert {chunk.seq for chunk in in_flight(bench).chunks} == {plain.seq, r.seq}
    assert in_flight(bench).level == 0
    while bench.state(r) is not State.FINISHED:
        bench.step(*range(50, 50 + len(in_flight(bench).chunks)))
    assert bench.core.counters.tokens_in == (10, 0, 2, 0)


def test_slo_is_told_of_the_load_at_the_controller_until_that_is_old() -> None:
    costs = tuple(StepCost((1, 16), (us, 10 * us)) for us in (1000.0, 500.0))
    bench = nested(costs=costs)
    bench.running(request(max_tokens=11), 40)
    settings = PrecisionSettings(ttft_target_ms=1000, dwell_ms=0)
    said = PrecisionRule(settings=settings, waiting_tokens=4, waiting_ms=950)
    bench.do(ReportAnswered(ReportReply(epoch=1, number=1, resync=False, precision=said)))
    bench.step(41)
    assert in_flight(bench).next_level == 1, "somebody has waited 950 ms of 1,000"
    bench.step(42)
    assert in_flight(bench).level == 1
    bench.wait(1999)
    bench.step(43)
    assert in_flight(bench).next_level == 1
    bench.wait(1)
    bench.step(44)
    assert in_flight(bench).next_level == 0, "the controller has not been heard of since"


def test_slo_learns_how_long_steps_really_take() -> None:
    costs = tuple(StepCost((1, 16), (us, us)) for us in (10_000.0, 5000.0))
    for took_ms, pace, opens in (
        (10, 1.0, False),
        (20, 2.0, True),
        (90, 3.0, True),
        (1, 0.5, False),
    ):
        bench = nested(costs=costs, blocks_total=128)
        rule(bench, "slo", tpot_target_ms=15, dwell_ms=0)
        bench.running(request(max_tokens=250))
        levels = set()
        for _ in range(200):
            bench.now_ms += took_ms
            bench.step(40)
            levels.add(in_flight(bench).level)
        assert (1 in levels) == opens, took_ms
        if not opens:
            assert bench.core._levels.pace == pytest.approx(pace, abs=0.1)


def test_a_worker_says_why_it_stays() -> None:
    same = (StepCost((1,), (1000.0,)),) * 2
    for bench, remark in ((nested(costs=same), "no faster"), (nested(), "not measured")):
        rule(bench, "slo", tpot_target_ms=0.001)
        bench.running(request(), 40)
        assert in_flight(bench).level == 0
        bench.wait(100)
        assert bench.report is not None
        assert bench.report.precision is not None
        assert remark in bench.report.precision.remark
        rule(bench, "fp8", number=2)
        bench.wait(100)
        assert bench.report.precision.remark == "", "who asks for FP8 gets it"
    bench = nested(costs=same, start_shed=True)
    rule(bench, "slo")
    bench.running(request(), 40)
    assert in_flight(bench).level == 1
    bench.wait(100)
    assert bench.report is not None
    assert bench.report.precision is not None
    assert bench.report.precision.remark == "", "it does not stay in FP16"


def test_a_start_says_whether_levels_are_of_use() -> None:
    slow, fast = StepCost((1,), (1000.0,)), StepCost((1,), (620.0,))
    assert note(1, ()) == ()
    assert note(2, (slow, fast)) == (
        "nested weights: a step of 8 rows takes 62% of its FP16 time in FP8",
    )
    (said,) = note(2, (slow, slow))
    assert said.startswith("nested weights: FP8 steps are no faster here: of an FP16 step's time")
    assert said.endswith("with precision = 'slo' every step is FP16")


def test_what_was_counted_is_reported() -> None:
    bench = nested(3, blocks_total=16)
    bench.running(request(max_tokens=20))
    bench.now_ms += 20
    bench.step(40)
    rule(bench, level_max=1)
    for token, ms in ((41, 3), (42, 5), (43, 7), (44, 9), (45, 11)):
        bench.now_ms += ms
        bench.step(token)
        if token == 43:
            rule(bench)
    bench.wait(100)
    assert bench.report is not None
    said = bench.report.precision
    assert said is not None
    assert (said.level, said.levels, said.switches) == (2, 3, 2)
    assert said.tokens == (3, 3, 0, 0), "the step at level 2 is in flight"
    metrics = bench.core.metrics()
    assert metrics['precision_tokens{precision="fp16"}'] == said.tokens[0]
    assert metrics['precision_seconds{precision="mixed"}'] == said.ms[1] / 1000
    assert sum(said.ms) == 55


def test_large_steps_at_the_highest_level_are_w8a8() -> None:
    """Others are not, and the policy's level, its switches and announcements know nothing of it."""
    bench = nested(3, w8a8_rows=5, blocks_total=16, prefill_chunk_tokens=8)
    rule(bench)
    bench.running(request("a", 4, max_tokens=20), 40)
    assert tags(bench) == [FP8], "4 tokens"
    assert bench.core.counters.precision_switches == 1
    late = request("b", 5)
    bench.attached(late, bench.admit(late))
    bench.step(41)
    plan = in_flight(bench)
    assert sum(len(chunk.token_ids) for chunk in plan.chunks) == 6
    assert (plan.level, plan.next_level) == (3, 2)
    bench.step(42, 43)
    assert tags(bench) == [W8A8, W8A8]
    assert (in_flight(bench).level, in_flight(bench).next_level) == (2, 2)
    bench.step(44, 45)
    assert tags(bench) == [FP8, FP8]
    assert bench.core.counters.tokens_in == (0, 0, 4, 2)
    assert bench.core.counters.precision_switches == 1
    rule(bench, number=2, level_max=1)
    again = request("c", 5)
    bench.attached(again, bench.admit(again))
    bench.step(46, 47)
    assert sum(len(chunk.token_ids) for chunk in in_flight(bench).chunks) >= 5
    assert in_flight(bench).level == 1, "some layers are in FP16"


def test_an_exact_request_makes_a_large_step_fp16() -> None:
    bench = nested(w8a8_rows=2, blocks_total=16)
    rule(bench)
    made = exact("x", 6)
    bench.attached(made, bench.admit(made))
    assert in_flight(bench).level == 0
    with pytest.raises(WorkerConfigError, match=r"w8a8_rows = 2: must be 0 where levels is 1"):
        nested(1, w8a8_rows=2)


# ---- tags of KV ----------------------------------------------------------------------------


def test_purity_only_falls_along_a_sequence() -> None:
    purity = Purity()
    for start, end, tag in (
        (0, 4, FP16),
        (4, 6, MIXED),
        (6, 9, FP16),
        (9, 10, FP8),
        (10, 12, FP16),
        (12, 14, W8A8),
        (14, 15, FP8),
    ):
        purity.extend(start, end, tag)
        purity.check(end)
    assert [purity.at(tokens) for tokens in (0, 4, 5, 9, 10, 12, 13, 15)] == [
        FP16, FP16, MIXED, MIXED, FP8, FP8, W8A8, W8A8,
    ]  # fmt: skip
    purity.truncate(12)
    purity.extend(12, 13, FP8)
    assert purity.at(13) is FP8
    purity.truncate(5)
    purity.extend(5, 6, FP16)
    assert purity.at(6) is MIXED
    purity.truncate(3)
    purity.extend(3, 6, FP16)
    assert purity.at(6) is FP16
    purity.check(6)


@pytest.mark.parametrize("policies", ["fp16 fp16", "fp8 fp8", "fp8 fp16", "fp16 fp8"])
def test_a_payload_has_the_worst_tag_of_its_chain(policies: str) -> None:
    before, after = policies.split()
    bench = nested()
    rule(bench, before)
    r = request()
    run = bench.running(r, 40, 41)
    rule(bench, after)
    bench.step(42)
    bench.step(43)
    bench.swap_out(r, run)
    bench.step(44)
    put = bench.only(PutPayload)
    assert put.precision is (FP8 if "fp8" in policies else FP16)


def swapped_in(bench: Bench, r: Request, precision: Precision) -> Run:
    """Bring in a payload of the prompt and a token."""
    run = bench.swap_in(r, Ticket(r.seq, bench.mint(), bench.mint()), 6)
    bench.attached(r, run, (40,))
    fetch = bench.only(FetchPayload)
    tokens = (*r.record.prompt_ids, 40)
    bench.do(FetchDone(fetch.ticket, run, StoreStatus.OK, tokens[:-1], 3, 1, precision=precision))
    return run


def test_what_was_fetched_keeps_its_tag() -> None:
    bench = nested()
    r = request()
    run = swapped_in(bench, r, MIXED)
    assert bench.core.residents[r.seq].computed == 5
    bench.step(41)
    bench.swap_out(r, run)
    bench.step(42)
    assert bench.only(PutPayload).precision is MIXED


def test_an_exact_request_does_not_go_on_from_a_tagged_payload() -> None:
    bench = nested()
    r = exact()
    swapped_in(bench, r, FP8)
    assert in_flight(bench).chunks[0].start == 0, "all of it is computed again"
    assert bench.core.counters.recomputed == 1
    other = nested()
    swapped_in(other, r, FP16)
    assert in_flight(other).chunks[0].start == 5


def test_an_exact_request_that_was_not_drops_what_is_tagged() -> None:
    bench = nested()
    rule(bench)
    r = request()
    bench.running(r, 40)
    run = bench.admit(r)  # another gateway takes over, and says that it is exact
    r.record = replace(r.record, exact=True)
    bench.attached(r, run, (40,))
    bench.step(41)
    plan = in_flight(bench)
    assert (plan.level, plan.chunks[0].start) == (0, 0)


# ---- the prefix cache ----------------------------------------------------------------------


def finish(bench: Bench, r: Request) -> None:
    """Run a request alone to its end."""
    while bench.state(r) is not State.FINISHED:
        chunks = in_flight(bench).chunks
        bench.step(*(40 for chunk in chunks if chunk.sample))


def start_of(bench: Bench, r: Request) -> int:
    """Admit a request; how many tokens the cache gave it."""
    bench.attached(r, bench.admit(r))
    return bench.only(RunStep).plan.chunks[0].start


PROMPT = (7, 8, 9, 10, 11)


def test_an_exact_request_reuses_no_tagged_block_and_leaves_a_better_one() -> None:
    bench = nested()
    rule(bench)
    first = alike("a", PROMPT)
    assert start_of(bench, first) == 0
    finish(bench, first)
    second = alike("b", PROMPT, is_exact=True)
    assert start_of(bench, second) == 0, "the cache has it, but not as FP16 would"
    finish(bench, second)
    third = alike("c", PROMPT, is_exact=True)
    assert start_of(bench, third) == 4, "what an exact request has computed took its place"
    finish(bench, third)
    fourth = alike("d", PROMPT)
    assert start_of(bench, fourth) == 4
    finish(bench, fourth)


def test_an_fp16_block_behind_fp8_history_is_not_pure() -> None:
    bench = nested()
    rule(bench)
    first = alike("a", (7, 8, 9, 10, 11, 12, 13))
    bench.attached(first, bench.admit(first))
    assert in_flight(bench).level == 1
    rule(bench, "fp16")
    bench.step()
    assert in_flight(bench).level == 0
    assert in_flight(bench).chunks[0].start == 4
    finish(bench, first)
    second = alike("b", (7, 8, 9, 10, 11, 12, 13), is_exact=True)
    assert start_of(bench, second) == 0
    third = BlockManager(4, 2)
    a, b = third.allocate(2)
    third.register(a, b"a", FP16)
    third.register(b, b"b", FP8)
    assert (third.tag(a), third.tag(b)) == (FP16, FP8)


def test_a_better_block_takes_a_worse_ones_place_in_the_cache() -> None:
    blocks = BlockManager(6, 1)
    first = blocks.digest(blocks.root, [5])
    held, unused, better, equal = (blocks.allocate(1)[0] for _ in range(4))
    blocks.register(unused, first, FP8)
    blocks.release([unused])
    assert blocks.cached == 1
    blocks.register(equal, first, FP8)
    assert blocks.cached == 1, "an equal one does not"
    blocks.register(held, first, MIXED)
    assert blocks.cached == 0
    assert blocks.available == 3, "the unused one is free again"
    blocks.register(better, first, FP16)
    blocks.check()
    found, _ = blocks.match([5, 6], 9, pure=True)
    assert found == [better]
    blocks.release([held])
    assert blocks.cached == 0, "its contents have no name any more"
    blocks.check()


def test_a_levels_setting_that_cannot_be_is_named() -> None:
    with pytest.raises(WorkerConfigError, match=r"worker.costs = .*one for each of 2 levels"):
        nested(costs=(StepCost((1,), (1.0,)),))


def test_tokens_are_not_told_apart_by_their_tag_alone() -> None:
    """What a worker sends again is what it sent first."""
    bench = nested()
    rule(bench)
    r = request()
    bench.running(r, 40)
    bench.wait(bench.config.resend_ms)
    assert bench.said(Tokens) == [Tokens(r.seq, Run(1, 1), 0, (Token(40, precision=FP8),), None)]
