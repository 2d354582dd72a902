"""Times of attention: paged decode and paged prefill at a model's shape, every KV dtype."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.deploy.bench.kernel_timing import fill_with_numbers, graph_us, rotations
from deepinfer.kernels.attention import (
    DecodeWorkspace,
    KvView,
    paged_decode,
    partition_for,
    partitions,
)
from deepinfer.kernels.prefill import PrefillSpan, paged_prefill, plan_for
from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.workers.gpu.card import Card
from deepinfer.workers.gpu.shapes import kv_views
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.decoder import kv_layout
from deepinfer.workers.pool import PagedPool

BLOCK_SIZE: Final = 16
_FREE_SHARE: Final = 0.6
"""Of the card's free memory, for a pool."""

PREFILLS: Final = {
    "2k": ((0, 2048),),
    "8k": ((0, 8192),),
    "512 at 8k": ((8192, 512),),
    "8 x 1k": ((0, 1024),) * 8,
}
"""(tokens cached, tokens new) of each request of a launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What attention is of a model, and the card it runs on."""

    config: ModelConfig
    card: Card

    @property
    def group(self) -> int:
        """Query heads to a KV head."""
        return self.config.heads // self.config.kv_heads

    def layout(self, dtype: str) -> KvLayout:
        """Of a pool."""
        return kv_layout(self.config, resolve_kv_dtype(dtype), BLOCK_SIZE)

    def pool(self, dtype: str, blocks: int) -> PagedPool:
        """A pool of up to ``blocks`` blocks, as many as there is room for, full of numbers."""
        layout = self.layout(dtype)
        room = int(torch.cuda.mem_get_info()[0] * _FREE_SHARE) // layout.block_bytes
        pool = PagedPool(layout, max(1, min(blocks, room)), self.card.device)
        fill_with_numbers(pool.storage)
        return pool


def time_decode(
    shape: AttentionShape, dtype: str, cells: Sequence[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """One record for each (batch, context): microseconds a layer, as the serving graphs cut it.

    Blocks lie in the pool as they do in a worker, all layers of a block side by side; the layers
    and blocks of successive launches differ.
    """
    config, device = shape.config, shape.card.device
    pool = shape.pool(dtype, max(b * -(-c // BLOCK_SIZE) for b, c in cells) + 64)
    views = kv_views(pool)
    bytes_a_token = pool.layout.block_bytes / BLOCK_SIZE / config.layers
    for batch, context in cells:
        blocks = context // BLOCK_SIZE
        if batch * blocks > pool.num_blocks:
            yield {"kv_cache_dtype": dtype, "batch": batch, "context": context, "us": None}
            continue
        read = int(batch * context * bytes_a_token)
        count = rotations(read, least=12)
        sets = max(1, min(pool.num_blocks // (batch * blocks), -(-count // config.layers)))
        order = torch.randperm(pool.num_blocks, device=device)[: sets * batch * blocks]
        tables = order.int().view(sets, batch, blocks)
        partition = partition_for(batch, config.kv_heads, context, shape.card.multiprocessors)
        launch = _decode_launch(shape, batch, context, partition)
        calls = [
            functools.partial(launch, views[at % config.layers], tables[at // config.layers % sets])
            for at in range(count)
        ]
        us = graph_us(calls)
        yield {
            "kv_cache_dtype": dtype,
            "batch": batch,
            "context": context,
            "partition": partition,
            "us": us,
            "bytes": read,
            "bytes_per_s": read / us * 1e6,
            "rotated_bytes": read * min(count, sets * config.layers),
        }


def _decode_launch(
    shape: AttentionShape, batch: int, context: int, partition: int
) -> Callable[[KvView, Tensor], None]:
    config, device = shape.config, shape.card.device
    qkv = torch.randn(batch, config.qkv_rows, device=device).half()
    q = qkv[:, : config.heads * config.head_dim].view(batch, config.heads, config.head_dim)
    out = torch.empty(q.shape, dtype=torch.float16, device=device)
    lens = torch.full((batch,), context, dtype=torch.int32, device=device)
    workspace = DecodeWorkspace.allocate(
        batch, config.heads, config.head_dim, partitions(context, partition), device
    )

    def launch(view: KvView, tables: Tensor) -> None:
        paged_decode(
            out,
            q,
            view,
            tables,
            lens,
            scale=config.head_dim**-0.5,
            partition=partition,
            workspace=workspace,
        )

    return launch


def time_prefill(shape: AttentionShape, dtype: str, name: str) -> dict[str, Any]:
    """Microseconds a layer of one of ``PREFILLS``, with the tiles that a worker chooses."""
    config, device = shape.config, shape.card.device
    parts = PREFILLS[name]
    blocks = sum(-(-(start + rows) // BLOCK_SIZE) for start, rows in parts)
    rows = sum(rows for _, rows in parts)
    read = int(blocks * shape.layout(dtype).block_bytes / config.layers)
    moved = read + 4 * rows * config.heads * config.head_dim
    count = rotations(moved, most=24)
    pool = shape.pool(dtype, blocks * max(1, -(-count // config.layers)) + 8)
    views = kv_views(pool)
    columns = max(-(-(start + rows) // BLOCK_SIZE) for start, rows in parts)
    tables = torch.zeros((len(parts), columns), dtype=torch.int32, device=device)
    order = torch.randperm(pool.num_blocks, device=device).int()
    spans, row, taken = [], 0, 0
    for at, (start, new) in enumerate(parts):
        own = -(-(start + new) // BLOCK_SIZE)
        tables[at, :own] = order[taken : taken + own]
        spans.append(PrefillSpan(row, new, start, at))
        row, taken = row + new, taken + own
    plan = plan_for(
        spans,
        group=shape.group,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        sm_count=shape.card.multiprocessors,
        device=device,
    )
    size = (rows, config.heads, config.head_dim)
    pairs = [
        (
            torch.randn(size, device=device).half(),
            torch.empty(size, dtype=torch.float16, device=device),
        )
        for _ in range(min(count, config.layers))
    ]

    def launch(at: int) -> None:
        q, out = pairs[at % len(pairs)]
        view = views[at % len(views)]
        paged_prefill(out, q, view, plan, tables, scale=config.head_dim**-0.5)

    us = graph_us([functools.partial(launch, at) for at in range(count)])
    work = prefill_flops(config, parts)
    return {
        "kv_cache_dtype": dtype,
        "shape": name,
        "tile_rows": plan.tile_rows,
        "part_tokens": None if plan.split is None else plan.split.tokens,
        "us": us,
        "flop_per_s": work / us * 1e6,
    }


def prefill_flops(config: ModelConfig, parts: Sequence[tuple[int, int]]) -> float:
    """Floating point operations of causal attention: two products of the pairs that attend."""
    pairs = sum(rows * start + rows * (rows + 1) / 2 for start, rows in parts)
    return 4.0 * config.heads * config.head_dim * pairs


def matrix_rate() -> float:
    """FLOP/s of cuBLAS on a large half product: what arithmetic the card gives at best."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    return 2 * math.prod((8192, 8192, 8192)) / graph_us([lambda: x @ x] * 4) * 1e6
