"""Models that the GPU kernels were not made for are refused, naming the field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deepinfer.deploy.bench.random_weights import QWEN25_3B
from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.workers.gpu.shapes import KV_FORMATS, check_kernels, kv_views
from deepinfer.workers.model.decoder import kv_layout
from deepinfer.workers.pool import PagedPool

FP16 = resolve_kv_dtype("fp16")


@pytest.mark.parametrize(
    ("changes", "block_size", "message"),
    [
        ({"head_dim": 80}, 16, "head_dim = 80: the kernels take 64, 96, 128"),
        ({"heads": 34}, 16, "17 query heads to a KV head"),
        ({}, 24, "block_size = 24: must be a power of two from 16"),
        ({}, 8, "block_size = 8: must be a power of two from 16"),
        ({"hidden_size": 8224}, 16, "hidden_size = 8224: the kernels take up to 8192"),
        ({"hidden_size": 2040}, 16, "hidden_size = 2040 with 16 heads of 128"),
        ({"rotary_dim": 66}, 16, "rotary_dim = 66"),
    ],
)
def test_sizes_without_a_kernel_are_named(
    changes: dict[str, Any], block_size: int, message: str
) -> None:
    config = replace(QWEN25_3B, **changes)
    with pytest.raises(ValueError, match=message):
        check_kernels(config, kv_layout(config, FP16, block_size))


def test_what_is_supported_passes() -> None:
    for block_size in (16, 32):
        check_kernels(QWEN25_3B, kv_layout(QWEN25_3B, FP16, block_size))


@pytest.mark.parametrize("name", KV_FORMATS)
def test_the_kernels_see_the_pools_own_bytes(name: str) -> None:
    layout = KvLayout(resolve_kv_dtype(name), layers=3, kv_heads=2, head_dim=64, block_size=16)
    pool = PagedPool(layout, 4)
    for layer, view in enumerate(kv_views(pool)):
        base = view.storage.data_ptr()
        assert base + view.k_offset == pool.k(layer).data_ptr()
        assert base + view.v_offset == pool.v(layer).data_ptr()
        assert view.block_bytes == layout.block_bytes
        if layout.dtype.scaled:
            assert base + view.scale_offset == pool.scales(layer).data_ptr()
