"""The Ray job, as docs/ray.md writes it: submitted, used, stopped; nothing but the head is left."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deepinfer.client import AsyncClient, Delta
from support.cluster import Oracle, tiny_model
from support.cluster_stories import (
    BLOCK_SIZE,
    BLOCKS,
    GREEDY,
    OUTPUT,
    SEEDED,
    Ask,
    assert_right,
    one_after_another,
    prompt,
)
from support.docs_blocks import ROOT
from support.ray_head import Head, documented, running_head

SERVE_S = 120.0
DEAD_S = 30.0
SUBMIT = "--submission-id deepinfer"
STOP = "ray job stop"
DOWN = "deploy.job --down"
CARRY = "py_modules"


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """A head whose user has the folders that the document speaks of."""
    with running_head() as made:
        serve = made.folder / "serve"
        serve.mkdir()
        settings = {
            "model": str(tiny_model(made.folder)),
            "max_cache": f"{BLOCKS} blocks",
            "block_size": BLOCK_SIZE,
            "prefill_chunk_tokens": 1,
            "max_cpu_offload_mb": 64,
            "port": int(made.ports["7470"]),
            "metrics_port": 0,
        }
        (serve / "cluster.yaml").write_text(yaml.safe_dump(settings))
        (made.folder / "src").symlink_to(ROOT / "src")
        yield made


@contextlib.contextmanager
def submitted(head: Head, block: str) -> Iterator[Path]:
    """Run a submitting block beside the test; yield the file with what it shows."""
    log = head.folder / "job.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", head.script(block)],
            cwd=head.folder,
            env=head.environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield log
    finally:
        process.terminate()
        process.wait()


def endpoint_of(log: Path) -> str:
    """Wait until the job says where it serves."""
    deadline = time.monotonic() + SERVE_S
    while not (found := re.search(r"serving \S+ at (\S+)", log.read_text())):
        assert time.monotonic() < deadline, log.read_text()
        assert "failed" not in log.read_text(), log.read_text()
        time.sleep(0.1)
    return found[1]


def assert_only_the_head_is_left(head: Head) -> None:
    deadline = time.monotonic() + DEAD_S
    while left := head.actors():
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert any("raylet" in command for command in head.processes().values())


def test_submit_serve_swap_stop(head: Head) -> None:
    with submitted(head, documented(SUBMIT)) as log:
        endpoint = endpoint_of(log)
        assert endpoint == f"127.0.0.1:{head.ports['7470']}"
        _check_swap(head, endpoint)
        for line in documented("deepinfer generate").splitlines():
            done = head.run(line)
            assert done.returncode == 0, done.stdout
        assert "worker-0" in done.stdout
        _check_second_is_refused(head)
        stopped = head.run(documented(STOP))
        assert stopped.returncode == 0, stopped.stdout
        assert "was stopped" in stopped.stdout
    assert "Traceback" not in log.read_text()
    assert_only_the_head_is_left(head)


def _check_swap(head: Head, endpoint: str) -> None:
    """Two requests, of which the second drives the first out; both answer as if alone."""
    token = (head.folder / ".local/state/deepinfer/token").read_text().strip()
    asks = [
        Ask(prompt(1), {**GREEDY, "max_tokens": OUTPUT}),
        Ask(prompt(2), {**SEEDED, "max_tokens": OUTPUT - 1}),
    ]

    async def run() -> None:
        async with AsyncClient(endpoint, token=token) as client:
            seen = await asyncio.wait_for(one_after_another(client, asks, Delta), 60)
        assert_right(Oracle(tiny_model(head.folder), "auto"), asks, seen)
        assert [one.choice.swaps.swaps for one in seen] == [1, 0]
        assert [one.choice.swaps.resumes for one in seen] == [1, 0]

    asyncio.run(run())


def _check_second_is_refused(head: Head) -> None:
    done = head.run(documented(SUBMIT).replace(SUBMIT, ""))
    assert done.returncode != 0
    assert "error: a DeepInfer cluster runs in this Ray already" in done.stdout
    assert "Traceback" not in done.stdout


def test_detached_with_the_package_carried_along_then_removed(head: Head) -> None:
    done = head.run(documented(CARRY))
    assert done.returncode == 0, done.stdout
    assert "detached: remove it with" in done.stdout
    assert "succeeded" in done.stdout
    workers = [pid for pid, command in head.processes().items() if "WorkerActor" in command]
    assert len(workers) == 1
    environment = Path(f"/proc/{workers[0]}/environ").read_bytes().decode().split("\0")
    path = next(entry for entry in environment if entry.startswith("PYTHONPATH="))
    assert "py_modules_files" in path, path
    removed = head.run(documented(DOWN))
    assert removed.returncode == 0, removed.stdout
    names = "controller, gateway-0, store-127.0.0.2, worker-0"
    assert f"removed {names}" in removed.stdout  # and so nobody has them any more
    assert_only_the_head_is_left(head)
