"""Quantised checkpoints, packed here bit by bit from the tables that describe their layouts.

Nothing of this shares code with what reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.hf_config_writer import hf_config
from deepinfer.workers.model.weights import expected_shapes

Codes = npt.NDArray[np.int64]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of eight, that nibble 0, 1, ... of a word holds."""


@dataclass(frozen=True, slots=True)
class Layer:
    """``scales * (codes - zeros)``: codes ``[N, K]``, 0 to 15, and ``[N, K / group]`` twice."""

    codes: Codes
    zeros: Codes
    scales: npt.NDArray[np.float16]

    def weight(self) -> torch.Tensor:
        """float32 ``[N, K]``."""
        group = self.codes.shape[1] // self.scales.shape[1]
        steps = self.codes - np.repeat(self.zeros, group, axis=1)
        scales = np.repeat(self.scales, group, axis=1).astype(np.float32)
        return torch.from_numpy(scales * steps.astype(np.float32))


def random_layer(
    random: np.random.Generator, rows: int, columns: int, group: int, *, symmetric: bool
) -> Layer:
    """Zero points, where there are any, are 1 to 15: what all packings can say."""
    groups = columns // group
    zeros = np.full((rows, groups), 8) if symmetric else random.integers(1, 16, (rows, groups))
    scales = random.uniform(0.005, 0.03, (rows, groups)).astype(np.float16)
    return Layer(random.integers(0, 16, (rows, columns)), zeros.astype(np.int64), scales)


def words(
    values: Codes, axis: int, order: Sequence[int] = tuple(range(8))
) -> npt.NDArray[np.int32]:
    """Eight along ``axis`` to an int32: bits 4 i and up hold number ``order[i]`` of the eight."""
    values = np.moveaxis(values, axis, -1)
    eights = values.reshape(*values.shape[:-1], -1, 8)
    packed = sum(eights[..., number] << (4 * nibble) for nibble, number in enumerate(order))
    signed = np.where(packed >= 1 << 31, packed - (1 << 32), packed).astype(np.int32)
    return np.ascontiguousarray(np.moveaxis(signed, -1, axis))


def gptq(layer: Layer, *, version: int = 1) -> dict[str, Any]:
    """qweight ``[K / 8, N]``, qzeros ``[K / G, N / 8]`` (version 1: less one), scales, g_idx."""
    columns, groups = layer.codes.shape[1], layer.scales.shape[1]
    return {
        "qweight": words(layer.codes.T, axis=0),
        "qzeros": words(layer.zeros.T - (version == 1), axis=1),
        "scales": np.ascontiguousarray(layer.scales.T),
        "g_idx": (np.arange(columns) // (columns // groups)).astype(np.int32),
    }


def gptq_v2(layer: Layer) -> dict[str, Any]:
    """Zero points as they are."""
    return gptq(layer, version=2)


def awq(layer: Layer) -> dict[str, Any]:
    """qweight ``[K, N / 8]``, qzeros ``[K / G, N / 8]``, both in AWQ's order, and scales."""
    return {
        "qweight": words(layer.codes.T, axis=1, order=AWQ_ORDER),
        "qzeros": words(layer.zeros.T, axis=1, order=AWQ_ORDER),
        "scales": np.ascontiguousarray(layer.scales.T),
    }


def compressed(layer: Layer) -> dict[str, Any]:
    """weight_packed ``[N, K / 8]``, weight_scale, weight_shape, and zero points if not all 8."""
    tensors: dict[str, Any] = {
        "weight_packed": words(layer.codes, axis=1),
        "weight_scale": layer.scales,
        "weight_shape": np.array(layer.codes.shape, dtype=np.int64),
    }
    if (layer.zeros != 8).any():
        tensors["weight_zero_point"] = words(layer.zeros, axis=0)
    return tensors


Packer = Callable[[Layer], dict[str, Any]]


def gptq_config(**changes: Any) -> dict[str, Any]:
    """As auto-gptq writes it."""
    usual = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    return {**usual, "static_groups": False, "damp_percent": 0.01, **changes}


def awq_config(**changes: Any) -> dict[str, Any]:
    """As autoawq writes it."""
    usual = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    return {**usual, "version": "gemm", "modules_to_not_convert": None, **changes}


def compressed_config(
    weights: Mapping[str, Any] | None = None, group: Mapping[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """As llm-compressor writes it; ``weights`` and ``group`` change what lies deeper."""
    inner = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
        "actorder": None, "dynamic": False, "observer": "minmax", **(weights or {}),
    }  # fmt: skip
    first = {
        "targets": ["Linear"], "weights": inner, "input_activations": None,
        "output_activations": None, **(group or {}),
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": first}, "quantization_status": "compressed",
        "kv_cache_scheme": None, **changes,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackedModel:
    """``tensors`` are those of the file, ``plain`` the same weights as a model would use them."""

    config: ModelConfig
    tensors: dict[str, torch.Tensor]
    plain: dict[str, torch.Tensor]
    layers: dict[str, Layer]

    def write(self, folder: Path, quantization: Mapping[str, Any] | None) -> Path:
        """A Hugging Face folder without a tokenizer."""
        folder.mkdir()
        values = hf_config(self.config)
        if quantization is not None:
            values["quantization_config"] = quantization
        (folder / "config.json").write_text(json.dumps(values))
        save_file(self.tensors, folder / "model.safetensors")
        return folder


def packed_model(
    config: ModelConfig,
    pack: Packer,
    *,
    symmetric: bool,
    group: Callable[[str], int | None] = lambda module: 32,
    seed: int = 0,
) -> PackedModel:
    """A random model; ``group`` says for each linear layer how many inputs share a scale.

    None leaves a layer in floats: float16's values, stored as float32.
    """
    random = np.random.default_rng(seed)
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    layers: dict[str, Layer] = {}
    for name, shape in expected_shapes(config).items():
        module = name.removesuffix(".weight")
        size = group(module) if name.endswith("_proj.weight") else None
        if size is not None:
            layer = random_layer(random, shape[0], shape[1], size, symmetric=symmetric)
            layers[name], plain[name] = layer, layer.weight()
            for suffix, array in pack(layer).items():
                tensors[f"{module}.{suffix}"] = torch.from_numpy(array)
            continue
        values = random.standard_normal(shape)
        values = 1 + 0.1 * values if "norm" in name else 0.2 * values
        tensors[name] = plain[name] = torch.from_numpy(values).half().float()
    return PackedModel(config, tensors, plain, layers)
