"""Random weights of a known model's shape: what a bench needs where no checkpoint is at hand."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.quantized import QuantizedTensor
from deepinfer.workers.model.weights import (
    CheckpointError,
    LoadedModel,
    RowLookup,
    expected_shapes,
    row_lookup,
)

QWEN25_3B: Final = ModelConfig(
    family="qwen2",
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=11_008,
    layers=36,
    heads=16,
    kv_heads=2,
    head_dim=128,
    max_positions=32_768,
    rms_eps=1e-6,
    rope_theta=1e6,
    tied_embeddings=True,
    qkv_bias=True,
)
"""The shape of Qwen2.5-3B (its published config)."""

SMOLLM2_135M: Final = ModelConfig(
    family="llama",
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    max_positions=8192,
    rms_eps=1e-5,
    rope_theta=1e5,
    tied_embeddings=True,
)
"""The shape of SmolLM2-135M (its published config)."""

SHAPES: Final = {"qwen2.5-3b": QWEN25_3B, "smollm2": SMOLLM2_135M}
"""By the names that ``--shape`` takes."""


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """A ``WeightSource`` that draws each tensor when it is read, always the same for one seed.

    float16 on ``device``, scaled so that activations stay near 1.
    """

    config: ModelConfig
    seed: int
    device: torch.device

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return expected_shapes(self.config)

    def read(self, name: str) -> Tensor:
        """One tensor. Raises CheckpointError when there is none of that name."""
        shape = self.shapes().get(name)
        if shape is None:
            raise CheckpointError(f"tensor {name} is missing")
        # Python's own hash of a text differs from process to process.
        seed = (self.seed << 32) + zlib.crc32(name.encode())
        generator = torch.Generator(self.device).manual_seed(seed)
        drawn = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)
        if "norm" in name:
            return (1.0 + 0.1 * drawn).half()
        if name.endswith("bias"):
            return (0.2 * drawn).half()
        return drawn.mul_(shape[-1] ** -0.5).half()

    def read_quantized(
        self, name: str, device: torch.device | None = None
    ) -> QuantizedTensor | None:
        """None: nothing is packed."""
        return None

    def read_nested(self, name: str, device: torch.device | None = None) -> None:
        """None: nothing is nested."""

    def stored(self, name: str) -> tuple[memoryview, ...]:
        """The bytes of one tensor."""
        return (self.read(name).cpu().contiguous().flatten().view(torch.uint8).numpy().data,)

    def rows(self, name: str) -> RowLookup:
        """Rows of one matrix by their number, as float32."""
        return row_lookup(self.read(name))

    def release(self) -> None:
        """Nothing is kept."""


def random_model(
    config: ModelConfig, *, seed: int = 0, device: torch.device | str = "cpu"
) -> LoadedModel:
    """A model of ``config`` with random weights that are drawn on ``device``."""
    weights = RandomWeights(config, seed, torch.device(device))
    return LoadedModel(config, weights, f"random-{seed}")
