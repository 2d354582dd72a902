"""How every bench draws: figures that need no display, written beside the JSON."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer.deploy.config import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_plots() -> None:
    """Make sure, before a bench begins, that its plot can be drawn at the end.

    Raises:
        ConfigError: matplotlib is not installed; says how to get it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("matplotlib is not installed: pip install 'deepinfer-cluster[bench]'")


def axes_in_a_row(count: int, size: tuple[float, float], **options: Any) -> tuple[Figure, Any]:
    """A figure of ``size`` inches, and its axes: an array, or the one if there is one.

    ``options`` are those of ``Figure.subplots``.
    """
    # Not through pyplot, which keeps every figure it makes and asks for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(1, count, **options)


def write_plot(figure: Figure, path: Path) -> None:
    """Write it as a picture, in a folder that may not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
