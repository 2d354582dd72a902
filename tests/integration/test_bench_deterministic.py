"""`bench deterministic`: its streams are those of the requests alone, and it says so if not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deepinfer.client.results import Choice, Notice, SwapStats, Timings, Usage
from deepinfer.deploy.bench import deterministic
from deepinfer.deploy.bench.alone import Answered, Machine, answer_alone
from deepinfer.deploy.bench.deterministic import (
    Mode,
    Plan,
    Stream,
    difference,
    make_requests,
    moves,
    run_deterministic,
)
from deepinfer.deploy.bench.deterministic_report import figures, others, portion
from deepinfer.deploy.config import ConfigError
from deepinfer.deploy.watch import Watched
from support.tiny_model import write_tiny_llama

CHOICE = Choice(
    index=0,
    text="",
    token_ids=(1, 2, 3),
    finish_reason="length",
    message="",
    matched_stop=None,
    logprobs=(),
    usage=Usage(prompt_tokens=1, completion_tokens=3),
    swaps=SwapStats(),
    timings=Timings(
        ttft_s=None,
        intervals_s=(),
        total_s=0.0,
        reconnects=0,
        gateway_ttft_s=None,
        gateway_tpot_s=None,
    ),
)


def test_what_differs_is_named() -> None:
    assert difference(CHOICE, Answered((1, 2, 3))) == ""
    assert difference(CHOICE, Answered((1, 7, 3))) == "token 1 of 3"
    assert difference(CHOICE, Answered((1, 2, 3, 4))) == "token 3 of 4"
    assert difference(CHOICE, Answered((1, 2, 3), (0.5,))) == "log-probabilities"
    broken = replace(CHOICE, finish_reason="error", message="gone")
    assert difference(broken, Answered((1, 2, 3))) == "ended by error: gone"


def test_one_stream_that_differs_is_enough() -> None:
    def found(*streams: Stream) -> bool:
        modes = [Mode(True, list(streams)), Mode(False)]
        found = figures([portion(Plan(), modes, [], complete=True)])
        return bool(found["as_it_should_be"])

    good = Stream(0, identical=True, numbers=False)
    assert found(good)
    assert not found(good, Stream(0, identical=False, numbers=False, wrong="token 1 of 3"))
    assert not found()


def test_portions_of_other_seeds_are_counted_and_the_same_seed_replaced(tmp_path: Path) -> None:
    def run(seed: int, *, good: bool) -> dict[str, Any]:
        modes = [Mode(True, [Stream(0, identical=good, numbers=False)], kills=2), Mode(False)]
        return portion(Plan(seed=seed), modes, [], complete=True)

    file, subject = tmp_path / "r.json", {"model": "m", "kv_cache_dtype": "fp16"}
    assert others(file, subject, 1) == []
    file.write_text(json.dumps(subject | figures([run(0, good=True), run(1, good=False)])))
    kept = others(file, subject, 1)
    assert [each["plan"]["seed"] for each in kept] == [0]
    found = figures([*kept, run(1, good=True)])
    assert found["deterministic"]["streams"] == found["deterministic"]["identical"] == 2
    assert found["deterministic"]["worker_kills"] == 4
    assert found["as_it_should_be"]
    assert not figures([*kept, run(1, good=False)])["as_it_should_be"]
    with pytest.raises(ConfigError, match="is of kv_cache_dtype = 'fp16', not 'int8'"):
        others(file, subject | {"kv_cache_dtype": "int8"}, 1)
    file.write_text("[]")
    with pytest.raises(ConfigError, match=r"r\.json is no result of this bench"):
        others(file, subject, 1)


def test_a_move_is_a_resume_somewhere_else() -> None:
    def notice(kind: str, worker: str) -> Notice:
        return Notice(
            kind=kind, choice=0, worker=worker, store="", blocks=1, payload_bytes=1, copy_s=0.0
        )

    seen = Watched("", notices=[notice("placed", "a"), notice("swapped_out", "a")])
    seen.notices += [notice("resumed", "b"), notice("swapped_out", "b"), notice("resumed", "b")]
    assert moves(seen) == 1


@pytest.mark.slow
def test_answers_do_not_depend_on_the_mode_or_on_who_computes_them(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "m")
    asked = make_requests(model, Plan(requests=5))

    def alone(deterministic: bool, processes: int) -> list[Answered]:
        machine = Machine(
            model=model,
            kv_cache_dtype="fp16",
            block_size=16,
            device="cpu",
            deterministic=deterministic,
        )
        return answer_alone(machine, asked, processes)

    assert alone(True, 2) == (found := alone(False, 1))
    assert [len(each.token_ids) for each in found] == [a.sampling["max_tokens"] for a in asked]
    assert [bool(each.logprobs) for each in found] == [False, False, False, True, False]


@pytest.mark.slow
def test_a_short_run_with_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(deterministic, "ORDINARY_SHARE", 10)
    model = write_tiny_llama(tmp_path / "m")
    plan = Plan(streams=40, requests=12, rounds=1, kills=1)
    assert run_deterministic(
        model=str(model), plan=plan, output=tmp_path, console=Console(quiet=True)
    )
    found = json.loads((tmp_path / "deterministic.json").read_text())
    assert found["deterministic"]["identical"] == found["deterministic"]["streams"] == 40
    assert found["deterministic"]["worker_kills"] == 1
    assert found["deterministic"]["swaps"] > 0
    assert found["ordinary"]["streams"] == 4
    assert set(found["tokens_per_second"]) == {"prompts", "decode_1", "decode_8", "decode_32"}


def test_the_last_worker_is_not_killed() -> None:
    with pytest.raises(ConfigError, match="workers = 1: must be 2 or more with kills"):
        Plan(workers=1)
