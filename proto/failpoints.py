"""Named places where a process may be stopped from outside, so that it can be killed exactly there.

A process started with ``DEEPINFER_FAILPOINT=<name>`` or ``<name>:<n>`` and
``DEEPINFER_FAILPOINT_FILE=<path>`` parks for ever the n-th time (1 if not given) it reaches the
place, after it has written its process id to the file.

With ``DEEPINFER_FAILPOINT_FOLDER=<path>`` a place can be chosen while processes run: the first
process to reach a place whose name is a file in that folder takes the file, by renaming it to
``<name>.<process id>``, and parks until that is removed. So one file stops one process, and its
successor runs on.

Without these variables nothing happens. It lies beside the contracts because every process may
import from there, and needs nothing of ours.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, NoReturn, TypeAlias, get_args

WorkerPlace: TypeAlias = Literal[
    "mid_prefill",
    "mid_decode",
    "before_reserve",
    "mid_copy",
    "before_commit",
    "after_commit_before_free",
    "mid_fetch",
    "after_fetch_before_report",
    "mid_return",
]
"""``before_reserve``: the victim has left the batch, no page of the store is its own yet."""
StorePlace: TypeAlias = Literal["after_reserve", "mid_put", "before_commit_reply", "mid_get"]
ControllerPlace: TypeAlias = Literal[
    "before_order", "after_order", "before_store_call", "mid_recovery"
]
"""``mid_recovery``: this life has heard from somebody, but not from everybody yet."""
GatewayPlace: TypeAlias = Literal["after_accept", "mid_stream", "before_finish", "mid_resume"]
Place: TypeAlias = WorkerPlace | StorePlace | ControllerPlace | GatewayPlace

WORKER_PLACES: Final[tuple[WorkerPlace, ...]] = get_args(WorkerPlace)
STORE_PLACES: Final[tuple[StorePlace, ...]] = get_args(StorePlace)
CONTROLLER_PLACES: Final[tuple[ControllerPlace, ...]] = get_args(ControllerPlace)
GATEWAY_PLACES: Final[tuple[GatewayPlace, ...]] = get_args(GatewayPlace)
PLACES: Final[tuple[Place, ...]] = (
    *WORKER_PLACES,
    *STORE_PLACES,
    *CONTROLLER_PLACES,
    *GATEWAY_PLACES,
)

POINT_VARIABLE: Final = "DEEPINFER_FAILPOINT"
FILE_VARIABLE: Final = "DEEPINFER_FAILPOINT_FILE"
FOLDER_VARIABLE: Final = "DEEPINFER_FAILPOINT_FOLDER"
LOOK_S: Final = 0.002
"""How often a parked thread looks whether it may go on."""


class Failpoints:
    """Counts arrivals at one named place and parks at the chosen one. Any thread may call."""

    def __init__(
        self,
        place: str | None = None,
        arrival: int = 1,
        file: Path | None = None,
        folder: Path | None = None,
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
        self._folder = folder
        self._seen = 0
        self._lock = threading.Lock()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Failpoints:
        """Read the variables. Raises ValueError naming one that has no meaning."""
        text = environment.get(POINT_VARIABLE)
        file = environment.get(FILE_VARIABLE)
        named = environment.get(FOLDER_VARIABLE)
        folder = Path(named) if named else None
        if not text:
            return cls(None, 1, Path(file) if file else None, folder)
        place, _, number = text.partition(":")
        if number and not number.isdecimal():
            raise ValueError(f"{POINT_VARIABLE} = {text!r}: must be <place> or <place>:<number>")
        return cls(place, int(number or 1), Path(file) if file else None, folder)

    def hit(self, place: Place) -> None:
        """Say that the calling thread is at ``place``; returns unless it is to park there."""
        if self._folder is not None and (taken := _take(self._folder / place)) is not None:
            while taken.exists():
                time.sleep(LOOK_S)
        if place != self._place:
            return
        with self._lock:
            self._seen += 1
            if self._seen != self._arrival:
                return
        self._announce()
        _park()

    def _announce(self) -> None:
        assert self._file is not None
        # Renamed into place, so that whoever sees the file sees the whole number.
        part = self._file.with_suffix(f".{os.getpid()}")
        part.write_text(f"{os.getpid()}\n")
        part.rename(self._file)


def _take(chosen: Path) -> Path | None:
    """Take the file that chooses a place; None if there is none, or another process was first."""
    taken = chosen.with_name(f"{chosen.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        chosen.rename(taken)
        return taken
    return None


def _park() -> NoReturn:
    while True:
        time.sleep(3600)
