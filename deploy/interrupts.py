"""Ctrl-C and SIGTERM: heard once, and never in the middle of what must not be cut short.

Only the main thread hears signals; elsewhere these blocks change nothing.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)
DEAF_S = 1.0
"""For so long after a signal another one is not heard: the second of two quick ones would
otherwise end a clean-up before it has begun."""


class Terminated(KeyboardInterrupt):
    """SIGTERM came. No SystemExit, of which Ray makes one of its own with another code."""


class _Heard:
    """The last signal of this process's ``stop_signals``."""

    number: int | None = None
    at_s: float | None = None


def _raise(number: int, _: FrameType | None = None) -> None:
    now_s = time.monotonic()
    if _Heard.at_s is not None and now_s - _Heard.at_s < DEAF_S:
        return
    _Heard.number, _Heard.at_s = number, now_s
    raise KeyboardInterrupt if number == signal.SIGINT else Terminated


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt and SIGTERM raise Terminated within the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _Heard.number = _Heard.at_s = None
    with _handling(_raise):
        yield


def ending() -> None:
    """After a signal the process ends: a further one must not kill it on its last steps."""
    if _Heard.number is not None:
        for number in STOPPING:
            signal.signal(number, signal.SIG_IGN)


def exit_code() -> int:
    """What a command ends with after a signal: the shell's number for it."""
    return 128 + (_Heard.number or signal.SIGINT)


def anew() -> None:
    """A signal was heard and is being acted upon: from here on only the next one counts."""
    _Heard.number = None


def check() -> None:
    """Raise for a signal that was heard, but whose exception was swallowed on its way.

    Python drops what is raised in callbacks of its own (weak references, ``__del__``). Whoever
    waits for long calls this now and then.
    """
    if _Heard.number is not None:
        raise KeyboardInterrupt if _Heard.number == signal.SIGINT else Terminated


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Hold signals back until the block ends.

    For what leaves processes behind when it is cut short, and for imports, where an exception may
    turn into another one or into a module that is there by half. What is called in the block cannot
    change the handlers: ``ray.init`` begins by laying one over SIGTERM that ends it half done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    change = signal.signal

    def keep(signalnum: int, handler: signal._HANDLER) -> signal._HANDLER:
        known = signalnum in STOPPING
        return signal.getsignal(signalnum) if known else change(signalnum, handler)

    with _handling(lambda number, _: came.append(number)):
        signal.signal = keep
        try:
            yield
        finally:
            signal.signal = change
    if came:
        signal.raise_signal(came[0])


@contextlib.contextmanager
def ignored() -> Iterator[None]:
    """Do not hear signals: a clean-up is under way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _handling(signal.SIG_IGN):
        yield


@contextlib.contextmanager
def _handling(handler: signal._HANDLER) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in STOPPING}
    try:
        yield
    finally:
        # Also where nobody changed Python's: ``ray.init`` puts a handler for SIGTERM beneath it,
        # which aborts the process 3 s after the signal, in the middle of stopping. Setting
        # Python's anew takes that away.
        for number, old in before.items():
            signal.signal(number, old)
