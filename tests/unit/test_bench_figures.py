"""What the load benches compute from their runs: figures by hand, and no timing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer.client import Accepted, Delta, Event, Notice
from deepinfer.deploy.bench import concurrency_report, jitter, jitter_report, memory
from deepinfer.deploy.bench.concurrency import Load, Measured, Run, joined, parse_levels, steps_of
from deepinfer.deploy.bench.prompts import SPREAD, make_prompts, read_text
from deepinfer.deploy.config import ConfigError
from deepinfer.text.load import load_tokenizer
from support.tiny_model import write_tiny_llama


def run(seconds: float, tpot_s: float | None, *ids: tuple[int, ...]) -> Run:
    if tpot_s is None:
        return Run(seconds=seconds, token_ids=ids)
    intervals = tuple((tpot_s,) * (len(i) - 1) for i in ids)
    return Run(seconds=seconds, token_ids=ids, ttfts_s=(0.5,) * len(ids), intervals_s=intervals)


def test_ratios_are_taken_within_a_round_and_then_the_median() -> None:
    # The machine is twice as slow in the second round, which must favour nobody.
    load = Load(levels=(1,), rounds=3, max_tokens=3)
    measured: Measured = {
        ("cluster", "fp16", 1): [run(s, s / 10, (1, 2, 3)) for s in (1.1, 2.2, 1.1)],
        ("engine", "fp16", 1): [run(s, s / 10, (1, 2, 3)) for s in (1.0, 2.0, 1.0)],
        ("one_by_one", "fp16", 1): [run(s, None, (1, 2, 3)) for s in (3.3, 6.6, 9.9)],
        ("padded_batch", "fp16", 1): [run(s, None, (1, 9, 3)) for s in (0.55, 1.1, 0.55)],
    }
    found = concurrency_report.figures(load, [64], measured)["results"]["fp16"]["1"]
    ratios = found["ratios"]
    assert ratios["tokens_per_s_over_engine"] == pytest.approx(1 / 1.1)
    assert ratios["tpot_over_engine"] == pytest.approx(1.1)
    assert ratios["interval_p50_over_engine"] == pytest.approx(1.1)
    assert ratios["tokens_per_s_over_transformers_one_by_one"] == pytest.approx(3.0)
    assert ratios["tokens_per_s_over_transformers_padded_batch"] == pytest.approx(0.5)
    assert found["cluster"]["tokens_per_s"] == pytest.approx(3 / 1.1)
    assert found["cluster"]["seconds"] == [1.1, 2.2, 1.1]
    assert found["cluster"]["tpot_p50_ms"] == pytest.approx(110)
    # Of the sorted 110, 110, 220: 0.95 lies 0.9 of the way from the middle to the last.
    assert found["cluster"]["tpot_p95_minus_p50_ms"] == pytest.approx(99)
    assert found["cluster"]["ttft_p50_ms"] == 500
    assert (found["cluster"]["tokens"], found["cluster"]["tokens_as_engine"]) == (9, 9)
    assert found["padded_batch"]["tokens_as_engine"] == 3  # one token of three, three times


def test_runs_one_after_another_add_up() -> None:
    whole = joined([run(1.0, None, (1, 2)), run(2.5, None, (3,))])
    assert (whole.seconds, whole.token_ids) == (3.5, ((1, 2), (3,)))
    assert whole.tokens_per_s == pytest.approx(3 / 3.5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"levels": ()}, "levels = \\[\\]: must be different numbers"),
        ({"levels": (1, 1)}, "levels"),
        ({"levels": (0,)}, "levels"),
        ({"max_tokens": 1}, "max_tokens = 1: must be 2 or more"),
        ({"rounds": 0}, "rounds = 0"),
        ({"kv_cache_dtypes": ("fp4",)}, "fp4"),
    ],
)
def test_a_load_that_cannot_be_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Load(**settings)  # type: ignore[arg-type]


def test_levels_are_numbers_between_commas() -> None:
    assert parse_levels("1,2, 16") == (1, 2, 16)
    with pytest.raises(ConfigError, match="levels = '1;2'"):
        parse_levels("1;2")
    load = Load(levels=(1, 4), rounds=2, kv_cache_dtypes=("fp16", "int8"))
    assert steps_of(load) == 2 * 2 * 4 * 2


def test_prompts_differ_in_text_and_length(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tiny_llama(tmp_path))
    prompts = make_prompts(tokenizer, 10, 40)
    assert [len(prompt) for prompt in prompts[:8]] == [round(40 * share) for share in SPREAD]
    assert len({prompt[:5] for prompt in prompts}) == 10
    assert len(make_prompts(tokenizer, 1, 30_000, "two words")[0]) == 30_000
    with pytest.raises(ConfigError, match="has 1 words: must have at least 2"):
        make_prompts(tokenizer, 1, 4, "word")


def test_a_text_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("Bär".encode("latin-1"))
    for path in (latin, tmp_path / "absent.txt"):
        with pytest.raises(ConfigError, match=path.name):
            read_text(path)


# ---- jitter --------------------------------------------------------------------------------


def delta(*ids: int) -> Delta:
    return Delta(choice=0, position=0, token_ids=ids, text="", logprobs=())


def notice(kind: str) -> Notice:
    return Notice(kind=kind, choice=0, worker="w", store="s", blocks=1, payload_bytes=1, copy_s=0.0)


def test_intervals_know_whether_a_swap_lay_in_them() -> None:
    clock = jitter.Clock()
    accepted = Accepted(request_id="r", resume_key="k", prompt_tokens=1, gateway="g")
    story: list[tuple[Event, float]] = [
        (accepted, 0.0),
        (delta(1), 1.0),
        (delta(2), 1.5),
        (notice("swapped_out"), 1.6),
        (notice("resumed"), 3.0),
        (delta(), 3.1),  # text without a token: no end of the interval
        (delta(3, 4), 3.5),
        (notice("placed"), 3.6),
        (delta(5), 4.0),
    ]
    for event, now_s in story:
        clock.hear(event, now_s)
    assert [(i.seconds, i.swapped) for i in clock.intervals] == [
        (0.5, False),
        (2.0, True),
        (0.0, False),
        (0.5, False),
    ]


def stream_run(ids: tuple[int, ...], *intervals: tuple[float, bool]) -> jitter.StreamRun:
    swaps = sum(swapped for _, swapped in intervals)
    return jitter.StreamRun(
        token_ids=ids,
        intervals=tuple(jitter.Interval(seconds=s, swapped=swapped) for s, swapped in intervals),
        swaps=swaps,
        resumes=swaps,
        stall_s=sum(s for s, swapped in intervals if swapped),
        copy_out_s=0.25 * swaps,
        copy_in_s=0.5 * swaps,
    )


def test_a_stall_is_told_apart_from_its_copies() -> None:
    runs = {
        "roomy": [[stream_run((1, 2, 3), (0.1, False), (0.3, False))]],
        "pressed": [[stream_run((1, 2, 4), (0.2, False), (2.0, True))]],
    }
    load = jitter.Load(streams=2, max_tokens=3, rounds=1)
    found = jitter_report.figures(load, {"roomy": 9, "pressed": 5}, runs)
    assert (found["tokens"], found["same_tokens"]) == (3, 2)
    pressed = found["pools"]["pressed"]
    assert pressed["swapped_streams"] == [
        {
            "swaps": 1,
            "stall_ms": 2000.0,
            "copy_out_ms": 250.0,
            "copy_in_ms": 500.0,
            "wait_ms": 1250.0,
        }
    ]
    assert pressed["around_swaps"] == {
        "count": 1, "p50_ms": 2000.0, "p95_ms": 2000.0, "p99_ms": 2000.0, "max_ms": 2000.0
    }  # fmt: skip
    assert pressed["between_swaps"]["max_ms"] == 200.0
    assert found["pools"]["roomy"]["intervals"]["p50_ms"] == pytest.approx(200.0)
    assert found["pools"]["roomy"]["around_swaps"] is None
    assert "copies 250.0 ms out and 500.0 ms in" in jitter_report.sentence(found)


def test_the_pressed_pool_holds_the_largest_request() -> None:
    load = jitter.Load(streams=2, max_tokens=16, share=0.01)
    assert jitter.pool_blocks(load, [(1,) * 16, (1,) * 40]) == {"roomy": 8, "pressed": 4}
    for share in (0.0, 1.0):
        with pytest.raises(ConfigError, match="share"):
            jitter.Load(share=share)


# ---- memory --------------------------------------------------------------------------------


def test_processes_below_one_are_found_and_measured() -> None:
    grow = "import sys; x = bytearray(64 << 20); del x; print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", grow], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "ready\n"
        assert child.pid in memory.descendants(os.getpid())
        found = memory.usages(os.getpid(), {child.pid: "the child"})
        child.stdin.write("\n")
    usage = found["the child"]
    assert usage.peak_rss_bytes > 64 << 20
    assert usage.peak_rss_bytes > usage.rss_bytes >= usage.pss_bytes > 1 << 20
    assert "launcher" in found
    assert memory.usage_of(child.pid) is None
