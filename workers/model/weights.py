"""Weights as a checkpoint offers them: named, lazily read, never all in memory at once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.nested import NestedWeight
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.quantized import QuantizedTensor

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in total) before the first tensor is read and after each."""

RowLookup = Callable[[Tensor], Tensor]
"""Row numbers, int64 ``[n]``, to float32 ``[n, width]``."""

_HARMLESS_SUFFIXES: Final = ("rotary_emb.inv_freq",)
"""Buffers that old checkpoints carry: what they hold follows from the config."""

_SAMPLES: Final = 8
_SAMPLE_BYTES: Final = 64


class CheckpointError(ValueError):
    """A checkpoint file is damaged, incomplete, or not what it claims; the message says where."""


class WeightSource(Protocol):
    """Tensors by their Hugging Face names.

    ``read`` returns quantised tensors as float32, others in the dtype they are stored in; always a
    fresh tensor or a view of a private mapping: keep it as long as you need it.
    """

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, in a stable order."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor. Raises CheckpointError when it is not there."""
        ...

    def read_quantized(
        self, name: str, device: torch.device | None = None
    ) -> QuantizedTensor | None:
        """One 4-bit weight as it is packed, on ``device`` (None: the CPU); None for all others."""
        ...

    def read_nested(self, name: str, device: torch.device | None = None) -> NestedWeight | None:
        """One nested weight, on ``device`` (None: the CPU); None for all others.

        ``read`` gives its FP16 values.
        """
        ...

    def stored(self, name: str) -> tuple[memoryview, ...]:
        """The stored bytes of one tensor, of all its parts (what identifies it)."""
        ...

    def rows(self, name: str) -> RowLookup:
        """Rows of one matrix by their number, as float32, read each time from where it lies.

        Raises CheckpointError when it is not there.
        """
        ...

    def release(self) -> None:
        """Give back the memory that reading has touched; what was read stays valid."""
        ...


class CountedWeights:
    """A ``WeightSource`` that tells ``progress`` what was read of the tensors in ``wanted``."""

    def __init__(self, source: WeightSource, wanted: Iterable[str], progress: Progress) -> None:
        self._source = source
        self._progress = progress
        self._left = {name: _stored_bytes(source, name) for name in wanted}
        self._bytes_total = sum(self._left.values())
        self._bytes_read = 0
        progress(0, self._bytes_total)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return self._source.shapes()

    def read(self, name: str) -> Tensor:
        """One tensor; it counts the first time."""
        tensor = self._source.read(name)
        self._count(name)
        return tensor

    def read_quantized(
        self, name: str, device: torch.device | None = None
    ) -> QuantizedTensor | None:
        """One 4-bit weight; it counts the first time, and only if it is one."""
        weight = self._source.read_quantized(name, device)
        if weight is not None:
            self._count(name)
        return weight

    def read_nested(self, name: str, device: torch.device | None = None) -> NestedWeight | None:
        """One nested weight; it counts the first time, and only if it is one."""
        weight = self._source.read_nested(name, device)
        if weight is not None:
            self._count(name)
        return weight

    def stored(self, name: str) -> tuple[memoryview, ...]:
        """The stored bytes of one tensor."""
        return self._source.stored(name)

    def rows(self, name: str) -> RowLookup:
        """Rows of one matrix, which counts as read."""
        lookup = self._source.rows(name)
        self._count(name)
        return lookup

    def release(self) -> None:
        """Give back what the source can."""
        self._source.release()

    def _count(self, name: str) -> None:
        self._bytes_read += self._left.pop(name, 0)
        self._progress(self._bytes_read, self._bytes_total)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint that was opened and checked: every tensor is there with the right shape.

    ``fingerprint`` identifies config and weights: KV computed by one model is only ever read by a
    model of the same fingerprint. Of a ``nested`` model ``weights.read_nested`` gives the linear
    layers and the head, or all but a few; ``layer_order`` names its decoder layers, those first
    that suffer least from FP8 (empty: nobody measured it).
    """

    config: ModelConfig
    weights: WeightSource
    fingerprint: str
    nested: bool = False
    layer_order: tuple[int, ...] = ()


def row_lookup(matrix: Tensor) -> RowLookup:
    """Look rows up in ``matrix`` ``[rows, width]``, which keeps its dtype."""
    return lambda numbers: F.embedding(numbers, matrix).to(torch.float32)


def open_model(
    config: ModelConfig, weights: WeightSource, *, progress: Progress | None = None
) -> LoadedModel:
    """Check that ``weights`` hold what ``config`` needs and nothing else, and fingerprint them.

    Raises CheckpointError listing missing tensors, or naming one with a wrong shape or one that
    the model would have to use and this decoder does not.
    """
    expected = expected_shapes(config)
    present = weights.shapes()
    missing = [name for name in expected if name not in present]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"missing tensors: {', '.join(missing[:3])}{more}")
    for name, shape in expected.items():
        if tuple(present[name]) != shape:
            raise CheckpointError(
                f"tensor {name} has shape {list(present[name])}, config asks for {list(shape)}"
            )
    # A bias that is left out, say, would only show in the answers.
    unused = [n for n in present if n not in expected and not n.endswith(_HARMLESS_SUFFIXES)]
    if unused and not (config.tied_embeddings and unused == ["lm_head.weight"]):
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        raise CheckpointError(
            f"tensors that a {config.family} model of this config has no use for: "
            f"{', '.join(unused[:3])}{more}"
        )
    identity = fingerprint(config, weights)
    weights.release()
    if progress is not None:
        weights = CountedWeights(weights, expected, progress)
    return LoadedModel(config, weights, identity)


def fingerprint(config: ModelConfig, weights: WeightSource) -> str:
    """SHA-256 (first 32 hex digits) of config, tensor names and shapes, and sampled bytes.

    From every stored part of a tensor ``_SAMPLES`` evenly spaced runs of ``_SAMPLE_BYTES`` are
    hashed, so a fine-tune of the same shape differs without reading gigabytes.
    """
    digest = hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode())
    for name in expected_shapes(config):
        for part in weights.stored(name):
            digest.update(f"{name}:{weights.shapes()[name]}:{part.nbytes}".encode())
            step = max(1, part.nbytes // _SAMPLES)
            for start in range(0, part.nbytes, step):
                digest.update(part[start : start + _SAMPLE_BYTES])
    return digest.hexdigest()[:32]


def _stored_bytes(weights: WeightSource, name: str) -> int:
    return sum(part.nbytes for part in weights.stored(name))


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that a decoder of ``config`` reads."""
    hidden, width = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.layers):
        attention = f"model.layers.{layer}.self_attn"
        mlp = f"model.layers.{layer}.mlp"
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (hidden,)
        if config.fused_projections:
            shapes[f"{attention}.qkv_proj.weight"] = (config.qkv_rows, hidden)
        else:
            for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
                shapes[f"{attention}.{name}_proj.weight"] = (rows, hidden)
                if config.qkv_bias:
                    shapes[f"{attention}.{name}_proj.bias"] = (rows,)
        if config.qk_norm:
            shapes[f"{attention}.q_norm.weight"] = (config.head_dim,)
            shapes[f"{attention}.k_norm.weight"] = (config.head_dim,)
        shapes[f"{attention}.o_proj.weight"] = (hidden, q_rows)
        if config.o_bias:
            shapes[f"{attention}.o_proj.bias"] = (hidden,)
        shapes[f"model.layers.{layer}.post_attention_layernorm.weight"] = (hidden,)
        if config.fused_projections:
            shapes[f"{mlp}.gate_up_proj.weight"] = (2 * width, hidden)
        else:
            shapes[f"{mlp}.gate_proj.weight"] = (width, hidden)
            shapes[f"{mlp}.up_proj.weight"] = (width, hidden)
        shapes[f"{mlp}.down_proj.weight"] = (hidden, width)
        if config.mlp_bias:
            shapes[f"{mlp}.gate_proj.bias"] = (width,)
            shapes[f"{mlp}.up_proj.bias"] = (width,)
            shapes[f"{mlp}.down_proj.bias"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes
