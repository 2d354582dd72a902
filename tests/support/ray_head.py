"""A Ray head as docs/ray.md starts it, on free ports, and the commands of that page."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.cluster import processes_with
from support.docs_blocks import ROOT, blocks_of

MARK = "RAY_TMPDIR"
"""Set for everything here, and so inherited by every process of the head and of its jobs."""
AGENT_S = 120.0
STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class Head:
    """A running head; ``folder`` is home, state and working folder of all commands."""

    folder: Path
    ports: dict[str, str]
    """What stands for a port of the document."""

    @property
    def environment(self) -> dict[str, str]:
        left_out = ("RAY_ADDRESS", "XDG_STATE_HOME")
        return {
            **{k: v for k, v in os.environ.items() if k not in left_out},
            "HOME": str(self.folder),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "NO_COLOR": "1",
            MARK: str(self.folder / "ray"),
        }

    def script(self, block: str) -> str:
        """A block of the document, behind what it tells the reader to export."""
        exports = re.findall(r"^export .*$", documented("ray start"), re.M)
        text = "\n".join(["set -eu", *exports, block])
        for port, free in self.ports.items():
            text = text.replace(port, free)
        return text

    def run(self, block: str, timeout_s: float = 90.0) -> subprocess.CompletedProcess[str]:
        """Run a block to its end; its output, errors and all, is in ``stdout``."""
        with (self.folder / "out").open("w+") as out:  # not a pipe, which a daemon would hold
            done = subprocess.run(
                ["bash", "-c", self.script(block)],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
            out.seek(0)
            return subprocess.CompletedProcess(done.args, done.returncode, out.read())

    def processes(self) -> dict[int, str]:
        return processes_with(MARK, str(self.folder / "ray"))

    def actors(self) -> list[str]:
        """The command lines of processes that are a cluster's actors, or its job."""
        return [c for c in self.processes().values() if "Actor" in c or "deploy.job" in c]


def documented(part: str) -> str:
    """The only shell block of docs/ray.md that contains ``part``."""
    [body] = [
        block.script
        for block in blocks_of(ROOT / "docs" / "ray.md")
        if block.language == "sh" and part in block.script
    ]
    return body


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running_head() -> Iterator[Head]:
    """Start a head with the document's own lines; end it by its processes' ids."""
    # Short: Ray keeps Unix sockets below it.
    folder = Path(tempfile.mkdtemp(prefix="di-"))
    (folder / "ray").mkdir()
    head = Head(folder, {port: str(free_port()) for port in ("6379", "8265", "7470")})
    try:
        started = head.run(documented("ray start"))
        assert started.returncode == 0, started.stdout
        _await_job_agent(head)
        yield head
    finally:
        deadline = time.monotonic() + STOP_S
        number = signal.SIGTERM
        while (left := head.processes()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(1.0)
            number = signal.SIGKILL
        shutil.rmtree(folder, ignore_errors=True)


def _await_job_agent(head: Head) -> None:
    """`ray start` returns before the agent that starts jobs is there."""
    deadline = time.monotonic() + AGENT_S
    while True:
        done = head.run("ray job submit --address http://127.0.0.1:8265 --no-wait -- true")
        if "No available agent" not in done.stdout:
            assert done.returncode == 0, done.stdout
            return
        assert time.monotonic() < deadline, done.stdout
        time.sleep(1.0)
