"""What the kernels were made for: formats, sizes, and the instances that one model needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from deepinfer.kernels import attention, linear, linear_w8a8, pointwise, prefill, sampling
from deepinfer.kernels.attention import KvView
from deepinfer.kernels.compiler import KernelSpec
from deepinfer.kernels.linear import NestedWeight, W4Weight
from deepinfer.kernels.linear_w8a8 import CAPABILITY_MIN
from deepinfer.kvstore.core.layout import KvLayout
from deepinfer.workers.gpu.card import Card
from deepinfer.workers.gpu.weights import GpuWeights, linears
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.pool import PagedPool

KV_FORMATS: Final = {
    "fp16": attention.KV_FP16,
    "int8": attention.KV_INT8,
    "fp8": attention.KV_E4M3,
    "fp8_e5m2": attention.KV_E5M2,
    "k16v8": attention.KV_K16V8,
}
"""What the kernels call the pools' dtypes."""


_SPECIAL: Final = {"w4": W4Weight, "nested": NestedWeight}
"""Kernels with such a name are for such weights alone."""


def kv_views(pool: PagedPool) -> tuple[KvView, ...]:
    """A pool's layers as the kernels see them."""
    layout = pool.layout
    return tuple(
        KvView(
            storage=pool.storage,
            block_bytes=layout.block_bytes,
            k_offset=layout.k_offset(layer),
            v_offset=layout.v_offset(layer),
            scale_offset=layout.k_scale_offset(layer) if layout.dtype.scaled else 0,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            block_size=layout.block_size,
            format=KV_FORMATS[layout.dtype.name],
        )
        for layer in range(layout.layers)
    )


def check_kernels(config: ModelConfig, layout: KvLayout) -> None:
    """Refuse what the kernels were not made for.

    Raises:
        ValueError: names the field, its value and what is legal.
    """
    group = config.heads // config.kv_heads
    instead = "serve it with --device cpu"
    if config.head_dim not in attention.HEAD_DIMS:
        raise ValueError(
            f"head_dim = {config.head_dim}: the kernels take "
            f"{', '.join(map(str, attention.HEAD_DIMS))}: {instead}"
        )
    if group > attention.GROUP_MAX:
        raise ValueError(
            f"{group} query heads to a KV head: the kernels take {attention.GROUP_MAX}: {instead}"
        )
    if layout.block_size % attention.TILE_TOKENS or layout.block_size & (layout.block_size - 1):
        raise ValueError(
            f"block_size = {layout.block_size}: must be a power of two from "
            f"{attention.TILE_TOKENS} on a card"
        )
    if config.hidden_size > pointwise.COLUMNS_MAX:
        raise ValueError(
            f"hidden_size = {config.hidden_size}: the kernels take up to "
            f"{pointwise.COLUMNS_MAX}: {instead}"
        )
    if config.vocab_size > sampling.VOCAB_MAX:
        raise ValueError(
            f"vocab_size = {config.vocab_size}: the kernels take up to {sampling.VOCAB_MAX}: "
            f"{instead}"
        )
    if config.rope_dim % 4:
        raise ValueError(
            f"rotary_dim = {config.rope_dim}: the kernels take multiples of 4: {instead}"
        )
    if config.hidden_size % 32 or (config.heads * config.head_dim) % 32:
        raise ValueError(
            f"hidden_size = {config.hidden_size} with {config.heads} heads of {config.head_dim}: "
            f"the kernels take multiples of 32: {instead}"
        )


def check_w8a8(card: Card) -> None:
    """Raise ValueError for a card that has no products of FP8 with FP8."""
    if card.capability < CAPABILITY_MIN:
        has, needs = (".".join(map(str, each)) for each in (card.capability, CAPABILITY_MIN))
        raise ValueError(
            f"fp8_products = 'w8a8': {card.name} has compute capability {has}, products of FP8 "
            f"with FP8 need {needs}: take 'w8a16'"
        )


def model_specs(
    weights: GpuWeights, layout: KvLayout, *, w8a8: bool = False
) -> Iterator[KernelSpec]:
    """Every kernel that a model's steps may launch on its card."""
    config = weights.config
    form, group = KV_FORMATS[layout.dtype.name], config.heads // config.kv_heads
    device = weights.cos.device
    yield from attention.device_specs(form, config.head_dim, group, device)
    yield from prefill.device_specs(form, config.head_dim, device)
    yield from pointwise.specs()
    yield from sampling.specs()
    if w8a8:
        yield from linear_w8a8.specs()
    kinds = {type(weight) for weight in (*linears(weights), weights.head)}
    for spec in linear.specs():
        special = {kind for name, kind in _SPECIAL.items() if name in spec.source + spec.name}
        if special <= kinds:
            yield spec
