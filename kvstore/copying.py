"""Moving bytes between views, however each side is cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes between views of one length, without holding the interpreter while it lasts."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class SpreadWriter:
    """Writes a stream of pieces over a list of byte views, one view after the other."""

    __slots__ = ("_at", "_target", "_targets")

    def __init__(self, targets: Sequence[memoryview]) -> None:
        self._targets = targets
        self._target = 0
        self._at = 0

    def write(self, piece: memoryview) -> list[memoryview]:
        """Write the next bytes; the caller keeps to what the views hold in total.

        Returns the parts of the views that hold them now, for whoever checks the copy while it is
        still in the processor's cache.
        """
        written = []
        while len(piece):
            target = self._targets[self._target]
            count = min(len(piece), len(target) - self._at)
            part = target[self._at : self._at + count]
            copy(part, piece[:count])
            written.append(part)
            piece = piece[count:]
            self._at += count
            if self._at == len(target):
                self._target, self._at = self._target + 1, 0
        return written


def chunks(views: Iterable[memoryview], chunk_bytes: int) -> Iterator[list[memoryview]]:
    """Regroup views into lists of ``chunk_bytes`` in total (the last may be shorter)."""
    pieces: list[memoryview] = []
    room = chunk_bytes
    for view in views:
        rest = view
        while len(rest):
            piece, rest = rest[:room], rest[room:]
            pieces.append(piece)
            room -= len(piece)
            if room == 0:
                yield pieces
                pieces, room = [], chunk_bytes
    if pieces:
        yield pieces


def byte_views(name: str, views: Sequence[memoryview], total_bytes: int) -> list[memoryview]:
    """The views as bytes. Raises ValueError unless contiguous and ``total_bytes`` in total."""
    for index, view in enumerate(views):
        if not view.c_contiguous:
            raise ValueError(f"{name}[{index}] is not contiguous")
    total = sum(view.nbytes for view in views)
    if total != total_bytes:
        raise ValueError(f"{name}: {total} bytes in total, must be {total_bytes}")
    return [view.cast("B") for view in views]
