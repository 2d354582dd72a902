"""Many seeds: shared out, written down, resumed, stopped in time, and told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepinfer.deploy.cli import app
from deepinfer.deploy.sim import campaign as campaigns
from deepinfer.deploy.sim import simulate
from deepinfer.deploy.sim.campaign import Campaign, Progress, conduct, fingerprint
from deepinfer.deploy.sim.checker import ViolationError
from deepinfer.deploy.sim.world import World

FEW = 6


@pytest.fixture
def chunks_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaigns, "CHUNK", 2)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(world: World) -> None:
        world.start()
        world.engine.run_until(60)
        if world.plan.seed % 2:
            raise ViolationError(f"as planned for seed {world.plan.seed}")

    monkeypatch.setattr(World, "run", run)


def test_processes_find_what_one_finds() -> None:
    alone, _ = conduct(Campaign(seeds=FEW, start=40))
    shared, wall_s = conduct(Campaign(seeds=FEW, start=40, jobs=2))
    assert alone.tally == shared.tally
    assert shared.complete
    assert wall_s > 0


@pytest.mark.usefixtures("chunks_of_two")
def test_it_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    campaign = Campaign(seeds=FEW, start=40, progress=tmp_path / "folder" / "progress.json")

    def interrupt(progress: Progress) -> None:
        if progress.tally.seeds == 4:
            progress.save(1.5)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        conduct(campaign, watch=interrupt)
    seen: list[int] = []
    done, wall_s = conduct(campaign, watch=lambda progress: seen.append(progress.tally.seeds))
    assert seen == [4, 6]
    assert done.resumed
    assert done.parts == 2
    assert wall_s > 1.5
    assert done.tally == conduct(Campaign(seeds=FEW, start=40))[0].tally
    assert campaign.progress is not None
    assert not campaign.progress.exists(), "what has ended is not gone on with"


@pytest.mark.usefixtures("chunks_of_two")
def test_gaps_are_filled() -> None:
    progress = Progress(Campaign(seeds=10, start=5))
    for first in (7, 13):
        progress.add(first, simulate.Tally(seeds=2))
    progress.add(9, simulate.Tally(seeds=2))
    assert progress.done == [[7, 11], [13, 15]]
    assert list(progress.chunks()) == [(5, 2), (11, 2)]


@pytest.mark.usefixtures("chunks_of_two")
def test_it_stops_in_time_and_keeps_what_is_done(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    done, _ = conduct(Campaign(seeds=10_000, budget_s=0.001, progress=path))
    assert not done.complete
    assert json.loads(path.read_text())["tally"]["seeds"] == done.tally.seeds


def test_what_other_code_has_found_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = Campaign(seeds=100, budget_s=0.001, progress=tmp_path / "progress.json")
    conduct(campaign)
    assert Progress(campaign).resumed
    monkeypatch.setattr(campaigns, "fingerprint", lambda: "other")
    assert not Progress(campaign).resumed


def test_a_fingerprint_names_every_core() -> None:
    assert re.fullmatch("[0-9a-f]{32}", fingerprint())


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=re.escape(f"{path} is no progress of a simulation")):
        conduct(Campaign(seeds=1, progress=path))


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("seeds", 0, "1 or more"),
        ("start", -1, "0 or more"),
        ("jobs", 0, "1 or more"),
        ("failures_max", 0, "1 or more"),
        ("budget_s", 0.0, "positive"),
    ],
)
def test_bad_numbers_are_named(name: str, value: float, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"{name} = {value}: must be {allowed}"):
        Campaign(**{"seeds": 1, name: value})  # type: ignore[arg-type]


# ---- the command ----------------------------------------------------------------------------


@pytest.mark.usefixtures("broken")
def test_a_failing_seed_prints_its_replay(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    words = ["simulate", "--seeds", "3", "--start", "41", "--jobs", "1", "--output", str(output)]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 1
    assert "seed 41: ViolationError: as planned for seed 41" in told.output
    assert "deepinfer simulate --seeds 1 --start 43 --trace" in told.output
    assert "deepinfer simulate --seeds 1 --start 43 --shrink" in told.output
    assert "WorkerReport" in told.output, "the last events are shown"
    assert "3 seeds, 2 failed" in told.output
    result = json.loads(output.read_text())
    assert (result["seeds"], result["violations"]) == (3, 2)
    kinds = {failure["kind"] for failure in result["failures"]}
    assert kinds == {"ViolationError: as planned for seed _"}


@pytest.mark.usefixtures("broken")
def test_it_ends_with_so_many_failures() -> None:
    done, _ = conduct(Campaign(seeds=1000, failures_max=1))
    assert len(done.tally.failures) >= 1
    assert done.tally.seeds < 1000


def test_a_result_says_what_was_seen(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    words = ["simulate", "--seeds", "8", "--jobs", "1", "--coverage", "--output", str(output)]
    told = CliRunner().invoke(app, words)
    assert told.exit_code == 0, told.output
    assert re.search(r"\d  waiting -> prefill\n", told.output)
    result = json.loads(output.read_text())
    assert result["coverage"]["event"]["worker StepDone"] > 0
    assert result["seeds_asked"] == result["seeds"] == 8
    assert {"command", "date", "device", "versions"} <= set(result)


def test_a_trace_is_printed_and_named() -> None:
    told = CliRunner().invoke(app, ["simulate", "--start", "3", "--seeds", "1", "--trace"])
    assert told.exit_code == 0
    assert f"passed, trace {simulate.trace_digest(3)}" in told.output


@pytest.mark.parametrize("wrong", ["{", "{}", '{"plan": {"seeds": 3}, "mishaps": null}'])
def test_a_file_that_is_no_case_is_named(tmp_path: Path, wrong: str) -> None:
    path = tmp_path / "case.json"
    path.write_text(wrong)
    told = CliRunner().invoke(app, ["simulate", "--replay", str(path)])
    assert told.exit_code == 1
    assert "is no case of this version's simulator" in told.output.replace("\n", " ")
