"""Plots: drawn from figures like those in ``docs/results``, and asked for before a long bench."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepinfer.deploy.bench import controller, handoff, precision_report, quality_report
from deepinfer.deploy.config import ConfigError

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("result", "plot"),
    [
        ("controller_scale", controller.plot),
        ("handoff", handoff.plot),
        ("quality", quality_report.plot),
        ("precision", precision_report.plot),
    ],
)
def test_committed_figures_can_be_drawn_again(
    tmp_path: Path, repo_root: Path, result: str, plot: Callable[[dict[str, Any], Path], None]
) -> None:
    pytest.importorskip("matplotlib")
    figures = json.loads((repo_root / "docs/results" / f"{result}.json").read_text("utf-8"))
    path = tmp_path / "new" / f"{result}.png"
    plot(figures, path)
    assert path.read_bytes().startswith(PNG)
    assert path.stat().st_size > 10_000


def test_no_bench_measures_what_it_cannot_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(controller, "run", lambda _: pytest.fail("measured"))
    with pytest.raises(ConfigError, match="matplotlib is not installed: pip install"):
        controller.main(tmp_path)
