"""A failing case is cut down to what it takes, and still fails from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer.deploy.sim import command
from deepinfer.deploy.sim.case import Case, kind_of, load
from deepinfer.deploy.sim.checker import ViolationError
from deepinfer.deploy.sim.faults import Mishap
from deepinfer.deploy.sim.plan import draw
from deepinfer.deploy.sim.shrink import NoFailureError, _minimize, shrink
from deepinfer.deploy.sim.world import World

SEED = next(s for s in range(1000) if len(draw(s).strikes) > 20 and len(draw(s).stores) > 0)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any world fails in which a worker is killed and, at any time, a call is lost."""
    run = World.run

    def broken(world: World) -> None:
        run(world)
        lost = [mishap for mishap in world.weather.mishaps if mishap.kind == "lost"]
        if world.saboteur.struck["kill_worker"] and lost:
            raise ViolationError(f"{lost[0].source} lost {len(lost)} calls and w0 died")

    monkeypatch.setattr(World, "run", broken)


def failing_seed() -> int:
    for seed in range(2000):
        plan = draw(seed)
        if "kill_worker" in plan.faults and plan.weather.loss_share > 0.1 and plan.patient:
            try:
                Case(plan).world().run()
            except ViolationError:
                return seed
    raise AssertionError("no seed has both")


@pytest.mark.usefixtures("planted")
def test_only_what_it_takes_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed = failing_seed()
    path = tmp_path / "case.json"
    assert command.shrink_seed(seed, path) == 1
    left = load(path)
    strikes = [strike.name for strike in left.plan.strikes]
    assert "kill_worker" in strikes
    assert len(strikes) <= 4 < len(draw(seed).strikes)
    assert left.mishaps is not None
    assert [mishap.kind for mishap in left.mishaps] == ["lost"]
    assert len(left.plan.clients) <= 2
    told = capsys.readouterr().out
    assert "still fails with " in told
    assert f"replay: deepinfer simulate --replay {path}" in told
    assert command.replay(path) == 1
    assert "ViolationError: " in capsys.readouterr().out


def test_a_case_that_passes_has_nothing_to_shrink() -> None:
    with pytest.raises(NoFailureError, match="the case passes"):
        shrink(Case(draw(3)))


def test_a_file_holds_everything(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    for mishaps in (
        None,
        frozenset({Mishap("w0", "s0", 3, "lost"), Mishap("k1", "w0", 1, "late")}),
    ):
        case = Case(draw(SEED), mishaps)
        case.save(path)
        assert load(path) == case


def test_without_its_mishaps_a_run_goes_another_way() -> None:
    seed = next(s for s in range(1000) if draw(s).weather.loss_share > 0.2)
    whole = Case(draw(seed)).world()
    whole.run()
    assert whole.weather.mishaps
    again = Case(draw(seed), frozenset(whole.weather.mishaps)).world()
    again.run()
    assert again.engine.acts == whole.engine.acts
    quiet = Case(draw(seed), frozenset()).world()
    quiet.run()
    assert quiet.weather.mishaps == []


@pytest.mark.parametrize(
    ("needed", "found"),
    [([], []), ([5], [5]), ([0, 19], [0, 19]), (list(range(20)), list(range(20)))],
)
def test_delta_debugging_finds_what_is_needed(needed: list[int], found: list[int]) -> None:
    assert _minimize(range(20), lambda some: set(needed) <= set(some)) == found


def test_kinds_forget_names_and_numbers() -> None:
    first = ViolationError("c3: Seq(request='g0.1-2', choice=0) got position 7 when 4 was due")
    other = ViolationError("c1: Seq(request='g1.3-1', choice=1) got position 2 when 1 was due")
    assert (
        kind_of(first) == kind_of(other) == "ViolationError: _: Seq_ got position _ when _ was due"
    )
