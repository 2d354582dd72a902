"""Failpoints: nothing unless asked for; then the chosen arrival parks and says so."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepinfer.workers.failpoints import FILE_VARIABLE, POINT_VARIABLE, Failpoints


def test_without_variables_nothing_happens() -> None:
    points = Failpoints.from_environment({})
    points.hit("mid_copy")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({POINT_VARIABLE: "nowhere", FILE_VARIABLE: "f"}, "'nowhere': must be one of mid_prefill"),
        ({POINT_VARIABLE: "mid_copy:x", FILE_VARIABLE: "f"}, "<place>:<number>"),
        ({POINT_VARIABLE: "mid_copy:0", FILE_VARIABLE: "f"}, "arrival 0 must be 1 or more"),
        ({POINT_VARIABLE: "mid_copy"}, "must be set together"),
        ({FILE_VARIABLE: "f"}, "must be set together"),
    ],
)
def test_a_setting_without_meaning_is_an_error(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Failpoints.from_environment(environment)


def test_the_chosen_arrival_parks_after_it_has_told_its_process_id(tmp_path: Path) -> None:
    announced = tmp_path / "parked"
    code = (
        "from deepinfer.workers.failpoints import Failpoints\n"
        "points = Failpoints.from_environment()\n"
        "for place in ('mid_copy', 'mid_fetch', 'mid_copy'):\n"
        "    points.hit(place)\n"
        "    print(place, flush=True)\n"
    )
    environment = {**os.environ, POINT_VARIABLE: "mid_copy:2", FILE_VARIABLE: str(announced)}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            deadline = time.monotonic() + 30
            while not announced.exists():
                assert child.poll() is None, "it ran through"
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert announced.read_text() == f"{child.pid}\n"
            assert child.poll() is None
        finally:
            child.kill()
        assert child.stdout is not None
        assert child.stdout.read().split() == ["mid_copy", "mid_fetch"]
