"""`bench prefetch` with small payloads: both ways bring the payload, and the file says how fast."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
from rich.console import Console

from deepinfer.deploy.bench.prefetch import LAYOUT, run_prefetch


def test_both_ways_are_measured_with_the_same_payloads(tmp_path: Path) -> None:
    figures = run_prefetch(tokens=(20, 70), rounds=3, output=tmp_path, console=Console(quiet=True))
    found = json.loads((tmp_path / "prefetch.json").read_text())
    assert found.items() >= figures.items()
    assert found["command"] == "deepinfer bench prefetch --tokens 20 --tokens 70 --rounds 3"
    assert [one["blocks"] for one in found["results"]] == [2, 5]
    for one in found["results"]:
        assert one["payload_bytes"] == one["blocks"] * LAYOUT.block_bytes
        for way in ("from_store_ms", "ahead_ms"):
            rounds = one[f"rounds_{way}"]
            assert len(rounds) == 3
            assert one[way] == median(rounds) > 0
        assert one["ratio"] == pytest.approx(one["from_store_ms"] / one["ahead_ms"], abs=0.01)
