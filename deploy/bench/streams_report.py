"""What `bench streams` measured: its figures, table and plot."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from deepinfer.deploy.bench.crowd import Footprint
from deepinfer.deploy.bench.plots import axes_in_a_row, write_plot
from deepinfer.deploy.bench.results import percentile
from deepinfer.deploy.status import mib

BLOCK_SIZE = 16
PROMPT_TOKENS = 16
PHASES = {"alone": (False, False), "crowd": (True, False), "crowd and slow reader": (True, True)}
"""Whether there is a crowd, and whether the second request's reader reads nothing at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked for."""

    streams: int = 1_000
    processes: int = 1
    """Of the crowd."""
    tokens: int = 144
    """Of the request that is measured."""
    rounds: int = 2

    @property
    def blocks(self) -> int:
        """Of the pool: both requests in full, and no more."""
        return self.needs(self.tokens) + self.needs(self.second_tokens)

    @property
    def second_tokens(self) -> int:
        """The second request ends after the first, so that the pool stays full meanwhile."""
        return self.tokens + 2 * BLOCK_SIZE

    @staticmethod
    def needs(tokens: int) -> int:
        return math.ceil((PROMPT_TOKENS + tokens) / BLOCK_SIZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Second:
    """What the second request's reader got, and in how many messages."""

    token_ids: tuple[int, ...]
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of one round."""

    name: str
    intervals_ms: tuple[float, ...]
    """Between tokens of the measured request, from when all of the crowd was accepted."""
    opening_ms: tuple[float, ...]
    """The same while the crowd opened its streams."""
    token_ids: tuple[int, ...]
    second: Second
    waiting: int
    """Sequences that the controller had in line with all streams open."""
    opening_s: float
    ends: dict[str, int]
    """Of the crowd's streams: finish reason, or error, to how many."""
    before: Footprint
    with_all: Footprint
    after: Footprint
    """The gateway: before the phase, with all streams open, and when nothing is held any more."""
    clients: tuple[tuple[Footprint, Footprint], ...]
    """Each of the crowd's processes, before and with all of its streams."""


def summary(load: Load, done: list[Phase]) -> dict[str, Any]:
    """The figures: by phase over all rounds, memory a stream, and whether all was right."""
    crowded = [phase for phase in done if PHASES[phase.name][0]]
    slow = [phase for phase in done if PHASES[phase.name][1]]
    # The first crowd finds a gateway that has never had one: later ones find memory that it keeps.
    first = crowded[0]
    right = (
        all(phase.token_ids == done[0].token_ids for phase in done)
        and all(phase.second.token_ids == done[0].second.token_ids for phase in done)
        and len(done[0].token_ids) == load.tokens
        and len(done[0].second.token_ids) == load.second_tokens
    )
    well = all(phase.ends == {"length": load.streams} for phase in crowded)
    return {
        "streams": load.streams,
        "client_processes": load.processes,
        "rounds": load.rounds,
        "as_it_should_be": right and well,
        "same_tokens_in_every_phase": right,
        "ends_of_the_crowd": [phase.ends for phase in crowded],
        "in_line_with_all_streams_open": [phase.waiting for phase in crowded],
        "opening_s": [round(phase.opening_s, 3) for phase in crowded],
        "phases": {name: _times([p for p in done if p.name == name]) for name in PHASES},
        "slow_reader": {
            "tokens": load.second_tokens,
            "messages_when_read_late": [phase.second.messages for phase in slow],
            "messages_when_read_at_once": [
                phase.second.messages for phase in done if not PHASES[phase.name][1]
            ],
        },
        "gateway": {
            "bytes_per_stream": _per_stream(first.before, first.with_all, load.streams),
            "before": [asdict(phase.before) for phase in crowded],
            "with_all": [asdict(phase.with_all) for phase in crowded],
            "after": [asdict(phase.after) for phase in crowded],
        },
        "client": {
            "bytes_per_stream": sum(
                _per_stream(before, with_all, load.streams) for before, with_all in first.clients
            ),
            "before": [asdict(before) for before, _ in first.clients],
            "with_all": [asdict(with_all) for _, with_all in first.clients],
        },
    }


def _per_stream(before: Footprint, with_all: Footprint, streams: int) -> int:
    return round((with_all.rss_bytes - before.rss_bytes) / streams)


def _times(phases: list[Phase]) -> dict[str, Any]:
    values = [ms for phase in phases for ms in phase.intervals_ms]
    opening = [ms for phase in phases for ms in phase.opening_ms]
    return {
        "intervals": len(values),
        **{f"p{round(q * 100)}_ms": percentile(values, q) for q in (0.5, 0.95, 0.99)},
        "max_ms": max(values),
        "p50_ms_by_round": [percentile(list(phase.intervals_ms), 0.5) for phase in phases],
        "p95_ms_by_round": [percentile(list(phase.intervals_ms), 0.95) for phase in phases],
        "while_opening": {
            "intervals": len(opening),
            "p50_ms": percentile(opening, 0.5) if opening else None,
            "max_ms": max(opening, default=None),
        },
    }


def table(figures: dict[str, Any]) -> Table:
    """The figures for a terminal."""
    gateway = figures["gateway"]
    before, with_all, after = (gateway[key][0] for key in ("before", "with_all", "after"))
    shown = Table(
        title=f"{figures['streams']} streams: times between tokens in ms",
        caption=(
            f"gateway: {mib(before['rss_bytes'])} before, {mib(with_all['rss_bytes'])} with all, "
            f"{mib(after['rss_bytes'])} after: {gateway['bytes_per_stream'] / 1024:.1f} KiB a "
            f"stream; {before['fds']} file descriptors, {with_all['fds']} with all; "
            f"client: {figures['client']['bytes_per_stream'] / 1024:.1f} KiB a stream"
        ),
    )
    shown.add_column("phase", no_wrap=True)
    for column in ("p50", "p95", "p99", "max"):
        shown.add_column(column, justify="right")
    for name, times in figures["phases"].items():
        values = (times[f"{key}_ms"] for key in ("p50", "p95", "p99", "max"))
        shown.add_row(name, *(f"{value:.1f}" for value in values))
    return shown


def plot(figures: dict[str, Any], done: list[Phase], path: Path) -> None:
    """Shares of intervals below each length, by phase; and the gateway's memory."""
    figure, (times, memory) = axes_in_a_row(2, (10, 4), width_ratios=(2, 1))
    for name in PHASES:
        values = sorted(ms for p in done if p.name == name for ms in p.intervals_ms)
        times.plot(values, [(i + 1) / len(values) for i in range(len(values))], label=name)
    times.set_xlabel("ms between two tokens")
    times.set_ylabel("share of intervals")
    times.set_xlim(left=0)
    times.grid(alpha=0.3)
    times.legend(loc="upper left")
    gateway = figures["gateway"]
    names = ("before", "with_all", "after")
    heights = [gateway[name][0]["rss_bytes"] / 2**20 for name in names]
    memory.bar([name.replace("_", " ") for name in names], heights)
    memory.set_ylabel("gateway's memory, MiB")
    memory.grid(axis="y", alpha=0.3)
    figure.suptitle(
        f"{figures['streams']} waiting streams: "
        f"{gateway['bytes_per_stream'] / 1024:.1f} KiB of the gateway each"
    )
    write_plot(figure, path)
