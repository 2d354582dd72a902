"""What `bench precision` says of its measurements: a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from deepinfer.deploy.bench.plots import axes_in_a_row, write_plot


def table(figures: dict[str, Any]) -> Table:
    """What is printed at the end."""
    tokens = figures["greedy"]["answer_tokens"]
    shown = Table(title="beside FP16 weights and KV (± standard error)", padding=(0, 1, 0, 0))
    for name in ("weights", "KV"):
        shown.add_column(name, no_wrap=True)
    for name in ("perplexity", "change %", "KL nats", "top token %", f"alike of {tokens}"):
        shown.add_column(name, justify="right", no_wrap=True)
    for weights, by_dtype in figures["results"].items():
        for dtype, one in by_dtype.items():
            above, kl = one["perplexity_over_reference"], one["kl_nats"]
            top, alike = one["top_token_agreement"], one["greedy_tokens_alike"]
            shown.add_row(
                weights,
                dtype,
                f"{one['perplexity']['mean']:.2f}",
                f"{100 * (above['mean'] - 1):+.2f} ± {100 * above['standard_error']:.2f}",
                f"{kl['mean']:.2g} ± {kl['standard_error']:.1g}",
                f"{100 * top['mean']:.1f}",
                f"{alike['mean']:.1f}",
            )
        shown.add_section()
    return shown


def plot(figures: dict[str, Any], path: Path) -> None:
    """Draw divergence, perplexity and greedy agreement of each pair; what each layer suffers."""
    figure, axes = axes_in_a_row(5, (20, 3.8))
    tokens = figures["greedy"]["answer_tokens"]
    _bars(axes[0], figures, "kl_nats", "KL from FP16, nats", log=True)
    _bars(axes[1], figures, "perplexity_over_reference", "perplexity above FP16, %", 100.0, 1.0)
    _bars(axes[2], figures, "greedy_tokens_alike", f"greedy tokens alike, of {tokens}")
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", ncols=len(names), fontsize=8)
    layers = figures["layers"]
    axes[3].bar(range(len(layers["kl_nats"])), layers["kl_nats"], color="tab:gray")
    axes[3].set_title(
        f"KL of one layer in FP8, nats (the head: {layers['head_kl_nats']:.2g})", fontsize=10
    )
    axes[3].set_xlabel("layer", fontsize=8)
    for name, kl in layers["prefixes"]["kl_nats"].items():
        axes[4].plot(layers["prefixes"]["layers"], kl, marker="o", markersize=3, label=name)
    axes[4].set_title("KL of the first layers in FP8, nats", fontsize=10)
    axes[4].set_xlabel("layers in FP8", fontsize=8)
    axes[4].set_ylim(bottom=0)
    axes[4].legend(fontsize=7, title="order", title_fontsize=7)
    for axis in axes:
        axis.grid(axis="y", alpha=0.3)
    figure.suptitle(
        f"{figures['model']}: {figures['windows']} windows of {figures['window_tokens']} tokens; "
        f"bars: mean and standard error; mixed: each step FP16 or FP8, drawn",
        fontsize=10,
    )
    write_plot(figure, path)


def _bars(
    axis: Any,
    figures: dict[str, Any],
    key: str,
    title: str,
    scale: float = 1.0,
    offset: float = 0.0,
    *,
    log: bool = False,
) -> None:
    """One group of bars a KV dtype, one bar a form of the weights."""
    results = figures["results"]
    width = 0.8 / len(results)
    names: list[str] = []
    for at, (weights, by_dtype) in enumerate(results.items()):
        names = list(by_dtype)
        means = [scale * (one[key]["mean"] - offset) for one in by_dtype.values()]
        errors = [abs(scale) * one[key]["standard_error"] for one in by_dtype.values()]
        places = [i + (at - (len(results) - 1) / 2) * width for i in range(len(names))]
        if log:  # the reference beside itself is 0, which has no place on the axis
            means = [mean if mean > 0 else float("nan") for mean in means]
        axis.bar(places, means, width, yerr=errors, label=weights, error_kw={"linewidth": 0.7})
    axis.set_xticks(range(len(names)), names, rotation=30, fontsize=8)
    axis.set_title(title, fontsize=10)
    if log:
        axis.set_yscale("log")
