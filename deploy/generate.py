"""`deepinfer generate` and `deepinfer model get`: one answer, or one model, at a terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from deepinfer.client import Delta, Finished
from deepinfer.deploy.launch import connect
from deepinfer.deploy.models import resolve_model


def get_model(name: str, *, console: Console) -> Path:
    """Resolve ``name`` to a path, fetching it with a progress bar if it is not cached."""
    bar = Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console)
    task = bar.add_task(f"fetching model {name}", total=None)

    def show(done: int, total: int | None) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        return resolve_model(name, progress=show)
    finally:
        bar.stop()


def stream_one(
    prompt: str,
    sampling: dict[str, Any],
    *,
    chat: bool,
    endpoint: str | None,
    token_file: Path | None,
) -> None:
    """Write one answer to standard output as it comes. Ctrl-C aborts the request.

    Raises what ``connect`` and the SDK raise.
    """
    asked = [{"role": "user", "content": prompt}] if chat else prompt
    with connect(endpoint, token_file) as client, client.stream(asked, **sampling) as stream:
        for event in stream:
            if isinstance(event, Delta | Finished):
                sys.stdout.write(event.text)
                sys.stdout.flush()
    sys.stdout.write("\n")
