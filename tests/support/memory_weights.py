"""Models whose weights are in memory, random ones for the most part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.weights import (
    CheckpointError,
    LoadedModel,
    RowLookup,
    expected_shapes,
    open_model,
    row_lookup,
)


@dataclass(frozen=True, slots=True)
class MemoryWeights:
    """A ``WeightSource`` over tensors in memory."""

    tensors: Mapping[str, Tensor]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        """One tensor. Raises CheckpointError when it is not there."""
        if name not in self.tensors:
            raise CheckpointError(f"tensor {name} is missing")
        return self.tensors[name]

    def read_quantized(self, name: str, device: torch.device | None = None) -> None:
        """None: nothing is packed."""

    def read_nested(self, name: str, device: torch.device | None = None) -> None:
        """None: nothing is nested."""

    def stored(self, name: str) -> tuple[memoryview, ...]:
        """The bytes of one tensor."""
        return (self.read(name).contiguous().flatten().view(torch.uint8).numpy().data,)

    def rows(self, name: str) -> RowLookup:
        """Rows of one matrix by their number, as float32."""
        return row_lookup(self.read(name))

    def release(self) -> None:
        """Nothing to give back: the tensors are the memory."""


def random_model(config: ModelConfig, seed: int) -> LoadedModel:
    """A model of ``config`` with random weights: float32, scaled so that activations stay near 1.

    Deterministic in ``config`` and ``seed``.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        if "norm" in name:
            tensors[name] = 1.0 + 0.1 * torch.randn(shape, generator=generator)
        elif name.endswith("bias"):
            tensors[name] = 0.2 * torch.randn(shape, generator=generator)
        else:
            tensors[name] = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
    return open_model(config, MemoryWeights(tensors))
