"""SIGKILL of real processes under load: every stream ends with the right ids, nothing is left over.

``DEEPINFER_KILLS`` sets the number of worker kills (6), ``DEEPINFER_CHAOS_SEED`` when they come,
``DEEPINFER_CHAOS_OUTPUT`` a folder for the figures.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path

import pytest

from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.chaos.history import Faults
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.config import ClusterConfig
from deepinfer.deploy.models import resolve_model
from deepinfer.deploy.oracle import Question, unpressed
from deepinfer.proto.failpoints import PLACES, Place
from support.chaos import Chaos, Kill, chaos_folder, summary, tight_pool
from support.tiny_model import write_tiny_llama

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]

KILLS = int(os.environ.get("DEEPINFER_KILLS", "6"))
SEED = int(os.environ.get("DEEPINFER_CHAOS_SEED", "0"))
SWAPPING: tuple[Place, ...] = tuple(place for place in PLACES if place != "mid_return")
"""Where swaps and steps come; ``test_chaos_shedding.py`` has the rest."""
ORDERS: dict[str, tuple[Place, ...]] = {
    "memfd": (
        "mid_copy",
        "mid_decode",
        "mid_fetch",
        "before_commit",
        "after_commit_before_free",
        "after_fetch_before_report",
        "mid_prefill",
    ),
    "grpc": (
        "after_commit_before_free",
        "mid_fetch",
        "mid_prefill",
        "mid_copy",
        "mid_decode",
        "before_commit",
        "after_fetch_before_report",
    ),
}
ORDERS["demo"] = ORDERS["memfd"]


def questions(count: int, max_tokens: int, vocabulary: int) -> list[Question]:
    """Prompts of 16 to 48 random ids; every other one draws its tokens."""
    draw = random.Random(7)
    return [
        Question(
            prompt=tuple(draw.randrange(vocabulary) for _ in range(draw.randint(16, 48))),
            sampling={"max_tokens": max_tokens, "temperature": 0.0 if i % 2 == 0 else 0.8},
            seed=i,
        )
        for i in range(count)
    ]


def write_figures(kills: list[Kill], name: str) -> None:
    """Write what was measured, if asked for."""
    if output := os.environ.get("DEEPINFER_CHAOS_OUTPUT"):
        figures = summary(kills) | {"rows": [asdict(kill) for kill in kills]}
        names = ("DEEPINFER_KILLS", "DEEPINFER_CHAOS_SEED")
        asked = " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
        command = f"{asked} pytest tests/chaos/test_chaos_kills.py".strip()
        write_result(Path(output) / f"kills_{name}.json", command, figures)


@pytest.fixture(scope="module")
def chaos(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Chaos]:
    """A cluster of two workers and two gateways; the pools are too small for what is asked."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "demo":
        model, asked, max_tokens = resolve_model("demo"), questions(4, 48, 40_000), 48
    else:
        model = write_tiny_llama(folder / "tiny", seed=3)
        asked, max_tokens = questions(6, 120, 256), 120
    answers = unpressed(model, asked, kv_cache_dtype="auto")
    config = ClusterConfig(
        model=str(model),
        workers=2,
        gateways=2,
        store_path="grpc" if request.param == "grpc" else "memfd",
        port=0,
        token_file=str(folder / "token"),
    )
    pool = tight_pool(answers, max_tokens, config)
    failpoints, environment = chaos_folder(folder)
    with Cluster(config.model_copy(update={"max_cache": pool}), worker_env=environment) as cluster:
        chaos = Chaos(cluster, failpoints, asked, answers, seed=SEED)
        yield chaos
    write_figures(chaos.kills, request.param)


def test_every_place_is_tried() -> None:
    assert all(sorted(order) == sorted(SWAPPING) for order in ORDERS.values())


@pytest.mark.parametrize(
    "chaos", ["memfd", "grpc", pytest.param("demo", marks=pytest.mark.slow)], indirect=True
)
def test_worker_kills(chaos: Chaos, request: pytest.FixtureRequest) -> None:
    path = request.node.callspec.params["chaos"]
    count = len(SWAPPING) if path == "demo" else (KILLS + (path == "memfd")) // 2
    for place in islice(cycle(ORDERS[path]), count):
        kill = chaos.kill_worker(place)
        assert kill.faults == Faults()
    assert any(kill.recovered_s for kill in chaos.kills), "no stream ever had to move"
    assert all(kill.swaps for kill in chaos.kills), "the pools were not too small"


@pytest.mark.parametrize("chaos", ["memfd"], indirect=True)
@pytest.mark.parametrize(
    "actors",
    [
        ("controller",),
        ("store-local",),
        ("gateway-0",),
        pytest.param(("gateway-0", "gateway-1"), marks=pytest.mark.slow),
        pytest.param(("worker-0", "worker-1"), marks=pytest.mark.slow),
        pytest.param(("controller", "worker-0", "store-local"), marks=pytest.mark.slow),
    ],
    ids=" + ".join,
)
def test_kill_of(chaos: Chaos, actors: tuple[str, ...]) -> None:
    assert chaos.kill_actors(*actors).faults == Faults()


@pytest.mark.slow
@pytest.mark.parametrize("chaos", ["memfd", "grpc"], indirect=True)
@pytest.mark.parametrize(
    "actors",
    [
        ("worker-0", "worker-1"),
        ("worker-0", "worker-1", "controller", "store-local", "gateway-0", "gateway-1"),
    ],
    ids=["workers", "everyone"],
)
def test_storm(chaos: Chaos, actors: tuple[str, ...]) -> None:
    assert chaos.storm(actors, kills=20).faults == Faults()
