"""What a killed launcher leaves: the next start removes that, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from deepinfer.deploy import leftovers, rays, running
from deepinfer.deploy.leftovers import Mark

SLEEPER = "import time; time.sleep(600)"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv(leftovers.VARIABLE, raising=False)
    return tmp_path / "state" / "deepinfer"


def started(mark: str | None) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if k != leftovers.VARIABLE}
    if mark is not None:
        environment[leftovers.VARIABLE] = mark
    return subprocess.Popen([sys.executable, "-c", SLEEPER], env=environment)


def dead_pid() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_what_a_dead_launcher_left_is_removed_and_nothing_else(state: Path, tmp_path: Path) -> None:
    pid = dead_pid()
    ray = tmp_path / "ray"
    ours, others = ray / f"session_2026_{pid}", ray / f"session_2026_{pid}7"
    for folder in (ours, others):
        (folder / "logs").mkdir(parents=True)
    (ray / "session_latest").symlink_to(ours)
    mark = Mark("0123456789abcdef", pid, 1, str(ray))
    state.mkdir(parents=True)
    running.write_private(mark.file, asdict(mark))
    (state / "half.ray").write_text('{"mark": "half')
    left, other, unmarked = started(mark.mark), started("fedcba9876543210"), started(None)
    try:
        assert leftovers.sweep() == (
            f"removed what a cluster that was killed has left: 1 process, {ours}",
        )
        assert left.wait(5) != 0
        assert other.poll() is None
        assert unmarked.poll() is None
    finally:
        for process in (left, other, unmarked):
            process.kill()
            process.wait()
    assert not ours.exists()
    assert not (ray / "session_latest").is_symlink()
    assert others.exists()
    assert list(state.glob("*.ray")) == []
    assert leftovers.sweep() == ()


def test_a_launcher_that_lives_keeps_all_it_has(state: Path) -> None:
    mark = leftovers.leave_mark()
    assert os.environ[leftovers.VARIABLE] == mark.mark
    assert mark.file.stat().st_mode & 0o777 == 0o600
    process = started(mark.mark)
    try:
        assert leftovers.sweep() == ()
        assert process.poll() is None
        assert mark.processes() == [process.pid]
    finally:
        process.kill()
        process.wait()
    leftovers.remove_mark(mark)
    assert list(state.iterdir()) == []
    assert leftovers.VARIABLE not in os.environ


def test_rays_token_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    rays.make_ray_token()
    file = tmp_path / ".ray" / "auth_token"
    token = file.read_text()
    assert len(token) == 64
    assert file.stat().st_mode & 0o777 == 0o600
    rays.make_ray_token()
    assert file.read_text() == token
    assert list(file.parent.iterdir()) == [file]


def test_a_token_that_is_named_makes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a-token")
    rays.make_ray_token()
    assert list(tmp_path.iterdir()) == []
