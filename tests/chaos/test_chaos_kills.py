"""SIGKILL and SIGSTOP of real processes under load: every stream ends right, nothing is left over.

``DEEPINFER_KILLS`` sets the number of worker kills (6), ``DEEPINFER_CHAOS_SEED`` when they come.
Longer campaigns are ``deepinfer chaos``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import cycle, islice

import pytest

from deepinfer.deploy.chaos.load import questions
from deepinfer.deploy.chaos.points import KINDS, SWAPPING, Target
from deepinfer.deploy.config import ClusterConfig
from deepinfer.deploy.models import resolve_model
from deepinfer.deploy.oracle import unpressed
from deepinfer.proto.failpoints import Place
from support.chaos import Chaos, chaos_cluster
from support.tiny_model import write_tiny_llama

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]

KILLS = int(os.environ.get("DEEPINFER_KILLS", "6"))
SEED = int(os.environ.get("DEEPINFER_CHAOS_SEED", "0"))
ORDERS: dict[str, tuple[Place, ...]] = {
    "memfd": (
        "mid_copy",
        "mid_decode",
        "mid_fetch",
        "before_commit",
        "after_commit_before_free",
        "after_fetch_before_report",
        "mid_prefill",
        "before_reserve",
    ),
    "grpc": (
        "after_commit_before_free",
        "mid_fetch",
        "mid_prefill",
        "mid_copy",
        "mid_decode",
        "before_commit",
        "after_fetch_before_report",
        "before_reserve",
    ),
}
ORDERS["demo"] = ORDERS["memfd"]
QUICK: dict[Target, Place] = {
    "controller": "before_order",
    "store": "before_commit_reply",
    "gateway": "mid_stream",
}


@pytest.fixture(scope="module")
def chaos(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Chaos]:
    """A cluster of two workers and two gateways."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "demo":
        model, asked = resolve_model("demo"), questions(4, 48, 40_000)
    else:
        model = write_tiny_llama(folder / "tiny", seed=3)
        asked = questions(6, 120, 256)
    answers = unpressed(model, asked, kv_cache_dtype="auto")
    config = ClusterConfig(
        model=str(model),
        workers=2,
        gateways=2,
        store_path="grpc" if request.param == "grpc" else "memfd",
        port=0,
        token_file=str(folder / "token"),
    )
    pairs = list(zip(asked, answers, strict=True))
    with chaos_cluster(folder, config, pairs, seed=SEED) as chaos:
        yield chaos


def test_every_place_is_tried() -> None:
    assert all(sorted(order) == sorted(SWAPPING) for order in ORDERS.values())
    assert all(place in KINDS[target].places for target, place in QUICK.items())


@pytest.mark.parametrize(
    "chaos", ["memfd", "grpc", pytest.param("demo", marks=pytest.mark.slow)], indirect=True
)
def test_worker_kills(chaos: Chaos, request: pytest.FixtureRequest) -> None:
    path = request.node.callspec.params["chaos"]
    count = len(SWAPPING) if path == "demo" else (KILLS + (path == "memfd")) // 2
    for place in islice(cycle(ORDERS[path]), count):
        trial = chaos.trial("worker", place)
        assert trial.right, trial
        assert trial.swaps or trial.roomy, "the pools were not too small"
    assert any(trial.recovered_s for trial in chaos.trials), "no stream ever had to move"


@pytest.mark.parametrize("chaos", ["memfd"], indirect=True)
@pytest.mark.parametrize("target", QUICK)
def test_kill_of(chaos: Chaos, target: Target) -> None:
    trial = chaos.trial(target, QUICK[target])
    assert trial.right, trial


@pytest.mark.slow
@pytest.mark.parametrize("chaos", ["memfd", "grpc"], indirect=True)
@pytest.mark.parametrize(
    ("target", "point"), [(target, place) for target in QUICK for place in KINDS[target].places]
)
def test_kill_at(chaos: Chaos, target: Target, point: Place) -> None:
    trial = chaos.trial(target, point)
    assert trial.right, trial


@pytest.mark.slow
@pytest.mark.parametrize("chaos", ["memfd"], indirect=True)
@pytest.mark.parametrize(
    ("target", "point", "pause_s"),
    [
        # Longer than the controller believes in a worker: its pages must not be lent again.
        ("worker", "mid_copy", 12.0),
        ("worker", "mid_decode", 12.0),
        ("worker", "mid_fetch", 3.0),
        ("store", "mid_put", 3.0),
        ("controller", "after_order", 3.0),
        ("gateway", "mid_stream", 3.0),
    ],
)
def test_pause_at(chaos: Chaos, target: Target, point: Place, pause_s: float) -> None:
    trial = chaos.trial(target, point, pause_s=pause_s)
    assert trial.right, trial


@pytest.mark.slow
@pytest.mark.parametrize("chaos", ["memfd"], indirect=True)
@pytest.mark.parametrize(
    "actors",
    [
        ("gateway-0", "gateway-1"),
        ("worker-0", "worker-1"),
        ("controller", "worker-0", "store-local"),
    ],
    ids=" + ".join,
)
def test_kill_together(chaos: Chaos, actors: tuple[str, ...]) -> None:
    assert chaos.kill_together(*actors) == []


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
    assert chaos.storm(actors, kills=20) == []
