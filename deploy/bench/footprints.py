"""What each process of a cluster holds, from /proc: memory, pinned pages, descriptors, threads."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deepinfer.deploy.bench.memory import names_of
from deepinfer.deploy.bench.procfs import number

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_BLOCK_BYTES = 512
"""What ``st_blocks`` counts in, whatever the file system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One process at one moment."""

    rss_bytes: int
    pss_bytes: int
    """Pages shared by k processes count 1/k: it changes with who else runs."""
    anon_bytes: int
    """Memory of no file: the heap, and what grows with a leak."""
    pinned_bytes: int
    """Locked, or pinned for a device."""
    memfd_bytes: int
    """Pages of the anonymous files that it has open, whoever else has them open too."""
    fds: int
    threads: int
    cpu_s: float
    """Since it began, in user and system mode."""


def held_by(pid: int) -> Held | None:
    """What a process holds; None if it has ended, or is another user's."""
    here = _PROC / str(pid)
    try:
        status = (here / "status").read_text(errors="replace")
        rollup = (here / "smaps_rollup").read_text()
        stat = (here / "stat").read_text(errors="replace").rpartition(")")[2].split()
        fds = os.listdir(here / "fd")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    if "VmRSS" not in status:
        return None
    return Held(
        rss_bytes=1024 * number(status, "VmRSS"),
        pss_bytes=1024 * number(rollup, "Pss"),
        anon_bytes=1024 * number(rollup, "Anonymous"),
        pinned_bytes=1024 * (number(status, "VmLck") + number(status, "VmPin")),
        memfd_bytes=sum(_memfd_bytes(here / "fd" / fd) for fd in fds),
        fds=len(fds),
        threads=number(status, "Threads"),
        # Fields 14 and 15 of proc(5), counted from the third.
        cpu_s=(int(stat[11]) + int(stat[12])) / _TICKS_PER_S,
    )


def held_by_all(root: int, names: Mapping[int, str]) -> dict[str, Held]:
    """What ``root`` and all processes below it hold, by the names that ``memory.names_of`` gives.

    Ray's helpers that come and go get a name as well: who judges a trend looks for names that stay.
    """
    found = {}
    for pid, name in names_of(root, names).items():
        held = held_by(pid)
        if held is not None:
            found[name] = held
    return found


def _memfd_bytes(link: Path) -> int:
    try:
        if not os.readlink(link).startswith("/memfd:"):
            return 0
        return _BLOCK_BYTES * link.stat().st_blocks
    except OSError:  # closed meanwhile
        return 0
