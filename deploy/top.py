"""`deepinfer top`: the cluster as it is, on a screen that keeps up with it.

``Watcher`` folds one status document after another into a ``Frame``: what is, how fast it moves,
and which swaps were seen. ``render`` draws a frame. Neither talks to anyone.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deepinfer.client import Client, DeepInferError
from deepinfer.deploy.status import mib, mode

EVENTS = 6
BAR_WIDTH = 24
STYLES = {
    "waiting": "dim",
    "prefill": "cyan",
    "decode": "green",
    "swapping_out": "yellow",
    "swapped": "yellow",
    "swapping_in": "yellow",
    "recovering": "red",
}
ORDER = {state: i for i, state in enumerate(
    ("decode", "prefill", "swapping_in", "swapping_out", "recovering", "swapped", "waiting")
)}  # fmt: skip
"""Most active first."""
RUNNING = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Row:
    """One request (one choice of it)."""

    name: str
    state: str
    where: str
    """Its worker; the store that has its KV while no worker has."""
    age_s: float | None
    tokens: int
    tokens_max: int
    rate: float | None
    """Tokens a second since the document before; None in the first one."""
    swaps: int


@dataclass(frozen=True, slots=True)
class Frame:
    """What one document shows beside the one before."""

    document: dict[str, Any]
    rows: tuple[Row, ...]
    rate: float | None
    """Tokens a second of all listed requests."""
    events: tuple[str, ...]


@dataclass(slots=True)
class Watcher:
    """Compares each document with the one before."""

    events: deque[str] = field(default_factory=lambda: deque(maxlen=EVENTS))
    _before: dict[str, dict[str, Any]] = field(default_factory=dict)
    _then_s: float | None = None

    def take(self, document: dict[str, Any], now_s: float, clock: str) -> Frame:
        """Fold one document in; ``clock`` is written before the events seen now."""
        elapsed_s = None if self._then_s is None else max(1e-3, now_s - self._then_s)
        listed = {f"{s['request']}/{s['choice']}": s for s in document["sequences"]}
        rows, total = [], 0.0
        for key, said in listed.items():
            before = self._before.get(key)
            # A recovered request may be known with fewer tokens for a moment.
            made = max(0, said["tokens"] - before["tokens"]) if before else 0
            rate = None if elapsed_s is None or before is None else made / elapsed_s
            total += rate or 0.0
            rows.append(_row(said, document.get("now_ms"), rate))
            if before is not None:
                self._tell(clock, said, before)
        rows.sort(key=lambda row: (ORDER.get(row.state, len(ORDER)), -(row.age_s or 0), row.name))
        self._before, self._then_s = listed, now_s
        return Frame(
            document, tuple(rows), None if elapsed_s is None else total, tuple(self.events)
        )

    def _tell(self, clock: str, said: dict[str, Any], before: dict[str, Any]) -> None:
        name, now, was = _short(said), said["state"], before["state"]
        left = said["swaps"] > before["swaps"]
        back = now in RUNNING and (left or was in ("swapped", "swapping_in"))
        if left or back:
            here = [before["worker"] or "a worker"] if left else []
            path = [*here, said["store"] or before["store"] or "the store"]
            path += [said["worker"]] if back else []
            self.events.append(f"{clock} {name}: {' > '.join(path)}")
        elif now == "recovering" != was:
            self.events.append(f"{clock} {name}: lost its worker, recovering")


def _row(said: dict[str, Any], now_ms: int | None, rate: float | None) -> Row:
    arrival_ms: int | None = said["arrival_ms"]
    age_s = None
    if arrival_ms is not None and now_ms is not None:
        age_s = max(0.0, (now_ms - arrival_ms) / 1e3)
    return Row(
        name=_short(said),
        state=said["state"],
        where=said["worker"] or said["store"] or "",
        age_s=age_s,
        tokens=said["tokens"],
        tokens_max=said["tokens_max"],
        rate=rate,
        swaps=said["swaps"],
    )


def _short(said: dict[str, Any]) -> str:
    """The end of the request's id: its beginning names the gateway. And the choice, if not 0."""
    name: str = said["request"][-8:]
    return f"{name}/{said['choice']}" if said["choice"] else name


def render(frame: Frame, *, height: int, note: str = "") -> Group:
    """Draw a frame on ``height`` lines; requests that do not fit are counted."""
    document = frame.document
    offload, counters = document["cpu_offload"], document["counters"]
    live = sum(n for state, n in document["requests"].items() if state in ORDER)
    head = Text.assemble(
        (f"{live} requests", "bold"),
        f", {document['swapped']} swapped, {document['waiting']} in line, "
        f"{'-' if frame.rate is None else f'{frame.rate:.1f}'} tok/s; swaps: "
        f"{counters['requests_swapped_total']:g} out, {counters['requests_resumed_total']:g} back, "
        f"{counters['kv_cpu_offload_rejected_total']:g} refused",
    )
    if not offload["enabled"]:
        head.append("; swapping is off")
    if not document["ready"]:
        head.append("; the controller has just started", style="yellow")
    pools = Table("pool", "", "blocks", "residents", "state", box=None, padding=(0, 2, 0, 0))
    for name, worker in sorted(document["workers"].items()):
        used = worker["blocks_total"] - worker["blocks_free"]
        precision, planes = worker.get("precision"), worker.get("planes")
        shed = planes is not None and planes["state"] not in ("held", "locked")
        pools.add_row(
            name,
            ProgressBar(max(1, worker["blocks_total"]), used, width=BAR_WIDTH),
            f"{used} / {worker['blocks_total']}"
            + (f", short of {worker['blocks_short']}" if worker["blocks_short"] else ""),
            str(worker["residents"]),
            worker["state"]
            + (f", {mode(precision)}" if precision else "")
            + (f", planes {planes['state']}" if shed else ""),
        )
    for name, store in sorted(document["stores"].items()):
        pools.add_row(
            name,
            ProgressBar(max(1, store["budget_bytes"]), store["used_bytes"], width=BAR_WIDTH),
            f"{mib(store['used_bytes'])} / {mib(store['budget_bytes'])}",
            str(store["tickets"]),
            "serving" if store["alive"] else "gone",
        )
    parts: list[RenderableType] = [head, Text(note, style="red"), pools, Text()]
    room = height - 7 - pools.row_count - EVENTS
    parts.append(_requests(frame.rows, max(3, room), document.get("sequences_left_out", 0)))
    parts += [Text(), *(Text(line, style="dim") for line in frame.events)]
    return Group(*parts)


def _requests(rows: tuple[Row, ...], room: int, left_out: int) -> RenderableType:
    if not rows:
        return Text("no requests", style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("request", "state", "on"):
        table.add_column(name, no_wrap=True)
    for name in ("age", "tokens", "tok/s", "swaps"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows[:room]:
        table.add_row(
            row.name,
            Text(row.state, style=STYLES.get(row.state, "")),
            row.where,
            "-" if row.age_s is None else f"{row.age_s:.1f} s",
            f"{row.tokens} / {row.tokens_max}",
            "-" if row.rate is None else f"{row.rate:.1f}",
            str(row.swaps),
        )
    hidden = len(rows[room:]) + left_out
    return Group(table, Text(f"and {hidden} more", style="dim")) if hidden else table


def run_top(client: Client, *, interval_s: float, once: bool, console: Console) -> None:
    """Draw until q or Ctrl-C; with ``once`` draw two documents' difference and return.

    While no gateway answers the last frame stays, with a note.

    Raises:
        DeepInferError: the first document cannot be had.
    """
    watcher = Watcher()
    frame = _look(client, watcher)
    if once or not console.is_terminal:
        time.sleep(interval_s)
        frame = _look(client, watcher)
        console.print(render(frame, height=10**6))
        return
    with (
        Live(console=console, screen=True, auto_refresh=False) as screen,
        _keys() as pressed,
    ):
        note = silent = ""
        while True:
            # Drawn anew each time for the size that the terminal has now.
            screen.update(render(frame, height=console.height, note=note), refresh=True)
            if pressed(interval_s) == "q":
                return
            try:
                frame, note, silent = _look(client, watcher), "", ""
            except DeepInferError as error:
                silent = silent or time.strftime("%H:%M:%S")
                note = f"no answer since {silent}, trying again: {error}"


def _look(client: Client, watcher: Watcher) -> Frame:
    return watcher.take(client.status(), time.monotonic(), time.strftime("%H:%M:%S"))


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits at most so long for a key and returns it, or "".

    The terminal is put back as it was.
    """
    if not sys.stdin.isatty():

        def wait(timeout_s: float) -> str:
            time.sleep(timeout_s)
            return ""

        yield wait
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def read(timeout_s: float) -> str:
        ready, _, _ = select.select([descriptor], [], [], timeout_s)
        return os.read(descriptor, 1).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield read
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
