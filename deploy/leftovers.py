"""What a launcher that was killed has left on this machine, and its removal by the next `up`.

Before it starts Ray a launcher writes down that it will, with a mark that all its processes inherit
in their environment. A mark whose launcher is dead is swept: its processes are killed, by that mark
alone, and Ray's folder of them is removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from deepinfer.deploy.running import alive, process_ticks, state_dir, write_private

VARIABLE = "DEEPINFER_CLUSTER"
"""The environment variable with the mark."""
DEAD_S = 5.0
"""How long killed processes may take to be gone."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One launcher's Ray, from before its start until its orderly end."""

    mark: str
    pid: int
    started_ticks: int
    """The launcher's start time in clock ticks since boot: a reused pid has another."""
    ray_folder: str
    """Where Ray keeps its sessions."""

    @property
    def file(self) -> Path:
        return state_dir() / f"{self.mark}.ray"

    @property
    def alive(self) -> bool:
        return process_ticks(self.pid) == self.started_ticks

    def processes(self) -> list[int]:
        """All that carry the mark, but not the launcher, whose environment may be older."""
        entry = f"{VARIABLE}={self.mark}".encode()
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and int(folder.name) != os.getpid():
                with contextlib.suppress(OSError):  # gone meanwhile, or somebody else's
                    if entry in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
        return found

    def sessions(self) -> list[Path]:
        """Ray's folders of it: their names end in the launcher's pid."""
        if process_ticks(self.pid) is not None:
            return []  # the pid is another's now, and so may the folders be
        return sorted(Path(self.ray_folder).glob(f"session_*_{self.pid}"))


def leave_mark() -> Mark:
    """Write down that this process is about to start Ray, and mark whatever it starts."""
    ticks = process_ticks(os.getpid())
    assert ticks is not None, "this process lives"
    base = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # as Ray
    mark = Mark(secrets.token_hex(8), os.getpid(), ticks, str(Path(base) / "ray"))
    mark.file.parent.mkdir(parents=True, exist_ok=True)
    write_private(mark.file, asdict(mark))
    os.environ[VARIABLE] = mark.mark
    return mark


def remove_mark(mark: Mark) -> None:
    """Nothing of it is left."""
    mark.file.unlink(missing_ok=True)
    if os.environ.get(VARIABLE) == mark.mark:
        del os.environ[VARIABLE]


def sweep() -> tuple[str, ...]:
    """Remove what dead launchers have left; a sentence for each."""
    said = []
    alive()  # forgets clusters that are not
    for path in sorted(state_dir().glob("*.ray")):
        try:
            mark = Mark(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            path.unlink(missing_ok=True)  # of another version, or written by half
            continue
        if mark.file != path or mark.alive:
            continue
        killed = _kill(mark)
        folders = mark.sessions()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        remove_link(Path(mark.ray_folder))
        path.unlink(missing_ok=True)
        what = f"{killed} {'process' if killed == 1 else 'processes'}"
        what += "".join(f", {folder}" for folder in folders)
        said.append(f"removed what a cluster that was killed has left: {what}")
    return tuple(said)


def _kill(mark: Mark) -> int:
    """Kill all that carry the mark, and those that they start meanwhile; how many they were."""
    killed: dict[int, None] = {}
    deadline = time.monotonic() + DEAD_S
    while (found := mark.processes()) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed[pid] = None
        time.sleep(0.05)
    return len(killed)


def remove_link(ray_folder: Path) -> None:
    """Remove Ray's link to its latest session, if that is gone."""
    latest = ray_folder / "session_latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink(missing_ok=True)
