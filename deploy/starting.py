"""What a cluster's start looks like: a live display at a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn

from deepinfer.deploy.status import mib


class Starting:
    """Shows what the start is doing, and how much of its weights each worker has loaded.

    A context manager: leaving it takes the live display away.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said = ""
        self._loaded: set[str] = set()
        self._tasks: dict[str, TaskID] = {}
        text = TextColumn("{task.description}", markup=False)
        self._step = Progress(SpinnerColumn(), text, console=console)
        self._bars = Progress(text, BarColumn(), DownloadColumn(binary_units=True), console=console)
        self._live = (
            Live(Group(self._step, self._bars), console=console, transient=True)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        """A step has begun."""
        if line == self._said:
            return
        self._said = line
        if self._live is None:
            self._console.print(line, markup=False, highlight=False)
        elif self._step.tasks:
            self._step.update(self._step.tasks[0].id, description=line)
        else:
            self._step.add_task(line, total=None)

    def loading(self, name: str, bytes_read: int, bytes_total: int) -> None:
        """``name`` (a worker, or the download) has come so far."""
        if self._live is not None:
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name, total=bytes_total)
            self._bars.update(self._tasks[name], completed=bytes_read, total=bytes_total)
        elif bytes_read >= bytes_total and name not in self._loaded:
            self._loaded.add(name)
            self._console.print(f"{name}: {mib(bytes_total)} loaded", markup=False, highlight=False)
