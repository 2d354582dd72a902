"""What ``bench stops`` counts, and that it goes on where it was cut short."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deepinfer.deploy.bench import stops
from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.bench.stops import Plan, Trial, figures, wrong
from deepinfer.deploy.bench.stops_load import Book
from deepinfer.deploy.errors import LaunchError

PLAN = Plan(
    model="/somewhere/model.gguf", times=3, rolling=1, grace_s=20.0, streams=6, max_tokens=64,
    blocks=16, seed=0,
)  # fmt: skip


def trial(number: int, **seen: object) -> Trial:
    book = Book(finished=6, tokens=300, swaps=1).figures()
    made = Trial(number, ended=True, stopping=book, running=6, stop_s=3.0 + number, exit_code=0)
    for name, value in seen.items():
        setattr(made, name, value)
    return made


def test_what_is_as_promised_is_not_wrong() -> None:
    rolled = trial(0, restarted={"worker-0": 9.0, "gateway-0": 4.0}, rolling=Book(50).figures())
    found = figures(PLAN, [rolled, trial(1)])
    assert (found["trials"], found["wrong"], found["troubles"]) == (2, 0, [])
    assert (found["stops"]["stops"], found["stops"]["in_grace"]) == (2, 2)
    assert (found["stops"]["finished"], found["stops"]["stop_max_s"]) == (12, 4.0)
    assert (found["rolling"]["rolling_restarts"], found["rolling"]["processes"]) == (1, 2)
    assert (found["rolling"]["finished"], found["rolling"]["worker_max_s"]) == (50, 9.0)
    assert found["plan"]["model"] == "model.gguf"


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        ({"exit_code": -9}, "exit code -9"),
        ({"stop_s": 20.5}, "stopped after 20.5 s, grace 20 s"),
        ({"left": ("raylet",)}, "left: raylet"),
        ({"stopping": Book(failed=["lost"]).figures()}, "stopping: lost"),
        ({"rolling": Book(changed=2).figures()}, "rolling: 2 answers are others"),
        ({"rolling": Book(refused=["Unavailable"]).figures()}, "rolling: refused: Unavailable"),
        ({"ended": False, "trouble": "LaunchError: no\nlog"}, "LaunchError: no"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_what_is_not_is(seen: dict[str, object], said: str) -> None:
    assert wrong(PLAN, trial(7, **seen)) == [said]
    assert figures(PLAN, [trial(7, **seen)])["wrong"] == 1


def test_a_result_is_gone_on_with_if_it_is_of_the_same_plan(tmp_path: Path) -> None:
    path = tmp_path / "stops.json"
    assert stops._read(path, PLAN) == []
    kept, again = trial(0, left=("a",)), trial(1, ended=False, trouble="no")
    write_result(path, "test", figures(PLAN, [kept, again]))
    assert stops._read(path, replace(PLAN, model="/elsewhere/model.gguf")) == [kept]
    with pytest.raises(LaunchError, match="is of another plan"):
        stops._read(path, replace(PLAN, grace_s=5.0))
