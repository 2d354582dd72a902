"""Signals are heard once, held back where they would do harm, and never lost."""

from __future__ import annotations

import contextlib
import signal
import threading

import pytest

from deepinfer.deploy import interrupts
from deepinfer.deploy.interrupts import Terminated, check, exit_code, held, ignored, stop_signals


def test_each_signal_ends_the_block_in_its_own_way() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), stop_signals():
        signal.raise_signal(signal.SIGINT)
    assert exit_code() == 130
    with pytest.raises(Terminated), stop_signals():
        signal.raise_signal(signal.SIGTERM)
    assert exit_code() == 143
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_the_second_of_two_quick_signals_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr("deepinfer.deploy.interrupts.time.monotonic", lambda: now_s[0])
    with stop_signals():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        now_s[0] += interrupts.DEAF_S + 0.1
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)


def test_a_held_signal_comes_when_the_block_has_ended() -> None:
    done = []

    def work() -> None:
        with stop_signals():
            with held():
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
                done.append("all of it")
            done.append("more")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["all of it"]


def test_what_holds_signals_cannot_be_taken_over() -> None:
    """Ray's init lays a handler of its own over SIGTERM."""
    done = []

    def work() -> None:
        with stop_signals():
            with held():
                signal.signal(signal.SIGTERM, lambda *_: done.append("taken over"))
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)
                signal.raise_signal(signal.SIGTERM)
                done.append("all of it")
            done.append("more")

    change, other = signal.signal, signal.getsignal(signal.SIGUSR1)
    with pytest.raises(Terminated):
        work()
    assert done == ["all of it"]
    assert signal.signal is change
    assert signal.signal(signal.SIGUSR1, other) == signal.SIG_IGN


def test_a_clean_up_hears_nothing() -> None:
    with stop_signals(), ignored():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_whose_exception_was_dropped_is_raised_again() -> None:
    with stop_signals():
        check()
        with contextlib.suppress(KeyboardInterrupt):  # as Python does in callbacks of its own
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()
    with stop_signals():
        check()


def test_other_threads_are_left_alone() -> None:
    seen = []

    def work() -> None:
        with stop_signals(), held(), ignored():
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
