"""Reading traces and costs, making requests of them, replaying them, and judging that."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rich.console import Console

from deepinfer.deploy.bench import trace_report
from deepinfer.deploy.bench.results import without_folders
from deepinfer.deploy.bench.trace import Plan, parse_rates, run_trace
from deepinfer.deploy.bench.trace_costs import ASSUMED, capacity, facts_of, read_costs
from deepinfer.deploy.bench.trace_drive import (
    Replayed,
    Served,
    SimulatedClock,
    SimulatedStepper,
    WallClock,
    replay,
)
from deepinfer.deploy.bench.trace_figures import Alone, attainment, cell, over_seeds, verdict
from deepinfer.deploy.bench.trace_files import Arrival, TraceError, read_trace
from deepinfer.deploy.bench.trace_load import Ask, Shape, Words, one_by_one, window
from deepinfer.deploy.bench.trace_places import BLOCK_BYTES, worker_config
from deepinfer.deploy.config import ConfigError
from deepinfer.kvstore.core.precision import Policy, Precision, PrecisionSettings
from deepinfer.kvstore.core.requests import FinishReason

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE = HEADER + (
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:46.6805910,396,109\r\n"
    "\n"
    "2023-11-17 00:00:00,1,0\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [0, 9]}\n'
)
WORDS = Words(bytes(range(64, 104)) * 3)
COSTS = ASSUMED.levels


def write(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


# ---- files ---------------------------------------------------------------------------------


def test_azure(tmp_path: Path) -> None:
    first, second, third = read_trace(write(tmp_path, "\ufeff" + AZURE))
    assert first == Arrival(0.0, 374, 44)
    assert second[1:] == (396, 109, ())
    assert second.at_ms == pytest.approx(0.001, abs=3e-4), "seven digits are a tenth of a us"
    assert third.at_ms == pytest.approx(20_653_319.41, abs=0.01)


def test_mooncake(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, MOONCAKE)) == (
        Arrival(0.0, 1100, 5, (0, 1, 2)),
        Arrival(3000.0, 600, 7, (0, 9)),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"trace: lines = 0: must be at least one request"),
        (HEADER, r"trace: lines = 1: must be a header and at least one request"),
        ("a,b\n1,2\n", r"trace:1: first line = 'a,b': must be 'TIMESTAMP,"),
        (HEADER + "2023-11-16 18:15:46.1,3\n", r"trace:2: line = .*: must be three fields"),
        (HEADER + "16/11/2023,3,4\n", r"trace:2: TIMESTAMP = '16/11/2023': must be a time such"),
        (HEADER + "2023-13-16 18:15:46,3,4\n", r"trace:2: TIMESTAMP = '2023-13-16 18:15:46'"),
        (HEADER + "2023-11-16 18:15:46,x,4\n", r"trace:2: ContextTokens = 'x': must be a whole"),
        (HEADER + "2023-11-16 18:15:46,3,-4\n", r"trace:2: GeneratedTokens = '-4': must be"),
        (HEADER + "2023-11-16 18:15:46,3,10000001\n", r"= '10000001': .* from 0 to 10000000"),
        (
            HEADER + "2023-11-16 18:15:46,3,4\n2023-11-16 18:15:45,3,4\n",
            r"trace:3: time = .*: must be .* or later",
        ),
        ('{"timestamp": 0,\n', r"trace:1: line = .*: must be a JSON object"),
        (MOONCAKE + "[]\n", r"trace:3: line = '\[\]': must be a JSON object"),
        (MOONCAKE + "{}\n", r"trace:3: timestamp = None: must be a whole number from 0"),
        (MOONCAKE.replace("3000", "true"), r"trace:2: timestamp = True: must be a whole"),
        (MOONCAKE.replace("600", "0"), r"trace:2: input_length = 0: must be a whole number from 1"),
        (MOONCAKE.replace("[0, 9]", "[0]"), r"trace:2: hash_ids = \[0\]: must be 2 ids, one for"),
        (MOONCAKE.replace("[0, 9]", "[0, -9]"), r"trace:2: hash_ids\[1\] = -9: must be a whole"),
        ("[" * 100_000, r"trace:1: first line = '\[{20}"),
        (HEADER + "x" * (2 << 20), r"trace:2: line = 'x+\.\.\.: must be 1048576 characters at"),
        (HEADER + "\x00\n", r"trace:2: line"),
    ],
)
def test_what_no_trace_holds(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        read_trace(write(tmp_path, text))


def test_traces_are_bounded(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace:5: lines = 5: must be 4 at most"):
        read_trace(write(tmp_path, AZURE), lines_max=4)
    assert len(read_trace(write(tmp_path, AZURE), lines_max=5)) == 3


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_trace(tmp_path / "nowhere")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="utf-8"):
        read_trace(tmp_path / "bytes")


# ---- requests ------------------------------------------------------------------------------


def test_lengths_fit_the_context() -> None:
    arrivals = [Arrival(0.0, 900, 100), Arrival(1.0, 10, 1)]
    assert Shape.for_context(arrivals, 4096) == Shape(1.0)
    shape = Shape.for_context(arrivals, 102)
    assert shape.factor == pytest.approx(0.1)
    assert [shape.tokens(n) for n in (900, 100, 10, 1)] == [90, 10, 1, 1]


def test_prompts_share_what_the_trace_says() -> None:
    arrivals = (
        Arrival(0.0, 1100, 5, (0, 1, 2)),
        Arrival(0.0, 1030, 5, (0, 1, 7)),
        Arrival(0.0, 600, 5, (3, 1)),
    )
    shape = Shape(1.0)
    one, two, three = (WORDS.prompt(a, i, 0, shape) for i, a in enumerate(arrivals))
    assert [len(one), len(two), len(three)] == [1100, 1030, 600]
    assert one[:1024] == two[:1024]
    assert one[1024:1030] != two[1024:]
    assert one[512:600] == three[512:], "a block's tokens depend on its id alone"
    assert one[:8] != three[:8]
    assert WORDS.prompt(arrivals[0], 0, 1, shape)[:8] != one[:8], "another lap shares nothing"
    half = [WORDS.prompt(a, i, 0, Shape(0.5)) for i, a in enumerate(arrivals)]
    assert [len(prompt) for prompt in half] == [550, 515, 300]
    assert half[0][:512] == half[1][:512]


def test_prompts_of_azure_share_nothing() -> None:
    arrivals = [Arrival(0.0, 400, 5)] * 200
    prompts = {WORDS.prompt(a, i, 0, Shape(1.0))[:8] for i, a in enumerate(arrivals)}
    assert len(prompts) == 200
    with pytest.raises(ConfigError, match="text has 3 different tokens: must have at least 16"):
        Words([1, 2, 3])


def test_windows_keep_the_trace_s_rhythm() -> None:
    at_ms = (0.0, 10.0, 20.0, 400.0, 410.0)
    arrivals = tuple(Arrival(at, 20 + i, 3) for i, at in enumerate(at_ms))
    asks = window(arrivals, WORDS, Shape(1.0), count=4, rate=3.0, seed=1)
    assert [len(ask.prompt_ids) for ask in asks] == [21, 22, 23, 24], "the seed draws the second"
    assert [ask.at_us for ask in asks] == [0, 25_000, 975_000, 1_000_000], "three gaps at 3/s"
    again = window(arrivals, WORDS, Shape(1.0), count=12, rate=3.0, seed=1)
    assert len({ask.prompt_ids for ask in again}) == 12, "a second lap has prompts of its own"
    together = (Arrival(0.0, 5, 5),) * 3
    same = window(together, WORDS, Shape(1.0), count=3, rate=2.0, seed=0)
    assert [ask.at_us for ask in same] == [0, 500_000, 1_000_000]
    assert len(one_by_one(arrivals, WORDS, Shape(1.0), count=9, lap=0)) == 5


# ---- costs ---------------------------------------------------------------------------------


def test_costs_are_read_as_they_are_written(tmp_path: Path) -> None:
    costs = [facts_of(cost) for cost in COSTS]
    path = write(tmp_path, json.dumps({"source": "somewhere", "costs": costs}))
    assert read_costs(path).levels == COSTS
    assert read_costs(path).source == "somewhere"
    result = {"nested": {"costs": costs}, "gpu": {"name": "H200"}}
    assert read_costs(write(tmp_path, json.dumps(result))).source == "trace, measured on H200"


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], "costs must be a list of 2 to 6"),
        ({"costs": [{}]}, "costs must be a list of 2 to 6"),
        ({"costs": [1, 2]}, r"costs\[0\] = 1: must be an object"),
        ({"costs": [{"rows": [1.5], "us": [1]}] * 2}, r"costs\[0\].rows = \[1.5\]: must be a list"),
        ({"costs": [{"rows": [1], "us": [True]}] * 2}, r"costs\[0\].us = \[True\]: must be a list"),
        ({"costs": [{"rows": [2, 1], "us": [1, 1]}] * 2}, r"costs\[0\].rows = \(2, 1\): must be"),
        ({"costs": [{"rows": [1], "us": [0]}] * 2}, r"costs\[0\].us = \(0.0,\): must be 1 times"),
        (
            {"costs": [{"rows": [1], "us": [1], "us_per_context_token": "x"}] * 2},
            r"us_per_context_token = 'x': must be a number",
        ),
    ],
)
def test_costs_that_cannot_be(tmp_path: Path, found: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_costs(write(tmp_path, json.dumps(found)))


def test_costs_that_are_no_file(tmp_path: Path) -> None:
    for text in ("{", "[" * 100_000, " " * ((1 << 20) + 1)):
        with pytest.raises(ConfigError, match=r"costs .*trace"):
            read_costs(write(tmp_path, text))
    with pytest.raises(ConfigError, match="nowhere"):
        read_costs(tmp_path / "nowhere")


def test_capacity_grows_with_speed() -> None:
    fp16, fp8 = (
        capacity(cost, input_tokens=1000, output_tokens=200, step_tokens=2048, seats=64)
        for cost in COSTS
    )
    assert 30 < fp16 < fp8 < 80


# ---- replays -------------------------------------------------------------------------------


def serve(asks: tuple[Ask, ...], policy: str, workers: int = 1) -> Replayed:
    config = worker_config(COSTS, 4096, BLOCK_BYTES)
    chosen = PrecisionSettings(policy=Policy(policy))
    steppers = [SimulatedStepper(COSTS, Random(i)) for i in range(workers)]
    return replay(asks, [config] * workers, steppers, chosen, SimulatedClock())


def asks_of(count: int, gap_us: int, prompt: int = 300, output: int = 20) -> tuple[Ask, ...]:
    arrival = Arrival(0.0, prompt, output)
    return tuple(
        Ask(i * gap_us, WORDS.prompt(arrival, i, 0, Shape(1.0)), output) for i in range(count)
    )


def test_a_replay_takes_what_its_steps_take() -> None:
    replayed = serve(asks_of(1, 0), "fp16")
    (served,) = replayed.served
    assert served.ok
    assert served.tokens == 20
    prompt_us, decode_us = COSTS[0].predict(300, 300), COSTS[0].predict(1, 310)
    assert served.ttft_ms == pytest.approx(prompt_us / 1000, rel=0.15)
    assert served.tpot_ms == pytest.approx(decode_us / 1000, rel=0.05)
    assert replayed.tokens == dict.fromkeys(Precision, 0) | {Precision.FP16: 20}
    assert sum(replayed.step_us) == replayed.step_us[0] == replayed.end_us
    fast = serve(asks_of(1, 0), "fp8")
    assert fast.tokens[Precision.FP8] == 20
    assert fast.step_us[0] == 0
    assert fast.served[0].tpot_ms == pytest.approx(0.6 * decode_us / 1000, rel=0.05)


def test_a_replay_is_the_same_again_and_uses_all_workers() -> None:
    asks = asks_of(30, 3000)
    one, again, two = serve(asks, "slo"), serve(asks, "slo"), serve(asks, "slo", workers=2)
    assert one.served == again.served
    assert all(served.ok for served in two.served)
    slow, fast = (max(s.tpot_ms or 0.0 for s in run.served) for run in (one, two))
    assert fast < slow, "each of two workers has smaller batches"


def test_equal_prefixes_are_found_in_the_cache() -> None:
    arrival = Arrival(0.0, 600, 4, (5, 6))
    asks = tuple(Ask(200_000 * i, WORDS.prompt(arrival, i, 0, Shape(1.0)), 4) for i in range(3))
    assert serve(asks, "fp16").cached_tokens == 2 * 592
    assert serve(asks_of(3, 200_000), "fp16").cached_tokens == 0


def test_what_no_pool_can_hold_is_an_error_and_what_is_late_is_left() -> None:
    huge = serve((*asks_of(1, 0, prompt=80_000), *asks_of(1, 0)), "fp16")
    assert [served.finish for served in huge.served] == [FinishReason.ERROR, FinishReason.LENGTH]
    config = worker_config(COSTS, 4096, BLOCK_BYTES)
    stepper = SimulatedStepper(COSTS, Random(0))
    settings = PrecisionSettings(policy=Policy.FP16)
    asks = asks_of(1, 0, output=2000)
    late = replay(asks, [config], [stepper], settings, SimulatedClock(), patience_us=1_000_000)
    assert late.served[0].finish is None
    assert 300 < late.served[0].tokens < 600
    figures = cell(late, Alone(10.0, 2.0, 1))
    assert figures["unfinished"] == 1
    assert figures["attainment"]["loose"]["both"] == 0.0


def test_the_wall_clock_waits() -> None:
    clock = WallClock()
    due_us = clock.now_us() + 3000
    assert clock.wait(due_us) >= due_us
    assert clock.wait(0) >= due_us, "what is past is not awaited"


# ---- figures -------------------------------------------------------------------------------


def test_attainment_counts_both_targets() -> None:
    def served(ttft_ms: int, tpot_ms: int, tokens: int = 11) -> Served:
        first = 1000 * ttft_ms
        last = first + 1000 * tpot_ms * (tokens - 1)
        return Served(0, first, last, tokens, FinishReason.LENGTH)

    failed = Served(0, 1, 2, 3, FinishReason.ERROR)
    found = attainment(
        [served(10, 5), served(11, 5), served(10, 6), served(10, 99, tokens=1), failed], 10.0, 5.0
    )
    assert found == {"ttft": 3 / 5, "tpot": 3 / 5, "both": 2 / 5}
    assert Alone.of([served(10, 4), served(30, 9, tokens=1)]) == Alone(20.0, 4.0, 2)


def rates(**attained: list[float]) -> list[dict[str, object]]:
    def over(policy: str, value: float) -> dict[str, object]:
        replayed = Replayed([Served(0, 1, 2, 3, FinishReason.LENGTH)], [1, 0])
        replayed.tokens = dict.fromkeys(Precision, 1)
        found = over_seeds([cell(replayed, Alone(1.0, 1.0, 1))] * 2)
        key = "attainment_tight_both"
        return found | {key: {"mean": value, "min": value, "max": value, "seeds": [value] * 2}}

    return [
        {"rate": i, "policies": {p: over(p, values[i]) for p, values in attained.items()}}
        for i in range(len(attained["fp16"]))
    ]


@pytest.mark.parametrize(
    ("slo", "threshold", "holds"),
    [
        ([0.90, 0.581], 0.5, True),
        ([0.90, 0.57], 0.5, False),  # keeps 70% of the gain
        ([0.888, 0.58], 0.5, False),  # 1.2 points below FP16
        ([0.891, 0.581], 0.5, True),
        ([0.95, 0.58], 0.59, False),  # below threshold
    ],
)
def test_the_verdict(slo: list[float], threshold: float, holds: bool) -> None:
    found = verdict(
        rates(fp16=[0.9, 0.5], fp8=[0.94, 0.6], slo=slo, threshold=[0.89, threshold]), "tight"
    )
    assert found is not None
    assert found["holds"] == holds
    assert [one["kept"] is None for one in found["rates"]] == [True, False]
    assert verdict(rates(fp16=[0.9], slo=[0.9]), "tight") is None


@pytest.mark.parametrize(
    ("threshold", "share", "least"),
    [
        (0.585, 0.2, False),  # keeps 85% with fewer FP8 tokens
        (0.585, 0.25, True),
        (0.57, 0.0, True),  # keeps too little to count
    ],
)
def test_slo_has_the_least_share_of_fp8_tokens_of_those_that_keep_the_gain(
    threshold: float, share: float, least: bool
) -> None:
    of_rates = rates(fp16=[0.5], fp8=[0.6], slo=[0.59], threshold=[threshold])
    policies: Any = of_rates[0]["policies"]
    policies["threshold"]["fp8_share_of_tokens"]["mean"] = share
    found = verdict(of_rates, "tight")
    assert found is not None
    (one,) = found["rates"]
    assert (one["least_share"], one["holds"], found["holds"]) == (least, least, least)
    shown = trace_report.judgement({"verdict": {"tight": found}})
    assert ("not the least share" in shown) is not least
    assert "with 25% (25-25) FP8 tokens" in shown
    assert "fp8 25%" in shown


# ---- the whole -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("where", "moon", "where = 'moon': must be one of simulate, cpu, card"),
        ("rates", (0.0,), "rates = .* above 0"),
        ("rates", (1.0, 1.0), "rates = .* different"),
        ("rates", (float("nan"),), "rates = "),
        ("policies", ("fp16", "best"), "policies: precision = 'best': must be one of"),
        ("policies", ("fp16", "fp16"), "policies = .* different"),
        ("seeds", 0, "seeds = 0: must be between 1 and 100"),
        ("first_seed", -1, "first_seed = -1: must be between 0 and"),
        ("seconds", 0.0, "seconds = 0.0: must be above 0"),
        ("alone", 0, "alone = 0: must be between"),
        ("max_context", 8, "max_context = 8: must be between 64 and"),
        ("workers", 0, "workers = 0: must be between"),
    ],
)
def test_plans_that_cannot_be(name: str, value: Any, said: str) -> None:
    plan = Plan(trace=Path("trace"))
    with pytest.raises(ConfigError, match=said):
        replace(plan, **{name: value})


def test_options_of_the_simulation_alone() -> None:
    given: dict[str, Any] = {"workers": 2, "costs": Path("costs")}
    for name, value in given.items():
        with pytest.raises(ConfigError, match=f"{name} = .* where card"):
            replace(Plan(trace=Path("trace"), where="card"), **{name: value})
    assert parse_rates("1,2.5") == (1.0, 2.5)
    assert parse_rates(None) == ()
    with pytest.raises(ConfigError, match="rates = '1;2': must be numbers separated by commas"):
        parse_rates("1;2")


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("x --trace /a/b/c.csv --text ../x/y.txt", "x --trace c.csv --text ../x/y.txt"),
        ("x --model=/a/models/m/ --n 1/2", "x --model=m --n 1/2"),
        ("x --model ~/models/m.gguf", "x --model m.gguf"),
        ("KILLS=2 pytest tests/chaos/x.py", "KILLS=2 pytest tests/chaos/x.py"),
    ],
)
def test_a_results_command_names_no_folder_of_the_machine(given: str, written: str) -> None:
    assert without_folders(given) == written


def test_a_whole_run(tmp_path: Path) -> None:
    lines = [
        f"2023-11-16 18:15:{i // 10:02}.{i % 10}000000,{100 + 7 * i % 300},{5 + i % 20}"
        for i in range(60)
    ]
    trace = write(tmp_path, HEADER + "\n".join(lines) + "\n")
    plan = Plan(trace=trace, rates=(5.0, 40.0), seeds=2, seconds=0.5, alone=3)
    console = Console(file=io.StringIO(), width=100)
    assert run_trace(plan, output=tmp_path, console=console)
    found = json.loads((tmp_path / "trace_simulate.json").read_text())
    assert (tmp_path / "trace_simulate.png").stat().st_size > 10_000
    options = "--trace trace --where simulate --rates 5,40 --policies fp16,fp8,threshold,slo"
    assert f"bench trace {options} --seeds 2" in found["command"], "no folder of this machine"
    assert found["place"]["source"] == ASSUMED.source
    assert found["targets_ms"]["loose"]["tpot"] == 10 * found["alone"]["tpot_mean_ms"]
    assert [one["rate"] for one in found["rates"]] == [5.0, 40.0]
    assert found["verdict"]["tight"]["holds"], "nothing is late here"
    shares = found["rates"][1]["policies"]
    assert shares["fp8"]["fp8_share_of_tokens"]["mean"] == 1.0
    assert shares["fp16"]["fp8_share_of_tokens"]["mean"] == 0.0
    later = replace(plan, rates=(40.0,), seeds=1, first_seed=1)
    assert run_trace(later, output=tmp_path, console=console)
    again = json.loads((tmp_path / "trace_simulate_from_1.json").read_text())
    assert "--seeds 1 --first-seed 1 " in again["command"]
    cells = {(one["rate"], one["policy"]): one["seeds"] for one in found["cells"]}
    for one in again["cells"]:  # the same part of the trace
        (seed,), (_, before) = one["seeds"], cells[40.0, one["policy"]]
        assert seed["tokens"] == before["tokens"]
    assert [one["requests"] for one in cells[40.0, "slo"]] == [20, 20]
