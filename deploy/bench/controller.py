"""The controller's core alone: events a second, and how the cost of one grows.

``handle()`` is timed on one core, nothing else: the events were made before.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.core import ControllerCore
from deepinfer.controller.core.events import Event
from deepinfer.deploy.bench.controller_traffic import TOKENS_A_ROUND, Traffic
from deepinfer.deploy.bench.plots import axes_in_a_row, check_plots, write_plot
from deepinfer.deploy.bench.results import percentile, write_result

EVENTS_A_SECOND_REQUIRED = 20_000
WORKERS, REQUESTS = 1_000, 20_000
REQUESTS_A_WORKER = REQUESTS // WORKERS
POOL_BLOCKS = 630
"""Blocks a worker: 20 requests take 580 on average, so that pools run short now and then."""
SATURATED_BLOCKS = 560
"""Blocks a worker that are too few: every newcomer is placed by swapping another out."""
WORKERS_SWEEP = (10, 100, 1_000, 2_000)
LINE_WORKERS = 100
LINE_SWEEP = (2_400, 9_600, 38_400)
"""Live requests on the full pools of 100 workers: what 2,000 do not leave room for waits."""
WARM_UP_ROUNDS = 30
EVENTS_TIMED = 10_000
REPEATS = 3


def measure(
    workers: int,
    requests: int,
    *,
    pool_blocks: int = POOL_BLOCKS,
    events: int = EVENTS_TIMED,
    seed: int = 0,
) -> dict[str, Any]:
    """Time ``handle()`` over at least ``events`` events of a cluster that is warm and busy.

    Returns:
        events per second and the mean of one event (microseconds), both of the thread's CPU time,
        so that others on the machine do not count; the same by the wall clock, with median and 99th
        percentile; and what the events and effects were. Of ``REPEATS`` runs the fastest counts.
    """
    traffic = Traffic(workers, requests, pool_blocks, seed)
    traffic.run(WARM_UP_ROUNDS)
    warm = len(traffic.kept)
    before = traffic.core.counters
    decided = {name: getattr(before, name) for name in before.__slots__}
    while len(traffic.kept) < warm + events:
        traffic.run(1)
    timed = traffic.kept[warm:]
    best: tuple[float, list[int], int] | None = None
    for _ in range(REPEATS):
        core = ControllerCore(1, ControllerConfig())
        for event, now_ms in traffic.kept[:warm]:
            core.handle(event, now_ms)
        nanoseconds, cpu_s, effects = _time(core, timed)
        if core.counters != traffic.core.counters:
            raise RuntimeError("the core decided otherwise when it was told the same again")
        if best is None or cpu_s < best[0]:
            best = cpu_s, nanoseconds, effects
    assert best is not None
    cpu_s, nanoseconds, effects = best
    after = core.counters
    wall_s = sum(nanoseconds) / 1e9
    micros = [n / 1e3 for n in nanoseconds]
    return {
        "workers": workers,
        "requests": requests,
        "pool_blocks": pool_blocks,
        "events": len(timed),
        "events_per_s": round(len(timed) / cpu_s),
        "events_per_s_wall": round(len(timed) / wall_s),
        "event_us": {
            "mean": round(cpu_s * 1e6 / len(timed), 2),
            "p50_wall": round(percentile(micros, 0.5), 2),
            "p99_wall": round(percentile(micros, 0.99), 2),
        },
        "events_by_kind": dict(Counter(type(event).__name__ for event, _ in timed)),
        "effects": effects,
        "decided": {
            name: getattr(after, name) - count
            for name, count in decided.items()
            if getattr(after, name) != count
        },
        "states": core.snapshot()["requests"],
    }


def _time(core: ControllerCore, timed: list[tuple[Event, int]]) -> tuple[list[int], float, int]:
    """Wall nanoseconds of each event, CPU seconds of all, and how many effects they had.

    What was made before is put out of the garbage collector's sight, which stays on.
    """
    nanoseconds = []
    effects = 0
    gc.collect()
    gc.freeze()
    try:
        cpu_begun = thread_time_ns()
        for event, now_ms in timed:
            begun = perf_counter_ns()
            made = core.handle(event, now_ms)
            nanoseconds.append(perf_counter_ns() - begun)
            effects += len(made)
        cpu_s = (thread_time_ns() - cpu_begun) / 1e9
    finally:
        gc.unfreeze()
    return nanoseconds, cpu_s, effects


def run(progress: Progress | None = None) -> dict[str, Any]:
    """Measure the sweeps, of which the required size is a part.

    In the first sweep, workers and requests grow together, 20 requests a worker; in the second the
    waiting line grows on workers that are full. ``decided`` tells how many swaps each point had: a
    larger cluster makes its events in a shorter time after its start, so it has had fewer. The
    saturated point has as many for each event as the first of the second sweep, ten times smaller.
    The cost may grow by no more than the logarithm of the requests does.
    """
    sizes = [(w, w * REQUESTS_A_WORKER, POOL_BLOCKS) for w in WORKERS_SWEEP]
    sizes += [(LINE_WORKERS, r, POOL_BLOCKS) for r in LINE_SWEEP]
    sizes.append((WORKERS, REQUESTS, SATURATED_BLOCKS))
    task = None if progress is None else progress.add_task("controller", total=len(sizes))
    measured = {}
    for workers, requests, pool_blocks in sizes:
        if progress is not None and task is not None:
            progress.update(task, description=f"{workers:,} workers, {requests:,} requests")
        size = workers, requests, pool_blocks
        measured[size] = measure(workers, requests, pool_blocks=pool_blocks)
        if progress is not None and task is not None:
            progress.advance(task)
    by_workers = [measured[w, w * REQUESTS_A_WORKER, POOL_BLOCKS] for w in WORKERS_SWEEP]
    by_line = [measured[LINE_WORKERS, r, POOL_BLOCKS] for r in LINE_SWEEP]
    required = measured[WORKERS, REQUESTS, POOL_BLOCKS]
    return {
        "traffic": {
            "block_size": 16,
            "tokens_per_100_ms": TOKENS_A_ROUND,
            "prompt_tokens": "uniform 32..479",
            "max_tokens": "uniform 64..767",
        },
        "required": {
            "events_per_s": EVENTS_A_SECOND_REQUIRED,
            "measured": required["events_per_s"],
            "holds": required["events_per_s"] >= EVENTS_A_SECOND_REQUIRED,
        },
        "growth": {
            "workers_and_requests": _growth(by_workers),
            "line": _growth(by_line),
        },
        "by_workers": by_workers,
        "by_line": by_line,
        "saturated": measured[WORKERS, REQUESTS, SATURATED_BLOCKS],
    }


def _growth(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """How the mean cost grows from the smallest size to the largest, against log(requests)."""
    low, high = measured[0], measured[-1]
    cost = high["event_us"]["mean"] / low["event_us"]["mean"]
    bound = math.log(high["requests"]) / math.log(low["requests"])
    return {
        "workers": [low["workers"], high["workers"]],
        "requests": [low["requests"], high["requests"]],
        "cost_ratio": round(cost, 3),
        "log_ratio": round(bound, 3),
        "holds": cost <= bound,
    }


def plot(figures: dict[str, Any], path: Path) -> None:
    """Draw the mean cost of an event over both sizes."""
    from matplotlib.ticker import NullFormatter

    figure, axes = axes_in_a_row(2, (9, 3.6), sharey=True)
    for axis, rows in ((axes[0], figures["by_workers"]), (axes[1], figures["by_line"])):
        sizes = [row["requests"] for row in rows]
        means = [row["event_us"]["mean"] for row in rows]
        axis.plot(sizes, means, "o-", label="mean of handle()")
        scale = means[0] / math.log(sizes[0])
        bound = [scale * math.log(s) for s in sizes]
        axis.plot(sizes, bound, "--", color="grey", label="growth with log(requests)")
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_xlabel("live requests")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    limit_us = 1e6 / EVENTS_A_SECOND_REQUIRED
    for axis in axes:
        axis.axhline(limit_us, color="tab:red", lw=0.8)
    axes[0].annotate(
        "20,000 events/s", (figures["by_workers"][0]["requests"], limit_us), fontsize=8, va="bottom"
    )
    axes[0].set_ylabel("microseconds an event")
    axes[0].set_title("20 requests a worker (10 to 2,000 workers)", fontsize=10)
    axes[1].set_title(f"{LINE_WORKERS} full workers, the rest waits", fontsize=10)
    axes[0].set_ylim(bottom=0)
    write_plot(figure, path)


def main(output: Path = Path("docs/results")) -> None:
    """Run everything; write ``controller_scale.json`` and ``controller_scale.png``.

    Raises:
        ConfigError: matplotlib is missing.
    """
    check_plots()
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), transient=True
    ) as progress:
        figures = run(progress)
        write_result(output / "controller_scale.json", "deepinfer bench controller", figures)
        plot(figures, output / "controller_scale.png")
        required, growth = figures["required"], figures["growth"]
        progress.console.print(
            f"{required['measured']:,} events/s at {WORKERS:,} workers and {REQUESTS:,} requests "
            f"(required {EVENTS_A_SECOND_REQUIRED:,}); "
            f"its cost grows x{growth['workers_and_requests']['cost_ratio']} over the sizes "
            f"and x{growth['line']['cost_ratio']} over the length of the line",
            highlight=False,
        )
