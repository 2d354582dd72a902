"""Every command and every program in README.md and docs/*.md is run as it is written there.

The blocks of one document run in order, in one folder and one home; ``deepinfer up`` goes to the
background, as a reader would give it a terminal of its own, and the next command waits for it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from deepinfer.deploy.models import SMOLLM2, cache_folder
from support.cluster import processes_with
from support.docs_blocks import PYTHON, SHELL, SILENT, Block, blocks_of, documents

MARK = "DEEPINFER_DOCS_TEST"
PORTS = (7470, 7471, 7480)
"""The documents name no other: gateways, and metrics."""
BLOCK_S = 90.0
STOP_S = 15.0
PRELUDE = """
set -eu
deepinfer() {
    if [ "${1-}" != up ]; then command deepinfer "$@"; return; fi
    log=$(mktemp -p "$HOME" up-XXXXXX)
    command deepinfer "$@" >"$log" 2>&1 &
    up=$!
    until grep -q "Ctrl-C stops" "$log"; do
        kill -0 $up 2>/dev/null || { cat "$log" >&2; return 1; }
        sleep 0.1
    done
}
"""
"""Waits where a reader would see that it serves."""

ALL = [block for document in documents() for block in blocks_of(document)]


def test_every_block_says_what_it_is() -> None:
    """A block without a language, or of one nobody knows, would never be run or missed."""
    known = SHELL | SILENT | {PYTHON}
    assert [b.name for b in ALL if b.language not in known] == []


def test_what_is_not_run_has_a_reason_and_is_the_exception(
    record_property: Callable[[str, object], None],
) -> None:
    commands = [b for b in ALL if b.language in SHELL or b.language == PYTHON]
    left_out = [b for b in commands if b.not_run]
    for block in left_out:
        record_property(block.name, block.not_run)
    assert [b.name for b in left_out if len(b.not_run) < 10] == []
    assert len(left_out) < len(commands) - len(left_out)
    assert [b.name for b in commands if not b.script.strip()] == []


def _cannot_run(why: str) -> NoReturn:
    """Skip; but fail where CI is set, as nobody would notice there that documents go unchecked."""
    if os.environ.get("CI"):
        pytest.fail(f"{why}: the documents are not checked", pytrace=False)
    pytest.skip(why)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    model = cache_folder() / "models" / Path(SMOLLM2.member).name
    if not model.is_file():
        pytest.skip(f"the demo model is not cached: {model}")
    for port in PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                _cannot_run(f"port {port}, which the documents name, is in use")
    for command in ("bash", "curl"):
        if shutil.which(command) is None:
            _cannot_run(f"there is no {command}, which the documents use")
    yield tmp_path
    deadline = time.monotonic() + STOP_S
    while (left := processes_with(MARK, str(tmp_path))) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)  # the port is free when they are gone


@pytest.mark.parametrize(
    "document",
    [d for d in documents() if any(b.runs for b in blocks_of(d))],
    ids=lambda path: path.stem,
)
def test_the_commands_of_a_document_run(document: Path, home: Path) -> None:
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("XDG_STATE_HOME", "XDG_CACHE_HOME")},
        "HOME": str(home),
        "DEEPINFER_CACHE": str(cache_folder()),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NO_COLOR": "1",
        MARK: str(home),
    }
    for block in blocks_of(document):
        if block.runs:
            _run(block, home, environment)
    subprocess.run(
        ["bash", "-c", "! deepinfer status >/dev/null 2>&1 || deepinfer down"],
        env=environment,
        check=True,
        capture_output=True,
        timeout=BLOCK_S,
    )
    deadline = time.monotonic() + STOP_S
    while left := processes_with(MARK, str(home)):
        assert time.monotonic() < deadline, f"left behind by {document.name}: {left}"
        time.sleep(0.1)


def _run(block: Block, home: Path, environment: dict[str, str]) -> None:
    if block.language == PYTHON:
        command = [sys.executable, "-c", block.script]
    else:
        command = ["bash", "-c", PRELUDE + block.script]
    with (home / "out").open("w+") as out:  # not a pipe, which a cluster in the background holds
        done = subprocess.run(
            command,
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=BLOCK_S,
            check=False,
            start_new_session=True,
        )
        out.seek(0)
        assert done.returncode == 0, f"{block.name}\n{block.script}\n{out.read()}"
