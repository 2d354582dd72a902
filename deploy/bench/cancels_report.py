"""What `bench cancels` has seen: figures, a table, a sentence and a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from deepinfer.deploy.bench.plots import axes_in_a_row, write_plot
from deepinfer.deploy.bench.results import percentile

if TYPE_CHECKING:
    from deepinfer.deploy.bench.cancels import Cancel, Seen

LIMIT_S = 1.0
STATES = (
    "arriving",
    "waiting",
    "prefill",
    "decode",
    "swapping_out",
    "swapped",
    "swapping_in",
    "recovering",
)


def figures(seen: Seen, model: str, blocks: int, wanted: int) -> dict[str, Any]:
    """Everything for the JSON."""
    cancels = seen.cancels
    late = [one for one in cancels if one.free_s is None or one.free_s > LIMIT_S]
    return {
        "as_it_should_be": len(cancels) >= wanted and not (late or seen.faults),
        "model": model,
        "pool_blocks": blocks,
        "cancels": len(cancels),
        "free_within_a_second": len(cancels) - len(late),
        "never_free": sum(one.free_s is None for one in cancels),
        "had_ended_before": seen.ended,
        "worker_kills": seen.kills,
        "rounds": dict(sorted(seen.rounds.items())),
        "rounds_that_missed_their_state": dict(sorted(seen.missed.items())),
        "free_s": _times(cancels),
        "by_state": {
            state: {"cancels": len(found)} | _times(found)
            for state in (*STATES, *_others(cancels))
            if (found := [one for one in cancels if one.state == state])
        },
        "by_parked_place": dict(sorted(Counter(one.place or "none" for one in cancels).items())),
        "in_transit_by_place": {
            f"{state} at {place}": count
            for (state, place), count in sorted(
                Counter((one.state, one.place) for one in cancels if one.place).items()
            )
            if state in ("prefill", "swapping_out", "swapping_in")
        },
        "held_after_a_second": seen.late[:50],
        "faults": seen.faults[:50],
    }


def _others(cancels: Sequence[Cancel]) -> list[str]:
    return sorted({one.state for one in cancels} - set(STATES))


def _times(cancels: Sequence[Cancel]) -> dict[str, float]:
    times = [one.free_s for one in cancels if one.free_s is not None]
    if not times:
        return {}
    named = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(percentile(times, q), 4) for name, q in named.items()}


def sentence(found: dict[str, Any]) -> str:
    """The result in words."""
    times = found["free_s"]
    shown = f"p50 {times['p50']:.3f} s, max {times['max']:.3f} s" if times else "no times"
    return (
        f"{found['free_within_a_second']} of {found['cancels']} cancels freed everything within "
        f"{LIMIT_S:g} s ({shown}); {len(found['faults'])} faults."
    )


def table(found: dict[str, Any]) -> Table:
    """Times by state, in milliseconds."""
    shown = Table(title="from a cancel until nothing is held, ms", padding=(0, 1, 0, 0))
    for name in ("state", "cancels", "p50", "p90", "p99", "max"):
        shown.add_column(name, justify="left" if name == "state" else "right")
    for state, one in found["by_state"].items():
        times = [f"{1e3 * one[q]:.0f}" if q in one else "-" for q in ("p50", "p90", "p99", "max")]
        shown.add_row(state, str(one["cancels"]), *times)
    return shown


def plot(seen: Seen, path: Path) -> None:
    """The distribution of the times, by state."""
    figure, axis = axes_in_a_row(1, (8, 4.2))
    for state in (*STATES, *_others(seen.cancels)):
        times = sorted(
            1e3 * one.free_s
            for one in seen.cancels
            if one.state == state and one.free_s is not None
        )
        if times:
            shares = [(i + 1) / len(times) for i in range(len(times))]
            axis.step(times, shares, where="post", label=f"{state} ({len(times)})")
    axis.axvline(1e3 * LIMIT_S, linestyle=":", color="gray")
    axis.set_xscale("log")
    axis.set_xlabel("ms from the cancel until nothing is held")
    axis.set_ylabel("share of the cancels")
    axis.set_title("Cancels by the state they met")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    write_plot(figure, path)
