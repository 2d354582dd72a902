"""A packed checkpoint through the CUDA runner, kernels emulated, against its expanded weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer.deploy.bench.sdpa_model import SdpaModel
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.runner import SequenceSlice
from deepinfer.workers.model.weights import open_model
from kernels.simt.build import COMPILER
from support import gpu_runner
from support.gpu_runner import CPU, cpu_runner, emulated_gpu
from support.memory_weights import MemoryWeights
from support.packed_models import awq, awq_config, packed_model

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

QWEN2 = ModelConfig(
    family="qwen2", vocab_size=96, hidden_size=64, intermediate_size=96, layers=1, heads=2,
    kv_heads=1, head_dim=64, max_positions=128, rms_eps=1e-6, rope_theta=1e4,
    tied_embeddings=True, qkv_bias=True,
)  # fmt: skip
TOLERANCE = 0.02
"""Of logits that reach 5: FP16 rounds about ten times a layer, by 2^-11 each."""


def test_prompts_and_tokens_of_a_packed_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = packed_model(QWEN2, awq, symmetric=False)
    packed = load_model(made.write(tmp_path / "m", awq_config()))
    monkeypatch.setattr(gpu_runner, "random_model", lambda config: packed)
    expanded = open_model(QWEN2, MemoryWeights(made.plain))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, QWEN2.vocab_size, (80,), generator=generator).tolist()
    wanted = SdpaModel(expanded, torch.float32, CPU).logits(tokens)
    assert 1 < wanted.abs().max() < 10
    table = tuple(range(6))
    with emulated_gpu():
        runner = cpu_runner(QWEN2, rows=80)
        # More rows than the 4-bit kernel takes are multiplied by weights that were expanded.
        for start, end in ((0, 70), (70, 79), (79, 80)):
            step = SequenceSlice(tokens[start:end], start, table, logits=True)
            found = runner.forward([step])
            assert float((found - wanted[[end - 1]]).abs().max()) < TOLERANCE, start
