"""What the gateway measures: exact values for scripted events under a clock of ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deepinfer.gateway import metrics
from deepinfer.gateway.core.events import (
    AbortRequest,
    FromWorker,
    Generate,
    Resume,
    StopMatched,
    StreamClosed,
)
from deepinfer.gateway.core.measures import Histogram
from deepinfer.gateway.core.scores import Taken
from deepinfer.gateway.reporting import COUNTED_S, Counted
from deepinfer.kvstore.core.ids import RequestId, Run, StoreId, StreamId
from deepinfer.kvstore.core.messages import Attach, Notice, NoticeKind, Reject
from deepinfer.kvstore.core.requests import FinishReason, SamplingParams
from support.gateway_bench import R1, R2, S1, S2, S3, SEQ, W1, W2, Bench, said
from support.requests import record

SHELL = {"live_requests": 3, "kept_requests": 5, "streams": 2, "worker_links": 1}


def exported(bench: Bench) -> dict[str, float]:
    """The samples without the prefix, and without zeros."""
    found = metrics.samples(bench.core.counters, bench.core.measures, SHELL)
    return {name.removeprefix("deepinfer_"): value for name, value in found.items() if value}


def buckets(found: dict[str, float], name: str) -> dict[str, float]:
    """A histogram's buckets that are not empty, by bound."""
    start = f'{name}_bucket{{le="'
    return {key[len(start) : -2]: v for key, v in found.items() if key.startswith(start)}


def notice(kind: NoticeKind, number: int, copy_us: int, run: Run = R1) -> FromWorker:
    return FromWorker(
        W1,
        Notice(SEQ, run, number, kind, W1.worker, StoreId("s"), 2, 2_000, copy_us),
    )


def started() -> Bench:
    """A request arrives, and 40 ms later a worker takes it."""
    bench = Bench()
    bench.tell(Generate(S1, record(), "key"))
    bench.now_ms += 40
    bench.tell(FromWorker(W1, Attach(SEQ, R1, W1)))
    return bench


def test_a_plain_request() -> None:
    bench = started()
    for after_ms, index, ids in ((60, 0, (7,)), (3, 1, (7,)), (20, 2, (7, 7)), (40, 4, (7,))):
        bench.now_ms += after_ms
        finish = FinishReason.LENGTH if index == 4 else None
        bench.tell(FromWorker(W1, said(R1, index, *ids, finish=finish)))
    found = exported(bench)
    assert found["requests_accepted_total"] == found["request_prompt_tokens_count"] == 1
    assert found["prompt_tokens_total"] == found["request_prompt_tokens_sum"] == 3
    assert found["generation_tokens_total"] == found["request_generation_tokens_sum"] == 5
    assert found["request_queue_seconds_sum"] == 0.04
    assert buckets(found, "request_queue_seconds")["0.05"] == 1
    assert "0.02" not in buckets(found, "request_queue_seconds")
    assert found["time_to_first_token_seconds_sum"] == 0.1
    # Four intervals of five tokens; two came together.
    assert found["inter_token_seconds_count"] == 4
    assert found["inter_token_seconds_sum"] == 0.063
    seen = buckets(found, "inter_token_seconds")
    assert (seen["0.002"], seen["0.003"], seen["0.015"], seen["0.02"]) == (1, 2, 2, 3)
    assert (seen["0.03"], seen["0.05"], seen["+Inf"]) == (3, 4, 4)
    assert found["time_per_output_token_seconds_sum"] == 0.063 / 4
    assert found["request_seconds_sum"] == 0.163
    assert found['requests_finished_total{reason="length"}'] == 1
    assert not [name for name in found if "swap" in name]


def test_a_repeated_token_and_a_second_attach_are_measured_once() -> None:
    bench = started()
    bench.now_ms += 10
    bench.tell(FromWorker(W1, said(R1, 0, 7)))
    bench.now_ms += 500
    bench.tell(FromWorker(W1, Attach(SEQ, R1, W1)), FromWorker(W1, said(R1, 0, 7)))
    found = exported(bench)
    assert found["request_queue_seconds_count"] == found["time_to_first_token_seconds_count"] == 1
    assert "inter_token_seconds_count" not in found


def test_a_swaps_stall_is_told_apart_from_its_copies() -> None:
    bench = started()
    bench.tell(FromWorker(W1, said(R1, 0, 7)))
    bench.now_ms += 5
    bench.tell(notice(NoticeKind.SWAPPED_OUT, 0, copy_us=300))
    bench.now_ms += 1_000
    bench.tell(FromWorker(W1, Attach(SEQ, R2, W1)), notice(NoticeKind.RESUMED, 0, 70, R2))
    bench.now_ms += 15
    bench.tell(FromWorker(W1, said(R2, 1, 8)), FromWorker(W1, said(R2, 2, 9)))
    found = exported(bench)
    assert found["swap_stall_seconds_count"] == 1
    assert found["swap_stall_seconds_sum"] == 1.02
    assert found['swap_copy_seconds_sum{direction="out"}'] == 0.0003
    assert found['swap_copy_seconds_sum{direction="in"}'] == 0.00007
    assert found['swap_copy_seconds_bucket{direction="in",le="0.0001"}'] == 1
    assert 'swap_copy_seconds_bucket{direction="in",le="5e-05"}' not in found
    # The stall is one of the intervals, too.
    assert found["inter_token_seconds_sum"] == 1.02
    assert buckets(found, "inter_token_seconds")["0.001"] == 1


def test_a_notice_that_comes_after_the_token_gives_the_same_stall() -> None:
    bench = started()
    bench.tell(FromWorker(W1, said(R1, 0, 7)))
    bench.now_ms += 250
    bench.tell(FromWorker(W2, Attach(SEQ, R2, W2)), FromWorker(W2, said(R2, 1, 8)))
    bench.tell(notice(NoticeKind.SWAPPED_OUT, 0, copy_us=300))
    assert exported(bench)["swap_stall_seconds_sum"] == 0.25


def test_a_request_taken_over_has_no_arrival_here() -> None:
    bench = Bench()
    bench.tell(Resume(S1, record(), "key", 1, ((5, 6),)))
    bench.tell(FromWorker(W1, Attach(SEQ, R1, W1)))
    for index in (2, 3, 4):
        bench.now_ms += 10
        finish = FinishReason.STOP if index == 4 else None
        bench.tell(FromWorker(W1, said(R1, index, 7, finish=finish)))
    found = exported(bench)
    assert found["takeovers_total"] == 1
    for name in ("request_queue", "time_to_first_token", "request"):
        assert f"{name}_seconds_count" not in found
    assert "requests_accepted_total" not in found
    assert "prompt_tokens_total" not in found
    assert found["inter_token_seconds_sum"] == 0.02
    assert found["time_per_output_token_seconds_sum"] == 0.01
    assert found["generation_tokens_total"] == 3
    assert found["request_generation_tokens_sum"] == 5
    assert found['requests_finished_total{reason="stop"}'] == 1


def test_a_stop_string_that_cuts_an_ended_choice_counts_one_end() -> None:
    bench = Bench()
    bench.tell(Generate(S1, record(sampling=SamplingParams(stop=("x",))), "key"))
    bench.tell(FromWorker(W1, Attach(SEQ, R1, W1)))
    bench.tell(FromWorker(W1, said(R1, 0, 7, 8, 9, finish=FinishReason.LENGTH)))
    assert 'requests_finished_total{reason="length"}' not in exported(bench)
    bench.tell(StopMatched(SEQ, 2))
    found = exported(bench)
    assert found['requests_finished_total{reason="stop"}'] == 1
    assert found["request_generation_tokens_sum"] == 2
    assert [name for name in found if name.startswith("requests_finished")] == [
        'requests_finished_total{reason="stop"}'
    ]


def test_every_other_end_has_its_reason() -> None:
    bench = Bench(orphan_grace_ms=100)
    for stream, name, deadline_ms in ((S1, "r1", None), (S2, "r2", 10_050), (S3, "r3", None)):
        bench.tell(Generate(stream, record(name, deadline_ms=deadline_ms), "key"))
    bench.tell(AbortRequest(RequestId("r1"), 0), StreamClosed(S3))
    bench.wait(60)
    bench.wait(60)
    found = exported(bench)
    for reason in ("abort", "deadline", "orphan"):
        assert found[f'requests_finished_total{{reason="{reason}"}}'] == 1
    assert found["aborts_total"] == found["deadlines_total"] == found["orphans_total"] == 1
    assert found["request_seconds_count"] == 2
    assert "time_per_output_token_seconds_count" not in found


def test_refusals_have_their_reasons() -> None:
    bench = Bench(max_live_requests=2, max_streams=3)
    for number in (1, 2, 3):
        bench.tell(Generate(StreamId(number), record(f"r{number}"), "key"))
    bench.answer(reject=(Reject(record("r1").seqs()[0], 9, 8),))
    bench.tell(Generate(StreamId(4), record("r4"), "key"))
    bench.tell(Generate(StreamId(5), record("r5"), "key"))
    found = exported(bench)
    assert found['requests_refused_total{reason="no_pool"}'] == 1
    assert found['requests_refused_total{reason="max_live_requests"}'] == 2
    assert found['requests_finished_total{reason="error"}'] == 1
    bench.tell(StreamClosed(StreamId(2)))
    bench.tell(Resume(StreamId(6), record("r2"), "wrong", 1, ((),)))
    assert exported(bench)["client_resumes_refused_total"] == 1


def test_full_of_streams() -> None:
    bench = Bench(max_live_requests=5, max_streams=1)
    bench.tell(Generate(S1, record("r1"), "key"), Generate(S2, record("r2"), "key"))
    assert exported(bench)['requests_refused_total{reason="max_streams"}'] == 1


def test_gauges_are_the_shells() -> None:
    found = exported(Bench())
    assert found == {
        "gateway_live_requests": 3,
        "gateway_kept_requests": 5,
        "gateway_streams": 2,
        "gateway_worker_links": 1,
    }


def test_every_total_that_the_core_keeps_is_exported(repo_root: Path) -> None:
    """A name that is not in the tables would be counted and lost."""
    sources = [file.read_text("utf-8") for file in (repo_root / "gateway/core").glob("*.py")]
    plain = set(re.findall(r'counters\["(\w+)"\]', "".join(sources)))
    by_reason = set(re.findall(r'by_reason\("(\w+)"', "".join(sources)))
    assert plain | {taken.value for taken in Taken} == set(metrics.TOTALS)
    assert by_reason == set(metrics.REASONS)


@pytest.mark.parametrize("bounds", [(), (1, 1), (2, 1)])
def test_bounds_must_rise(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="bounds"):
        Histogram(*bounds)


def test_a_bound_is_inclusive_and_all_is_counted() -> None:
    histogram = Histogram(1, 5)
    for value in (0, 1, 2, 5, 6, 1_000):
        histogram.observe(value)
    histogram.observe(5, times=3)
    assert list(histogram.cumulative()) == [(1, 2), (5, 7)]
    assert (histogram.count, histogram.total) == (9, 1_029)


def test_reports_carry_what_has_changed_and_a_new_stream_everything() -> None:
    now = {"a": 1.0, "b": 0.0}
    counted = Counted(lambda: dict(now))
    assert counted.changes(100.0) == {"a": 1.0, "b": 0.0}
    now["b"] = 2.0
    assert counted.changes(100.0 + COUNTED_S / 2) == {}, "not looked at before it is due"
    assert counted.changes(100.0 + COUNTED_S) == {"b": 2.0}
    assert counted.changes(101.0 + COUNTED_S) == {}
    assert Counted(lambda: dict(now)).changes(0.0) == now
