"""What a launch and its configuration can fail with."""

from __future__ import annotations


class ConfigError(ValueError):
    """A configuration that cannot be used. One line per fault: name, value, what is legal."""


class LaunchError(RuntimeError):
    """The cluster could not be started, found or stopped; says why and what to do."""


def cause_of(error: Exception) -> str:
    """The last line of what Ray says, which names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
