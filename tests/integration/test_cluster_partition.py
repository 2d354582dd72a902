"""Two nodes that cannot reach each other for a while: requests go on, the old epoch is not heard.

In network namespaces (``support/partition.py``), which need privileges that few machines give.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import partition
from support.cluster import Oracle, tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STORY_S = 300.0


def _missing() -> str | None:
    """Why there can be no second node here; None if there can."""
    for command in ("unshare", "nsenter", "ip"):
        if shutil.which(command) is None:
            return f"there is no {command}"
    cable = "ip link set lo up && ip link add here type veth peer name there"
    tried = subprocess.run(
        ["unshare", "--net", "sh", "-c", cable],
        capture_output=True,
        text=True,
        check=False,
    )
    said = tried.stderr.strip().splitlines()
    return f"no network namespaces: {said[-1] if said else '?'}" if tried.returncode else None


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="dip-"))  # short: Ray keeps Unix sockets below it
    yield made
    shutil.rmtree(made, ignore_errors=True)


def test_requests_outlive_a_partition_and_its_healing(folder: Path) -> None:
    why = _missing()
    if why is not None:
        pytest.skip(why)
    script = Path(partition.__file__)
    tests = str(script.parents[1])
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    log = folder / "log"
    with log.open("w") as out:
        done = subprocess.run(
            ["unshare", "--net", sys.executable, str(script), str(folder)],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=STORY_S,
            check=False,
        )
    assert done.returncode == 0, log.read_text()[-4000:]
    seen: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    assert seen["on_the_node"] >= 1, "nothing ran beyond the cable"
    oracle = Oracle(tiny_model(folder), "auto")
    for answer in seen["answers"]:
        options = {"max_tokens": partition.OUTPUT, **partition.GREEDY}
        assert answer["finish_reason"] == "length"
        assert tuple(answer["token_ids"]) == oracle.answer(tuple(answer["prompt"]), **options)
    # What ran beyond the cable spoke up when it was back, under numbers of the dead controller.
    assert sum(seen["counters"].values()) >= 1, seen
    before, after, node = seen["epochs"]
    assert before < after == node
