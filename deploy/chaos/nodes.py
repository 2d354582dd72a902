"""Several Ray nodes on this machine, each with a store and workers; one of them dies as a whole."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer.deploy.chaos.site import Site
from deepinfer.deploy.rays import OBJECT_STORE_BYTES

NETWORK = "127.0.0."
"""Ray replaces 127.0.0.1 by the machine's own address; others of the loopback it takes as they
are."""
FIRST = 2


@dataclass(slots=True)
class NodeSite(Site):
    """A cluster on several nodes: whoever is killed takes along all that runs on its node."""

    rays: dict[str, Any] = field(default_factory=dict)
    """Ray's handle of each node that computes, by address."""
    homes: dict[str, str] = field(default_factory=dict)
    """Which node each worker and store is on."""

    def doomed(self, name: str, pid: int) -> list[int]:
        """The raylet first, so that it starts nobody anew, and all its descendants."""
        node = self.rays[self.homes[name]]
        raylets = [p.process.pid for p in node.all_processes.get("raylet", [])]
        return [*raylets, *(child for raylet in raylets for child in descendants(raylet))]

    def away(self, name: str) -> set[str]:
        """Everybody on its node."""
        gone = {actor for actor, home in self.homes.items() if home == self.homes[name]}
        self.lost |= gone
        return gone


@contextlib.contextmanager
def several_nodes(count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """A Ray head and ``count`` nodes that compute, all on the loopback.

    Yields Ray's address, and the handles of those that compute. Reads and sets the environment as
    the launcher does: to be called before Ray is imported.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_AUTH_TOKEN" not in os.environ:
        command = [str(Path(sys.executable).parent / "ray"), "get-auth-token", "--generate"]
        subprocess.run(command, check=True, capture_output=True)
    from ray.cluster_utils import Cluster as RayCluster

    cluster: Any = RayCluster()
    try:
        nodes = {}
        for number in range(FIRST, FIRST + count + 1):
            address = f"{NETWORK}{number}"
            nodes[address] = cluster.add_node(
                node_ip_address=address,
                node_name=address,
                num_cpus=0 if number == FIRST else 1,  # the head has controller and gateways only
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
            )
        del nodes[f"{NETWORK}{FIRST}"]
        yield cluster.address, nodes
    finally:
        cluster.shutdown()


def descendants(pid: int) -> list[int]:
    """All processes below one, as they are now."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            # The name is in parentheses and may hold anything; behind it come state and parent.
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    below = [pid]
    while below:
        children = [child for each in below for child in parents.get(each, [])]
        found += children
        below = children
    return found
