"""Nested checkpoints of tiny models, with rows that are shifted and rows that are listed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.hf_config_writer import hf_config
from deepinfer.workers.model.nested import nestable_names
from deepinfer.workers.model.nested_writer import write_nested
from deepinfer.workers.model.quantization import NestedFormat
from deepinfer.workers.model.weights import LoadedModel, open_model
from support.memory_weights import MemoryWeights, random_model

LLAMA = ModelConfig(
    family="llama", vocab_size=48, hidden_size=48, intermediate_size=72, layers=4, heads=6,
    kv_heads=2, head_dim=16, max_positions=64, rms_eps=1e-5, rope_theta=1e4,
)  # fmt: skip
FAMILIES = {
    "llama": LLAMA,
    "llama with biases": replace(
        LLAMA, qkv_bias=True, o_bias=True, mlp_bias=True, tied_embeddings=True
    ),
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True, tied_embeddings=True),
    "qwen3": replace(LLAMA, family="qwen3", qk_norm=True),
    "phi3": replace(LLAMA, family="phi3", fused_projections=True, rotary_dim=12),
}


def half_model(
    config: ModelConfig, seed: int = 3, dtype: torch.dtype = torch.float16
) -> LoadedModel:
    """Random weights of 16 bits. Of each matrix row 1 has to be shifted by 1; row 2 cannot be."""
    weights = random_model(config, seed).weights
    tensors = {}
    for name in weights.shapes():
        tensor = weights.read(name)
        if tensor.ndim == 2:
            tensor = tensor.to(dtype)
            tensor[1] = (tensor[1] * 64).round() / 64
            tensor[1, 5] = 3.0
            tensor[2, 0], tensor[2, 7] = -2.5, 2.0**-24 if dtype == torch.float16 else 2.0**-16
        tensors[name] = tensor
    return open_model(config, MemoryWeights(tensors))


def fp8_values(weight: torch.Tensor) -> torch.Tensor:
    """What FP8 mode makes of a weight, by torch's own E4M3: float32."""
    wide = weight.half().float()
    large = wide.abs().amax(1) > 1.75
    shift = torch.where(large, (wide.abs().amax(1) / 1.75).clamp_min(1).log2().ceil(), 0.0)
    factor = torch.exp2(shift)[:, None]
    exact = ((wide / factor).half().float() * factor == wide).all(1, keepdim=True)
    factor = torch.where(exact, factor, 1.0)
    outliers = ~exact & (wide.abs() > 1.75)
    inside = wide.masked_fill(outliers, 0.0)
    rounded = (inside / factor * 256).to(torch.float8_e4m3fn).float() / 256 * factor
    return torch.where(outliers, wide, rounded)


def with_matrices(
    model: LoadedModel, change: Callable[[str, torch.Tensor], torch.Tensor]
) -> LoadedModel:
    """A plain model whose nestable weights are ``change(name, weight)``."""
    names = set(nestable_names(model.config))
    read = {name: model.weights.read(name) for name in model.weights.shapes()}
    changed = {name: change(name, t) if name in names else t for name, t in read.items()}
    return open_model(model.config, MemoryWeights(changed))


def write_nested_folder(
    model: LoadedModel, folder: Path, *, row_scaling: bool = True, **config: Any
) -> Path:
    """``model`` as a nested folder without a tokenizer; ``config``: fields of its quantisation."""
    folder.mkdir()
    reports = write_nested(model, folder / "model.safetensors", row_scaling=row_scaling)
    plain = tuple(one.name.removesuffix(".weight") for one in reports if not one.nested)
    form = NestedFormat(row_scaling=row_scaling, plain=plain)
    values = hf_config(model.config) | {"quantization_config": form.to_hf() | config}
    (folder / "config.json").write_text(json.dumps(values))
    return folder
