"""What a bench is doing and how far it has come, as a line in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)


@dataclass(frozen=True, slots=True)
class Steps:
    """A bench's steps; made by ``counted``."""

    _progress: Progress
    _task: TaskID

    def tell(self, doing: str) -> None:
        """Show what is being done now."""
        self._progress.update(self._task, description=doing)

    def expect(self, total: int) -> None:
        """There are so many, as has turned out."""
        self._progress.update(self._task, total=total)

    def advance(self, steps: int = 1) -> None:
        """So many more are done."""
        self._progress.advance(self._task, steps)


@contextmanager
def counted(console: Console, total: int, doing: str = "starting") -> Iterator[Steps]:
    """Show the line while the bench runs."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        yield Steps(progress, progress.add_task(doing, total=total))
