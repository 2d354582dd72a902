"""`deepinfer generate` and `deepinfer model get`: one answer, or one model, at a terminal."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from deepinfer.client import (
    Client,
    Delta,
    Event,
    Finished,
    Retrying,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from deepinfer.deploy.console import check_utf8
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
    client: Client, prompt: str, options: dict[str, Any], *, chat: bool, err: Console
) -> None:
    """Write one answer to standard output as it comes. Ctrl-C aborts the request.

    Raises what the SDK raises.
    """
    asked = _asked(prompt, chat)
    with client.stream(asked, **options, include_events=True) as stream:
        for event in stream:
            tell_of_retries(event, err)
            if isinstance(event, Delta | Finished):
                sys.stdout.write(event.text)
                sys.stdout.flush()
    sys.stdout.write("\n")


def generate_json(
    client: Client, prompt: str, options: dict[str, Any], *, chat: bool, err: Console
) -> None:
    """Write the finished answer with all that is known of it as one JSON document.

    The keys are those of ``deepinfer.client.Completion``, its ``usage`` among them; a token's
    ``bytes`` are numbers, as JSON has no bytes. Raises what the SDK raises.
    """
    asked = _asked(prompt, chat)
    with client.stream(asked, **options, include_events=True) as stream:
        for event in stream:
            tell_of_retries(event, err)
        completion = stream.completion()
    document = asdict(completion) | {
        "prompt_logprobs": [
            None if entry is None else _logprob(entry) for entry in completion.prompt_logprobs
        ],
        "usage": _usage(completion.usage),
    }
    for of, choice in zip(completion.choices, document["choices"], strict=True):
        choice["usage"] = _usage(of.usage)
        choice["logprobs"] = [_logprob(entry) for entry in of.logprobs]
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def _asked(prompt: str, chat: bool) -> str | list[dict[str, str]]:
    check_utf8(prompt)
    return [{"role": "user", "content": prompt}] if chat else prompt


def tell_of_retries(event: Event, err: Console) -> None:
    """Say that no gateway answers, if that is the event: the SDK goes on trying."""
    if isinstance(event, Retrying):
        err.print(
            f"no answer yet: {event.detail}; trying again for up to {event.patience_s:g} s",
            style="yellow",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _logprob(entry: TokenLogprob) -> dict[str, Any]:
    return _token(entry) | {"top": [_token(one) for one in entry.top]}


def _token(entry: TokenLogprob | TopLogprob) -> dict[str, Any]:
    return {
        "token_id": entry.token_id,
        "text": entry.text,
        "bytes": list(entry.token_bytes),
        "logprob": entry.logprob,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return asdict(usage) | {
        "total_tokens": usage.total_tokens,
        "precision_shares": usage.precision_shares,
    }
