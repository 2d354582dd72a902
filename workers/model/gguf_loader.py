"""GGUF checkpoints as Hugging Face-named weights: names, RoPE row order, dequantisation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from deepinfer.workers.model.config import ModelConfig, UnsupportedModelError
from deepinfer.workers.model.gguf_file import GgufFile
from deepinfer.workers.model.weights import CheckpointError, Progress

SUPPORTED_ARCHITECTURES: Final = ("llama", "qwen2", "qwen3", "phi3")

_PLAIN: Final = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}

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
    """``WeightSource`` over one GGUF file."""

    def __init__(self, file: GgufFile, config: ModelConfig, progress: Progress | None) -> None:
        self._file = file
        self._config = config
        self._names: dict[str, str] = {}
        for stored in file.tensors:
            name = _hf_name(stored, config)
            if name is not None:
                self._names[name] = stored
        self._progress = progress
        self._bytes_read = 0
        self._bytes_total = sum(
            file.tensors[stored].end - file.tensors[stored].begin for stored in self._names.values()
        )

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor the decoder may ask for."""
        return {name: self._file.tensors[stored].shape for name, stored in self._names.items()}

    def read(self, name: str) -> Tensor:
        """One tensor: dequantised to float32, or a view of the file for 16- and 32-bit floats."""
        raw = self.raw(name)
        tensor = self._file.tensors[self._names[name]]
        if (dtype := _PLAIN.get(tensor.kind)) is not None:
            values = torch.frombuffer(raw, dtype=dtype).view(tensor.shape)
        else:
            rows = np.frombuffer(raw, dtype=np.uint8).reshape(*tensor.shape[:-1], -1)
            try:
                values = torch.from_numpy(dequantize(rows, tensor.kind))
            except NotImplementedError as error:
                raise UnsupportedModelError(
                    f"{self._file.path.name}: tensor {name} is stored as {tensor.kind.name}, "
                    "which the gguf package cannot dequantise"
                ) from error
        self._bytes_read += raw.nbytes
        if self._progress is not None:
            self._progress(min(self._bytes_read, self._bytes_total), self._bytes_total)
        return self._unpermute(name, values)

    def raw(self, name: str) -> memoryview:
        """The stored bytes of one tensor."""
        stored = self._names.get(name)
        if stored is None:
            raise CheckpointError(f"tensor {name} is missing")
        return self._file.bytes_of(self._file.tensors[stored])

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


def load_gguf(path: Path, *, progress: Progress | None = None) -> tuple[ModelConfig, GgufWeights]:
    """Open a GGUF file.

    Raises CheckpointError for a damaged file, UnsupportedModelError for an architecture, RoPE
    scaling, sliding window or tensor type that is not supported; each by name.
    """
    file = GgufFile(path)
    config = _config(file)
    return config, GgufWeights(file, config, progress)


def _config(file: GgufFile) -> ModelConfig:
    architecture = file.metadata.get("general.architecture")
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path.name}: architecture {architecture!r} is not supported; known: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    fields = _Fields(file, str(architecture))
    if experts := fields.integer("expert_count", 0):
        raise UnsupportedModelError(f"mixture of experts (expert_count={experts}) is unsupported")
    scaling = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise UnsupportedModelError(f"RoPE scaling {scaling!r} is not supported in GGUF files")
    hidden = fields.integer("embedding_length")
    heads = fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // max(heads, 1))
    if (value_dim := fields.integer("attention.value_length", head_dim)) != head_dim:
        raise UnsupportedModelError(f"value heads of {value_dim} beside key heads of {head_dim}")
    if (rotated := fields.integer("rope.dimension_count", head_dim)) != head_dim:
        raise UnsupportedModelError(
            f"rope.dimension_count {rotated} of head_dim {head_dim}: partial RoPE is not supported"
        )
    positions = fields.integer("context_length")
    window = fields.integer("attention.sliding_window", positions)
    if 0 < window < positions:
        raise UnsupportedModelError(
            f"sliding_window {window} is shorter than context_length {positions}: "
            "sliding-window attention is not supported"
        )
    return ModelConfig(
        family=str(architecture),
        vocab_size=_vocab_size(file, fields),
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length"),
        layers=fields.integer("block_count"),
        heads=heads,
        kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=positions,
        rms_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10_000.0),
        rope_divisors=_rope_divisors(file, head_dim),
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

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._file.metadata.get(f"{self._architecture}.{name}", default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(
                f"{self._file.path.name}: {self._architecture}.{name} must be an integer, "
                f"got {value!r}"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._file.metadata.get(f"{self._architecture}.{name}", default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(
                f"{self._file.path.name}: {self._architecture}.{name} must be a number, "
                f"got {value!r}"
            )
        return float(value)


def _vocab_size(file: GgufFile, fields: _Fields) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path.name}: tensor token_embd.weight is missing")
    return fields.integer("vocab_size", embedding.shape[0])


def _rope_divisors(file: GgufFile, head_dim: int) -> tuple[float, ...] | None:
    """Llama 3's scaling, which a converter stores as one divisor a frequency."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if tensor.kind is not GGMLQuantizationType.F32 or tensor.shape != (head_dim // 2,):
        raise CheckpointError(
            f"{file.path.name}: rope_freqs.weight must be F32 [{head_dim // 2}], got "
            f"{tensor.kind.name} {list(tensor.shape)}"
        )
    values = np.frombuffer(file.bytes_of(tensor), dtype=np.float32)
    return tuple(float(value) for value in values)


def _hf_name(stored: str, config: ModelConfig) -> str | None:
    """The Hugging Face name of a stored tensor; None for one the decoder has no use for."""
    if stored in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[stored]
    parts = stored.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_NAMES:
        return None
    name = _LAYER_NAMES[parts[2]]
    if config.fused_projections and parts[2] == "ffn_up":
        name = "mlp.gate_up_proj"  # llama.cpp keeps Phi-3's fused gate and up under this name
    return f"model.layers.{parts[1]}.{name}.{parts[3]}"
