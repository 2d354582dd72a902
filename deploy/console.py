"""What every command prints with, and how it tells errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

out = Console()
err = Console(stderr=True)


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
