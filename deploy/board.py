"""Several streams side by side in a terminal, and the table that closes a demo.

Fed with plain values; knows neither the SDK nor the cluster.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_STYLES = {
    "waiting": "dim",
    "running": "green",
    "swapped": "yellow",
    "finished": "blue",
    "failed": "red",
}


@dataclass(slots=True)
class Lane:
    """One request on the board."""

    title: str
    text: str = ""
    state: str = "waiting"
    where: str = ""


@dataclass(slots=True)
class Outcome:
    """One request's row in the closing table. Times in seconds, None where there is none."""

    name: str
    tokens: int
    ttft_s: float | None
    tpot_s: float | None
    swaps: int
    resumes: int
    recomputes: int
    payload_bytes: int
    copy_out_s: float
    copy_in_s: float
    stall_s: float
    same: bool
    path: list[str] = field(default_factory=list)
    """Where it ran: "worker-0 > store-… > worker-1"."""


class Board:
    """A live board on a terminal; plain lines of what happened elsewhere."""

    def __init__(self, console: Console, titles: list[str], lines: int = 6) -> None:
        self.lanes = [Lane(title) for title in titles]
        self._console = console
        self._lines = lines
        self._events: deque[str] = deque(maxlen=8)
        self._live = (
            Live(self._render(), console=console, refresh_per_second=8, transient=False)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Board:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.refresh()
        if self._live is not None:
            self._live.stop()
        else:
            self._console.print(self._render())

    def tell(self, line: str) -> None:
        """Show an event below the lanes."""
        self._events.append(line)
        if self._live is None:
            self._console.print(line, markup=False, highlight=False)
        self.refresh()

    def refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._render())

    def _render(self) -> RenderableType:
        width = max(30, (self._console.width - 4) // 3)
        panels = [self._panel(lane, width) for lane in self.lanes]
        events = Text("\n".join(self._events) if self._live is not None else "", style="dim")
        return Group(Columns(panels), events)

    def _panel(self, lane: Lane, width: int) -> Panel:
        body = Text(lane.text.strip().replace("\n", " "), overflow="fold")
        rows = body.wrap(self._console, width - 4)[-self._lines :]
        padded = Text("\n").join([*rows, *[Text("")] * (self._lines - len(rows))])
        style = _STYLES[lane.state]
        place = f" {lane.where}" if lane.where else ""
        return Panel(
            padded,
            title=Text(lane.title[: width - 6]),
            subtitle=Text(f"{lane.state}{place}"),
            border_style=style,
            width=width,
        )


def outcome_table(outcomes: list[Outcome]) -> Table:
    """TTFT, TPOT, swaps, bytes, copies out and in, stalls, and whether the answer is right."""
    table = Table(title="what each request saw (times in ms)", padding=(0, 1, 0, 0))
    table.add_column("request", no_wrap=True)
    for name in ("tok", "TTFT", "TPOT", "swaps", "KiB", "out", "in", "stall"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("same")
    table.add_column("ran on", overflow="fold")
    for row in outcomes:
        table.add_row(
            row.name,
            str(row.tokens),
            _ms(row.ttft_s),
            _ms(row.tpot_s),
            f"{row.swaps}/{row.resumes}",
            f"{row.payload_bytes / 1024:.0f}",
            _ms(row.copy_out_s),
            _ms(row.copy_in_s),
            _ms(row.stall_s),
            "yes" if row.same else "NO",
            " > ".join(row.path),
        )
    return table


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.1f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"
