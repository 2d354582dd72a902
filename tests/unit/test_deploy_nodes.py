"""Which of Ray's nodes a cluster runs on, by what names and addresses; what cannot work there."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.deploy.config import ClusterConfig
from deepinfer.deploy.errors import LaunchError
from deepinfer.deploy.nodes import (
    HEAD,
    HERE,
    LOOPBACK,
    advertised_host,
    check_reachable,
    choose_nodes,
)


def record(
    number: int, *, cpus: float = 4, head: bool = False, alive: bool = True, name: str = ""
) -> dict[str, Any]:
    """One entry of ``ray.nodes()``."""
    address = f"10.0.0.{number}"
    resources = {"memory": 1.0} | ({"CPU": cpus} if cpus else {}) | ({HEAD: 1.0} if head else {})
    return {
        "NodeID": f"{number:x}" * 8,
        "Alive": alive,
        "NodeManagerAddress": address,
        "NodeName": name or address,
        "Resources": resources,
    }


RECORDS = [record(3), record(1), record(2, head=True), record(4, alive=False)]


def test_the_head_is_home_and_every_living_node_computes() -> None:
    nodes = choose_nodes(RECORDS, "all")
    assert nodes.home.address == "10.0.0.2"
    assert [node.address for node in nodes.computing] == ["10.0.0.2", "10.0.0.1", "10.0.0.3"]
    assert [node.name for node in nodes.computing] == ["10.0.0.2", "10.0.0.1", "10.0.0.3"]
    assert nodes.computing[1].ray_id == "11111111"
    assert nodes.everyone == nodes.computing


def test_a_head_without_cpus_keeps_controller_and_gateways_only() -> None:
    nodes = choose_nodes([record(1, cpus=0, head=True), record(2)], "all")
    assert nodes.home.address == "10.0.0.1"
    assert [node.address for node in nodes.computing] == ["10.0.0.2"]
    assert [node.address for node in nodes.everyone] == ["10.0.0.1", "10.0.0.2"]


def test_a_number_takes_so_many_and_refuses_fewer_with_both_numbers() -> None:
    assert len(choose_nodes(RECORDS, 2).computing) == 2
    with pytest.raises(LaunchError, match=r"nodes = 4: Ray has 3 nodes with CPUs, of 3"):
        choose_nodes(RECORDS, 4)
    with pytest.raises(LaunchError, match=r"nodes = all: Ray has 0 nodes with CPUs, of 1"):
        choose_nodes([record(1, cpus=0, head=True)], "all")


def test_nodes_of_one_name_are_told_apart() -> None:
    nodes = choose_nodes([record(1, head=True, name="box"), record(2, name="box")], "all")
    assert [node.name for node in nodes.computing] == ["box-111111", "box-222222"]


def test_a_single_node_speaks_with_itself_over_loopback() -> None:
    nodes = choose_nodes([record(7, head=True)], "all")
    assert nodes.home.address == LOOPBACK
    assert nodes.computing == (nodes.home,)
    assert nodes.home.ray_id == "77777777"


def test_gateways_on_loopback_are_refused_where_workers_are_elsewhere() -> None:
    nodes = choose_nodes(RECORDS, "all")
    with pytest.raises(LaunchError, match=r"host = '127\.0\.0\.1': .*set host to 10\.0\.0\.2"):
        check_reachable(ClusterConfig(), nodes)
    check_reachable(ClusterConfig(host="0.0.0.0"), nodes)
    check_reachable(ClusterConfig(), choose_nodes(RECORDS, 1))
    check_reachable(ClusterConfig(), HERE)


def test_shared_memory_alone_is_refused_with_several_nodes() -> None:
    config = ClusterConfig(host="0.0.0.0", store_path="memfd")
    with pytest.raises(LaunchError, match="store_path = 'memfd'"):
        check_reachable(config, choose_nodes(RECORDS, "all"))
    check_reachable(config, choose_nodes(RECORDS, 1))


def test_every_interface_is_advertised_as_the_heads_address() -> None:
    nodes = choose_nodes(RECORDS, "all")
    assert advertised_host(ClusterConfig(host="0.0.0.0"), nodes) == "10.0.0.2"
    assert advertised_host(ClusterConfig(host="::"), nodes) == "10.0.0.2"
    assert advertised_host(ClusterConfig(host="10.0.0.9"), nodes) == "10.0.0.9"
    assert advertised_host(ClusterConfig(host="localhost"), nodes) == "localhost"
