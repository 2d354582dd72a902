"""What may be said about lower planes, and what a worker is told of it."""

from __future__ import annotations

import re

import pytest

from deepinfer.deploy.config import ClusterConfig, ConfigError, load_config


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"start_shed": True, "shed": True}, "shed = True has no meaning with start_shed = True"),
        (
            {"start_shed": True, "precision": "slo"},
            "precision = 'slo' has no meaning with start_shed = True",
        ),
        ({"shed": True, "precision": "fp16"}, "shed = True has no meaning with precision = 'fp16'"),
        ({"shed_head": True, "shed": False}, "shed_head = True has no meaning with shed = False"),
        (
            {"shed_head": True, "precision": "fp16"},
            "shed_head = True has no meaning with precision = 'fp16'",
        ),
        (
            {"shed_exact_wait_ms": 5, "shed": False},
            "shed_exact_wait_ms = 5 has no meaning with shed = False",
        ),
        (
            {"shed_exact_wait_ms": 5, "start_shed": True},
            "shed_exact_wait_ms = 5 has no meaning with start_shed = True",
        ),
        ({"shed_exact_wait_ms": 0}, "shed_exact_wait_ms"),
    ],
)
def test_contradictions_are_named(values: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        load_config(None, values)


def test_cards_shed_unless_told_not_to_and_cpus_only_if_told_to() -> None:
    assert ClusterConfig().sheds("cuda")
    assert not ClusterConfig().sheds("cpu")
    assert ClusterConfig(shed=True).sheds("cpu")
    assert not ClusterConfig(shed=False).sheds("cuda")
    assert not ClusterConfig(precision="fp16").sheds("cuda")
    assert not ClusterConfig(start_shed=True).sheds("cuda")


def test_all_of_it_concerns_nested_weights_only() -> None:
    given = ClusterConfig(shed=True, shed_head=True, shed_exact_wait_ms=100)
    assert given.precision_given == ("shed", "shed_head", "shed_exact_wait_ms")
    assert ClusterConfig(start_shed=True).precision_given == ("start_shed",)
