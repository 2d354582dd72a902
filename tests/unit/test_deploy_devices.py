"""What workers compute on: chosen before anything starts, with a sentence where it cannot be."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch

from deepinfer.deploy.actors import Actors, Served
from deepinfer.deploy.config import ClusterConfig, ConfigError, load_config
from deepinfer.deploy.devices import local_device, ray_device, share_cards
from deepinfer.deploy.errors import LaunchError
from deepinfer.deploy.nodes import Node, Nodes, choose_nodes
from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.workers.gpu import card
from deepinfer.workers.gpu.card import Card, GpuUnavailableError, find_card


def cards(
    monkeypatch: pytest.MonkeyPatch, *, count: int, major: int = 8, cupy: bool = True
) -> None:
    """Make this machine look as if it had cards."""
    found = Card(
        index=0,
        name="A card",
        capability=(major, 6),
        multiprocessors=48,
        bytes_total=12 * 2**30,
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(card, "count_cards", lambda: count)
    monkeypatch.setattr(card, "describe_card", lambda index: replace(found, index=index))
    spec = importlib.util.find_spec("torch") if cupy else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)


def told(config: ClusterConfig) -> tuple[tuple[str, int], list[str]]:
    said: list[str] = []
    return local_device(config, said.append), said


def test_auto_takes_the_cards_that_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, count=2)
    assert told(ClusterConfig()) == (("cuda", 2), [])
    assert told(ClusterConfig(device="cpu")) == (("cpu", 0), [])
    cards(monkeypatch, count=0)
    assert told(ClusterConfig()) == (("cpu", 0), [])


def test_auto_says_why_a_card_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, count=1, cupy=False)
    device, said = told(ClusterConfig())
    assert device == ("cpu", 0)
    assert [line for line in said if "CPU" in line and "cuda13" in line] == said != []


@pytest.mark.parametrize(
    ("count", "major", "cupy", "needles"),
    [
        (0, 8, True, ["no CUDA device 0", "driver", "--device cpu"]),
        (1, 7, True, ["A card", "SM76", "SM80", "--device cpu"]),
        (1, 8, False, ["CuPy", "deepinfer-cluster[cuda13]", "--device cpu"]),
    ],
)
def test_cuda_says_what_to_install_or_use(
    monkeypatch: pytest.MonkeyPatch, count: int, major: int, cupy: bool, needles: list[str]
) -> None:
    cards(monkeypatch, count=count, major=major, cupy=cupy)
    with pytest.raises(LaunchError) as caught:
        told(ClusterConfig(device="cuda"))
    assert [n for n in needles if n not in str(caught.value)] == []


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(GpuUnavailableError, match=r"built without CUDA: install .* --device cpu"):
        find_card()


def record(number: int, gpus: float) -> dict[str, Any]:
    return {
        "NodeID": f"{number:x}" * 8,
        "Alive": True,
        "NodeManagerAddress": f"10.0.0.{number}",
        "NodeName": f"10.0.0.{number}",
        "Resources": {"CPU": 8.0} | ({"GPU": gpus} if gpus else {}),
    }


def test_in_a_running_ray_nodes_with_cards_compute() -> None:
    records = [record(1, 0), record(2, 4)]
    assert ray_device(ClusterConfig(), records) == "cuda"
    assert ray_device(ClusterConfig(), records[:1]) == "cpu"
    assert ray_device(ClusterConfig(device="cpu"), records) == "cpu"
    nodes = choose_nodes(records, "all", "cuda")
    assert [(node.address, node.cards) for node in nodes.computing] == [("10.0.0.2", 4)]
    with pytest.raises(LaunchError, match=r"nodes = 2: Ray has 1 nodes with GPUs, of 2"):
        choose_nodes(records, 2, "cuda")


@pytest.mark.parametrize(
    ("workers", "of", "share"), [(1, 1, 1.0), (2, 2, 1.0), (2, 1, 0.5), (3, 2, 0.5), (3, 1, 0.3333)]
)
def test_workers_share_cards_evenly(workers: int, of: int, share: float) -> None:
    found = share_cards(workers, of).of_card
    assert found == share
    assert found * -(-workers // of) <= 1


def test_workers_on_one_card_are_told_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[tuple[Any, float]] = []

    def note(self: Actors, name: str, node: Node, kind: type, *args: Any, **options: Any) -> None:
        created.append((args[0], options.get("num_gpus", 0.0)))

    monkeypatch.setattr(Actors, "_actor", note)
    here = Node("local", "127.0.0.1", cards=1)
    layout = KvLayout(resolve_kv_dtype("fp16"), 2, 2, 64, 16)
    served = Served(path="m", config=None, layout=layout, device="cuda", blocks=None)  # type: ignore[arg-type]
    config = ClusterConfig(workers=2, gpu_memory_utilization=0.8, gpu_probe=False)
    actors = Actors(config, Nodes(home=here, computing=(here,)), "token")
    actors._create_worker("worker-0", served, here, {}, None)
    [(settings, num_gpus)] = created
    assert num_gpus == 0.5
    assert settings.gpu.memory_utilization == pytest.approx(0.4)
    assert (settings.gpu.shared, settings.gpu.fill_card, settings.gpu.probe) == (True, True, False)
    assert settings.config.blocks_total == 1


@pytest.mark.parametrize(
    ("values", "needles"),
    [
        ({"device": "tpu"}, ["device", "tpu", "cuda"]),
        ({"device": "cpu", "gpu_probe": False}, ["gpu_probe", "device = 'cpu'"]),
        ({"device": "cpu", "gpu_memory_utilization": 0.5}, ["gpu_memory_utilization = 0.5"]),
        (
            {"max_cache": "1GiB", "gpu_memory_utilization": 0.5},
            ["gpu_memory_utilization = 0.5", "max_cache = '1GiB'"],
        ),
        ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization", "1.5"]),
    ],
)
def test_settings_without_meaning_are_refused(values: dict[str, Any], needles: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, values)
    assert [n for n in needles if n not in str(caught.value)] == []
