"""Inputs that broke something, kept as files: ``FOLDER/TARGET/KIND-HASH``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from deepinfer.deploy.fuzz.loop import Crash

EACH_MAX = 3
"""Inputs kept of one fault."""


def keep(folder: Path, crash: Crash) -> Path:
    """Write a crash's input, once."""
    name = f"{crash.kind}-{hashlib.sha256(crash.data).hexdigest()[:12]}"
    path = folder / crash.target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(crash.data)
    return path


def kept(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every input by its target's name."""
    for path in sorted(folder.glob("*/*")):
        yield path.parent.name, path
