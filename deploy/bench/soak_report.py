"""What `bench soak` has seen, judged: figures, a table, a sentence and a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from deepinfer.deploy.bench.footprints import Held
from deepinfer.deploy.bench.plots import axes_in_a_row, write_plot
from deepinfer.deploy.bench.results import percentile
from deepinfer.deploy.bench.trend import WARM_UP, Limit, Trend, thinned, trend

if TYPE_CHECKING:
    from deepinfer.deploy.bench.soak import Sample, Soak

MIB = 2**20
MEMORY = Limit(share=0.02, least=2.0)
"""In MiB: two percent over all of the time, or two MiB of a small process."""
NUMBER = Limit(share=0.0, least=0.5)
"""Of descriptors, threads and records: not one more."""
FIGURES: dict[str, tuple[Callable[[Held], float], Limit]] = {
    "rss_mib": (lambda held: held.rss_bytes / MIB, MEMORY),
    "anon_mib": (lambda held: held.anon_bytes / MIB, MEMORY),
    "pinned_mib": (lambda held: held.pinned_bytes / MIB, MEMORY),
    "memfd_mib": (lambda held: held.memfd_bytes / MIB, MEMORY),
    "fds": (lambda held: held.fds, NUMBER),
    "threads": (lambda held: held.threads, NUMBER),
}
COUNTS: dict[str, Limit] = {
    "blocks_used": NUMBER,
    "store_bytes": Limit(share=0.02, least=1024.0),
    "store_tickets": NUMBER,
    "controller_sequences": NUMBER,
    "gateway_live": NUMBER,
    "gateway_kept": Limit(share=0.1, least=2.0),
    "gateway_streams": NUMBER,
}
"""``gateway_kept`` holds ended requests for a while: it follows how many there were lately."""
POINTS = 120
"""Of each series in the JSON."""
STEADY = 0.9
"""Share of the samples that a process must be in to be judged: Ray starts some for a while."""
RAY = "ray: "


def figures(soak: Soak) -> dict[str, Any]:
    """Everything for the JSON."""
    tally, samples = soak.tally, soak.samples
    trends = _judged(samples)
    grown, of_ray = _grown(trends, ray=False), _grown(trends, ray=True)
    rate = tally.swaps / soak.seconds if soak.seconds else 0.0
    least = _least_rate(samples)
    right = not (tally.wrong or tally.failed or soak.leaks or soak.restarts)
    return {
        "complete": soak.complete,
        "as_it_should_be": soak.complete and right and not grown and bool(tally.swaps),
        "flat": not grown,
        "grown": grown,
        "grown_of_ray": of_ray,
        "model": soak.model.name,
        "workers": soak.plan.workers,
        "pool_blocks": soak.pool_blocks,
        "seconds": round(soak.seconds, 1),
        "stopped_by_a_signal": soak.stopped,
        "bursts": soak.bursts,
        "streams": dict(sorted(tally.streams.items())),
        "streams_complete": tally.complete,
        "streams_cancelled": tally.cancelled,
        "streams_wrong": tally.wrong,
        "streams_failed": tally.failed,
        "faults": tally.faults,
        "tokens": tally.tokens,
        "swaps": tally.swaps,
        "resumes": tally.resumes,
        "recomputes": tally.recomputes,
        "swaps_per_s": round(rate, 3),
        "swaps_per_s_least_of_5_minutes": least,
        "restarts": soak.restarts,
        "looks_when_idle": len(soak.quiet_s) + len(soak.leaks),
        "not_free_when_idle": soak.leaks,
        "free_after_p50_s": _rounded(percentile(soak.quiet_s, 0.5)) if soak.quiet_s else None,
        "free_after_max_s": _rounded(max(soak.quiet_s)) if soak.quiet_s else None,
        "cores_used": _cores(samples),
        "warm_up_share": WARM_UP,
        "limits": {
            "memory": "2 % or 2 MiB over the time that counts",
            "descriptors_threads_records": "less than half a one",
        },
        "trends": {
            name: {figure: _plain(found) for figure, found in sorted(one.items())}
            for name, one in trends.items()
        },
        "series": _series(samples),
    }


def _judged(samples: list[Sample]) -> dict[str, dict[str, Trend]]:
    """Trends by process (and "records") and figure."""
    found: dict[str, dict[str, Trend]] = {}
    for name in _steady(samples):
        here = [(s.at_s, s.processes[name]) for s in samples if name in s.processes]
        times = [at for at, _ in here]
        for figure, (of, limit) in FIGURES.items():
            line = trend(times, [of(held) for _, held in here], limit)
            if line is not None:
                found.setdefault(name, {})[figure] = line
    times = [s.at_s for s in samples]
    for count, limit in COUNTS.items():
        line = trend(times, [s.counts[count] for s in samples], limit)
        if line is not None:
            found.setdefault("records", {})[count] = line
    return found


def _grown(trends: dict[str, dict[str, Trend]], *, ray: bool) -> list[str]:
    """What is not flat, of Ray's own processes or of all others."""
    return sorted(
        f"{name} {figure}"
        for name, found in trends.items()
        if name.startswith(RAY) == ray
        for figure, line in found.items()
        if not line.flat
    )


def _steady(samples: list[Sample]) -> list[str]:
    """Names of the processes that were there nearly all the time; ours first."""
    seen: dict[str, int] = {}
    for sample in samples:
        for name in sample.processes:
            seen[name] = seen.get(name, 0) + 1
    names = [name for name, count in seen.items() if count >= STEADY * len(samples)]
    return sorted(names, key=lambda name: (name.startswith(RAY), name))


def _least_rate(samples: list[Sample], window_s: float = 300.0) -> float | None:
    """The fewest swaps a second in any five minutes; None if it did not last so long."""
    rates = []
    early = iter(samples)
    first = next(early, None)
    for last in samples:
        while first is not None and last.at_s - first.at_s >= window_s:
            rates.append((last.swaps - first.swaps) / (last.at_s - first.at_s))
            first = next(early, None)
    return _rounded(min(rates)) if rates else None


def _cores(samples: list[Sample]) -> dict[str, float]:
    """CPU seconds a second of each process that stayed, and of all."""
    if len(samples) < 2:
        return {}
    first, last = samples[0], samples[-1]
    used = {
        name: _rounded(
            (last.processes[name].cpu_s - held.cpu_s) / (last.at_s - first.at_s),
        )
        for name, held in first.processes.items()
        if name in last.processes
    }
    return dict(sorted(used.items())) | {"all": _rounded(sum(used.values()))}


def _series(samples: list[Sample]) -> dict[str, Any]:
    """What is drawn, thinned: of each of our own processes, of Ray's together, of records."""

    def thin(points: Iterator[tuple[float, float]]) -> list[list[float]]:
        return [[_rounded(at), _rounded(value)] for at, value in thinned(list(points), POINTS)]

    found: dict[str, Any] = {}
    names = _steady(samples)
    for name in [name for name in names if not name.startswith(RAY)]:
        for figure in ("rss_mib", "anon_mib", "fds"):
            of = FIGURES[figure][0]
            found[f"{name} {figure}"] = thin(
                (s.at_s, of(s.processes[name])) for s in samples if name in s.processes
            )
    rays = [name for name in names if name.startswith(RAY)]
    for figure in ("rss_mib", "anon_mib", "fds"):
        of = FIGURES[figure][0]
        found[f"{RAY}all {figure}"] = thin(
            (s.at_s, sum(of(s.processes[name]) for name in rays if name in s.processes))
            for s in samples
        )
    for count in COUNTS:
        found[count] = thin((s.at_s, s.counts[count]) for s in samples)
    found["swaps"] = thin((s.at_s, s.swaps) for s in samples)
    return found


def _plain(line: Trend) -> dict[str, float | bool]:
    return {
        "level": _rounded(line.level),
        "growth": _rounded(line.growth),
        "growth_percent": _rounded(line.growth_percent),
        "per_hour": _rounded(line.per_hour),
        "allowed": _rounded(line.allowed),
        "flat": line.flat,
    }


def _rounded(value: float) -> float:
    return round(value, 3)


def sentence(found: dict[str, Any]) -> str:
    """The result in words."""
    flat = "nothing grew" if found["flat"] else f"grown: {', '.join(found['grown'])}"
    wrong = found["streams_wrong"] + found["streams_failed"]
    return (
        f"{found['seconds']:.0f} s, {sum(found['streams'].values()):,} streams ({wrong} wrong or "
        f"failed), {found['swaps']:,} swaps ({found['swaps_per_s']:.2f}/s), "
        f"{len(found['not_free_when_idle'])} of {found['looks_when_idle']} looks found something "
        f"held when idle; {flat}."
    )


def table(found: dict[str, Any]) -> Table:
    """Level and growth of every figure of every process."""
    shown = Table(title="level, and growth over the time that counts", padding=(0, 1, 0, 0))
    shown.add_column("process")
    for name in FIGURES:
        shown.add_column(name.replace("_", " "), justify="right")
    for name, one in found["trends"].items():
        if name == "records":
            continue
        cells = []
        for figure in FIGURES:
            line = one.get(figure)
            if line is None:
                cells.append("-")
                continue
            mark = "" if line["flat"] else " !"
            cells.append(f"{line['level']:.4g} {line['growth']:+.2g}{mark}")
        shown.add_row(name, *cells)
    return shown


def plot(soak: Soak, path: Path) -> None:
    """Memory, descriptors, records and the rate of swaps over time."""
    found = _series(soak.samples)
    figure, axes = axes_in_a_row(4, (17, 4.2))
    memory, fds, records, swaps = axes
    for name, points in found.items():
        hours = [at / 3600 for at, _ in points]
        values = [value for _, value in points]
        if name.endswith(" anon_mib"):
            memory.plot(hours, values, label=name.removesuffix(" anon_mib"), linewidth=1)
        elif name.endswith(" fds"):
            fds.plot(hours, values, label=name.removesuffix(" fds"), linewidth=1)
        elif name in ("blocks_used", "controller_sequences", "gateway_kept", "store_tickets"):
            records.plot(hours, values, label=name.replace("_", " "), linewidth=1)
    rates = [
        ((a[0] + b[0]) / 7200, (b[1] - a[1]) / (b[0] - a[0]))
        for a, b in pairwise(found["swaps"])
        if b[0] > a[0]
    ]
    swaps.plot([at for at, _ in rates], [rate for _, rate in rates], linewidth=1)
    if rates:
        swaps.axhline(median(rate for _, rate in rates), linestyle=":", color="gray")
    for axis, title in zip(
        axes,
        ("anonymous memory, MiB", "file descriptors", "records and blocks", "swaps a second"),
        strict=True,
    ):
        axis.set_title(title)
        axis.set_xlabel("hours")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        if axis is not swaps:
            axis.legend(fontsize=7)
    write_plot(figure, path)
