"""What `bench concurrency` makes of its runs: figures, ratios, a table and a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from deepinfer.deploy.bench.plots import axes_in_a_row, write_plot
from deepinfer.deploy.bench.results import percentile

if TYPE_CHECKING:
    from deepinfer.deploy.bench.concurrency import Load, Measured, Run

LABELS = {
    "cluster": "cluster, through the SDK",
    "engine": "bare engine loop",
    "padded_batch": "transformers, padded batch",
    "one_by_one": "transformers, one after another",
    "static": "transformers, static cache, compiled",
    "continuous": "transformers, continuous batching",
}
PEERS = {
    "one_by_one": "1 by 1",
    "padded_batch": "batch",
    "static": "static",
    "continuous": "contin.",
}
"""What the table calls transformers' ways."""


def figures(load: Load, prompt_lengths: Sequence[int], measured: Measured) -> dict[str, Any]:
    """Everything measured and computed, ready for JSON: times in milliseconds.

    A ratio is the median, over rounds, of the ratio within a round. ``tokens_as_engine`` counts
    the tokens up to each stream's first difference from the bare engine's.
    """
    results: dict[str, Any] = {}
    for dtype in load.kv_cache_dtypes:
        for level in sorted(load.levels):
            runs = {
                server: measured[server, dtype, level]
                for server in LABELS
                if (server, dtype, level) in measured
            }
            results.setdefault(dtype, {})[str(level)] = {
                **{server: _served(runs[server], runs["engine"]) for server in runs},
                "ratios": _ratios(runs),
            }
    return {
        **load.host.facts(),
        "compute_dtype": "float32" if load.host.device == "cpu" else "float16",
        "threads": load.threads,
        "rounds": load.rounds,
        "max_tokens": load.max_tokens,
        "prompt_tokens": list(prompt_lengths),
        "prefix_cache": False,
        "results": results,
    }


def _served(runs: Sequence[Run], engine: Sequence[Run]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tokens_per_s": median(run.tokens_per_s for run in runs),
        "seconds": [run.seconds for run in runs],
        "tokens": sum(len(ids) for run in runs for ids in run.token_ids),
        "tokens_as_engine": sum(
            _common(ids, right)
            for run, bare in zip(runs, engine, strict=True)
            for ids, right in zip(run.token_ids, bare.token_ids, strict=True)
        ),
    }
    ttfts = [1e3 * s for run in runs for s in run.ttfts_s]
    tpots = [1e3 * s for run in runs for s in run.tpots_s]
    if ttfts and tpots:
        found |= {
            "interval_p50_ms": median(1e3 * _interval(run) for run in runs),
            "ttft_p50_ms": median(ttfts),
            "tpot_p50_ms": median(tpots),
            "tpot_p95_minus_p50_ms": percentile(tpots, 0.95) - median(tpots),
        }
    return found


def _common(ids: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(ids, right, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(ids))


def _ratios(runs: dict[str, list[Run]]) -> dict[str, float]:
    def over(one: str, other: str, figure: Callable[[Run], float]) -> float:
        pairs = zip(runs[one], runs[other], strict=True)
        return median(figure(a) / figure(b) for a, b in pairs)

    ratios = {
        "tokens_per_s_over_engine": over("cluster", "engine", lambda run: run.tokens_per_s),
        "tpot_over_engine": over("cluster", "engine", lambda run: median(run.tpots_s)),
        "interval_p50_over_engine": over("cluster", "engine", _interval),
    }
    for server in PEERS:
        if server in runs:
            ratios[f"tokens_per_s_over_transformers_{server}"] = over(
                "cluster", server, lambda run: run.tokens_per_s
            )
    return ratios


def _interval(run: Run) -> float:
    """The median time between two tokens of a stream: a step in which nobody's prompt is read."""
    return median(seconds for stream in run.intervals_s for seconds in stream)


def table(found: dict[str, Any]) -> Table:
    """The figures for a terminal."""
    title = f"streams of {found['max_tokens']} tokens each; times in ms"
    shown = Table(title=title, padding=(0, 1, 0, 0))
    shown.add_column("dtype", no_wrap=True)
    some = next(iter(next(iter(found["results"].values())).values()))
    peers = {
        name: f"tokens_per_s_over_transformers_{server}"
        for server, name in PEERS.items()
        if server in some
    }
    for name in (
        *("streams", "tok/s", "TTFT", "TPOT", "p95-p50", "x engine"),
        *(f"x {name}" for name in peers),
    ):
        shown.add_column(name, justify="right")
    for dtype, levels in found["results"].items():
        for level, one in levels.items():
            cluster, ratios = one["cluster"], one["ratios"]
            shown.add_row(
                dtype,
                level,
                f"{cluster['tokens_per_s']:.1f}",
                f"{cluster['ttft_p50_ms']:.0f}",
                f"{cluster['tpot_p50_ms']:.1f}",
                f"{cluster['tpot_p95_minus_p50_ms']:.1f}",
                f"{ratios['tpot_over_engine']:.3f}",
                *(f"{ratios[key]:.2f}" if key in ratios else "-" for key in peers.values()),
            )
    return shown


def plot(found: dict[str, Any], path: Path) -> None:
    """Tokens a second, TTFT and TPOT over the number of streams."""
    figure, axes = axes_in_a_row(3, (14, 4.2))
    panels = (("tokens_per_s", "tokens/s"), ("ttft_p50_ms", "TTFT p50, ms"))
    several = len(found["results"]) > 1
    for dtype, levels in found["results"].items():
        streams = [int(level) for level in levels]
        for axis, (key, title) in zip(axes, panels, strict=False):
            for server, label in LABELS.items():
                if all(key in one.get(server, {}) for one in levels.values()):
                    values = [one[server][key] for one in levels.values()]
                    name = f"{label} ({dtype})" if several else label
                    axis.plot(streams, values, marker="o", label=name)
            axis.set_title(title)
        for server in ("cluster", "engine"):
            middles = [one[server]["tpot_p50_ms"] for one in levels.values()]
            tails = [one[server]["tpot_p95_minus_p50_ms"] for one in levels.values()]
            name = f"{LABELS[server]} ({dtype})" if several else LABELS[server]
            axes[2].errorbar(
                streams, middles, [[0.0] * len(tails), tails], marker="o", capsize=3, label=name
            )
        axes[2].set_title("TPOT p50, ms (bar: up to p95)")
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(streams, [str(level) for level in streams])
        axis.set_xlabel("streams")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    where = found.get("card") or f"{found['threads']} thread(s)"
    figure.suptitle(f"One worker, {where}, {found['max_tokens']} tokens a stream")
    write_plot(figure, path)
