"""The process that answers for comparison: its errors are told, and nobody waits for a dead one."""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path

import pytest

from deepinfer.deploy.errors import LaunchError
from deepinfer.deploy.oracle import Question, unpressed

QUESTIONS = [Question(prompt="a", sampling={"max_tokens": 1})]


def test_what_it_cannot_open_is_raised_here(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        unpressed(tmp_path / "nowhere", QUESTIONS, kv_cache_dtype="fp16")
    assert multiprocessing.active_children() == []


def test_one_that_dies_is_one_message(tmp_path: Path) -> None:
    def kill() -> None:
        while not (children := multiprocessing.active_children()):
            time.sleep(0.01)
        children[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(LaunchError, match=r"has died \(exit code -9\)"):
        unpressed(tmp_path / "nowhere", QUESTIONS, kv_cache_dtype="fp16")
    killer.join()
    assert multiprocessing.active_children() == []
