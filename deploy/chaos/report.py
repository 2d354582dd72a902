"""What a campaign found: its figures, a table, and a picture."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from deepinfer.deploy.bench.plots import axes_in_a_row, write_plot
from deepinfer.deploy.bench.results import percentile
from deepinfer.deploy.chaos.history import Faults
from deepinfer.deploy.chaos.rows import Trial

AIMS: Final = (
    ("recovered_s", "p50", 1.0),
    ("recovered_s", "p99", 5.0),
    ("detected_s", "p50", 0.2),
    ("admitted_s", "p99", 5.0),
)
"""Seconds after a kill; where a worker's streams have to move, with one and blocks to spare."""
COLOURS: Final = {
    "swapped_out": "tab:orange",
    "resumed": "tab:green",
    "placed": "tab:purple",
    "recomputed": "tab:red",
    "swap_failed": "black",
}


def summary(trials: Sequence[Trial], voids: int) -> dict[str, Any]:
    """The figures of a campaign, plain values."""
    counted = [trial for trial in trials if trial.counted]
    faults = sum((trial.faults for trial in trials), Faults())
    wrong = [trial for trial in trials if not trial.right]
    return {
        "trials": len(counted),
        "void": voids,
        "kills": sum(trial.kills for trial in counted),
        "pauses": sum(trial.pause_s > 0 for trial in counted),
        "faults": {
            **asdict(faults),
            "leaks": sum(bool(trial.left_over) for trial in trials),
            "given_up": sum(len(trial.errors) for trial in trials),
        },
        "wrong_trials": [trial.number for trial in wrong],
        # Nothing in n trials bounds the rate by 3 / n with 95% confidence.
        "bound_95": min(1.0, 3 / len(counted)) if counted and not wrong else None,
        "streams": sum(trial.streams for trial in trials),
        "tokens": sum(trial.tokens for trial in trials),
        "on_victim": sum(trial.on_victim for trial in counted),
        "swaps": sum(trial.swaps for trial in counted),
        "resumes": sum(trial.resumes for trial in counted),
        "recomputes": sum(trial.recomputes for trial in counted),
        "reconnects": sum(trial.reconnects for trial in counted),
        "quarantined_pages_max": max((trial.quarantined_pages for trial in counted), default=0),
        "by_point": {point: _figures(some) for point, some in _by_point(counted)},
        "all": _figures(counted),
        "roomy": _figures([trial for trial in counted if trial.roomy]),
        "aims": _aims([trial for trial in counted if not trial.pause_s]),
    }


def _aims(killed: Sequence[Trial]) -> list[dict[str, Any]]:
    """What was aimed at and what was reached, of those that these trials can tell of."""
    moving = [t for t in killed if t.roomy or t.target in ("store", "controller", "gateway")]
    reached = _figures(moving)
    return [
        {"figure": figure, "of": name, "at_most_s": most, "reached_s": spread[name]}
        for figure, name, most in AIMS
        if (spread := reached[figure]) is not None
    ]


def _by_point(trials: Iterable[Trial]) -> list[tuple[str, list[Trial]]]:
    ordered = sorted(trials, key=lambda trial: trial.point)
    return [(k, list(some)) for k, some in itertools.groupby(ordered, lambda t: t.point)]


def _figures(trials: Sequence[Trial]) -> dict[str, Any]:
    ratios = [t.others.ratio for t in trials if t.others.ratio is not None]
    return {
        "trials": len(trials),
        "recovered_s": _spread(s for t in trials for s in t.recovered_s),
        "detected_s": _spread(t.detected_s for t in trials),
        "admitted_s": _spread(t.admitted_s for t in trials),
        "restarted_s": _spread(t.restarted_s for t in trials),
        "settled_s": _spread(t.settled_s for t in trials),
        "longest_pause_s": _spread(t.paused_s for t in trials),
        "others_ratio": _spread(ratios),
        "others_longest_s": _spread(t.others.longest_s for t in trials),
    }


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {
        "count": len(known),
        "p50": percentile(known, 0.5),
        "p90": percentile(known, 0.9),
        "p99": percentile(known, 0.99),
        "max": max(known),
    }


def table(found: dict[str, Any], title: str) -> Table:
    """One row a point: how many, and what recovery took, as median / 99th percentile in seconds."""
    shown = Table(title=f"{title}; p50 / p99 s", padding=(0, 1, 0, 0))
    shown.add_column("point", no_wrap=True)
    for name in ("n", "next token", "detected", "restart", "others"):
        shown.add_column(name, justify="right", no_wrap=True)
    for point, figures in [*found["by_point"].items(), ("all", found["all"])]:
        others = figures["others_ratio"]
        shown.add_row(
            point,
            str(figures["trials"]),
            _cell(figures["recovered_s"]),
            _cell(figures["detected_s"]),
            _cell(figures["restarted_s"]),
            "-" if others is None else f"{others['p50']:.1f}x",
        )
    return shown


def _cell(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['p50']:.2f} / {spread['p99']:.2f}"


def verdict(found: dict[str, Any]) -> str:
    """In words: what was lost, and of how much."""
    faults = found["faults"]
    said = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in faults.items())
    bound = found["bound_95"]
    so = "" if bound is None else f"; fewer than {bound:.2%} of such trials fail (95%)"
    return (
        f"{found['trials']} trials ({found['void']} void), {found['streams']} streams, "
        f"{found['tokens']:,} tokens: {said}{so}"
    )


def draw(trials: Sequence[Trial], path: Path) -> None:
    """Left: the streams of one trial, the median by recovery. Right: all trials' times."""
    figure, (left, right) = axes_in_a_row(2, (13.0, 4.5))
    counted = [trial for trial in trials if trial.counted]
    shown = typical(counted)
    if shown is not None:
        for row, marks in enumerate(shown.timeline):
            tokens = [at / 1e3 for at, what in marks if what == "."]
            left.plot(tokens, [row] * len(tokens), "|", color="tab:blue", markersize=9)
            for at, what in marks:
                if what in COLOURS:
                    left.plot([at / 1e3], [row], "o", color=COLOURS[what], markersize=5)
        left.axvline(0.0, color="tab:red", linewidth=1)
        if shown.detected_s is not None:
            left.axvline(shown.detected_s, color="gray", linestyle="--", linewidth=1)
        for name, colour in COLOURS.items():
            left.plot([], [], "o", color=colour, label=name.replace("_", " "))
        left.plot([], [], "--", color="gray", label="detected")
        left.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        left.set_yticks(range(len(shown.timeline)))
        left.set_title(f"trial {shown.number}: {shown.victim} at {shown.point}", fontsize=9)
        left.set_xlabel("seconds from the signal")
        left.set_ylabel("stream (each tick is a message with tokens)")
    lines: dict[str, list[float | None]] = {
        "next token (on the victim)": [s for t in counted for s in t.recovered_s],
        "detected": [t.detected_s for t in counted],
        "admitting again": [t.admitted_s for t in counted],
        "victim serves again": [t.restarted_s for t in counted],
    }
    for name, values in lines.items():
        known = sorted(value for value in values if value is not None)
        if known:
            shares = [(i + 1) / len(known) for i in range(len(known))]
            right.step(known, shares, where="post", label=f"{name} ({len(known)})")
    right.set_xscale("log")
    right.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    right.xaxis.set_minor_formatter(lambda value, _: "")
    right.set_xlabel("seconds from the signal")
    right.set_ylabel("share of all")
    right.grid(alpha=0.3)
    right.legend(fontsize=8)
    right.set_title(f"{len(counted)} trials", fontsize=9)
    write_plot(figure, path)


def typical(trials: Sequence[Trial]) -> Trial | None:
    """The trial whose recovery is the median, of those in which a stream had to move."""
    moved = sorted((t for t in trials if t.recovered_s), key=lambda t: max(t.recovered_s))
    if moved:
        return moved[len(moved) // 2]
    return trials[0] if trials else None
