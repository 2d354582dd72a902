"""Frames of `deepinfer top`: rates, order, swaps seen, and what fits on a screen."""

from __future__ import annotations

import io
import itertools
import json
from typing import Any

import pytest
from rich.console import Console

from deepinfer.client import Client, Unavailable
from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.core import ControllerCore
from deepinfer.deploy import top
from deepinfer.deploy.status import SWAP_COUNTERS
from deepinfer.deploy.top import Watcher, render, run_top

NOW_MS = 1_700_000_010_000


def request(name: str, state: str, tokens: int = 30, **changes: Any) -> dict[str, Any]:
    where = {"worker": "worker-0"} if state in ("decode", "prefill") else {"worker": None}
    return {
        "request": f"g1-{name}",
        "choice": 0,
        "state": state,
        "gateway": "gateway-0",
        "run": None,
        "store": None,
        "swaps": 0,
        "prompt_tokens": 20,
        "tokens": tokens,
        "tokens_max": 60,
        "arrival_ms": NOW_MS - 4_000,
        **where,
        **changes,
    }


def document(*requests: dict[str, Any]) -> dict[str, Any]:
    """A status document with everything that a real one has."""
    found: dict[str, Any] = json.loads(json.dumps(ControllerCore(1, ControllerConfig()).snapshot()))
    found["counters"] |= dict.fromkeys(SWAP_COUNTERS, 0.0)
    found["requests"] = {
        s: len(list(g)) for s, g in itertools.groupby(r["state"] for r in requests)
    }
    worker = {"node": "here", "blocks_total": 10, "blocks_free": 4, "blocks_short": 1}
    found["workers"] = {"worker-0": worker | {"residents": 2, "state": "serving"}}
    found["stores"] = {
        "store-local": {
            "node": "here",
            "alive": True,
            "budget_bytes": 4 << 20,
            "used_bytes": 1 << 20,
            "tickets": 1,
        }
    }
    return found | {"sequences": list(requests), "now_ms": NOW_MS, "sequences_left_out": 0}


def shown(frame: top.Frame, *, height: int = 40) -> str:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(render(frame, height=height))
    return console.export_text()


def test_a_workers_mode_stands_behind_its_state() -> None:
    told = document(request("aaaaaaaa", "decode", 21, worker="worker-0"))
    worker = told["workers"]["worker-0"]
    told["workers"]["worker-1"] = worker | {"precision": {"level": 1, "levels": 2}}
    lines = shown(Watcher().take(told, 1.0, "12:00:00")).splitlines()
    states = {line.split()[0]: line.rstrip() for line in lines if line.startswith("worker-")}
    assert states["worker-0"].endswith("serving")
    assert states["worker-1"].endswith("serving, fp8")


def test_rates_are_tokens_between_two_documents() -> None:
    watcher = Watcher()
    first = watcher.take(document(request("aaaaaaaa", "decode", 30)), 100.0, "12:00:00")
    assert (first.rate, first.rows[0].rate) == (None, None)
    second = watcher.take(
        document(request("aaaaaaaa", "decode", 40), request("bbbbbbbb", "prefill", 25)),
        102.0,
        "12:00:02",
    )
    assert second.rate == 5.0
    assert [(row.name, row.rate) for row in second.rows] == [("aaaaaaaa", 5.0), ("bbbbbbbb", None)]
    assert second.rows[0].age_s == 4.0


def test_the_most_active_come_first_then_the_oldest() -> None:
    frame = Watcher().take(
        document(
            request("waits", "waiting"),
            request("young", "decode", arrival_ms=NOW_MS - 10),
            request("away", "swapped", store="store-local"),
            request("old", "decode", arrival_ms=NOW_MS - 9_000),
        ),
        0.0,
        "",
    )
    assert [row.name[-5:] for row in frame.rows] == ["1-old", "young", "-away", "waits"]
    assert frame.rows[2].where == "store-local"


def test_swaps_are_told_once_each() -> None:
    watcher = Watcher()
    watcher.take(document(request("aaaaaaaa", "decode")), 0.0, "12:00:00")
    out = request("aaaaaaaa", "swapped", store="store-local", swaps=1)
    watcher.take(document(out), 1.0, "12:00:01")
    watcher.take(document(out), 2.0, "12:00:02")
    back = request("aaaaaaaa", "decode", worker="worker-1", swaps=1)
    frame = watcher.take(document(back), 3.0, "12:00:03")
    quick = request("aaaaaaaa", "decode", worker="worker-0", swaps=2)
    frame = watcher.take(document(quick), 4.0, "12:00:04")
    lost = request("aaaaaaaa", "recovering", swaps=2)
    frame = watcher.take(document(lost), 5.0, "12:00:05")
    assert frame.events == (
        "12:00:01 aaaaaaaa: worker-0 > store-local",
        "12:00:03 aaaaaaaa: store-local > worker-1",
        "12:00:04 aaaaaaaa: worker-1 > the store > worker-0",
        "12:00:05 aaaaaaaa: lost its worker, recovering",
    )


def test_the_screen_shows_pools_requests_and_what_does_not_fit() -> None:
    requests = [request(f"reques{i:02}", "decode", 30 + i, swaps=i) for i in range(30)]
    text = shown(Watcher().take(document(*requests), 0.0, ""), height=24)
    lines = {tuple(line.replace("━", "").split()) for line in text.splitlines()}
    assert ("worker-0", "6", "/", "10,", "short", "of", "1", "2", "serving") in lines
    assert ("store-local", "1.0", "MiB", "/", "4.0", "MiB", "1", "serving") in lines
    assert ("reques00", "decode", "worker-0", "4.0", "s", "30", "/", "60", "-", "0") in lines
    rows = sum("decode" in line for line in text.splitlines())
    assert f"and {30 - rows} more" in text
    assert len(text.splitlines()) <= 24


def test_an_idle_cluster_is_shown_as_such() -> None:
    text = shown(Watcher().take(document(), 0.0, ""))
    assert "0 requests" in text
    assert "no requests" in text


class Status(Client):
    """Gives documents, or raises, in turn."""

    def __init__(self, *answers: dict[str, Any] | Exception) -> None:
        self._answers = list(answers)

    def status(self) -> dict[str, Any]:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_once_prints_a_frame_with_rates() -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    client = Status(
        document(request("aaaaaaaa", "decode", 30)), document(request("aaaaaaaa", "decode", 31))
    )
    run_top(client, interval_s=0.01, once=True, console=console)
    [row] = [line.split() for line in console.export_text().splitlines() if "aaaaaaaa" in line]
    assert float(row[-2]) > 1.0


def test_silence_is_noted_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    file = io.StringIO()
    console = Console(width=120, height=40, file=file, force_terminal=True, color_system=None)
    client = Status(document(), Unavailable("no endpoint answers"), document())

    def draw(frame: top.Frame, *, height: int, note: str = "") -> Any:
        drawn.append(note)
        return render(frame, height=height, note=note)

    def presses(timeout_s: float) -> str:
        return "q" if len(drawn) == 3 else ""

    class Keys:
        def __enter__(self) -> Any:
            return presses

        def __exit__(self, *_: object) -> None:
            return None

    monkeypatch.setattr(top, "render", draw)
    monkeypatch.setattr(top, "_keys", Keys)
    run_top(client, interval_s=0.01, once=False, console=console)
    assert drawn[0] == drawn[2] == ""
    assert drawn[1].endswith("trying again: no endpoint answers")
