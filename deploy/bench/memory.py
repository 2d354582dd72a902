"""`deepinfer bench memory`: what each process of an idle cluster takes.

Read from /proc after the start, and again after a short load. PSS shares a page among those that
map it: its sum is what the cluster takes of the machine; resident sets count such pages each time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deepinfer.client import AsyncClient
from deepinfer.deploy.bench.plots import axes_in_a_row, check_plots, write_plot
from deepinfer.deploy.bench.procfs import number
from deepinfer.deploy.bench.prompts import make_prompts
from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.bench.steps import counted
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig, ConfigError
from deepinfer.deploy.generate import get_model

MOMENTS = ("started", "after_load")
MAX_CACHE = "64MiB"
LOAD_STREAMS = 4
LOAD_PROMPT_TOKENS = 32
LOAD_TOKENS = 8

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Memory of one process, in bytes."""

    peak_rss_bytes: int
    """VmHWM: the largest resident set since it began."""
    rss_bytes: int
    pss_bytes: int
    """Pages shared by k processes count 1/k."""


def run_memory(*, model: str, workers: int, output: Path, console: Console) -> None:
    """Measure and write ``idle_memory.json`` and ``.png``.

    Raises:
        ConfigError: no /proc here, or matplotlib is missing.
    """
    if not (_PROC / "self/smaps_rollup").exists():
        raise ConfigError("bench memory reads /proc/PID/smaps_rollup, which this system lacks")
    check_plots()
    path = get_model(model, console=console)
    with counted(console, len(MOMENTS)) as steps:
        config = ClusterConfig(model=str(path), workers=workers, max_cache=MAX_CACHE, port=0)
        found = measure(path, config, steps.advance)
    figures = {
        "workers": workers,
        "max_cache": MAX_CACHE,
        "load": f"{LOAD_STREAMS} requests of {LOAD_TOKENS} tokens",
        "moments": {
            moment: {
                "processes": {name: asdict(usage) for name, usage in processes.items()},
                "pss_bytes_total": sum(usage.pss_bytes for usage in processes.values()),
            }
            for moment, processes in found.items()
        },
    }
    write_result(
        output / "idle_memory.json",
        f"deepinfer bench memory --model {model} --workers {workers}",
        figures,
    )
    _plot(found, output / "idle_memory.png")
    console.print(_table(found))


def measure(
    model: Path, config: ClusterConfig, advance: Callable[[], None]
) -> dict[str, dict[str, Usage]]:
    """Usage by moment and process of a cluster that is started for it."""
    from deepinfer.text.load import load_tokenizer

    prompts = make_prompts(load_tokenizer(model), LOAD_STREAMS, LOAD_PROMPT_TOKENS)
    with Cluster(config) as cluster:
        names = {cluster.pid(actor): actor for actor in cluster.actors}
        started = usages(os.getpid(), names)
        advance()
        asyncio.run(_load(cluster, prompts))
        after = usages(os.getpid(), names)
        advance()
    return dict(zip(MOMENTS, (started, after), strict=True))


async def _load(cluster: Cluster, prompts: Sequence[tuple[int, ...]]) -> None:
    async with AsyncClient(list(cluster.endpoints), token=cluster.token) as client:
        options: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
        await asyncio.gather(
            *(client.generate(prompt, max_tokens=LOAD_TOKENS, **options) for prompt in prompts)
        )


def usages(root: int, names: Mapping[int, str]) -> dict[str, Usage]:
    """Usage of ``root`` and all processes below it, in the order of their names; see ``names_of``.

    Equal names get numbers.
    """
    found: dict[str, Usage] = {}
    for pid, name in names_of(root, names).items():
        usage = usage_of(pid)
        if usage is not None:
            found[name] = usage
    return dict(sorted(found.items(), key=lambda item: (item[0].startswith("ray:"), item[0])))


def names_of(root: int, names: Mapping[int, str]) -> dict[int, str]:
    """Names of ``root`` and all processes below it by process id; equal ones get numbers.

    ``names`` are known ones by process id; ``root`` is the launcher, and others (Ray's) are named
    by their command.
    """
    found: dict[int, str] = {}
    seen: dict[str, int] = {}
    for pid in sorted({root, *descendants(root)}):
        name = "launcher" if pid == root else names.get(pid) or f"ray: {_command(pid)}"
        seen[name] = seen.get(name, 0) + 1
        found[pid] = name if seen[name] == 1 else f"{name} #{seen[name]}"
    return found


def descendants(root: int) -> list[int]:
    """Process ids of all children, their children and so on."""
    parents: dict[int, int] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (status := _read(entry / "status")):
            parents[int(entry.name)] = number(status, "PPid")
    below: list[int] = []
    level = [root]
    while level:
        level = [pid for pid, parent in sorted(parents.items()) if parent in level]
        below += level
    return below


def usage_of(pid: int) -> Usage | None:
    """Usage of a process; None if it has ended."""
    status, rollup = _read(_PROC / str(pid) / "status"), _read(_PROC / str(pid) / "smaps_rollup")
    if not status or not rollup or "VmHWM" not in status:
        return None
    return Usage(
        peak_rss_bytes=1024 * number(status, "VmHWM"),
        rss_bytes=1024 * number(status, "VmRSS"),
        pss_bytes=1024 * number(rollup, "Pss"),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def _command(pid: int) -> str:
    """A process's command in a word: a title, a program, or the script that Python runs."""
    words = _read(_PROC / str(pid) / "cmdline").replace("\0", " ").split()
    program = Path(words[0]).name if words else "?"
    # Other programs name scripts too: the raylet those that it starts.
    scripts = [Path(word).stem for word in words if word.endswith(".py")]
    return scripts[0] if scripts and program.startswith("python") else program


def _table(found: Mapping[str, Mapping[str, Usage]]) -> Table:
    shown = Table(title="MiB of each process", padding=(0, 1, 0, 0))
    shown.add_column("process")
    for moment in MOMENTS:
        for kind in ("peak", "RSS", "PSS"):
            shown.add_column(f"{kind} {moment.replace('_', ' ')}", justify="right")
    for name in sorted({name for one in found.values() for name in one}):
        cells = []
        for moment in MOMENTS:
            usage = found[moment].get(name)
            sizes = (
                (usage.peak_rss_bytes, usage.rss_bytes, usage.pss_bytes)
                if usage
                else (None, None, None)
            )
            cells += ["-" if size is None else f"{size / 2**20:.0f}" for size in sizes]
        shown.add_row(name, *cells)
    totals = []
    for moment in MOMENTS:
        total = sum(usage.pss_bytes for usage in found[moment].values())
        totals += ["", "", f"{total / 2**20:.0f}"]
    shown.add_row("all", *totals, style="bold")
    return shown


def _plot(found: Mapping[str, Mapping[str, Usage]], path: Path) -> None:
    names = list(found[MOMENTS[-1]])[::-1]
    figure, axis = axes_in_a_row(1, (9, 0.5 + 0.42 * len(names)))
    height = 0.27
    for place, (label, size) in enumerate(
        (
            ("PSS", "pss_bytes"),
            ("RSS", "rss_bytes"),
            ("peak RSS", "peak_rss_bytes"),
        )
    ):
        sizes = [getattr(found[MOMENTS[-1]][name], size) / 2**20 for name in names]
        middles = [at + (place - 1) * height for at in range(len(names))]
        axis.barh(middles, sizes, height, label=label)
    axis.set_yticks(range(len(names)), names)
    axis.set_xlabel("MiB")
    axis.legend()
    axis.grid(axis="x", alpha=0.3)
    axis.set_title("An idle cluster after a short load")
    write_plot(figure, path)
