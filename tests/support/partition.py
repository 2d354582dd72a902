"""Two nodes in network namespaces of their own, and a cable between them that is pulled.

    unshare --net python tests/support/partition.py FOLDER

runs the whole story and writes ``FOLDER/seen.json``. In the namespace that it is started in are
the head (controller, gateway, a store, a worker) and the clients; the other node has a store and a
worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deepinfer.client import AsyncClient, Delta
from deepinfer.deploy.access import CONTROLLER
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig
from deepinfer.deploy.rays import RunningRay
from support.cluster import assert_nothing_left, controller_status, processes_with, tiny_model

HEAD, NODE = "10.77.0.1", "10.77.0.2"
PORT = 6379
MARK = "RAY_TMPDIR"
REQUESTS, OUTPUT = 4, 480
"""Two for each worker, which take longer than it takes to pull the cable."""
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
GONE_S, BACK_S, END_S = 30.0, 60.0, 90.0
"""How long the node's loss may take to be acted upon, its return, and the requests' end."""


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[str]:
    """A Ray head here and a node behind the cable; yields our end of it."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    ray = str(Path(sys.executable).parent / "ray")
    common = ["--num-cpus=1", f"--object-store-memory={80 * 2**20}", "--disable-usage-stats"]
    try:
        there = _entering(holder.pid)
        for line in (
            "ip link set lo up",
            "ip link add here type veth peer name there",
            f"ip link set there netns {holder.pid}",
            f"ip addr add {HEAD}/24 dev here",
            "ip link set here up",
        ):
            _run(line.split())
        for line in (
            "ip link set lo up", f"ip addr add {NODE}/24 dev there", "ip link set there up",
        ):  # fmt: skip
            _run([*there, *line.split()])
        head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        _run([ray, "start", *head, f"--node-ip-address={HEAD}", *common])
        join = [f"--address={HEAD}:{PORT}", f"--node-ip-address={NODE}"]
        _run([*there, ray, "start", *join, *common])
        yield "here"
    finally:
        for pid in processes_with(MARK, str(folder)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        holder.kill()
        holder.wait()


def _entering(pid: int) -> list[str]:
    """A command's beginning that lets it run in the namespace of another process."""
    deadline = time.monotonic() + 10
    here = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{pid}/ns/net") == here:
        assert time.monotonic() < deadline, "unshare takes too long"
        time.sleep(0.01)
    return ["nsenter", f"--net=/proc/{pid}/ns/net"]


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr, timeout=120)


async def _until(
    cluster: Cluster, holds: Callable[[dict[str, Any]], bool], patience_s: float
) -> float:
    """Wait until the status says something; the seconds that took."""
    began = time.monotonic()
    document: dict[str, Any] = {}
    while time.monotonic() - began < patience_s:
        with contextlib.suppress(Exception):  # the controller may be restarting
            document = await asyncio.wait_for(controller_status(cluster), 2)
            if holds(document):
                return time.monotonic() - began
        await asyncio.sleep(0.1)
    raise AssertionError(f"not so after {patience_s:g} s: {document.get('workers')}")


def _worker_of(document: dict[str, Any], node: str) -> str:
    workers: dict[str, Any] = document["workers"]
    return next(name for name, w in workers.items() if w["node"].startswith(node))


async def story(cluster: Cluster, cable: str) -> dict[str, Any]:
    """Requests run on both nodes; the cable is pulled; the controller dies; the cable is back."""
    seen: dict[str, Any] = {}
    there = await _names(cluster)
    async with AsyncClient(list(cluster.endpoints), token=cluster.token) as client:
        tokens = [0] * REQUESTS

        async def ask(number: int) -> dict[str, Any]:
            prompt = tuple(range(number + 1, number + 20))
            async with client.stream(prompt, max_tokens=OUTPUT, **GREEDY) as stream:
                async for event in stream:
                    if isinstance(event, Delta):
                        tokens[number] += len(event.token_ids)
                completion = await stream.completion()
            [choice] = completion.choices
            return {
                "prompt": prompt,
                "token_ids": choice.token_ids,
                "finish_reason": choice.finish_reason,
                "longest_gap_s": max(choice.timings.intervals_s),
            }

        asks = [asyncio.create_task(ask(number)) for number in range(REQUESTS)]
        await _until(cluster, lambda d: d["workers"][there]["residents"] >= 1, 30)
        await _until(cluster, lambda _: min(tokens) >= 5, 30)
        before = await controller_status(cluster)
        seen["on_the_node"] = before["workers"][there]["residents"]
        _run(["ip", "link", "set", cable, "down"])
        pulled = time.monotonic()
        seen["gone_after_s"] = await _until(
            cluster, lambda d: d["workers"][there]["state"] == "gone", GONE_S
        )
        # Its runs go on here under a higher number; now under a higher epoch, too.
        os.kill(cluster.pid(CONTROLLER), signal.SIGKILL)
        seen["epoch_after_s"] = await _until(
            cluster, lambda d: d["epoch"] > before["epoch"] and d["ready"], GONE_S
        )
        _run(["ip", "link", "set", cable, "up"])
        seen["partition_s"] = time.monotonic() - pulled
        seen["back_after_s"] = await _until(
            cluster, lambda d: d["workers"].get(there, {}).get("state") == "serving", BACK_S
        )
        seen["answers"] = await asyncio.wait_for(asyncio.gather(*asks), END_S)
        await assert_nothing_left(cluster, 30)
        document = await client.status()
    names = ("tokens_outdated_total", "attaches_refused_total")
    seen["counters"] = {n: document["counters"][f"deepinfer_{n}"] for n in names}
    status = await cluster.actors[there].status.remote()
    seen["epochs"] = (before["epoch"], document["epoch"], status["epoch_seen"])
    return seen


async def _names(cluster: Cluster) -> str:
    return _worker_of(await controller_status(cluster), NODE)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def main(folder: Path) -> None:
    os.environ |= {
        "RAY_AUTH_MODE": "token",
        "RAY_worker_niceness": "0",
        MARK: str(folder),
        "XDG_STATE_HOME": str(folder / "state"),
    }
    if "RAY_AUTH_TOKEN" not in os.environ:
        from deepinfer.deploy.rays import make_ray_token

        make_ray_token()
    config = ClusterConfig(
        model=str(tiny_model(folder)),
        host=HEAD,
        port=0,
        metrics_port=0,
        max_cache="128 blocks",
        max_cpu_offload_mb=64,
        kv_quality="off",
    )
    with two_nodes(folder) as cable:
        node = RunningRay(2, address=f"{HEAD}:{PORT}")
        with Cluster(config, say=_say, ray=node) as cluster:
            seen = asyncio.run(story(cluster, cable))
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
