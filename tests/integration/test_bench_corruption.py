"""`bench corruption`: every kind of damage is refused, and would be noticed if it were not."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from random import Random

import pytest
from rich.console import Console

from deepinfer.deploy.bench import corruption, damages
from deepinfer.deploy.bench.corruption import KINDS, Kind, run_corruption, run_trials
from deepinfer.deploy.bench.corruption_cluster import STRIDE, Slabs
from deepinfer.deploy.bench.corruptor import Armed
from deepinfer.workers.core.events import REFUSALS
from deepinfer.workers.swap import KvIdentity
from support.tiny_model import write_tiny_llama


def test_nothing_damaged_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corruption, "LONG_EVERY", 100)
    tally = run_trials(7, 400)
    assert (tally.used, tally.lost) == ([], [])
    assert tally.refused.total() == 400
    assert tally.controls >= 10
    kinds = {name.rpartition(", ")[0] for name in tally.refused}
    assert len(kinds) > 0.9 * len(KINDS)
    reasons = {name for name in tally.reasons if not name.startswith("put: ")}
    assert {"bytes", "run", "model", "layout", "dtype", "precision"} <= reasons
    assert reasons <= {*REFUSALS, "unreachable", "bad_payload"}


def test_a_reader_that_believes_everything_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the worker's own look at the manifest foreign payloads would be used."""
    monkeypatch.setattr(KvIdentity, "refusal", lambda *_: None)
    monkeypatch.setattr(corruption, "KINDS", tuple(k for k in KINDS if k.name.startswith("of ")))
    tally = run_trials(3, 12)
    assert tally.refused.total() == 0
    assert len(tally.used) == 12


def test_damage_that_changes_nothing_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    chances = iter([True] * 5 + [False] * 100)

    def arm(_: object, chance: Random) -> Armed:
        idle = next(chances)
        return Armed(chance, at_rest=(lambda *_: None) if idle else damages.flip_bit)

    monkeypatch.setattr(corruption, "KINDS", (Kind("a bit, sometimes", arm),))
    tally = run_trials(3, 4)
    assert (tally.refused.total(), tally.untouched, tally.used) == (4, 5, [])


def test_a_stores_slabs_are_found_and_damaged(tmp_path: Path) -> None:
    fd = os.memfd_create("kv-store-here")
    try:
        os.ftruncate(fd, 3 * mmap.PAGESIZE)
        slabs = Slabs(os.getpid())
        assert slabs.damage() >= 3 * mmap.PAGESIZE // STRIDE
        assert os.pread(fd, 2, STRIDE) == b"\x00\x40"
        slabs.close()
    finally:
        os.close(fd)


@pytest.mark.slow
def test_the_whole_bench_in_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert run_corruption(
        payloads=300,
        processes=1,
        seed=1,
        model=str(write_tiny_llama(tmp_path / "m")),
        rounds=4,
        budget_s=None,
        output=tmp_path,
        console=Console(quiet=True),
    )
    found = json.loads((tmp_path / "corruption.json").read_text())
    assert found["payloads"] == found["refused"] == 300
    cluster = found["cluster"]
    assert cluster["damaged"] == 4
    assert 2 <= cluster["recomputed"] == cluster["counted_as_refused"]
    assert cluster["right"] == 8
