"""What `bench jitter` makes of its runs: quantiles, a table and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from deepinfer.deploy.bench.plots import axes_in_a_row, write_plot
from deepinfer.deploy.bench.results import percentile

if TYPE_CHECKING:
    from deepinfer.deploy.bench.jitter import Load, StreamRun

QUANTILES = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99, "max_ms": 1.0}


def figures(
    load: Load, blocks: Mapping[str, int], runs: Mapping[str, Sequence[Sequence[StreamRun]]]
) -> dict[str, Any]:
    """Everything for JSON, times in milliseconds.

    ``between_swaps`` are the pressed pool's intervals in which the stream itself was not swapped:
    beside the roomy pool's they say what others' swaps cost it.
    """
    roomy = [run for one in runs["roomy"] for run in one]
    pressed = [run for one in runs["pressed"] for run in one]
    return {
        **load.host.facts(),
        "streams": load.streams,
        "rounds": load.rounds,
        "max_tokens": load.max_tokens,
        "kv_cache_dtype": load.kv_cache_dtype,
        "threads": load.threads,
        "prefix_cache": False,
        "pool_blocks": dict(blocks),
        "tokens": sum(len(run.token_ids) for run in pressed),
        "same_tokens": sum(
            sum(a == b for a, b in zip(one.token_ids, other.token_ids, strict=True))
            for one, other in zip(roomy, pressed, strict=True)
        ),
        "pools": {"roomy": _pool(roomy), "pressed": _pool(pressed)},
    }


def _pool(runs: Sequence[StreamRun]) -> dict[str, Any]:
    every = [interval for run in runs for interval in run.intervals]
    swapped = [run for run in runs if run.swaps]
    return {
        "intervals": quantiles([i.seconds for i in every]),
        "between_swaps": quantiles([i.seconds for i in every if not i.swapped]),
        "around_swaps": quantiles([i.seconds for i in every if i.swapped]),
        "swaps": sum(run.swaps for run in runs),
        "resumes": sum(run.resumes for run in runs),
        "swapped_streams": [
            {
                "swaps": run.swaps,
                "stall_ms": 1e3 * run.stall_s,
                "copy_out_ms": 1e3 * run.copy_out_s,
                "copy_in_ms": 1e3 * run.copy_in_s,
                "wait_ms": 1e3 * run.wait_s,
            }
            for run in swapped
        ],
    }


def quantiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Count, p50, p95, p99 and the largest, in milliseconds; None of nothing."""
    if not seconds:
        return None
    found = {name: 1e3 * percentile(list(seconds), q) for name, q in QUANTILES.items()}
    return {"count": len(seconds)} | found


def table(found: dict[str, Any]) -> Table:
    """The intervals for a terminal."""
    shown = Table(title="time between tokens of a stream, ms", padding=(0, 1, 0, 0))
    for name in ("pool", "intervals", "count", *QUANTILES):
        shown.add_column(name.removesuffix("_ms"), justify="left" if name == "pool" else "right")
    for pool, one in found["pools"].items():
        for kind in ("intervals", "between_swaps", "around_swaps"):
            values = one[kind]
            if values is None or (kind == "between_swaps" and one["around_swaps"] is None):
                continue
            label = "all" if kind == "intervals" else kind.replace("_", " ")
            shown.add_row(
                pool, label, str(values["count"]), *(f"{values[q]:.1f}" for q in QUANTILES)
            )
    return shown


def sentence(found: dict[str, Any]) -> str:
    """What the swaps were made of."""
    pressed = found["pools"]["pressed"]
    streams = pressed["swapped_streams"]
    if not streams:
        return "nothing was swapped: choose a smaller --share"
    parts = {
        name: median(stream[f"{name}_ms"] for stream in streams)
        for name in ("stall", "copy_out", "copy_in", "wait")
    }
    return (
        f"{pressed['swaps']} swaps in {len(streams)} streams; a swapped stream stood still for "
        f"{parts['stall']:.0f} ms (median): copies {parts['copy_out']:.1f} ms out and "
        f"{parts['copy_in']:.1f} ms in, the rest ({parts['wait']:.0f} ms) waiting for room; "
        f"{found['same_tokens']} of {found['tokens']} tokens as in the roomy pool"
    )


def plot(
    found: dict[str, Any], runs: Mapping[str, Sequence[Sequence[StreamRun]]], path: Path
) -> None:
    """How intervals are distributed, and what each swapped stream's stall was made of."""
    figure, (spread, stalls) = axes_in_a_row(2, (12, 4.2))
    every = {
        pool: [interval for one in rounds for run in one for interval in run.intervals]
        for pool, rounds in runs.items()
    }
    lines = {
        "roomy pool": [i.seconds for i in every["roomy"]],
        "pressed pool": [i.seconds for i in every["pressed"]],
        "pressed pool, between swaps": [i.seconds for i in every["pressed"] if not i.swapped],
    }
    for label, seconds in lines.items():
        # The share that took longer: a straight look at the tail, on both logarithmic axes.
        values = sorted(1e3 * s for s in seconds if s > 0)
        left = [1 - place / len(values) for place in range(len(values))]
        spread.step(values, left, where="post", label=label)
    spread.set_xscale("log")
    spread.set_yscale("log")
    spread.set_xlabel("time between tokens, ms")
    spread.set_ylabel("share of intervals at least as long")
    spread.legend(fontsize="small")
    spread.set_title("inter-token intervals")
    streams = found["pools"]["pressed"]["swapped_streams"]
    places = list(range(1, len(streams) + 1))
    bottom = [0.0] * len(streams)
    for name, label in (
        ("copy_out_ms", "copy out"),
        ("copy_in_ms", "copy in"),
        ("wait_ms", "waiting for room"),
    ):
        heights = [stream[name] for stream in streams]
        stalls.bar(places, heights, bottom=bottom, label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    stalls.set_title("stall of each swapped stream")
    stalls.set_xlabel("stream")
    stalls.set_ylabel("ms")
    stalls.legend(fontsize="small")
    for axis in (spread, stalls):
        axis.grid(alpha=0.3)
    figure.suptitle(
        f"{found['streams']} streams of {found['max_tokens']} tokens, {found['kv_cache_dtype']} "
        f"KV: pools of {found['pool_blocks']['roomy']} and {found['pool_blocks']['pressed']} blocks"
    )
    write_plot(figure, path)
