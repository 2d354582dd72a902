"""The KV quality gate over the CUDA runner, emulated: it measures and scales as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer.kernels.attention import DecodeWorkspace
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.core.quality import INT8_SCALED, Candidate, Figures
from deepinfer.workers.gpu.buffers import Buffers
from deepinfer.workers.gpu.limits import StepLimits
from deepinfer.workers.gpu.opening import make_runner
from deepinfer.workers.gpu.runner import GpuRunner
from deepinfer.workers.gpu.shapes import model_specs
from deepinfer.workers.gpu.trial import GpuTrial
from deepinfer.workers.gpu.weights import GpuWeights, load_weights
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.decoder import Decoder, kv_layout
from deepinfer.workers.pool import PagedPool
from deepinfer.workers.quality import CpuTrial, QualityGate, Trial, Verdict
from deepinfer.workers.quality_cache import QualityCache
from deepinfer.workers.quality_settings import QualitySettings
from kernels.simt.build import COMPILER, prebuild
from support.gpu_runner import emulated_gpu
from support.memory_weights import random_model
from support.provoked_model import provoked

pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")

BLOCK_SIZE = 16
CPU = torch.device("cpu")
MODEL = provoked(
    random_model(
        ModelConfig(
            family="llama",
            vocab_size=96,
            hidden_size=64,
            intermediate_size=96,
            layers=1,
            heads=2,
            kv_heads=1,
            head_dim=64,
            max_positions=64,
            rms_eps=1e-5,
            rope_theta=1e6,
        ),
        seed=3,
    ),
    200.0,
)
TOKENS = tuple((7 * i * i + 3 * i) % 96 for i in range(40))


def gpu_trial() -> GpuTrial:
    config, rows = MODEL.config, 24
    workspace = DecodeWorkspace.allocate(1, config.heads, config.head_dim, 8, CPU)
    buffers = Buffers.allocate(config, rows, 1, 1, workspace, CPU)

    def bind(weights: GpuWeights, pool: PagedPool) -> GpuRunner:
        limits = StepLimits(rows=rows, sequences=1, context=config.max_positions)
        return make_runner(weights, pool, buffers, limits, fused_rows=1, multiprocessors=4)

    weights = load_weights(MODEL, CPU, config.max_positions)
    for dtype in ("fp16", "int8"):
        prebuild(model_specs(weights, kv_layout(config, resolve_kv_dtype(dtype), BLOCK_SIZE)))
    return GpuTrial(weights, BLOCK_SIZE, rows, buffers.saturations, bind)


def settled(trial: Trial, folder: Path) -> tuple[Verdict, dict[Candidate, Figures]]:
    settings = QualitySettings(mode="warn", token_ids=TOKENS, cache_folder=str(folder))
    int8 = resolve_kv_dtype("int8")
    verdict = QualityGate(settings, MODEL, int8, BLOCK_SIZE, "here").settle(trial)
    return verdict, QualityCache(
        folder, MODEL.fingerprint, TOKENS, BLOCK_SIZE, "here"
    ).read().figures


def test_a_card_comes_to_the_cpus_verdict(tmp_path: Path) -> None:
    with emulated_gpu():
        trial = gpu_trial()
        before = trial.weights.layers[0].qkv
        verdict, figures = settled(trial, tmp_path / "card")
    backend = CpuBackend()
    cpu = CpuTrial(Decoder(MODEL, backend), backend, BLOCK_SIZE)
    expected, right = settled(cpu, tmp_path / "cpu")
    assert verdict.scales is not None
    assert expected.scales is not None
    assert verdict.scales.digest == expected.scales.digest
    plain, scaled = Candidate("int8"), INT8_SCALED
    assert figures[plain].kl_nats == pytest.approx(right[plain].kl_nats, rel=0.2)
    assert figures[scaled].kl_nats < figures[plain].kl_nats / 4
    assert figures[scaled].positions == len(TOKENS)
    assert trial.weights.layers[0].qkv is not before
    assert trial.saturations() == 0
