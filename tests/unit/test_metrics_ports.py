"""Where ``/metrics`` is: beside the gateways unless told otherwise, and never in their way."""

from __future__ import annotations

import socket

import pytest

from deepinfer.deploy.cluster import Cluster, LaunchError
from deepinfer.deploy.config import ClusterConfig, ConfigError, load_config


@pytest.mark.parametrize(
    ("values", "port"),
    [
        ({}, 7480),
        ({"port": 9000}, 9010),
        ({"port": 0}, None),
        ({"port": 0, "metrics_port": 9100}, 9100),
        ({"metrics_port": 7469}, 7469),
        ({"metrics_port": 0}, 0),
        ({"gateways": 10}, 7480),
        ({"gateways": 11, "metrics_port": 7469}, 7469),
    ],
)
def test_the_port_follows_the_gateways_unless_it_is_named(
    values: dict[str, object], port: int | None
) -> None:
    assert load_config(None, values).metrics_fixed_port == port


@pytest.mark.parametrize(
    ("values", "needles"),
    [
        ({"metrics_port": -1}, ["metrics_port", "-1"]),
        ({"metrics_port": 65536}, ["metrics_port", "65536"]),
        ({"port": 65530}, ["port = 65530", "65540", "65535", "metrics_port"]),
        ({"gateways": 11}, ["metrics_port = 7480", "gateway-10", "gateways = 11"]),
        ({"metrics_port": 7470}, ["metrics_port = 7470", "gateway-0", "port = 7470"]),
    ],
)
def test_a_port_that_cannot_be_is_named(values: dict[str, object], needles: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, values)
    assert [n for n in needles if n not in str(caught.value)] == []


def test_a_taken_port_stops_the_start_before_anything_is_started() -> None:
    steps: list[str] = []
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cluster = Cluster(ClusterConfig(port=0, metrics_port=port), say=steps.append)
        with pytest.raises(LaunchError, match=rf"/metrics on port {port} .*--metrics-port"):
            cluster.__enter__()
    assert steps == []
