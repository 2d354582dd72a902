"""What `bench quality` says of its measurements: means with their errors, a table, a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from rich.table import Table

from deepinfer.deploy.bench.plots import axes_in_a_row, write_plot
from deepinfer.deploy.bench.results import percentile


class Window(NamedTuple):
    """Means over the positions of one window; the divergence of each position, in nats."""

    nll: float
    agreement: float
    kl: tuple[float, ...]


class Spread(NamedTuple):
    """A mean and its standard error."""

    mean: float
    error: float

    def figures(self) -> dict[str, float]:
        """For the JSON."""
        return {"mean": float(f"{self.mean:.6g}"), "standard_error": float(f"{self.error:.2g}")}


def spread(values: Sequence[float]) -> Spread:
    """The mean of two or more independent values, and its standard error."""
    return Spread(fmean(values), stdev(values) / math.sqrt(len(values)))


def exponential(logarithm: Spread) -> Spread:
    """The exponential of a mean, its error to first order."""
    value = math.exp(logarithm.mean)
    return Spread(value, value * logarithm.error)


def figures_of(
    windows: Sequence[Window], reference: Sequence[Window], name: str = "fp32"
) -> dict[str, Any]:
    """What one dtype's windows come to, beside those of the reference, called ``name``.

    The ratio of perplexities is taken window by window: how much the windows themselves differ does
    not blur it.
    """
    above = [ours.nll - right.nll for ours, right in zip(windows, reference, strict=True)]
    divergence = [kl for window in windows for kl in window.kl]
    return {
        "perplexity": exponential(spread([window.nll for window in windows])).figures(),
        f"perplexity_over_{name}": exponential(spread(above)).figures(),
        "kl_nats": spread([fmean(window.kl) for window in windows]).figures(),
        "kl_nats_p99": float(f"{percentile(divergence, 0.99):.4g}"),
        "top_token_agreement": spread([window.agreement for window in windows]).figures(),
    }


def table(figures: dict[str, Any]) -> Table:
    """What is printed at the end."""
    tokens = figures["greedy"]["answer_tokens"]
    shown = Table(title="beside float32 (± standard error)", padding=(0, 1, 0, 0))
    shown.add_column("KV", no_wrap=True)
    for name in ("perplexity", "change %", "KL nats", "top token %", f"alike of {tokens}"):
        shown.add_column(name, justify="right", no_wrap=True)
    for dtype, one in figures["results"].items():
        if dtype == "fp32":
            shown.add_row(dtype, f"{one['perplexity']['mean']:.2f}")
            continue
        ratio, kl = one["perplexity_over_fp32"], one["kl_nats"]
        same, alike = one["top_token_agreement"], one["greedy_tokens_alike"]
        shown.add_row(
            dtype,
            f"{one['perplexity']['mean']:.2f}",
            f"{100 * (ratio['mean'] - 1):+.2f} ±{100 * ratio['standard_error']:.2f}",
            f"{kl['mean']:.1e} ±{kl['standard_error']:.0e}",
            f"{100 * same['mean']:.2f} ±{100 * same['standard_error']:.2f}",
            f"{alike['mean']:.1f} ±{alike['standard_error']:.1f}",
        )
    return shown


def plot(figures: dict[str, Any], path: Path) -> None:
    """Draw divergence, change of perplexity, and agreement of each dtype."""
    results = {name: one for name, one in figures["results"].items() if name != "fp32"}
    names = list(results)
    tokens = figures["greedy"]["answer_tokens"]

    def column(key: str, scale: float, offset: float = 0.0) -> tuple[list[float], list[float]]:
        means = [scale * (one[key]["mean"] - offset) for one in results.values()]
        return means, [scale * one[key]["standard_error"] for one in results.values()]

    panels = (
        ("KL from float32, nats", column("kl_nats", 1.0), "log"),
        ("perplexity above float32, %", column("perplexity_over_fp32", 100.0, 1.0), "linear"),
        ("positions with another top token, %", column("top_token_agreement", -100.0, 1.0), "log"),
        (f"greedy tokens alike, of {tokens}", column("greedy_tokens_alike", 1.0), "linear"),
    )
    figure, axes = axes_in_a_row(4, (14, 3.6))
    for axis, (title, (means, errors), scale) in zip(axes, panels, strict=True):
        axis.bar(names, means, yerr=[abs(error) for error in errors], capsize=3)
        axis.set_title(title, fontsize=10)
        if scale == "log" and max(means) > 0:
            axis.set_yscale("log")
        axis.tick_params(axis="x", labelrotation=30)
        axis.grid(axis="y", alpha=0.3)
    figure.suptitle(
        f"{figures['model']}: {figures['windows']} windows of {figures['window_tokens']} tokens; "
        "bars: mean and standard error",
        fontsize=10,
    )
    write_plot(figure, path)
