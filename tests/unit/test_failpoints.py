"""Failpoints: nothing unless asked for; then the chosen arrival parks and says so."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deepinfer.proto.failpoints import (
    FILE_VARIABLE,
    FOLDER_VARIABLE,
    POINT_VARIABLE,
    Failpoints,
)


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
        "from deepinfer.proto.failpoints import Failpoints\n"
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


def test_a_file_in_the_folder_parks_the_first_process_that_comes(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from deepinfer.proto.failpoints import Failpoints\n"
        "points = Failpoints.from_environment()\n"
        "for place in sys.stdin:\n"
        "    points.hit(place.strip())\n"
        "    print(place, end='', flush=True)\n"
    )

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, FOLDER_VARIABLE: str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def passes(child: subprocess.Popen[str], place: str) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(f"{place}\n")
        child.stdin.flush()
        assert child.stdout.readline() == f"{place}\n"

    with start() as first, start() as second:
        try:
            passes(first, "mid_copy")
            (tmp_path / "mid_copy").touch()
            passes(first, "mid_fetch")
            assert first.stdin is not None
            first.stdin.write("mid_copy\n")
            first.stdin.flush()
            deadline = time.monotonic() + 30
            while not (tmp_path / f"mid_copy.{first.pid}").exists():
                assert first.poll() is None, "it ended"
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert not (tmp_path / "mid_copy").exists()
            passes(second, "mid_copy")
        finally:
            first.kill()
            second.kill()


def test_a_parked_thread_goes_on_when_its_file_is_removed(tmp_path: Path) -> None:
    points = Failpoints.from_environment({FOLDER_VARIABLE: str(tmp_path)})
    taken = tmp_path / f"mid_put.{os.getpid()}"
    (tmp_path / "mid_put").touch()
    parked = threading.Thread(target=points.hit, args=("mid_put",), daemon=True)
    parked.start()
    deadline = time.monotonic() + 30
    while not taken.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    parked.join(0.05)
    assert parked.is_alive()
    taken.unlink()
    parked.join(30)
    assert not parked.is_alive()
