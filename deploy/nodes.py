"""Which machines a cluster runs on, chosen from what Ray says of its nodes."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from deepinfer.deploy.config import ClusterConfig, Device
from deepinfer.deploy.devices import cards_of
from deepinfer.deploy.errors import LaunchError

LOOPBACK = "127.0.0.1"
HEAD = "node:__internal_head__"
"""The resource by which Ray marks its head."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine, as the cluster knows it."""

    name: str
    """Workers and stores report it; the end of its store's name."""
    address: str
    """Where its processes serve the others."""
    ray_id: str | None = None
    """Its id in Ray: actors stay there. None if Ray has one node only."""
    cards: int = 0
    """CUDA cards, where workers compute on them."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Where everyone runs."""

    home: Node
    """Controller and gateways."""
    computing: tuple[Node, ...]
    """Each has a store and its workers. ``home`` may be one of them."""

    @property
    def everyone(self) -> tuple[Node, ...]:
        return (self.home, *(node for node in self.computing if node != self.home))


HERE = Nodes(home=Node("local", LOOPBACK), computing=(Node("local", LOOPBACK),))
"""This machine alone."""


def choose_nodes(
    records: Sequence[Mapping[str, Any]], wanted: int | Literal["all"], device: Device = "cpu"
) -> Nodes:
    """Pick from ``ray.nodes()``: the head, which is home, first; the others by address.

    A node computes if Ray has CPUs there, and cards if ``device`` is cuda: a head with
    ``num-cpus: 0``, as KubeRay has it, gets the controller and the gateways only.

    Args:
        records: what ``ray.nodes()`` returned.
        wanted: how many nodes compute; ``all`` takes every one.
        device: what their workers compute on.

    Raises:
        LaunchError: fewer nodes can compute than wanted, or none; says both numbers.
    """
    alive = sorted(
        (record for record in records if record["Alive"]),
        key=lambda r: (HEAD not in r["Resources"], r["NodeManagerAddress"], r["NodeID"]),
    )
    titles = Counter(record["NodeName"] for record in alive)
    nodes = {
        record["NodeID"]: Node(
            name=(
                record["NodeName"]
                if titles[record["NodeName"]] == 1
                else f"{record['NodeName']}-{record['NodeID'][:6]}"
            ),
            address=record["NodeManagerAddress"],
            ray_id=record["NodeID"],
            cards=cards_of(record) if device == "cuda" else 0,
        )
        for record in alive
    }
    able = [nodes[r["NodeID"]] for r in alive if r["Resources"].get("CPU", 0) > 0]
    if device == "cuda":
        able = [node for node in able if node.cards]
    least = 1 if wanted == "all" else wanted
    if len(able) < least:
        raise LaunchError(
            f"nodes = {wanted}: Ray has {len(able)} nodes with "
            f"{'CPUs' if device == 'cpu' else 'GPUs'}, of {len(alive)} that are alive"
        )
    home = nodes[alive[0]["NodeID"]]
    chosen = Nodes(home=home, computing=tuple(able if wanted == "all" else able[:wanted]))
    if len(chosen.everyone) > 1:
        return chosen
    alone = replace(chosen.home, address=LOOPBACK)  # nobody elsewhere has to reach it
    return Nodes(home=alone, computing=(alone,))


def check_reachable(config: ClusterConfig, nodes: Nodes) -> None:
    """Refuse gateways and stores that workers on other nodes cannot reach.

    Raises:
        LaunchError: ``host`` is loopback, and a node is not on this machine; or ``store_path`` is
            ``memfd``, and there is more than one node.
    """
    if config.store_path == "memfd" and len(nodes.everyone) > 1:
        raise LaunchError(
            "store_path = 'memfd': a payload in another node's store could not be fetched: must be "
            "auto or grpc with several nodes"
        )
    far = [n.address for n in nodes.everyone if not ipaddress.ip_address(n.address).is_loopback]
    if config.loopback and far and len(nodes.everyone) > 1:
        raise LaunchError(
            f"host = {config.host!r}: workers on other nodes ({', '.join(far)}) must reach the "
            f"gateways: set host to {nodes.home.address} or 0.0.0.0"
        )


def advertised_host(config: ClusterConfig, nodes: Nodes) -> str:
    """Where the gateways say they are: ``host``, or home's address if that is every interface."""
    try:
        everywhere = ipaddress.ip_address(config.host).is_unspecified
    except ValueError:  # a name
        everywhere = False
    return nodes.home.address if everywhere else config.host
