"""Campaigns without a cluster: what is asked for, what is kept, what is told of it."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deepinfer.deploy.chaos.campaign import Campaign, Runner, tight_blocks
from deepinfer.deploy.chaos.history import Faults
from deepinfer.deploy.chaos.journal import Journal
from deepinfer.deploy.chaos.load import questions
from deepinfer.deploy.chaos.nodes import descendants
from deepinfer.deploy.chaos.points import KINDS, TARGETS, points_of
from deepinfer.deploy.chaos.report import summary, typical, verdict
from deepinfer.deploy.chaos.rows import Others, Trial
from deepinfer.deploy.chaos.run import figures_of, run_chaos
from deepinfer.deploy.chaos.site import Site, is_back, is_gone, lives_of
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig, ConfigError
from deepinfer.deploy.oracle import Answer

TRIAL = Trial(
    number=3,
    job=1,
    target="worker",
    point="mid_copy",
    path="memfd",
    victim="worker-1",
    parked_s=0.25,
    loads=1,
    streams=5,
    on_victim=2,
    tokens=160,
    faults=Faults(),
    recovered_s=(0.5, 0.75),
    detected_s=0.16,
    paused_s=0.75,
    settled_s=2.0,
    restarted_s=5.0,
    others=Others(before_s=0.02, after_s=0.03, longest_s=0.1),
    swaps=4,
    timeline=(((-20, "placed"), (5, ".")), ()),
)


def test_every_target_has_points() -> None:
    assert all(points_of(target, "any") == KINDS[target].places for target in TARGETS)
    assert points_of("store", "mid_put") == ("mid_put",)
    with pytest.raises(ConfigError, match="'mid_put': of a worker must be any, mid_prefill"):
        points_of("worker", "mid_put")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": "store", "point": "mid_copy"}, "of a store must be any, after_reserve"),
        ({"target": "worker", "path": "tcp"}, "path = 'tcp': must be memfd or grpc"),
        ({"target": "node"}, "must be grpc for nodes"),
        ({"target": "node", "path": "grpc", "workers": 1}, "must be 2 or more to kill a node"),
        ({"target": "gateway", "point": "mid_resume", "gateways": 1}, "must be 2 or more"),
        ({"target": "worker", "pauses_s": (3.0, 0.0)}, "must be above 0"),
        (
            {"target": "controller", "point": "mid_recovery", "pauses_s": (1.0,)},
            "must be killed, not paused",
        ),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Campaign(**given)


def test_points_come_in_turn_and_nobody_is_paused_where_he_must_be_killed() -> None:
    campaign = Campaign(target="controller")
    assert [campaign.place(n) for n in range(5)] == [
        "before_order",
        "after_order",
        "before_store_call",
        "mid_recovery",
        "before_order",
    ]
    paused = Campaign(target="controller", pauses_s=(1.0,))
    assert "mid_recovery" not in paused.points


def test_the_command_names_no_folder_of_this_machine() -> None:
    campaign = Campaign(target="worker", model="/somewhere/m.gguf", pauses_s=(1.0, 12.0))
    command = campaign.command(Path("/elsewhere/chaos.json"))
    assert "/" not in command
    assert "--model m.gguf" in command
    assert "--pause 1,12" in command
    assert "deterministic" not in command
    assert "--deterministic" in replace(campaign, deterministic=True).command(Path("x"))


def test_two_requests_do_not_fit_in_a_tight_pool() -> None:
    answers = [Answer(prompt_ids=(0,) * n, token_ids=()) for n in (16, 48)]
    assert tight_blocks(answers, 32) == 6
    asked = questions(8, 32, 100)
    assert all(16 <= len(q.prompt) <= 48 for q in asked)
    assert asked == questions(8, 32, 100)


def test_a_trial_survives_its_line() -> None:
    import json

    assert Trial.from_dict(json.loads(TRIAL.to_json())) == TRIAL
    wrong = replace(TRIAL, faults=Faults(lost=2), left_over=("worker-0 has 5 of 6 blocks free",))
    assert Trial.from_dict(json.loads(wrong.to_json())) == wrong


def test_a_journal_goes_on_behind_a_torn_line(tmp_path: Path) -> None:
    path, header = tmp_path / "a" / "chaos.trials.jsonl", Campaign(target="worker").header()
    journal = Journal.open(path, header)
    journal.add(TRIAL)
    journal.miss(0, "nobody parked")
    journal.add(replace(TRIAL, number=1, counted=False, errors=("Unavailable: gone",)))
    with path.open("a") as file:
        file.write('{"number":2,"coun')
    again = Journal.open(path, header)
    assert again.trials == journal.trials
    assert again.missed == 1
    assert again.left(5) == [0, 1, 2, 4]
    again.add(replace(TRIAL, number=2))
    assert Journal.open(path, header).left(5) == [0, 1, 4]
    with pytest.raises(ConfigError, match=r"seed was 0 and is 1.*name another --output"):
        Journal.open(path, header | {"seed": 1})


@pytest.mark.parametrize("text", ["no journal\n", "[]\n"])
def test_another_file_is_no_journal(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.trials.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"journal|header"):
        Journal.open(path, {"seed": 0})


def test_figures_count_every_fault_and_only_trials_that_parked() -> None:
    unparked = replace(TRIAL, number=9, counted=False, kills=0, faults=Faults(changed=1))
    leaking = replace(TRIAL, number=4, left_over=("sequences are known: x",), recovered_s=(3.0,))
    right = summary([TRIAL], 0)
    assert right["bound_95"] == 1.0
    assert right["all"]["recovered_s"]["max"] == 0.75
    assert right["all"]["others_ratio"]["p50"] == pytest.approx(1.5)
    assert right["by_point"].keys() == {"mid_copy"}
    assert right["aims"] == [], "the pools were tight"
    [median, worst, seen] = summary([replace(TRIAL, roomy=True)], 0)["aims"]
    assert (median["at_most_s"], median["reached_s"]) == (1.0, 0.625)
    assert (worst["of"], worst["reached_s"]) == ("p99", pytest.approx(0.7475))
    assert seen["figure"] == "detected_s"
    assert "0 lost" in verdict(right)
    found = summary([TRIAL, unparked, leaking], 2)
    assert found["trials"] == found["kills"] == 2
    assert found["void"] == 2
    assert found["faults"]["changed"] == 1
    assert found["faults"]["leaks"] == 1
    assert found["wrong_trials"] == [9, 4]
    assert found["bound_95"] is None
    assert summary([replace(TRIAL, number=n) for n in range(300)], 0)["bound_95"] == 0.01


def test_a_finished_campaign_is_only_drawn(tmp_path: Path) -> None:
    output = tmp_path / "chaos.json"
    campaign = Campaign(target="worker", kills=1, model="m")
    journal = Journal.open(output.with_suffix(".trials.jsonl"), campaign.header())
    journal.add(replace(TRIAL, number=0))
    said = io.StringIO()
    output.write_text("measured elsewhere")
    assert run_chaos(campaign, output, Console(file=said, width=120))
    assert output.read_text() == "measured elsewhere"
    assert output.with_suffix(".png").exists()
    assert "1 trials (0 void), 5 streams, 160 tokens: 0 lost" in said.getvalue()
    journal.add(replace(TRIAL, number=1, counted=False, faults=Faults(lost=1)))
    assert not run_chaos(campaign, output, Console(file=said, width=120)), "a token was lost"


def test_the_figures_name_what_was_run_and_every_trial(tmp_path: Path) -> None:
    campaign = Campaign(target="worker", kills=3, jobs=2)
    journal = Journal.open(tmp_path / "x.trials.jsonl", campaign.header())
    journal.add(TRIAL)
    runner = Runner(campaign, journal, tmp_path, 256, tmp_path, print, starts_s=[9.0])
    found = figures_of(runner)
    assert found["campaign"]["kills"] == 3
    assert found["starts_s"] == [9.0]
    assert found["typical"]["timeline"] == [[[-20, "placed"], [5, "."]], None]
    [row] = found["rows"]
    assert row["recovered_s"] == [0.5, 0.75]
    assert row["victim"] == "worker-1"
    assert not row.keys() & {"timeline", "faults", "left_over", "target"}


def test_the_typical_trial_is_the_median_of_those_that_moved_someone() -> None:
    slow, slower = (replace(TRIAL, number=n, recovered_s=(float(n),)) for n in (5, 6))
    still = replace(TRIAL, number=1, recovered_s=())
    assert typical([slower, still, slow, TRIAL]) == slow
    assert typical([still]) == still
    assert typical([]) is None


def status(**changes: Any) -> dict[str, Any]:
    """Of a cluster in which all is well."""
    worker = {
        "state": "serving",
        "incarnation": 10,
        "blocks_free": 6,
        "blocks_total": 6,
        "residents": 0,
    }
    return {
        "epoch": 100,
        "ready": True,
        "all_reported": True,
        "workers": {"worker-0": worker, "worker-1": worker | {"incarnation": 11}},
        "stores": {
            "store-local": {"alive": True, "incarnation": 12, "used_bytes": 0, "tickets": 0}
        },
        "gateways": {"gateway-0": {"alive": True, "incarnation": 13}},
        "sequences": [],
    } | changes


def changed(kind: str, name: str, **values: Any) -> dict[str, Any]:
    found = status()
    found[kind] = found[kind] | {name: found[kind][name] | values}
    return found


NAMES = ("controller", "worker-0", "worker-1", "store-local", "gateway-0")


def test_lives_are_those_of_the_status() -> None:
    lives = lives_of(status(), [*NAMES, "worker-7"])
    assert lives == dict(zip(NAMES, (100, 10, 11, 12, 13), strict=True))


@pytest.mark.parametrize(
    ("found", "lives", "gone", "back"),
    [
        (status(), {"worker-0": 10}, False, False),
        (changed("workers", "worker-0", state="suspected"), {"worker-0": 10}, True, False),
        (changed("workers", "worker-0", state="gone"), {"worker-0": 10}, True, False),
        (changed("workers", "worker-0", incarnation=20), {"worker-0": 10}, True, True),
        (status(workers={}), {"worker-0": 10}, True, False),
        (changed("stores", "store-local", alive=False), {"store-local": 12}, True, False),
        (changed("gateways", "gateway-0", incarnation=14), {"gateway-0": 13}, True, True),
        (status(), {"controller": 100}, False, False),
        (status(), {"controller": 99}, True, True),
        (status(ready=False), {"controller": 99}, True, False),
    ],
)
def test_who_is_gone_and_who_is_back(
    found: Mapping[str, Any], lives: dict[str, int], gone: bool, back: bool
) -> None:
    assert is_gone(found, lives) == gone
    assert is_back(found, lives) == back


@pytest.mark.parametrize(
    ("found", "lives", "left"),
    [
        (status(), {}, []),
        (changed("workers", "worker-0", blocks_free=5), {}, ["worker-0 has 5 of 6 blocks free"]),
        (changed("workers", "worker-0", state="gone"), {}, ["worker-0 is gone"]),
        (changed("workers", "worker-0", state="gone"), {"worker-0": 10}, []),
        (changed("stores", "store-local", used_bytes=9), {}, ["store-local holds 9 bytes"]),
        (changed("stores", "store-local", tickets=1), {}, ["store-local holds 0 bytes, 1 tick"]),
        (
            status(sequences=[{"request": "r", "state": "SWAPPED"}]),
            {},
            ["sequences are known: r SWAPPED"],
        ),
        (status(), {"controller": 100}, ["the controller is the old one"]),
    ],
)
def test_whatever_is_held_is_found(
    tmp_path: Path, found: Mapping[str, Any], lives: dict[str, int], left: list[str]
) -> None:
    site = Site(Cluster(ClusterConfig()), tmp_path)
    said = list(site.left_over(found, lives))
    assert len(said) == len(left)
    assert all(a.startswith(b) for a, b in zip(said, left, strict=True))


def test_all_processes_below_one_are_found() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as child:
        try:
            deadline = time.monotonic() + 30
            while not (found := descendants(child.pid)):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert len(found) == 1
            assert child.pid not in found
        finally:
            child.communicate(b"\n")
