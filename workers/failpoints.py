"""Named places where a test may stop this process, so that it can be killed exactly there.

A process started with ``DEEPINFER_FAILPOINT=<name>`` or ``<name>:<n>`` and
``DEEPINFER_FAILPOINT_FILE=<path>`` parks for ever the n-th time (1 if not given) it reaches the
place, after it has written its process id to the file. Without these two nothing happens.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, get_args

Place = Literal[
    "mid_prefill",
    "mid_decode",
    "mid_copy",
    "before_commit",
    "after_commit_before_free",
    "mid_fetch",
    "after_fetch_before_report",
]
PLACES: Final[tuple[str, ...]] = get_args(Place)
POINT_VARIABLE: Final = "DEEPINFER_FAILPOINT"
FILE_VARIABLE: Final = "DEEPINFER_FAILPOINT_FILE"


class Failpoints:
    """Counts arrivals at one named place and parks at the chosen one. Any thread may call."""

    def __init__(
        self, place: str | None = None, arrival: int = 1, file: Path | None = None
    ) -> None:
        if place is not None and place not in PLACES:
            raise ValueError(f"{POINT_VARIABLE} = {place!r}: must be one of {', '.join(PLACES)}")
        if arrival < 1:
            raise ValueError(f"{POINT_VARIABLE}: arrival {arrival} must be 1 or more")
        if (place is None) != (file is None):
            raise ValueError(f"{POINT_VARIABLE} and {FILE_VARIABLE} must be set together")
        self._place = place
        self._arrival = arrival
        self._file = file
        self._seen = 0
        self._lock = threading.Lock()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Failpoints:
        """Read the two variables. Raises ValueError naming one that has no meaning."""
        text = environment.get(POINT_VARIABLE)
        file = environment.get(FILE_VARIABLE)
        if not text:
            return cls(None, 1, Path(file) if file else None)
        place, _, number = text.partition(":")
        if number and not number.isdecimal():
            raise ValueError(f"{POINT_VARIABLE} = {text!r}: must be <place> or <place>:<number>")
        return cls(place, int(number or 1), Path(file) if file else None)

    def hit(self, place: Place) -> None:
        """Say that the calling thread is at ``place``; returns unless it is the chosen arrival."""
        if place != self._place:
            return
        with self._lock:
            self._seen += 1
            if self._seen != self._arrival:
                return
        self._announce()
        while True:
            time.sleep(3600)

    def _announce(self) -> None:
        assert self._file is not None
        # Renamed into place, so that whoever sees the file sees the whole number.
        part = self._file.with_suffix(f".{os.getpid()}")
        part.write_text(f"{os.getpid()}\n")
        part.rename(self._file)
