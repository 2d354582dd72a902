"""A checkpoint's tensors on the card: fused, in half precision or 4 bits, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.linear import F16Weight, W4Weight, Weight, interleave_gate_up, pack_w4
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.decoder import EMBEDDING, MLP_WIDTH_MULTIPLE, RopeTable
from deepinfer.workers.model.heap import trim_heap
from deepinfer.workers.model.quantized import QuantizedTensor, stack
from deepinfer.workers.model.weights import CheckpointError, LoadedModel, WeightSource

HALF_MAX: Final = 65504.0


@dataclass(frozen=True, slots=True, eq=False)
class GpuLayer:
    """One layer. Norms are half, as everything is; ``gate_up``'s rows are interleaved by eights."""

    input_norm: Tensor
    qkv: Weight
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Weight
    mlp_norm: Tensor
    gate_up: Weight
    down: Weight


@dataclass(frozen=True, slots=True, eq=False)
class GpuWeights:
    """A model on one card. ``head`` is the embedding itself where they are tied.

    ``mlp_width`` is the intermediate size with its padding; ``cos`` and ``sin`` are float32
    ``[positions, rotary_dim / 2]``.
    """

    config: ModelConfig
    fingerprint: str
    embedding: Tensor
    layers: tuple[GpuLayer, ...]
    norm: Tensor
    head: F16Weight
    cos: Tensor
    sin: Tensor

    @property
    def mlp_width(self) -> int:
        """Columns of ``down``."""
        return padded_width(self.config)


def layer_weights(layer: GpuLayer) -> tuple[Weight, ...]:
    """The linear layers of one layer."""
    return layer.qkv, layer.out, layer.gate_up, layer.down


def padded_width(config: ModelConfig) -> int:
    """The MLP's width on the card: zero columns and rows fill it up."""
    return config.intermediate_size + -config.intermediate_size % MLP_WIDTH_MULTIPLE


def load_weights(model: LoadedModel, device: torch.device, positions: int) -> GpuWeights:
    """Copy a checkpoint to the card, tensor by tensor; the host never holds more than one.

    RoPE's table is made for ``positions``.

    Raises:
        CheckpointError: damaged, or a weight that half precision cannot hold.
    """
    reader = _Reader(model.weights, device)
    config = model.config
    embedding = reader.half(EMBEDDING)
    layers = []
    for index in range(config.layers):
        layers.append(_layer(reader, config, index))
        model.weights.release()
        trim_heap()
    if config.tied_embeddings:
        head = F16Weight(embedding, None)
    else:
        head = F16Weight(reader.half("lm_head.weight"), None)
    cos, sin = RopeTable(config, torch.device("cpu")).at(torch.arange(positions))
    weights = GpuWeights(
        config=config,
        fingerprint=model.fingerprint,
        embedding=embedding,
        layers=tuple(layers),
        norm=reader.vector("model.norm.weight"),
        head=head,
        cos=cos.to(device),
        sin=sin.to(device),
    )
    model.weights.release()
    trim_heap()
    return weights


class _Reader:
    """Reads a checkpoint's tensors onto a device."""

    def __init__(self, source: WeightSource, device: torch.device) -> None:
        self._source = source
        self._device = device

    def half(self, name: str) -> Tensor:
        """One tensor in float16, converted on the card."""
        # Stored dtype over the bus: half as much for BF16 as for float32.
        stored = self._source.read(name).to(self._device)
        if stored.dtype != torch.float16:
            # A comparison that NaN fails too.
            if not bool((stored.abs().amax() <= HALF_MAX).item()):
                raise CheckpointError(
                    f"tensor {name} holds values that float16 cannot (beyond ±{HALF_MAX:g}, or "
                    "NaN): serve it with --device cpu"
                )
            stored = stored.to(torch.float16)
        return stored.contiguous()

    def vector(self, name: str) -> Tensor:
        """A norm's weight, half."""
        return self._source.read(name).to(self._device, torch.float16).contiguous()

    def rows(self, names: Sequence[str]) -> Tensor:
        """Matrices (or biases) one below the other."""
        parts = [self.half(name) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def linear(self, names: Sequence[str], bias: Tensor | None, columns: int) -> Weight:
        """Layers one below the other, with zeros up to ``columns`` inputs.

        They are kept in 4 bits if the checkpoint has all of them so.
        """
        packed = self.packed(names)
        if packed is None:
            weight = self.rows(names)
            missing = columns - weight.shape[1]
            return F16Weight(F.pad(weight, (0, missing)) if missing else weight, bias)
        # Groups of a power of two from 32 up: nothing is missing.
        return _w4(packed, bias)

    def gate_up(self, names: Sequence[str], bias: Tensor | None, padding: int) -> Weight:
        """Gate and up (or one layer that is both), ``padding`` rows added to each, interleaved."""
        packed = self.packed(names)
        if packed is None:
            gate, up = self.rows(names).chunk(2)
            if padding:
                gate, up = (F.pad(part, (0, 0, 0, padding)) for part in (gate, up))
            return F16Weight(interleave_gate_up(gate, up), bias)
        width = packed.codes.shape[0] // 2
        parts = [packed.rows(start, start + width).padded(padding) for start in (0, width)]
        zeros = [part.zeros for part in parts if part.zeros is not None]
        return _w4(
            QuantizedTensor(
                interleave_gate_up(*(part.codes for part in parts)),
                interleave_gate_up(*(part.scales for part in parts)),
                interleave_gate_up(*zeros) if zeros else None,
            ),
            bias,
        )

    def packed(self, names: Sequence[str]) -> QuantizedTensor | None:
        """4-bit matrices one below the other, if the checkpoint has all of them so."""
        parts: list[QuantizedTensor] = []
        for name in names:
            part = self._source.read_quantized(name, self._device)
            if part is None:
                return None
            parts.append(part)
        return stack(parts)


def with_projections(weights: GpuWeights, model: LoadedModel) -> GpuWeights:
    """The same weights with q, k and v, and their norms, read anew from ``model``.

    It is the same model, but for key scales. Raises CheckpointError as ``load_weights``.
    """
    reader = _Reader(model.weights, weights.embedding.device)
    layers = []
    for index, layer in enumerate(weights.layers):
        qkv, q_norm, k_norm = _projections(reader, model.config, index)
        layers.append(replace(layer, qkv=qkv, q_norm=q_norm, k_norm=k_norm))
        model.weights.release()
    trim_heap()
    return replace(weights, layers=tuple(layers))


def _projections(
    reader: _Reader, config: ModelConfig, index: int
) -> tuple[Weight, Tensor | None, Tensor | None]:
    """Fused q, k and v, and the norms of q and k."""
    attention = f"model.layers.{index}.self_attn"
    if config.fused_projections:
        names = [f"{attention}.qkv_proj.weight"]
    else:
        names = [f"{attention}.{part}_proj.weight" for part in "qkv"]
    bias = q_norm = k_norm = None
    if config.qkv_bias:
        bias = reader.rows([f"{attention}.{part}_proj.bias" for part in "qkv"])
    if config.qk_norm:
        q_norm = reader.vector(f"{attention}.q_norm.weight")
        k_norm = reader.vector(f"{attention}.k_norm.weight")
    return reader.linear(names, bias, config.hidden_size), q_norm, k_norm


def _w4(weight: QuantizedTensor, bias: Tensor | None) -> W4Weight:
    return pack_w4(weight.codes, weight.scales, weight.zeros, bias=bias)


def _layer(reader: _Reader, config: ModelConfig, index: int) -> GpuLayer:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    padding = padded_width(config) - config.intermediate_size
    qkv, q_norm, k_norm = _projections(reader, config, index)
    if config.fused_projections:
        gate_up = [f"{mlp}.gate_up_proj.weight"]
    else:
        gate_up = [f"{mlp}.{part}_proj.weight" for part in ("gate", "up")]
    gate_up_bias = out_bias = down_bias = None
    if config.o_bias:
        out_bias = reader.half(f"{attention}.o_proj.bias")
    if config.mlp_bias:
        biases = (reader.half(f"{mlp}.{part}_proj.bias") for part in ("gate", "up"))
        gate_bias, up_bias = (F.pad(bias, (0, padding))[:, None] for bias in biases)
        gate_up_bias = interleave_gate_up(gate_bias, up_bias).view(-1)
        down_bias = reader.half(f"{mlp}.down_proj.bias")
    return GpuLayer(
        input_norm=reader.vector(f"{prefix}.input_layernorm.weight"),
        qkv=qkv,
        q_norm=q_norm,
        k_norm=k_norm,
        out=reader.linear([f"{attention}.o_proj.weight"], out_bias, config.heads * config.head_dim),
        mlp_norm=reader.vector(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=reader.gate_up(gate_up, gate_up_bias, padding),
        down=reader.linear([f"{mlp}.down_proj.weight"], down_bias, padded_width(config)),
    )
