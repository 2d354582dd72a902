"""`deepinfer generate` and `deepinfer model get`: one answer, or one model, at a terminal."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from deepinfer.client import Delta, Finished, Usage
from deepinfer.deploy.console import check_utf8
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
        if bar.live.is_started:  # or it would write an empty line
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
    with (
        connect(endpoint, token_file) as client,
        client.stream(_asked(prompt, chat), **sampling) as stream,
    ):
        for event in stream:
            if isinstance(event, Delta | Finished):
                sys.stdout.write(event.text)
                sys.stdout.flush()
    sys.stdout.write("\n")


def generate_json(
    prompt: str,
    sampling: dict[str, Any],
    *,
    chat: bool,
    endpoint: str | None,
    token_file: Path | None,
) -> None:
    """Write the finished answer with all that is known of it as one JSON document.

    The keys are those of ``deepinfer.client.Completion``, its ``usage`` among them. Raises what
    ``connect`` and the SDK raise.
    """
    with connect(endpoint, token_file) as client:
        completion = client.generate(_asked(prompt, chat), **sampling)
    document = asdict(completion) | {"usage": _usage(completion.usage)}
    for of, choice in zip(completion.choices, document["choices"], strict=True):
        choice["usage"] = _usage(of.usage)
        choice["logprobs"] = [logprob._asdict() for logprob in choice["logprobs"]]
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def _asked(prompt: str, chat: bool) -> str | list[dict[str, str]]:
    check_utf8(prompt)
    return [{"role": "user", "content": prompt}] if chat else prompt


def _usage(usage: Usage) -> dict[str, int]:
    return asdict(usage) | {"total_tokens": usage.total_tokens}
