"""Powers of two for K's channels, folded into the weights that make q and k.

Models whose K has a few very large channels (biases of Qwen2, norms of Qwen3) leave INT8, which has
one scale a token and head, no steps for all others. If channel c of K is kept times ``2**-e[c]``
and q carries ``2**e[c]``, every product ``q . k`` is what it was, and channels are alike in size.
RoPE turns channels i and i + rotary_dim / 2 into each other, so both have one exponent; the query
heads of a group share their KV head's. Multiplying by a power of two rounds nothing in float32. In
half precision a weight may become subnormal and lose up to ``2**-25``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels.nested import NestedWeight, scale_rows
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.quantized import QuantizedTensor
from deepinfer.workers.model.weights import LoadedModel, RowLookup, WeightSource

EXPONENT_MAX: Final = 4
"""Exponents are within plus and minus this: channels up to 256 times as large as others come out
equal, and weights of 2**-10 stay normal halves."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyScales:
    """``exponents`` int8 ``[layers, kv_heads, head_dim]``: K is kept times ``2**-exponent``."""

    exponents: Tensor

    def __post_init__(self) -> None:
        found = self.exponents
        if found.dtype != torch.int8 or found.ndim != 3:
            raise ValueError(
                f"key exponents: {found.dtype} {list(found.shape)}, must be int8 [layers, "
                "kv_heads, head_dim]"
            )
        if found.numel() and int(found.abs().max()) > EXPONENT_MAX:
            raise ValueError(f"key exponents: must be within ±{EXPONENT_MAX}")

    @property
    def digest(self) -> str:
        """Names these exponents: K of pools with others means something else."""
        shape = "x".join(map(str, self.exponents.shape))
        stored = self.exponents.contiguous().numpy().tobytes()
        return hashlib.sha256(shape.encode() + stored).hexdigest()[:16]

    @classmethod
    def for_sizes(cls, sizes: Tensor, config: ModelConfig) -> KeyScales:
        """Exponents that make channels alike; ``sizes`` ``[layers, kv_heads, head_dim]``, each
        channel's largest absolute value after RoPE.
        """
        sizes = sizes.to(torch.float32).clone()
        half = config.rope_dim // 2
        pairs = torch.maximum(sizes[..., :half], sizes[..., half : 2 * half])
        sizes[..., :half] = sizes[..., half : 2 * half] = pairs
        if config.qk_norm:  # one norm serves all heads
            sizes = sizes.amax(1, keepdim=True).expand_as(sizes)
        level = sizes.clamp_min(torch.finfo(torch.float32).tiny).log2()
        high = level.amax(-1, keepdim=True)
        level = torch.maximum(level, high - 2 * EXPONENT_MAX)
        # Half of the range up, half down: the least that q and k are changed by.
        middle = (high + level.amin(-1, keepdim=True)) / 2
        return cls((level - middle).round().to(torch.int8))

    @classmethod
    def from_lists(cls, exponents: Sequence[Sequence[Sequence[int]]]) -> KeyScales:
        """What ``to_lists`` gave. Raises ValueError for anything else."""
        try:
            wide = torch.tensor(exponents, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"key exponents: {error}") from error
        if wide.numel() and int(wide.abs().max()) > EXPONENT_MAX:
            raise ValueError(f"key exponents: must be within ±{EXPONENT_MAX}")
        return cls(wide.to(torch.int8))

    def to_lists(self) -> list[list[list[int]]]:
        """Plain numbers, for JSON."""
        lists: list[list[list[int]]] = self.exponents.tolist()
        return lists


def with_key_scales(model: LoadedModel, scales: KeyScales) -> LoadedModel:
    """The same model with scaled q and k: its logits are the same, its K is not.

    Raises ValueError for exponents of another model's sizes, or that tell RoPE's pairs (or, where
    q and k are normed, heads) apart.
    """
    return replace(model, weights=_ScaledWeights(model.weights, model.config, scales))


class _ScaledWeights:
    """A ``WeightSource`` whose q and k carry the exponents."""

    def __init__(self, source: WeightSource, config: ModelConfig, scales: KeyScales) -> None:
        self._source = source
        self._factors = _factors(config, scales.exponents)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return self._source.shapes()

    def read(self, name: str) -> Tensor:
        """One tensor; float32 where it is scaled, for then nothing is rounded."""
        tensor = self._source.read(name)
        factor = self._factors.get(name)
        if factor is None:
            return tensor
        return tensor.to(torch.float32) * _along_rows(factor, tensor)

    def read_quantized(
        self, name: str, device: torch.device | None = None
    ) -> QuantizedTensor | None:
        """One 4-bit weight: its scales take the factors."""
        weight = self._source.read_quantized(name, device)
        factor = self._factors.get(name)
        if weight is None or factor is None:
            return weight
        scaled = weight.scales.to(torch.float32) * _along_rows(factor, weight.scales)
        return QuantizedTensor(weight.codes, scaled.to(torch.float16), weight.zeros)

    def read_nested(self, name: str, device: torch.device | None = None) -> NestedWeight | None:
        """One nested weight: its rows' shifts take the factors."""
        weight = self._source.read_nested(name, device)
        factor = self._factors.get(name)
        if weight is None or factor is None:
            return weight
        return scale_rows(weight, factor.log2().round())

    def stored(self, name: str) -> tuple[memoryview, ...]:
        """The stored bytes of one tensor, as they are."""
        return self._source.stored(name)

    def rows(self, name: str) -> RowLookup:
        """Rows of one matrix; those that are looked up are never scaled."""
        assert name not in self._factors
        return self._source.rows(name)

    def release(self) -> None:
        """Give back what the source can."""
        self._source.release()


def _factors(config: ModelConfig, exponents: Tensor) -> dict[str, Tensor]:
    """What each scaled tensor's rows are multiplied by, float32 ``[rows]``, by its name."""
    sizes = (config.layers, config.kv_heads, config.head_dim)
    if tuple(exponents.shape) != sizes:
        raise ValueError(f"key exponents: {list(exponents.shape)}, the model has {list(sizes)}")
    half = config.rope_dim // 2
    if not torch.equal(exponents[..., :half], exponents[..., half : 2 * half]):
        raise ValueError("key exponents: the channels of a RoPE pair must have the same")
    if config.qk_norm and not torch.equal(exponents, exponents[:, :1].expand_as(exponents)):
        raise ValueError("key exponents: heads with one norm must have the same")
    group = config.heads // config.kv_heads
    factors: dict[str, Tensor] = {}
    for layer, found in enumerate(exponents.to(torch.float32)):
        attention = f"model.layers.{layer}.self_attn"
        if config.qk_norm:
            factors[f"{attention}.k_norm.weight"] = torch.exp2(-found[0])
            factors[f"{attention}.q_norm.weight"] = torch.exp2(found[0])
            continue
        k = torch.exp2(-found).flatten()
        q = torch.exp2(found).repeat_interleave(group, 0).flatten()
        if config.fused_projections:
            factors[f"{attention}.qkv_proj.weight"] = torch.cat((q, k, torch.ones_like(k)))
            continue
        for part, factor in (("q", q), ("k", k)):
            factors[f"{attention}.{part}_proj.weight"] = factor
            if config.qkv_bias:
                factors[f"{attention}.{part}_proj.bias"] = factor
    return factors


def _along_rows(factor: Tensor, tensor: Tensor) -> Tensor:
    return factor.to(tensor.device).view(-1, *[1] * (tensor.ndim - 1))
