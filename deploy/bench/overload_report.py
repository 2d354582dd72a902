"""What `bench overload` has seen, judged: figures, a table, a sentence and a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from deepinfer.deploy.bench.footprints import Held
from deepinfer.deploy.bench.plots import axes_in_a_row, write_plot
from deepinfer.deploy.bench.results import percentile
from deepinfer.deploy.bench.trend import Limit, trend

if TYPE_CHECKING:
    from deepinfer.deploy.bench.overload import Sample, Seen

MIB = 2**20
MEMORY = Limit(share=0.05, least=16.0)
"""In MiB, over all of the overload but its beginning."""
KEPT_SHARE = 0.9
"""Of the best speed."""
FULL_S = 10.0
"""Until queues are full: what comes before does not count."""
WINDOW_S = 10.0
"""In no such window may nothing be generated."""
REFUSAL = "RESOURCE_EXHAUSTED: max_"


def figures(seen: Seen, blocks: int) -> dict[str, Any]:
    """Everything for the JSON."""
    best, counted = seen.best, [s for s in seen.samples if s.at_s >= FULL_S] or seen.samples
    tokens_per_s, requests_per_s = _rates(counted)
    share = tokens_per_s / best.tokens_per_s if best.tokens_per_s else 0.0
    refused: Counter[str] = Counter()
    for said in seen.clients:
        refused.update(said["refused"])
    others = {why: n for why, n in refused.items() if not why.startswith(REFUSAL)}
    memory = _memory(seen)
    stalled = _stalled(counted)
    bounded = all(one["flat"] for one in memory.values())
    sums = {
        name: sum(said[name] for said in seen.clients)
        for name in ("sent", "late", "accepted", "complete", "tokens", "unread", "wrong_count")
    }
    return {
        "as_it_should_be": share >= KEPT_SHARE
        and bounded
        and not (others or seen.left or seen.restarts or seen.after or stalled)
        and bool(refused),
        "model": seen.model.name,
        "workers": seen.plan.workers,
        "pool_blocks": blocks,
        "max_live_requests": seen.plan.max_live_requests,
        "levels": [
            {
                "streams": level.streams,
                "tokens_per_s": round(level.tokens_per_s, 1),
                "requests_per_s": round(level.requests_per_s, 2),
            }
            for level in seen.levels
        ],
        "cores_at_best": best.cores,
        "cores_overloaded": cores(
            counted[0].processes, counted[-1].processes, counted[-1].at_s - counted[0].at_s
        ),
        "best_tokens_per_s": round(best.tokens_per_s, 1),
        "seconds": seen.plan.seconds,
        "rate_asked": round(seen.rate, 1),
        "rate_sent": round(sums["sent"] / seen.plan.seconds, 1),
        "times_the_best": round(sums["sent"] / seen.plan.seconds / best.requests_per_s, 2)
        if best.requests_per_s
        else None,
        "tokens_per_s": round(tokens_per_s, 1),
        "requests_per_s": round(requests_per_s, 2),
        "share_of_the_best": round(share, 3),
        "clients": sums,
        "refused": dict(sorted(refused.items())),
        "refused_by_gateway": seen.refused_by_gateway,
        "refusal_s": _times([t for said in seen.clients for t in said["refused_s"]]),
        "ttft_s": _times([t for said in seen.clients for t in said["ttft_s"]]),
        "swaps": seen.swaps,
        "longest_without_tokens": stalled,
        "live_requests_max": max((s.live for s in seen.samples), default=0),
        "streams_max": max((s.streams for s in seen.samples), default=0),
        "kept_requests_max": max((s.kept for s in seen.samples), default=0),
        "memory": memory,
        "memory_bounded": bounded,
        "restarts": seen.restarts,
        "held_when_it_was_over": seen.left,
        "free_after_s": round(seen.free_after_s, 2),
        "wrong_after": seen.after,
        "samples": [
            {
                "at_s": round(s.at_s, 1),
                "tokens": s.tokens,
                "live": s.live,
                "streams": s.streams,
                "rss_mib": {
                    n: round(s.processes[n].rss_bytes / MIB, 1)
                    for n in _ours(seen)
                    if n in s.processes
                },
            }
            for s in _thinned(seen.samples, 60)
        ],
    }


def _thinned(samples: Sequence[Sample], most: int) -> list[Sample]:
    step = max(1, -(-len(samples) // most))
    return list(samples[::step])


def _rates(samples: Sequence[Sample]) -> tuple[float, float]:
    if len(samples) < 2:
        return 0.0, 0.0
    first, last = samples[0], samples[-1]
    took_s = last.at_s - first.at_s
    return (last.tokens - first.tokens) / took_s, (last.complete - first.complete) / took_s


def cores(before: Mapping[str, Held], after: Mapping[str, Held], took_s: float) -> dict[str, float]:
    """CPU seconds a second, of each process that used any."""
    used = {
        name: round((held.cpu_s - before[name].cpu_s) / took_s, 3)
        for name, held in after.items()
        if name in before
    }
    return {name: share for name, share in sorted(used.items()) if share >= 0.005}


def _stalled(samples: Sequence[Sample]) -> list[str]:
    """Windows in which nothing was generated, in words."""
    found = []
    since = samples[0] if samples else None
    for sample in samples:
        assert since is not None
        if sample.tokens != since.tokens:
            since = sample
        elif sample.at_s - since.at_s >= WINDOW_S:
            found.append(f"from {since.at_s:.0f} to {sample.at_s:.0f} s")
            since = sample
    return found


def _ours(seen: Seen) -> list[str]:
    """The cluster's own processes: neither Ray's nor the clients."""
    last = seen.samples[-1].processes if seen.samples else {}
    return sorted(
        n for n in last if n.split("-")[0] in ("controller", "gateway", "store", "worker")
    )


def _memory(seen: Seen) -> dict[str, Any]:
    """Of each process before, at most and at the end, in MiB; and whether it was still growing."""
    found = {}
    for name in _ours(seen):
        here = [(s.at_s, s.processes[name].rss_bytes / MIB) for s in seen.samples
                if name in s.processes]  # fmt: skip
        line = trend([at for at, _ in here], [size for _, size in here], MEMORY)
        before = seen.before.get(name)
        found[name] = {
            "rss_mib_before": None if before is None else round(before.rss_bytes / MIB, 1),
            "rss_mib_most": round(max(size for _, size in here), 1),
            "rss_mib_last": round(here[-1][1], 1),
            "growth_mib": None if line is None else round(line.growth, 2),
            "flat": line is None or line.flat,
        }
    return found


def _times(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    named = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(percentile(values, q), 4) for name, q in named.items()}


def sentence(found: dict[str, Any]) -> str:
    """The result in words."""
    refused = sum(found["refused"].values())
    bounded = "bounded" if found["memory_bounded"] else "NOT bounded"
    return (
        f"{found['times_the_best']} times the best's requests for {found['seconds']:g} s: "
        f"{found['tokens_per_s']:.0f} of {found['best_tokens_per_s']:.0f} tokens/s "
        f"({100 * found['share_of_the_best']:.0f} %); {found['clients']['accepted']:,} accepted, "
        f"{refused:,} refused; memory {bounded}; free {found['free_after_s']:g} s after the end."
    )


def table(found: dict[str, Any]) -> Table:
    """Memory of each process."""
    shown = Table(title="RSS in MiB", padding=(0, 1, 0, 0))
    for name in ("process", "before", "most", "last", "growth"):
        shown.add_column(name, justify="left" if name == "process" else "right")
    for name, one in found["memory"].items():
        shown.add_row(
            name,
            *(
                "-" if value is None else f"{value:.1f}"
                for value in (
                    one["rss_mib_before"],
                    one["rss_mib_most"],
                    one["rss_mib_last"],
                    one["growth_mib"],
                )
            ),
        )
    return shown


def plot(seen: Seen, path: Path) -> None:
    """Speed, queues and memory over the time of the overload."""
    figure, (speed, queues, memory) = axes_in_a_row(3, (14, 4.2))
    rates = [
        ((a.at_s + b.at_s) / 2, (b.tokens - a.tokens) / (b.at_s - a.at_s))
        for a, b in pairwise(_thinned(seen.samples, 60))
        if b.at_s > a.at_s
    ]
    speed.plot([at for at, _ in rates], [rate for _, rate in rates], label="overloaded")
    speed.axhline(seen.best.tokens_per_s, linestyle=":", color="gray", label="best")
    speed.set_title("tokens a second")
    speed.legend()
    times = [s.at_s for s in seen.samples]
    queues.plot(times, [s.live for s in seen.samples], label="live requests")
    queues.plot(times, [s.streams for s in seen.samples], label="streams")
    queues.plot(times, [s.kept for s in seen.samples], label="records")
    queues.set_title("at the gateway")
    queues.legend()
    for name in _ours(seen):
        here = [(s.at_s, s.processes[name].rss_bytes / MIB) for s in seen.samples
                if name in s.processes]  # fmt: skip
        memory.plot([at for at, _ in here], [size for _, size in here], label=name)
    memory.set_title("RSS, MiB")
    memory.legend(fontsize=7)
    for axis in (speed, queues, memory):
        axis.set_ylim(bottom=0)
        axis.set_xlabel("s")
        axis.grid(alpha=0.3)
    write_plot(figure, path)
