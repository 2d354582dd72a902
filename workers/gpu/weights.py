"""A checkpoint's tensors on the card: fused, in half precision, 4 bits or nested; nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kernels.linear import F16Weight, Weight, interleave_gate_up
from deepinfer.kernels.nested import NestedWeight
from deepinfer.workers.gpu.reader import PlaneArena, TensorReader, WeightForm, aligned
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.decoder import EMBEDDING, MLP_WIDTH_MULTIPLE, RopeTable
from deepinfer.workers.model.heap import trim_heap
from deepinfer.workers.model.weights import LoadedModel

AS_STORED: Final = WeightForm()
"""As the checkpoint has them."""


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

    In a nested model the head, and so a tied embedding, has both planes; the layers' lower planes
    may be elsewhere (``planes``).

    ``mlp_width`` is the intermediate size with its padding; ``cos`` and ``sin`` are float32
    ``[positions, rotary_dim / 2]``.
    """

    config: ModelConfig
    fingerprint: str
    embedding: Tensor | NestedWeight
    layers: tuple[GpuLayer, ...]
    norm: Tensor
    head: F16Weight | NestedWeight
    cos: Tensor
    sin: Tensor

    @property
    def mlp_width(self) -> int:
        """Columns of ``down``."""
        return padded_width(self.config)

    @property
    def nested(self) -> bool:
        """Whether any layer is."""
        return any(isinstance(each, NestedWeight) for each in linears(self))


def layer_weights(layer: GpuLayer) -> tuple[Weight, ...]:
    """The linear layers of one layer."""
    return layer.qkv, layer.out, layer.gate_up, layer.down


def linears(weights: GpuWeights) -> Iterator[Weight]:
    """All linear layers but the head, in the order of the model."""
    for layer in weights.layers:
        yield from layer_weights(layer)


def padded_width(config: ModelConfig) -> int:
    """The MLP's width on the card: zero columns and rows fill it up."""
    return config.intermediate_size + -config.intermediate_size % MLP_WIDTH_MULTIPLE


def load_weights(
    model: LoadedModel, device: torch.device, positions: int, form: WeightForm = AS_STORED
) -> GpuWeights:
    """Copy a checkpoint to the card, tensor by tensor; the host never holds more than one.

    RoPE's table is made for ``positions``.

    Raises:
        CheckpointError: damaged, or a weight that half precision cannot hold.
    """
    reader = TensorReader(model.weights, device, form)
    config = model.config
    head: F16Weight | NestedWeight
    embedding: Tensor | NestedWeight
    if config.tied_embeddings:
        head = reader.head(EMBEDDING, nested=model.nested)
        embedding = head.weight if isinstance(head, F16Weight) else head
    else:
        head = reader.head("lm_head.weight", nested=model.nested)
        embedding = reader.half(EMBEDDING)
    layers = []
    for index in range(config.layers):
        layers.append(_layer(reader, config, index, nested=model.nested))
        model.weights.release()
        trim_heap()
    cos, sin = RopeTable(config, torch.device("cpu")).at(torch.arange(positions))
    weights = GpuWeights(
        config=config,
        fingerprint=model.fingerprint,
        embedding=embedding,
        layers=tuple(layers),
        norm=reader.half("model.norm.weight"),
        head=head,
        cos=cos.to(device),
        sin=sin.to(device),
    )
    model.weights.release()
    trim_heap()
    return weights


def with_projections(weights: GpuWeights, model: LoadedModel) -> GpuWeights:
    """The same weights with q, k and v, and their norms, read anew from ``model``.

    It is the same model, but for key scales. What is nested is written over what was there: the
    weights that were given are not to be used any more. Raises CheckpointError as ``load_weights``.
    """
    layers = []
    for index, layer in enumerate(weights.layers):
        before = layer.qkv
        form = WeightForm(upper_only=isinstance(before, NestedWeight) and before.lower is None)
        reader = TensorReader(model.weights, weights.cos.device, form)
        qkv, q_norm, k_norm = _projections(reader, model.config, index)
        if isinstance(before, NestedWeight) and isinstance(qkv, NestedWeight):
            qkv = _overwritten(before, qkv)
        layers.append(replace(layer, qkv=qkv, q_norm=q_norm, k_norm=k_norm))
        model.weights.release()
    trim_heap()
    return replace(weights, layers=tuple(layers))


def _overwritten(before: NestedWeight, after: NestedWeight) -> NestedWeight:
    """``after`` with its planes where those of ``before`` were."""
    before.upper.copy_(after.upper)
    if before.lower is not None and after.lower is not None:
        before.lower.copy_(after.lower)
    return replace(after, upper=before.upper, lower=before.lower)


def _projections(
    reader: TensorReader,
    config: ModelConfig,
    index: int,
    arena: PlaneArena | None = None,
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
        q_norm = reader.half(f"{attention}.q_norm.weight")
        k_norm = reader.half(f"{attention}.k_norm.weight")
    qkv = reader.linear(names, bias, config.hidden_size, arena)
    return qkv, q_norm, k_norm


def _layer(reader: TensorReader, config: ModelConfig, index: int, *, nested: bool) -> GpuLayer:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    width = padded_width(config)
    padding = width - config.intermediate_size
    heads = config.heads * config.head_dim
    inputs_and_outputs = (config.qkv_rows, heads, 2 * width, width)
    room = sum(aligned(config.hidden_size * each) for each in inputs_and_outputs)
    arena = reader.arena(room) if nested else None
    qkv, q_norm, k_norm = _projections(reader, config, index, arena)
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
        input_norm=reader.half(f"{prefix}.input_layernorm.weight"),
        qkv=qkv,
        q_norm=q_norm,
        k_norm=k_norm,
        out=reader.linear([f"{attention}.o_proj.weight"], out_bias, heads, arena),
        mlp_norm=reader.half(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=reader.gate_up(gate_up, gate_up_bias, padding, arena),
        down=reader.linear([f"{mlp}.down_proj.weight"], down_bias, width, arena),
    )
