"""Deterministic steps on a card, with the sizes of real models: bits, as the emulator compares."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from deepinfer.deploy.bench.kernel_steps import let_go
from deepinfer.deploy.bench.random_w4 import random_w4_model
from deepinfer.deploy.bench.random_weights import random_model
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.workers.gpu.card import find_card
from deepinfer.workers.gpu.opening import OpenedGpu, StepSizes, open_gpu
from deepinfer.workers.gpu.settings import GpuSettings
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.decoder import kv_layout
from deepinfer.workers.model.nested import nest
from deepinfer.workers.model.weights import LoadedModel
from support.schedules import compare_schedules

pytestmark = pytest.mark.gpu

QWEN = ModelConfig(
    family="qwen2", vocab_size=4096, hidden_size=2048, intermediate_size=11008, layers=2, heads=16,
    kv_heads=2, head_dim=128, max_positions=4096, rms_eps=1e-6, rope_theta=1e6,
    tied_embeddings=True, qkv_bias=True,
)  # fmt: skip
SMOLLM2 = replace(
    QWEN, family="llama", hidden_size=576, intermediate_size=1536, layers=4, heads=9, kv_heads=3,
    head_dim=64, qkv_bias=False,
)  # fmt: skip
BLOCKS = 128
LENGTHS = (700, 261, 330, 40, 90)
CUTS = (0, 1, 1, 1, 2, 17, 64, 130, 300)


@pytest.fixture(autouse=True)
def _card_is_left_empty() -> Iterator[None]:
    yield
    let_go()


def opened(model: LoadedModel, dtype: str, *, deterministic: bool) -> OpenedGpu:
    return open_gpu(
        find_card(),
        model,
        kv_layout(model.config, resolve_kv_dtype(dtype), 16),
        GpuSettings(fill_card=False, probe=False, deterministic=deterministic),
        StepSizes(rows=512, sequences=16),
        BLOCKS,
    )


def model_of(config: ModelConfig, kind: str) -> LoadedModel:
    if kind == "w4":
        return random_w4_model(config, device="cuda")
    model = random_model(config, device="cuda")
    return nest(model) if kind == "nested" else model


@pytest.mark.parametrize(
    ("config", "kind", "dtype"),
    [
        (QWEN, "f16", "fp16"),
        (QWEN, "nested", "fp8"),
        (QWEN, "w4", "int8"),
        (SMOLLM2, "f16", "fp16"),
        (SMOLLM2, "f16", "k16v8"),
    ],
)
@torch.inference_mode()
def test_any_schedule_gives_the_bits_of_decoding_alone(
    config: ModelConfig, kind: str, dtype: str
) -> None:
    runner = opened(model_of(config, kind), dtype, deterministic=True).runner
    chance = random.Random(kind)
    for level in range(runner.levels):
        found = compare_schedules(
            runner, LENGTHS, blocks=BLOCKS, chance=chance, cuts=CUTS, level=level
        )
        assert (found.different, found.kv_is_the_same) == (0, True)
        assert found.rows > 20


@torch.inference_mode()
def test_ordinary_steps_fail_the_same_test() -> None:
    runner = opened(model_of(QWEN, "f16"), "fp16", deterministic=False).runner
    chance = random.Random(2)
    assert compare_schedules(runner, LENGTHS, blocks=BLOCKS, chance=chance, cuts=CUTS).different
