"""Models whose K has a few very large channels, as Qwen2's biases give it.

A constant in a channel that RoPE hardly turns adds the same to a query's product with every key:
softmax takes it away again, so that the model is as good as before, with any KV that can hold it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.kernels.nested import NestedWeight
from deepinfer.workers.model.quantized import QuantizedTensor
from deepinfer.workers.model.weights import LoadedModel, RowLookup, WeightSource, expected_shapes


def provoked(model: LoadedModel, size: float, *, every: int = 1) -> LoadedModel:
    """``model`` as one of Qwen2 with biases of 0, but for K in every ``every``-th layer.

    There the channel that RoPE turns slowest has ``size``, in every head.
    """
    config = replace(model.config, family="qwen2", qkv_bias=True)
    biases = {}
    for name, shape in expected_shapes(config).items():
        if name.endswith("_proj.bias"):
            bias = torch.zeros(shape)
            if "k_proj" in name and int(name.split(".")[2]) % every == 0:
                bias.view(config.kv_heads, -1)[:, config.rope_dim // 2 - 1] = size
            biases[name] = bias
    weights = _Biased(model.weights, biases)
    name = f"{model.fingerprint[:20]}-biased-{size:g}"
    return replace(model, config=config, weights=weights, fingerprint=name)


@dataclass(frozen=True, slots=True)
class _Biased:
    """A ``WeightSource`` with other biases."""

    source: WeightSource
    biases: Mapping[str, Tensor]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {**self.source.shapes(), **{n: tuple(b.shape) for n, b in self.biases.items()}}

    def read(self, name: str) -> Tensor:
        bias = self.biases.get(name)
        return self.source.read(name) if bias is None else bias

    def read_quantized(
        self, name: str, device: torch.device | None = None
    ) -> QuantizedTensor | None:
        return self.source.read_quantized(name, device)

    def read_nested(self, name: str, device: torch.device | None = None) -> NestedWeight | None:
        return self.source.read_nested(name, device)

    def stored(self, name: str) -> tuple[memoryview, ...]:
        bias = self.biases.get(name)
        if bias is None:
            return self.source.stored(name)
        return (bias.view(torch.uint8).numpy().data,)

    def rows(self, name: str) -> RowLookup:
        return self.source.rows(name)

    def release(self) -> None:
        self.source.release()
