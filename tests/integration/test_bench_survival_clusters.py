"""`bench soak`, `cancels` and `overload` end to end, each for some seconds on its own cluster."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deepinfer.deploy.bench.cancels import run_cancels
from deepinfer.deploy.bench.overload import Plan as OverloadPlan
from deepinfer.deploy.bench.overload import run_overload
from deepinfer.deploy.bench.soak import Plan, run_soak
from support.tiny_model import write_tiny_llama

pytest.importorskip("matplotlib")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_tiny_llama(tmp_path / "tiny", seed=5))


def written(folder: Path, name: str) -> Any:
    assert (folder / f"{name}.png").stat().st_size > 1000
    found = json.loads((folder / f"{name}.json").read_text())
    assert found["command"].startswith(f"deepinfer bench {name} ")
    return found


def test_a_short_soak(model: str, tmp_path: Path) -> None:
    plan = Plan(seconds=12, swaps_per_s=0, every_s=1)
    run_soak(model=model, plan=plan, output=tmp_path, console=Console(quiet=True))
    found = written(tmp_path, "soak")  # in so short a time something may still fill up
    assert found["complete"]
    assert found["streams_wrong"] == found["streams_failed"] == 0, found["faults"]
    assert found["swaps"] > 10
    assert found["looks_when_idle"] >= 1
    assert not found["not_free_when_idle"]
    assert set(found["streams"]) == {"end", "stop", "cancel", "early", "slow"}
    assert {"worker-0", "gateway-0", "controller", "store-local", "records"} <= set(found["trends"])


def test_a_soak_that_is_told_to_stop_writes_its_result(model: str, tmp_path: Path) -> None:
    program = "from deepinfer.deploy.cli import main; main()"
    asked = ["bench", "soak", "--model", model, "--every", "1", "--output", str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-c", program, *asked], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while "worker-0" not in children(process.pid):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(8)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    found = written(tmp_path, "soak")
    assert found["stopped_by_a_signal"]
    assert found["complete"]
    assert found["bursts"] > 0


def children(root: int) -> set[str]:
    """Actors that run below a process."""
    from deepinfer.deploy.bench.memory import descendants

    found = set()
    for pid in descendants(root):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if words.startswith("ray::WorkerActor"):
            found.add("worker-0")
    return found


def test_a_few_cancels(model: str, tmp_path: Path) -> None:
    ok = run_cancels(model=model, cancels=60, seed=1, output=tmp_path, console=Console(quiet=True))
    found = written(tmp_path, "cancels")
    assert ok, found
    assert found["free_within_a_second"] == found["cancels"] == 60
    assert {"waiting", "decode"} <= set(found["by_state"])


def test_a_short_overload(model: str, tmp_path: Path) -> None:
    plan = OverloadPlan(
        seconds=8, levels=(4,), best_seconds=3, processes=1, max_live_requests=32, every_s=1
    )
    run_overload(model=model, plan=plan, output=tmp_path, console=Console(quiet=True))
    found = written(tmp_path, "overload")  # how fast is nobody's business here
    assert found["live_requests_max"] <= 32
    assert set(found["refused"]) <= {
        "RESOURCE_EXHAUSTED: max_live_requests",
        "RESOURCE_EXHAUSTED: max_streams",
    }
    assert found["refused"]
    assert found["clients"]["complete"] > 0
    assert found["clients"]["wrong_count"] == 0
    assert not found["held_when_it_was_over"]
    assert not found["wrong_after"]
