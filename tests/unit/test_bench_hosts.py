"""What a bench runs on: asked for by name, and named in its results."""

from __future__ import annotations

import pytest

from deepinfer.deploy.bench import hosts
from deepinfer.deploy.bench.hosts import CPU, Host, find_host
from deepinfer.deploy.config import ConfigError


def test_a_cards_results_do_not_overwrite_those_of_a_cpu() -> None:
    assert CPU.stem("offload") == "offload"
    assert Host("cuda", "NVIDIA H200").stem("offload") == "offload_h200"
    assert Host("cuda", "NVIDIA GeForce RTX 3060").stem("jitter") == "jitter_geforce_rtx_3060"


def test_the_card_is_in_the_result() -> None:
    assert CPU.facts() == {}
    assert Host("cuda", "NVIDIA H200").facts() == {"card": "NVIDIA H200"}


def test_no_card_is_looked_for_unless_one_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise AssertionError("somebody counts cards")

    monkeypatch.setattr("deepinfer.workers.gpu.card.count_cards", fail)
    assert find_host("cpu", print) == CPU


def test_without_a_card_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "local_device", lambda config, say: ("cpu", 0))
    assert find_host("auto", print) == CPU


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(ConfigError, match=r"device = 'tpu'"):
        find_host("tpu", print)
