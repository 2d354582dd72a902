"""GGUF checkpoints as Hugging Face-named weights: names, RoPE row order, dequantisation."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from deepinfer.workers.model.config import ModelConfig, UnsupportedModelError, check_size
from deepinfer.workers.model.gguf_file import GgufFile, GgufTensor, Scalar
from deepinfer.workers.model.weights import CheckpointError, RowLookup, row_lookup

SUPPORTED_ARCHITECTURES: Final = ("llama", "qwen2", "qwen3", "phi3")

_PLAIN: Final = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}

_ROWS_AT_ONCE: Final = 1024

_ROPE_TENSORS: Final = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)

_GLOBAL_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufWeights:
    """``WeightSource`` over one GGUF file.

    Raises UnsupportedModelError naming a tensor whose type cannot be dequantised.
    """

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._names: dict[str, str] = {}
        for stored, tensor in file.tensors.items():
            if stored in _ROPE_TENSORS:
                continue  # the config has read them
            if not _readable(tensor.kind):
                known = ", ".join(kind.name for kind in GGML_QUANT_SIZES if _readable(kind))
                raise UnsupportedModelError(
                    f"{file.path.name}: tensor {stored} is stored as {tensor.kind.name}, which is "
                    f"not supported; known: {known}"
                )
            self._names[_hf_name(stored, config)] = stored

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor; what has no Hugging Face name keeps its own."""
        return {name: self._file.tensors[stored].shape for name, stored in self._names.items()}

    def read(self, name: str) -> Tensor:
        """One tensor: dequantised to float32, or a view of the file for 16- and 32-bit floats."""
        tensor, stored = self._stored(name)
        if isinstance(stored, Tensor):
            return self._unpermute(name, stored)
        values = torch.empty(tensor.shape)
        flat = values.view(-1, tensor.shape[-1])
        # The dequantisers make several arrays of the size of what they are given.
        for start in range(0, len(stored), _ROWS_AT_ONCE):
            part = stored[start : start + _ROWS_AT_ONCE]
            flat[start : start + len(part)] = torch.from_numpy(dequantize(part, tensor.kind))
        return self._unpermute(name, values)

    def rows(self, name: str) -> RowLookup:
        """Rows of one matrix by their number, dequantised when they are looked up."""
        tensor, stored = self._stored(name)
        if isinstance(stored, Tensor):
            return row_lookup(stored)
        return lambda numbers: torch.from_numpy(dequantize(stored[numbers.numpy()], tensor.kind))

    def _stored(self, name: str) -> tuple[GgufTensor, Tensor | npt.NDArray[np.uint8]]:
        """A tensor as a view of the file: of its floats, or of its blocks, ``[rows, bytes]``."""
        (raw,) = self.stored(name)
        tensor = self._file.tensors[self._names[name]]
        if (dtype := _PLAIN.get(tensor.kind)) is not None:
            return tensor, torch.frombuffer(raw, dtype=dtype).view(tensor.shape)
        rows = np.frombuffer(raw, dtype=np.uint8)
        return tensor, rows.reshape(math.prod(tensor.shape[:-1]), -1)

    def read_quantized(self, name: str, device: torch.device | None = None) -> None:
        """None: what GGUF packs is read as float32."""

    def read_nested(self, name: str, device: torch.device | None = None) -> None:
        """None: nothing is nested."""

    def stored(self, name: str) -> tuple[memoryview, ...]:
        """The stored bytes of one tensor."""
        stored = self._names.get(name)
        if stored is None:
            raise CheckpointError(f"tensor {name} is missing")
        return (self._file.bytes_of(self._file.tensors[stored]),)

    def release(self) -> None:
        """Unload the pages that were read."""
        self._file.release()

    def _unpermute(self, name: str, values: Tensor) -> Tensor:
        """Undo the pairing of RoPE rows: llama.cpp stores Llama's q and k with pairs adjacent.

        The decoder (like Hugging Face) rotates halves instead; other families are stored so.
        """
        if self._config.family != "llama":
            return values
        if ".q_proj." in name:
            heads = self._config.heads
        elif ".k_proj." in name:
            heads = self._config.kv_heads
        else:
            return values
        paired = values.reshape(heads, self._config.head_dim // 2, 2, -1)
        return paired.transpose(1, 2).reshape(values.shape)


@functools.cache
def _readable(kind: GGMLQuantizationType) -> bool:
    """Whether the gguf package can dequantise ``kind``, which only trying tells."""
    if kind in _PLAIN:
        return True
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def load_gguf(path: Path) -> tuple[ModelConfig, GgufWeights]:
    """Open a GGUF file.

    Raises CheckpointError for a damaged file, UnsupportedModelError for an architecture, RoPE
    scaling or tensor type that is not supported; each by name.
    """
    file = GgufFile(path)
    config = _config(file)
    return config, GgufWeights(file, config)


def _config(file: GgufFile) -> ModelConfig:
    architecture = file.metadata.get("general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path.name}: architecture {architecture!r} is not supported; known: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    fields = _Fields(file, str(architecture))
    try:
        return _checked_config(file, str(architecture), fields)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{file.path.name}: {error}") from error


def _checked_config(file: GgufFile, architecture: str, fields: _Fields) -> ModelConfig:
    if (parts := file.metadata.get("split.count", 1)) not in (0, 1):
        raise UnsupportedModelError(f"it is one of {parts} parts: split GGUF is not supported")
    if experts := fields.integer("expert_count", 0):
        raise UnsupportedModelError(
            f"mixture of experts (expert_count = {experts}) is not supported"
        )
    hidden = fields.integer("embedding_length")
    heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // max(heads, 1))
    if (value_dim := fields.integer("attention.value_length", head_dim)) != head_dim:
        raise UnsupportedModelError(f"value heads of {value_dim} beside key heads of {head_dim}")
    rotated = fields.integer("rope.dimension_count", head_dim)
    if rotated != head_dim and architecture != "phi3":
        raise UnsupportedModelError(
            f"rope.dimension_count {rotated} of head_dim {head_dim}: partial RoPE is not supported "
            f"in {architecture} models"
        )
    for size in (head_dim, rotated):
        check_size("head_dim", size)  # RoPE's divisors are as many as half of it
    positions = fields.integer("context_length")
    rope = _rope(file, fields, rotated)
    limits: list[tuple[int, str | None]] = [(positions, None)]
    if rope.positions is not None:
        limits.append(rope.positions)
    if (window := fields.integer("attention.sliding_window", 0)) > 0:
        limits.append((window, f"sliding_window is {window}"))
    max_positions, limit = min(limits, key=lambda item: item[0])
    return ModelConfig(
        family=architecture,
        vocab_size=_vocab_size(file, fields),
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length"),
        layers=fields.integer("block_count"),
        heads=heads,
        kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=max_positions,
        positions_limit=limit,
        rms_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10_000.0),
        rotary_dim=None if rotated == head_dim else rotated,
        rope_divisors=rope.divisors,
        rope_magnitude=rope.magnitude,
        tied_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
        fused_projections=architecture == "phi3",
    )


class _Fields:
    """Metadata of one architecture, with type checks that name the key."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file = file
        self._architecture = architecture

    def get(self, name: str, default: Scalar | None) -> Scalar | None:
        """A scalar, or ``default`` where there is no such key; a list is neither."""
        key = f"{self._architecture}.{name}"
        if (length := self._file.array_lengths.get(key)) is not None:
            raise CheckpointError(
                f"{self._file.path.name}: {key} must be one value, got a list of {length}"
            )
        return self._file.metadata.get(key, default)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(self._fault(name, "a whole number", value))
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(self._fault(name, "a number", value))
        return float(value)

    def _fault(self, name: str, allowed: str, value: Scalar | None) -> str:
        got = "it is missing" if value is None else f"got {value!r}"
        return f"{self._file.path.name}: {self._architecture}.{name} must be {allowed}; {got}"


def _vocab_size(file: GgufFile, fields: _Fields) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path.name}: tensor token_embd.weight is missing")
    return fields.integer("vocab_size", embedding.shape[0])


class _Rope(NamedTuple):
    divisors: tuple[float, ...] | None = None
    magnitude: float = 1.0
    positions: tuple[int, str] | None = None
    """How many positions it is right for, and why no more."""


def _rope(file: GgufFile, fields: _Fields, rotary_dim: int) -> _Rope:
    """Read the RoPE scaling: named, or stored by the converter as one divisor a frequency."""
    kind = fields.get("rope.scaling.type", "none")
    old_factor = fields.number("rope.scale_linear", 1.0)
    if kind not in ("none", "linear", "longrope") or old_factor != 1.0:
        raise UnsupportedModelError(
            f"RoPE scaling {kind if old_factor == 1.0 else 'scale_linear'!r} is not supported in "
            "GGUF files; known: none, linear, longrope"
        )
    if kind == "linear":
        return _Rope((fields.number("rope.scaling.factor"),) * (rotary_dim // 2))
    if "rope_factors_short.weight" in file.tensors:
        original = fields.integer("rope.scaling.original_context_length")
        return _Rope(
            _factors(file, "rope_factors_short.weight", rotary_dim),
            fields.number("rope.scaling.attn_factor", 1.0),
            (original, f"longrope's original context is {original}"),
        )
    if kind == "longrope":
        raise CheckpointError(f"{file.path.name}: tensor rope_factors_short.weight is missing")
    if "rope_freqs.weight" in file.tensors:
        return _Rope(_factors(file, "rope_freqs.weight", rotary_dim))
    return _Rope()


def _factors(file: GgufFile, name: str, rotary_dim: int) -> tuple[float, ...]:
    tensor = file.tensors[name]
    if tensor.kind is not GGMLQuantizationType.F32 or tensor.shape != (rotary_dim // 2,):
        raise CheckpointError(
            f"{file.path.name}: {name} must be F32 [{rotary_dim // 2}], got "
            f"{tensor.kind.name} {list(tensor.shape)}"
        )
    values = np.frombuffer(file.bytes_of(tensor), dtype=np.float32)
    return tuple(float(value) for value in values)


def _hf_name(stored: str, config: ModelConfig) -> str:
    """The Hugging Face name of a stored tensor; its own if there is none."""
    if stored in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[stored]
    parts = stored.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_NAMES:
        return stored
    name = _LAYER_NAMES[parts[2]]
    if config.fused_projections and parts[2] == "ffn_up":
        name = "mlp.gate_up_proj"  # llama.cpp keeps Phi-3's fused gate and up under this name
    return f"model.layers.{parts[1]}.{name}.{parts[3]}"
