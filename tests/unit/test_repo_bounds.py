"""Every queue has a bound: one of its own, or one that is named here with what keeps it short."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDERS = ("client", "controller", "gateway", "kvstore", "proto", "text", "workers")
QUEUES = {"Queue", "PriorityQueue", "LifoQueue", "SimpleQueue", "deque"}

BOUNDED_OTHERWISE: dict[tuple[str, str], str] = {
    ("client/driver.py", "Queue"): "one event a message of one request, whose answer is kept too",
    ("controller/core/sequences.py", "deque"): "a walk over a line that is there anyway",
    ("gateway/shell.py", "Queue"): "one message under way a stream (core.streams), and its end",
    ("gateway/shell.py", "deque"): "events that follow from one event; empty when tell returns",
    ("kvstore/copier.py", "deque"): "a copy's pieces under way: as many as it has buffers",
    ("kvstore/frames.py", "deque"): "descriptors: _FDS_MAX, or the connection ends",
    ("workers/core/blocks.py", "deque"): "the pool's free blocks: as many as it has",
    ("workers/core/roster.py", "deque"): "WorkerConfig.ended_max",
    ("workers/engine.py", "SimpleQueue"): "the core has one step under way, and one ahead",
    ("workers/gpu/copying.py", "SimpleQueue"): "as many lanes as there are",
    ("workers/gpu/copying.py", "deque"): "a copy's pieces under way: as many as it has buffers",
    ("workers/gpu/planes.py", "deque"): "copies under way: as many as there are buffers",
    ("workers/local.py", "deque"): "events that follow from one event, and a caller's prompts",
}
"""File and kind of queue: what bounds those that say nothing themselves."""


def unbounded(source: str) -> Iterator[str]:
    """The kind of each queue that is made without a bound."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        made = node.func
        kind = made.attr if isinstance(made, ast.Attribute) else getattr(made, "id", "")
        if kind not in QUEUES:
            continue
        named = {keyword.arg for keyword in node.keywords}
        if kind == "deque":
            bounded = "maxlen" in named or len(node.args) == 2
        else:
            bounded = kind != "SimpleQueue" and ("maxsize" in named or bool(node.args))
        if not bounded:
            yield kind


def test_every_queue_has_a_bound(repo_root: Path) -> None:
    found: Counter[tuple[str, str]] = Counter()
    for folder in FOLDERS:
        for path in (repo_root / folder).rglob("*.py"):
            for kind in unbounded(path.read_text("utf-8")):
                found[path.relative_to(repo_root).as_posix(), kind] += 1
    new = sorted(found.keys() - BOUNDED_OTHERWISE.keys())
    assert not new, f"give these a bound, or say here what bounds them: {new}"
    gone = sorted(BOUNDED_OTHERWISE.keys() - found.keys())
    assert not gone, f"these are bounded now, or gone: {gone}"


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ("asyncio.Queue()", ["Queue"]),
        ("q: asyncio.Queue[int] = asyncio.Queue()", ["Queue"]),
        ("queue.SimpleQueue()", ["SimpleQueue"]),
        ("deque()", ["deque"]),
        ("collections.deque([1])", ["deque"]),
        ("asyncio.Queue(5)", []),
        ("asyncio.Queue(maxsize=5)", []),
        ("deque(maxlen=5)", []),
        ("deque((), 5)", []),
    ],
)
def test_planted_queues_are_found(source: str, kinds: list[str]) -> None:
    assert list(unbounded(source)) == kinds


def test_every_server_bounds_its_calls(repo_root: Path) -> None:
    """Whoever makes a gRPC server gives it the bound, and the guard before it."""
    for folder in FOLDERS:
        for path in (repo_root / folder).rglob("*.py"):
            source = path.read_text("utf-8")
            if "grpc.aio.server(" in source:
                assert "BoundedCalls(" in source, path
                assert "Guard(" in source, path
