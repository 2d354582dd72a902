"""How the replays of a trace are shown: a table a rate, the verdict, and a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from deepinfer.deploy.bench.plots import axes_in_a_row, write_plot
from deepinfer.deploy.bench.trace_figures import AIM, GAIN, KEEP, NEAR

COLOURS: Final = {"fp16": "tab:blue", "fp8": "tab:red", "threshold": "tab:gray", "slo": "tab:green"}


def tables(found: dict[str, Any]) -> list[Table]:
    """One for each rate: means over seeds."""
    shown = []
    for one in found["rates"]:
        title = f"{found['trace']['file']}, {one['rate']:g} requests/s and worker; %, ms"
        table = Table(title=title, padding=(0, 1, 0, 0))
        table.add_column("policy", no_wrap=True)
        names = ("tight", "loose", "TTFT p90", "TPOT p90", "FP8 tokens", "switches", "failed")
        for name in names:
            table.add_column(name, justify="right")
        for policy, over in one["policies"].items():
            tight = over["attainment_tight_both"]
            failed = over["errors"]["mean"] + over["unfinished"]["mean"]
            table.add_row(
                policy,
                f"{100 * tight['mean']:.1f} ({100 * tight['min']:.0f}-{100 * tight['max']:.0f})",
                f"{100 * over['attainment_loose_both']['mean']:.1f}",
                _mean(over, "ttft_ms_p90"),
                _mean(over, "tpot_ms_p90"),
                f"{100 * over['fp8_share_of_tokens']['mean']:.0f}%",
                f"{over['switches']['mean']:.0f}",
                f"{failed:.0f}",
            )
        shown.append(table)
    return shown


def _mean(over: dict[str, Any], name: str) -> str:
    return f"{over[name]['mean']:.1f}" if name in over else "-"


def judgement(found: dict[str, Any]) -> str:
    """The verdict in words, a line for each pair of targets."""
    lines = []
    for level, said in found["verdict"].items():
        if said is None:
            lines.append(f"{level}: no verdict without all four policies")
            continue
        kept = [one for one in said["rates"] if one["kept"] is not None]
        parts = [
            f"{one['rate']:g}/s keeps {100 * one['kept']:.0f}% of {100 * one['fp8_gain']:.1f} "
            f"points with {_share(one)} FP8 tokens{_beside(one)}"
            for one in kept
        ]
        others = [one["slo_gain"] for one in said["rates"] if one["kept"] is None]
        if others:
            parts.append(f"elsewhere {100 * min(others):+.1f} points or better beside FP16")
        least = min(one["slo_over_threshold"] for one in said["rates"])
        parts.append(f"beside threshold {100 * least:+.1f} points or better")
        holds = "holds" if said["holds"] else "DOES NOT HOLD"
        lines.append(f"{level} targets: slo {holds}: " + "; ".join(parts))
    wanted = f"{100 * KEEP:.0f}% of gains of {100 * GAIN:.0f} points or more"
    lines.append(
        f"(wanted: {wanted}, for the {AIM} targets, which slo is given, with the least share of "
        f"FP8 tokens of all policies that keep as much; elsewhere at most {100 * NEAR:.0f} below "
        "FP16; never below threshold)"
    )
    return "\n".join(lines)


def _share(one: dict[str, Any]) -> str:
    """Of tokens that slo computes in FP8 at a rate, with the least and the most of seeds."""
    over = one["fp8_share_of_seeds"]
    return f"{100 * over['mean']:.0f}% ({100 * over['min']:.0f}-{100 * over['max']:.0f})"


def _beside(one: dict[str, Any]) -> str:
    """The shares of the policies that keep as much."""
    others = one["shares_of_others_that_keep_it"].items()
    shown = ", ".join(f"{name} {100 * share:.0f}%" for name, share in others)
    least = ", the least share" if one["least_share"] else ", not the least share"
    return least + (f" (of {shown})" if shown else "")


def draw(found: dict[str, Any], path: Path, console: Console) -> None:
    """Draw it where matplotlib is there."""
    if importlib.util.find_spec("matplotlib") is None:
        console.print("matplotlib is not installed: no picture")
        return
    plot(found, path)


def plot(found: dict[str, Any], path: Path) -> None:
    """Attainment, FP8's share, and the tails of TTFT and TPOT over the rate."""
    figure, axes = axes_in_a_row(5, (21, 4.4))
    rates = [one["rate"] for one in found["rates"]]
    policies = list(found["rates"][0]["policies"])
    panels = (
        ("attainment_tight_both", "attainment, tight targets (5x), %", 100),
        ("attainment_loose_both", "attainment, loose targets (10x), %", 100),
        ("fp8_share_of_tokens", "tokens computed in FP8, %", 100),
        ("ttft_ms_p90", "TTFT p90, ms", 1),
        ("tpot_ms_p90", "TPOT p90, ms", 1),
    )
    for axis, (key, title, scale) in zip(axes, panels, strict=True):
        for policy in policies:
            over = [one["policies"][policy].get(key) for one in found["rates"]]
            if any(each is None for each in over):
                continue
            means = [scale * each["mean"] for each in over]
            low = [scale * (each["mean"] - each["min"]) for each in over]
            high = [scale * (each["max"] - each["mean"]) for each in over]
            axis.errorbar(
                rates,
                means,
                [low, high],
                marker="o",
                capsize=3,
                label=policy,
                color=COLOURS.get(policy),
                alpha=0.85,
            )
        axis.set_title(title)
        axis.set_xlabel("requests/s and worker")
        axis.grid(alpha=0.3)
    for axis in axes[:3]:
        axis.set_ylim(bottom=0)
    for axis, level in zip(axes[3:], ("ttft", "tpot"), strict=True):
        axis.axhline(found["targets_ms"]["tight"][level], color="black", linewidth=0.8, ls="--")
        axis.set_yscale("log")
    axes[0].legend(fontsize="small")
    place = found["place"]
    figure.suptitle(
        f"{found['trace']['file']}, {place['workers']} worker(s), {found['where']}, "
        f"{found['seeds']} seed(s); bars: least and most. {place.get('source', '')[:110]}",
        fontsize="medium",
    )
    write_plot(figure, path)
