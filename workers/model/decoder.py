"""The decoder: one forward pass over rows of tokens, whatever family the config describes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kvstore.core.layout import KvDtype, KvLayout
from deepinfer.workers.backends.base import Backend, Linear, Plan
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.finite import check_rows, finite_read
from deepinfer.workers.model.heap import trim_heap
from deepinfer.workers.model.levels import PrecisionLevels
from deepinfer.workers.model.nested import nested_read
from deepinfer.workers.model.rounding import round_rows_to_e4m3
from deepinfer.workers.model.weights import LoadedModel, WeightSource, row_lookup
from deepinfer.workers.pool import PagedPool

MLP_WIDTH_MULTIPLE: Final = 32
"""gate, up and down are zero-padded to a multiple of this: whole vectors, and 16-byte rows."""

TRIM_LAYERS: Final = 8
"""Layers that are packed between two trims of the heap: each costs as much as packing a layer."""

EMBEDDING: Final = "model.embed_tokens.weight"

ROPE_CHUNK: Final = 1024
"""Positions that RoPE's table grows by."""

LEVELS_DEFAULT: Final = 2
"""Levels of a nested model: FP16 and FP8."""

_Form = TypeVar("_Form")

Read = Callable[[str], Tensor]
"""A tensor by its Hugging Face name."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """Packed weights of one layer; ``qkv`` and ``gate_up`` are fused."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class RopeTable:
    """cos and sin of ``position * inverse frequency``, float32 ``[positions, rotary_dim / 2]``.

    Angles are float32 products, as the models were trained with; cos and sin are rounded from
    float64. Each position's values are the same however the table grew.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        exponents = torch.arange(0, config.rope_dim, 2, dtype=torch.int64).to(torch.float32)
        self._inverse = 1.0 / (config.rope_theta ** (exponents / config.rope_dim))
        if config.rope_divisors is not None:
            self._inverse /= torch.tensor(config.rope_divisors, dtype=torch.float32)
        self._device = device
        self._magnitude = config.rope_magnitude
        self._cos = self._sin = torch.empty((0, config.rope_dim // 2), device=device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for int64 ``[rows]`` positions: two ``[rows, rotary_dim / 2]``."""
        needed = int(positions.max()) + 1
        while self._cos.shape[0] < needed:
            start = self._cos.shape[0]
            place = torch.arange(start, start + ROPE_CHUNK, dtype=torch.float32)
            angle = torch.outer(place, self._inverse).to(torch.float64)
            self._cos = torch.cat((self._cos, self._rounded(angle.cos())))
            self._sin = torch.cat((self._sin, self._rounded(angle.sin())))
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _rounded(self, turn: Tensor) -> Tensor:
        return (turn.to(torch.float32) * self._magnitude).to(self._device)


class Decoder:
    """A model packed for one backend. Owns the weights; holds no KV and no request.

    ``embedding`` looks rows up. On the CPU that is in the mapped checkpoint itself, which needs
    no memory of its own. A nested model has ``precision_levels`` levels and is packed twice, its
    FP16 and its FP8 values, with ``upper_only`` the latter alone; others have one level.
    ``w8a8_rows`` is that of ``PrecisionLevels``.

    Raises ValueError for a number of levels that there cannot be, and CheckpointError (one, too)
    for NaN or an infinity in a tensor of a plain checkpoint, by its name and place.
    """

    def __init__(
        self,
        model: LoadedModel,
        backend: Backend,
        precision_levels: int = LEVELS_DEFAULT,
        *,
        upper_only: bool = False,
        w8a8_rows: int = 0,
    ) -> None:
        self.config = model.config
        self.fingerprint = model.fingerprint
        self.backend = backend
        config, weights = model.config, model.weights
        levels = precision_levels if model.nested else 1
        self.levels = PrecisionLevels(
            config.layers, levels, model.layer_order, w8a8_rows if model.nested else 0
        )
        self._upper_only = upper_only
        if backend.device.type == "cpu":
            self.embedding = weights.rows(EMBEDDING)
            if not config.tied_embeddings:  # those are read as the head
                check_rows(EMBEDDING, self.embedding, weights.shapes()[EMBEDDING])
                weights.release()
        else:
            self.embedding = row_lookup(weights.read(EMBEDDING).to(backend.device))
        # The largest first: what packing needs besides the result is then smaller than the rest.
        head = EMBEDDING if config.tied_embeddings else "lm_head.weight"
        reads = self._reads(weights)
        self._heads = self._forms([backend.pack_linear(read(head), None) for read in reads])
        self._layers: list[tuple[DecoderLayer, ...]] = []
        for layer in range(config.layers):
            forms = [_pack_layer(config, read, layer, backend) for read in reads]
            self._layers.append(self._forms(forms))
            weights.release()
            if layer % TRIM_LAYERS == 0:
                trim_heap()
        trim_heap()
        self.norm = _vector(reads[0], "model.norm.weight", backend)
        self.rope = RopeTable(config, backend.device)

    def linears(self) -> list[Linear]:
        """All packed weights at FP16, the LM head last."""
        packed = [
            linear
            for layer, *_ in self._layers
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
        ]
        return [*packed, self._heads[0]]

    def kv_layout(self, dtype: KvDtype, block_size: int) -> KvLayout:
        """The layout of a pool for this model."""
        return kv_layout(self.config, dtype, block_size)

    def take_projections(self, weights: WeightSource) -> None:
        """Read q, k and v, and their norms, anew: the same model's, but for key scales."""
        reads = self._reads(weights)
        for index, forms in enumerate(self._layers):
            taken: list[DecoderLayer] = []
            for layer, read in zip(forms[: len(reads)], reads, strict=True):
                qkv, q_norm, k_norm = _pack_projections(self.config, read, index, self.backend)
                taken.append(replace(layer, qkv=qkv, q_norm=q_norm, k_norm=k_norm))
            self._layers[index] = self._forms(taken)
            weights.release()
        trim_heap()

    def drop_planes(self, *, head: bool) -> None:
        """Let go of the FP16 values of every layer, and of the head: FP8 stands in for them."""
        self._layers[:] = [(fp8, fp8) for _, fp8 in self._layers]
        if head:
            self._heads = (self._heads[1], self._heads[1])

    def pack_planes(self, weights: WeightSource, layers: range) -> None:
        """Pack the FP16 values of some layers as at first; on any thread: no step reads them."""
        for layer in layers:
            form = _pack_layer(self.config, weights.read, layer, self.backend)
            self._layers[layer] = (form, self._layers[layer][1])
            weights.release()

    def pack_head(self, weights: WeightSource) -> None:
        """The same of the LM head."""
        head = EMBEDDING if self.config.tied_embeddings else "lm_head.weight"
        self._heads = (self.backend.pack_linear(weights.read(head), None), self._heads[1])

    def _forms(self, packed: list[_Form]) -> tuple[_Form, ...]:
        """What is read at a step's level: of a model without its lower planes, always the same."""
        return tuple(packed * 2) if self._upper_only else tuple(packed)

    def _reads(self, weights: WeightSource) -> tuple[Read, ...]:
        """How to read the weights, once for every form in which they are packed."""
        upper = partial(nested_read, weights)
        if self._upper_only:
            return (upper,)
        return (finite_read(weights.read),) if self.levels.count == 1 else (weights.read, upper)

    def forward(
        self,
        token_ids: Tensor,
        plan: Plan,
        pool: PagedPool,
        in_fp8: Sequence[bool],
        w8a8: bool = False,
    ) -> Tensor:
        """Write the step's KV and return the residual stream ``[padded_rows, hidden]``, float32.

        ``token_ids`` int64 ``[padded_rows]`` (padding rows: any valid id); ``in_fp8`` says of every
        layer whether it computes with its FP8 values; ``w8a8`` rounds what they are multiplied by
        to FP8 too (also what outliers are: a card multiplies those by the values as they were).
        """
        config, backend = self.config, self.backend
        heads, kv_heads = config.heads, config.kv_heads

        def linear(x: Tensor, weight: Linear) -> Tensor:
            return backend.linear(round_rows_to_e4m3(x) if w8a8 else x, weight)

        residual = self.embedding(token_ids)
        cos, sin = self.rope.at(plan.positions)
        for index, (forms, fp8) in enumerate(zip(self._layers, in_fp8, strict=True)):
            layer = forms[fp8]
            normed = backend.rms_norm(residual, layer.input_norm, config.rms_eps)
            qkv = linear(normed, layer.qkv).view(-1, heads + 2 * kv_heads, config.head_dim)
            q_and_k = qkv[:, : heads + kv_heads]
            if layer.q_norm is not None and layer.k_norm is not None:
                q = backend.rms_norm(q_and_k[:, :heads], layer.q_norm, config.rms_eps)
                k = backend.rms_norm(q_and_k[:, heads:], layer.k_norm, config.rms_eps)
                q_and_k = torch.cat((q, k), dim=1)
            rotated = backend.rope(q_and_k[..., : config.rope_dim], cos, sin)
            if config.rope_dim < config.head_dim:
                rotated = torch.cat((rotated, q_and_k[..., config.rope_dim :]), dim=-1)
            backend.kv_write(pool, index, rotated[:, heads:], qkv[:, heads + kv_heads :], plan)
            mixed = backend.attention(pool, index, rotated[:, :heads], plan)
            residual += linear(mixed, layer.out)
            normed = backend.rms_norm(residual, layer.mlp_norm, config.rms_eps)
            gated = backend.silu_mul(linear(normed, layer.gate_up))
            residual += linear(gated, layer.down)
        return residual

    def logits(self, residual: Tensor, in_fp8: bool) -> Tensor:
        """Final norm and LM head: ``[rows, hidden]`` to float32 ``[rows, vocab]``."""
        normed = self.backend.rms_norm(residual, self.norm, self.config.rms_eps)
        return self.backend.linear(normed, self._heads[in_fp8])


def kv_layout(config: ModelConfig, dtype: KvDtype, block_size: int) -> KvLayout:
    """The layout of a pool for a model of ``config``."""
    return KvLayout(dtype, config.layers, config.kv_heads, config.head_dim, block_size)


def _pack_projections(
    config: ModelConfig, read: Read, layer: int, backend: Backend
) -> tuple[Linear, Tensor | None, Tensor | None]:
    """Fused q, k and v, and the norms of q and k."""
    attention = f"model.layers.{layer}.self_attn"
    qkv_bias = q_norm = k_norm = None
    if config.fused_projections:
        qkv = read(f"{attention}.qkv_proj.weight")
    else:
        qkv = torch.cat([read(f"{attention}.{part}_proj.weight") for part in "qkv"])
    if config.qkv_bias:
        qkv_bias = torch.cat([read(f"{attention}.{part}_proj.bias") for part in "qkv"])
    if config.qk_norm:
        q_norm = _vector(read, f"{attention}.q_norm.weight", backend)
        k_norm = _vector(read, f"{attention}.k_norm.weight", backend)
    return backend.pack_linear(qkv, qkv_bias), q_norm, k_norm


def _pack_layer(config: ModelConfig, read: Read, layer: int, backend: Backend) -> DecoderLayer:
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    padding = -config.intermediate_size % MLP_WIDTH_MULTIPLE
    qkv, q_norm, k_norm = _pack_projections(config, read, layer, backend)
    if config.fused_projections:
        gate, up = read(f"{mlp}.gate_up_proj.weight").chunk(2)
    else:
        gate = read(f"{mlp}.gate_proj.weight")
        up = read(f"{mlp}.up_proj.weight")
    gate_up_bias = None
    if config.mlp_bias:
        gate_up_bias = torch.cat(
            [F.pad(read(f"{mlp}.{part}_proj.bias"), (0, padding)) for part in ("gate", "up")]
        )
    gate_up = torch.cat([F.pad(part, (0, 0, 0, padding)) for part in (gate, up)])
    down = F.pad(read(f"{mlp}.down_proj.weight"), (0, padding))
    return DecoderLayer(
        input_norm=_vector(read, f"{prefix}.input_layernorm.weight", backend),
        qkv=qkv,
        q_norm=q_norm,
        k_norm=k_norm,
        out=backend.pack_linear(
            read(f"{attention}.o_proj.weight"),
            read(f"{attention}.o_proj.bias") if config.o_bias else None,
        ),
        mlp_norm=_vector(read, f"{prefix}.post_attention_layernorm.weight", backend),
        gate_up=backend.pack_linear(gate_up, gate_up_bias),
        down=backend.pack_linear(down, read(f"{mlp}.down_proj.bias") if config.mlp_bias else None),
    )


def _vector(read: Read, name: str, backend: Backend) -> Tensor:
    return read(name).to(backend.device, torch.float32)
