"""What every command prints with, and how it tells errors."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import typer
from rich.console import Console

out = Console()
err = Console(stderr=True)


def standard_input() -> TextIO:
    """Standard input as UTF-8 whatever the locale says; ``check_utf8`` finds what is none."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    return sys.stdin


def check_utf8(text: str) -> str:
    """Return text of the command line or of ``standard_input``.

    Raises InvalidRequest, naming the first byte that is no UTF-8.
    """
    from deepinfer.client import InvalidRequest

    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF
        raise InvalidRequest(
            f"the prompt is not UTF-8: byte 0x{byte:02x} after {error.start:,} characters"
        ) from error
    return text


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn what the user or the world caused into one message and exit code 1 (no traceback)."""
    from deepinfer.client import DeepInferError
    from deepinfer.deploy import interrupts
    from deepinfer.deploy.cluster import LaunchError
    from deepinfer.deploy.config import ConfigError
    from deepinfer.deploy.models import ModelUnavailableError
    from deepinfer.deploy.running import TokenFileError

    expected = (ConfigError, LaunchError, ModelUnavailableError, TokenFileError, DeepInferError)
    try:
        yield
    except expected as error:
        err.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        raise typer.Exit(interrupts.exit_code()) from error
