"""How a model is opened on a card: its budget, pool, levels and notes; the card is emulated."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch

from deepinfer.deploy.bench.random_weights import random_model
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.workers.gpu import costs, opening
from deepinfer.workers.gpu.card import Card
from deepinfer.workers.gpu.opening import OpenedGpu, StepSizes, open_gpu
from deepinfer.workers.gpu.planes import lower_bytes, tail_bytes
from deepinfer.workers.gpu.settings import GpuSettings, NestedSettings
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.decoder import kv_layout
from deepinfer.workers.model.nested import nest
from deepinfer.workers.model.runner import SequenceSlice
from kernels.simt.build import COMPILER
from support.copy_device import LazyDevice
from support.gpu_runner import CPU, emulated_gpu

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

CONFIG: Final = ModelConfig(
    family="qwen2", vocab_size=96, hidden_size=64, intermediate_size=48, layers=1, heads=2,
    kv_heads=1, head_dim=64, max_positions=64, rms_eps=1e-6, rope_theta=1e4,
    tied_embeddings=True, qkv_bias=True,
)  # fmt: skip
LAYOUT: Final = kv_layout(CONFIG, resolve_kv_dtype("fp16"), 16)
BLOCKS: Final = 8
CARD: Final = Card(
    index=0, name="emulated", capability=(8, 6), multiprocessors=4, bytes_total=320 << 20
)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Card, "device", property(lambda _: CPU))
    cuda: dict[str, Callable[..., object]] = {
        "set_device": lambda _: None,
        "memory_reserved": lambda: 0,
        "mem_get_info": lambda: (318 << 20, 320 << 20),
        "empty_cache": lambda: None,
        "synchronize": lambda: None,
    }
    for name, found in cuda.items():
        monkeypatch.setattr(torch.cuda, name, found)
    monkeypatch.setattr(opening, "precompile", list)
    monkeypatch.setattr(opening, "CudaCopyDevice", lambda _: LazyDevice())
    monkeypatch.setattr(costs, "LIMIT_S", 0.0)
    monkeypatch.setattr(costs, "on_card_s", lambda call, _times: call() is None or 1e-3)
    with emulated_gpu():
        yield
    gc.unfreeze()


def opened(*, fill: bool = False, nested: NestedSettings | None = None) -> OpenedGpu:
    model = random_model(CONFIG)
    return open_gpu(
        CARD,
        model if nested is None else nest(model),
        LAYOUT,
        GpuSettings(fill_card=fill, probe=False),
        StepSizes(rows=16, sequences=1),
        BLOCKS,
        nested=nested,
    )


def test_a_plain_model_has_one_level_and_no_tail() -> None:
    found = opened()
    assert (found.runner.levels, found.runner.costs, found.planes) == (1, (), None)
    assert found.pool.num_blocks == BLOCKS + 1
    assert found.budget.lower == 0
    assert not any("nested" in note or "lower planes" in note for note in found.notes)


@pytest.mark.parametrize("head", [False, True])
def test_the_tail_is_in_the_budget_and_between_the_blocks_and_the_spares(head: bool) -> None:
    found = opened(nested=NestedSettings(levels=3, shed=True, shed_head=head))
    runner, planes = found.runner, found.planes
    assert planes is not None
    assert planes.return_ms >= 0
    assert found.blocks == BLOCKS
    assert found.pool.num_blocks == BLOCKS + planes.tail_blocks + 1
    assert runner.spares == (BLOCKS + planes.tail_blocks,)
    weights = runner.decoder.weights
    assert planes.tail_blocks == -(-tail_bytes(weights, head=head) // LAYOUT.block_bytes)
    assert found.budget.lower == LAYOUT.payload_bytes(planes.tail_blocks)
    assert len(runner.costs) == runner.levels == 3
    assert any(f"shedding frees {planes.tail_blocks} blocks more" in note for note in found.notes)
    planes.shed()
    step = SequenceSlice([5, 6], 0, (BLOCKS + planes.tail_blocks - 1,), True)
    assert bool(runner.forward([step], 2).isfinite().all())


def test_the_tail_takes_its_room_from_what_is_left() -> None:
    """In memory of which nothing is ever counted as freed."""
    stays = opened(fill=True, nested=NestedSettings())
    leaves = opened(fill=True, nested=NestedSettings(shed=True))
    assert stays.planes is None
    assert stays.budget.lower == lower_bytes(stays.runner.decoder.weights)
    assert leaves.planes is not None
    assert stays.blocks - leaves.blocks == leaves.planes.tail_blocks


def test_a_model_that_starts_shed_is_locked_to_the_last_level() -> None:
    found = opened(nested=NestedSettings(start_shed=True))
    runner = found.runner
    assert (runner.levels, runner.level_min, runner.costs, found.planes) == (2, 1, (), None)
    assert "nested weights without their lower planes: every step is computed in FP8" in found.notes


def test_without_host_memory_for_the_copy_nothing_is_shed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "available_bytes", lambda: 1 << 30)
    found = opened(nested=NestedSettings(shed=True))
    assert found.planes is None
    assert found.pool.num_blocks == BLOCKS + 1
    assert any(note.startswith("shedding is off: the host has 1,024 MiB") for note in found.notes)


def test_where_nothing_can_be_pinned_the_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = LazyDevice()
    device.pinnable = 5
    monkeypatch.setattr(opening, "CudaCopyDevice", lambda _: device)
    found = opened(nested=NestedSettings(shed=True))
    assert found.planes is not None
    assert "lower planes come back slowly: nothing is pinned" in found.notes


def test_only_a_nested_model_can_shed() -> None:
    with pytest.raises(ValueError, match=r"^shed: the model's weights are not nested"):
        open_gpu(
            CARD,
            random_model(CONFIG),
            LAYOUT,
            GpuSettings(),
            StepSizes(rows=16, sequences=1),
            BLOCKS,
            nested=NestedSettings(shed=True),
        )


def test_w8a8_is_refused_on_a_card_that_has_no_such_products() -> None:
    says = (
        r"fp8_products = 'w8a8': emulated has compute capability 8\.6, products of FP8 with FP8 "
        r"need 9\.0: take 'w8a16'"
    )
    with pytest.raises(ValueError, match=says):
        open_gpu(
            CARD,
            nest(random_model(CONFIG)),
            LAYOUT,
            GpuSettings(),
            StepSizes(rows=16, sequences=1),
            BLOCKS,
            nested=NestedSettings(w8a8=True),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": 1}, "precision_levels = 1: must be 2 to 6"),
        ({"levels": 7}, "precision_levels = 7: must be 2 to 6"),
        ({"shed": True, "start_shed": True}, "start_shed: lower planes that are not there"),
    ],
)
def test_settings_that_make_no_sense_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NestedSettings(**options)
