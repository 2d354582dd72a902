"""What `bench soak`, `cancels` and `overload` make of what they have seen; no cluster here."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepinfer.deploy.bench import cancels_report, overload_report, soak, soak_report
from deepinfer.deploy.bench.cancels import Cancel
from deepinfer.deploy.bench.cancels import Seen as SeenCancels
from deepinfer.deploy.bench.footprints import Held, held_by, held_by_all
from deepinfer.deploy.bench.holdings import counts, held, lives
from deepinfer.deploy.bench.known import Heard
from deepinfer.deploy.bench.overload import Level
from deepinfer.deploy.bench.overload import Plan as OverloadPlan
from deepinfer.deploy.bench.overload import Sample as OverloadSample
from deepinfer.deploy.bench.overload import Seen as SeenOverload
from deepinfer.deploy.bench.soak import Plan, Sample, Soak
from deepinfer.deploy.config import ConfigError

MIB = 2**20
PROCESS = Held(
    rss_bytes=100 * MIB,
    pss_bytes=80 * MIB,
    anon_bytes=60 * MIB,
    pinned_bytes=0,
    memfd_bytes=16 * MIB,
    fds=50,
    threads=30,
    cpu_s=1.0,
)
FREE: dict[str, Any] = {
    "epoch": 3,
    "workers": {
        "worker-0": {
            "state": "serving",
            "incarnation": 5,
            "blocks_free": 9,
            "blocks_total": 9,
            "residents": 0,
        }
    },
    "stores": {"store-0": {"incarnation": 6, "used_bytes": 0, "tickets": 0}},
    "gateways": {"gateway-0": {"incarnation": 7}},
    "sequences": [],
    "gateway": {"name": "gateway-0", "live_requests": 0, "kept_requests": 4, "streams": 0},
}


def test_a_stream_is_held_against_the_right_ids() -> None:
    heard = Heard((1, 2, 3, 4))
    heard.hear(0, (1, 2))
    heard.hear(2, (3,))
    assert (heard.tokens, heard.wrong) == (3, "")
    heard.end(4)
    assert heard.wrong == "3 tokens at the end: 4 are right"
    for position, ids in ((1, (2,)), (0, (2,)), (0, (1, 2, 3, 4, 5))):
        other = Heard((1, 2, 3, 4))
        other.hear(position, ids)
        assert other.wrong
    doubled = Heard((1, 2))
    doubled.hear(0, (1,))
    doubled.hear(0, (1,))
    assert doubled.wrong == "position 0 after 1 tokens"


def test_nothing_is_held_only_if_nobody_holds_anything() -> None:
    assert held(FREE) == []
    assert counts(FREE)["gateway_kept"] == 4
    assert lives(FREE) == {"controller": 3, "worker-0": 5, "store-0": 6, "gateway-0": 7}
    worker, store = FREE["workers"]["worker-0"], FREE["stores"]["store-0"]
    changes: tuple[dict[str, Any], ...] = (
        {"workers": {"worker-0": {**worker, "blocks_free": 8}}},
        {"workers": {"worker-0": {**worker, "residents": 1}}},
        {"stores": {"store-0": {**store, "used_bytes": 1}}},
        {"stores": {"store-0": {**store, "tickets": 1}}},
        {"sequences": [{}]},
        {"gateway": {**FREE["gateway"], "live_requests": 1}},
        {"gateway": {**FREE["gateway"], "streams": 1}},
    )
    for change in changes:
        assert len(held({**FREE, **change})) == 1, change
    gone = {**worker, "blocks_free": 0, "state": "gone"}
    assert held({**FREE, "workers": {"worker-0": gone}}) == []


def test_what_a_process_holds_is_read_from_proc() -> None:
    before = held_by(os.getpid())
    assert before is not None
    fd = os.memfd_create("test")
    try:
        os.write(fd, b"x" * MIB)
        with_it = held_by_all(os.getpid(), {})["launcher"]
    finally:
        os.close(fd)
    assert with_it.fds == before.fds + 1
    assert with_it.memfd_bytes == before.memfd_bytes + MIB
    assert with_it.rss_bytes > with_it.anon_bytes > 0
    assert with_it.threads >= 1
    assert held_by(2**22 + 1) is None  # above any process id there can be


def soaked(**growth: float) -> Soak:
    """A soak of an hour in which the worker's figures grow by so much."""
    seconds = 3600
    found = Soak(plan=Plan(seconds=seconds), model=Path("tiny"), pool_blocks=9)
    for at in range(0, seconds + 1, 30):
        grown = {name: getattr(PROCESS, name) + int(at / 3600 * by) for name, by in growth.items()}
        processes = {"worker-0": replace(PROCESS, **grown), "gateway-0": PROCESS}
        processes["ray: raylet"] = replace(PROCESS, rss_bytes=PROCESS.rss_bytes + at * 100_000)
        found.samples.append(Sample(float(at), processes, counts(FREE), round(1.2 * at)))
    found.tally.swaps = round(1.2 * seconds)
    found.tally.streams["end"] = 9
    found.seconds, found.complete = float(seconds), True
    found.quiet_s = [0.01, 0.2]
    return found


def test_a_soak_is_as_it_should_be_if_nothing_of_ours_grows(tmp_path: Path) -> None:
    found = soak_report.figures(soaked())
    assert found["as_it_should_be"]
    assert (found["grown"], found["swaps_per_s"]) == ([], 1.2)
    assert found["swaps_per_s_least_of_5_minutes"] == pytest.approx(1.2, abs=0.01)
    assert found["grown_of_ray"] == ["ray: raylet rss_mib"]
    soak_report.plot(soaked(), tmp_path / "soak.png")
    assert (tmp_path / "soak.png").stat().st_size > 10_000
    assert soak_report.table(found).row_count == 3
    assert "nothing grew" in soak_report.sentence(found)


@pytest.mark.parametrize(
    ("figure", "by", "named"),
    [
        ("fds", 3.0, "worker-0 fds"),
        ("threads", 3.0, "worker-0 threads"),
        ("anon_bytes", 5.0 * MIB, "worker-0 anon_mib"),
        ("memfd_bytes", 5.0 * MIB, "worker-0 memfd_mib"),
        ("pinned_bytes", 5.0 * MIB, "worker-0 pinned_mib"),
    ],
)
def test_a_soak_finds_what_grows(figure: str, by: float, named: str) -> None:
    found = soak_report.figures(soaked(**{figure: by}))
    assert found["grown"] == [named]
    assert not found["as_it_should_be"]
    assert named in soak_report.sentence(found)


@pytest.mark.parametrize("fault", ["wrong", "failed", "leak", "restart", "no swap", "cut short"])
def test_a_soak_is_not_as_it_should_be_with_a_single_fault(fault: str) -> None:
    found = soaked()
    match fault:
        case "wrong":
            found.tally.wrong = 1
        case "failed":
            found.tally.failed = 1
        case "leak":
            found.leaks.append("after 30 s: worker-0: 1 blocks, 0 requests")
        case "restart":
            found.restarts.append("worker-0")
        case "no swap":
            found.tally.swaps = 0
        case _:
            found.complete = False
    assert not soak_report.figures(found)["as_it_should_be"]


def test_plans_refuse_what_cannot_be_measured() -> None:
    with pytest.raises(ConfigError, match="burst = 1: must be 2 or more"):
        Plan(burst=1)
    with pytest.raises(ConfigError, match="swaps_per_s = -1: must be 0 or more"):
        Plan(swaps_per_s=-1)
    with pytest.raises(ConfigError, match=r"factor = 0.5: must be 1 or more"):
        OverloadPlan(factor=0.5)
    assert soak.config_for(Path("tiny"), Plan()).max_cache == "16 blocks"


def test_cancels_count_by_the_state_they_met(tmp_path: Path) -> None:
    seen = SeenCancels()
    for state, free_s in (("waiting", 0.1), ("swapping_out", 0.3), ("swapping_out", 0.5)):
        seen.cancels.append(Cancel(state=state, aim="random", place="mid_copy", free_s=free_s))
    found = cancels_report.figures(seen, "tiny", 9, 3)
    assert found["as_it_should_be"]
    assert found["free_within_a_second"] == 3
    assert found["by_state"]["swapping_out"]["cancels"] == 2
    assert found["by_state"]["swapping_out"]["max"] == 0.5
    assert found["in_transit_by_place"] == {"swapping_out at mid_copy": 2}
    cancels_report.plot(seen, tmp_path / "cancels.png")
    assert (tmp_path / "cancels.png").stat().st_size > 5_000
    assert cancels_report.table(found).row_count == 2
    assert not cancels_report.figures(seen, "tiny", 9, 4)["as_it_should_be"]
    for late_s in (1.1, None):
        seen.cancels.append(replace(seen.cancels[0], free_s=late_s))
        found = cancels_report.figures(seen, "tiny", 9, 3)
        assert (found["as_it_should_be"], found["free_within_a_second"]) == (False, 3)
        seen.cancels.pop()


CLIENT: dict[str, Any] = {
    "sent": 3000,
    "late": 0,
    "accepted": 320,
    "complete": 300,
    "tokens": 9000,
    "wrong": [],
    "wrong_count": 0,
    "refused": {"RESOURCE_EXHAUSTED: max_live_requests": 2700},
    "refused_s": [0.001, 0.002],
    "ttft_s": [1.0, 2.0],
    "unread": 10,
}


def overloaded() -> SeenOverload:
    plan = OverloadPlan(seconds=100)
    seen = SeenOverload(plan=plan, model=Path("tiny"), rate=30.0, clients=[dict(CLIENT)])
    seen.levels = [Level(8, 80.0, 2.0, {}), Level(16, 100.0, 3.0, {"worker-0": 0.9})]
    seen.before = {"worker-0": PROCESS}
    for at in range(0, 100, 2):
        processes = {"worker-0": replace(PROCESS, cpu_s=0.9 * at), "ray: raylet": PROCESS}
        seen.samples.append(OverloadSample(float(at), 95 * at, 3 * at, 100, 200, 120, processes))
    return seen


def test_an_overload_is_as_it_should_be(tmp_path: Path) -> None:
    seen = overloaded()
    found = overload_report.figures(seen, 9)
    assert found["as_it_should_be"], found
    assert (found["best_tokens_per_s"], found["tokens_per_s"]) == (100.0, 95.0)
    assert (found["share_of_the_best"], found["times_the_best"]) == (0.95, 10.0)
    assert found["cores_overloaded"] == {"worker-0": 0.9}
    assert list(found["memory"]) == ["worker-0"]
    overload_report.plot(seen, tmp_path / "overload.png")
    assert (tmp_path / "overload.png").stat().st_size > 10_000
    assert overload_report.table(found).row_count == 1
    assert "95 of 100 tokens/s (95 %)" in overload_report.sentence(found)


@pytest.mark.parametrize(
    "fault", ["slow", "stall", "memory", "status", "held", "restart", "wrong", "no refusal"]
)
def test_an_overload_is_not_as_it_should_be_with_a_single_fault(fault: str) -> None:
    seen = overloaded()
    match fault:
        case "slow":
            seen.levels.append(Level(32, 120.0, 3.0, {}))
        case "stall":
            seen.samples[20:] = [replace(s, tokens=s.tokens + 500) for s in seen.samples[20:]]
            for i in range(21, 28):
                seen.samples[i] = replace(seen.samples[i], tokens=seen.samples[20].tokens)
        case "memory":
            for i, sample in enumerate(seen.samples):
                more = replace(PROCESS, rss_bytes=PROCESS.rss_bytes + i * MIB)
                seen.samples[i] = replace(sample, processes={"worker-0": more})
        case "status":
            seen.clients[0]["refused"] = {**CLIENT["refused"], "UNAVAILABLE: socket closed": 1}
        case "held":
            seen.left.append("worker-0: 1 blocks, 0 requests")
        case "restart":
            seen.restarts.append("worker-0")
        case "wrong":
            seen.after = "the request after it: 3 tokens at the end: 4 are right"
        case _:
            seen.clients[0]["refused"] = {}
    assert not overload_report.figures(seen, 9)["as_it_should_be"]
