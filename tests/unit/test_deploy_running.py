"""What the machine remembers of clusters started on it, and their token files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from deepinfer.deploy.running import (
    Running,
    TokenFileError,
    alive,
    exposed,
    forget,
    process_ticks,
    read_or_make_token,
    read_token,
    remember,
    state_dir,
)


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def running(port: int, *, pid: int, ticks: int) -> Running:
    return Running(
        endpoints=(f"127.0.0.1:{port}",),
        pid=pid,
        started_ticks=ticks,
        token_file="t",
        model="demo",
    )


def test_a_cluster_is_remembered_while_its_process_lives() -> None:
    ticks = process_ticks(os.getpid())
    assert ticks is not None
    here = running(7470, pid=os.getpid(), ticks=ticks)
    reused_pid = running(7471, pid=os.getpid(), ticks=ticks + 1)
    remember(here)
    remember(reused_pid)
    (state_dir() / "torn.json").write_text("{")
    assert alive() == (here,)
    assert [p.name for p in state_dir().glob("*.json")] == ["127.0.0.1_7470.json"]
    forget(here.name)
    assert alive() == ()


def test_a_token_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "token"
    token = read_or_make_token(file)
    assert len(token) >= 32
    assert read_or_make_token(file) == token == read_token(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"short", b"two words are too many", b"\xff" * 20])
def test_a_bad_token_file_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(TokenFileError, match="token"):
        read_token(file)


def test_a_missing_token_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match="nowhere"):
        read_token(tmp_path / "nowhere")


def test_a_token_file_that_others_can_read_is_told_of(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-of-enough-characters\n")
    for mode, others in ((0o600, False), (0o400, False), (0o640, True), (0o604, True)):
        file.chmod(mode)
        told = exposed(file)
        assert (told is not None) == others, oct(mode)
        assert told is None or f"mode {mode:o}" in told
