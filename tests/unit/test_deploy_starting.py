"""What is shown while a cluster starts, at a terminal and in a log."""

from __future__ import annotations

import io

from rich.console import Console

from deepinfer.deploy.starting import Starting

MIB = 2**20


def test_a_log_has_a_line_a_step_and_a_line_a_worker() -> None:
    file = io.StringIO()
    with Starting(Console(file=file, width=80)) as view:
        view.say("starting Ray")
        view.say("starting Ray")
        view.loading("worker-0", 50 * MIB, 100 * MIB)
        view.say("waiting for worker-0")
        view.loading("worker-0", 100 * MIB, 100 * MIB)
        view.loading("worker-0", 100 * MIB, 100 * MIB)
    assert file.getvalue().splitlines() == [
        "starting Ray",
        "waiting for worker-0",
        "worker-0: 100.0 MiB loaded",
    ]


def test_a_terminal_has_a_bar_a_worker_and_keeps_nothing_of_it() -> None:
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=True, color_system=None)
    with Starting(console) as view:
        view.say("waiting for [worker-0]")
        view.loading("worker-0", 25 * MIB, 100 * MIB)
        view.loading("worker-1", 75 * MIB, 100 * MIB)
        assert view._live is not None
        view._live.refresh()
        drawn = file.getvalue()
    assert "waiting for [worker-0]" in drawn
    assert "25.0/100.0 MiB" in drawn
    assert "75.0/100.0 MiB" in drawn
    assert file.getvalue().endswith("\x1b[2K")  # the last thing done is to clear a line
