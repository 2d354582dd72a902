"""Paged attention on the CPU: tiles of a fixed number of keys, gathered from the pool.

Maxima are exact in any order, tiles are added one after another, and a masked key or tile adds
exactly zero: a row's result depends on its own keys alone, whatever shares its group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from deepinfer.kvstore.core.layout import KvLayout
from deepinfer.workers.backends.base import RowSpan
from deepinfer.workers.pool import PagedPool

TILE_KEYS: Final = 64
"""Keys of one attention tile, rounded up to whole blocks and vectors."""

CHUNK_ROWS: Final = 128
"""Query tokens handled at once: bounds the score matrix of a long prefill chunk."""

GROUP_BYTES: Final = 4 << 20
"""Float32 K and V of one group of decoding requests: what a cache holds (measured best)."""

VECTOR_WIDTH: Final = 32
"""Elements of one unrolled float32 vector iteration in torch's elementwise kernels."""

_SERIAL_ELEMENTS: Final = 32_768  # torch splits larger elementwise work across threads


@dataclass(frozen=True, slots=True, eq=False)
class AttentionGroup:
    """Requests with equally many query tokens, attended together.

    ``rows`` are their rows, ``members * count`` of them: a slice where they follow each other,
    else int64 indices. ``blocks`` are their block ids, padded with block 0 to whole tiles, int64
    ``[members * tiles * blocks a tile]``; ``masked`` is bool ``[members, 1, tiles, padded query
    rows, tile keys]``.

    The last four are scratch, float32, that every layer writes anew: ``k`` and ``v``
    ``[members, kv_heads, blocks, block_size, head_dim]``, ``queries`` ``[members, kv_heads,
    tiles, padded query rows, head_dim]`` (its padding rows hold anything), and ``scores``
    ``[members * kv_heads * tiles, padded query rows, tile keys]``. ``stale`` indexes the keys of
    ``v`` beyond each member's length, by member, head and key, int64.
    """

    rows: slice | Tensor
    members: int
    count: int
    tiles: int
    blocks: Tensor
    stale: Tensor
    masked: Tensor
    k: Tensor
    v: Tensor
    queries: Tensor
    scores: Tensor


class Scratch:
    """Memory that the groups of a backend share, one after another; it stays warm in the cache.

    What is larger than ``GROUP_BYTES`` (a long prompt's chunk) is not kept. One thread only.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Float32 memory of ``shape``, uninitialised; the same for every taker of ``name``."""
        elements = math.prod(shape)
        kept = self._kept.get(name)
        if kept is None or kept.numel() < elements:
            kept = torch.empty(elements, dtype=torch.float32)
            if 4 * elements <= GROUP_BYTES:
                self._kept[name] = kept
        return kept[:elements].view(shape)


def tile_keys(layout: KvLayout) -> int:
    """Keys of one attention tile: whole blocks and whole vectors, at least ``TILE_KEYS``.

    It depends on the block size alone.
    """
    step = math.lcm(layout.block_size, VECTOR_WIDTH)
    return -(-TILE_KEYS // step) * step


def tile_bucket(tiles: int) -> int:
    """Round ``tiles`` up by less than a quarter, so that requests of like length share a group."""
    step = 1 << max(0, tiles.bit_length() - 3)
    return -(-tiles // step) * step


def make_groups(
    spans: Sequence[RowSpan],
    layout: KvLayout,
    *,
    group_size: int,
    row_multiple: int,
    scratch: Scratch,
    chunk_rows: int = CHUNK_ROWS,
) -> tuple[AttentionGroup, ...]:
    """Split a step's spans into groups: prefill chunks one by one, decodes by like length.

    ``group_size`` is the number of query heads that share a KV head. A group has up to
    ``chunk_rows`` query tokens of a chunk.
    """
    tile = tile_keys(layout)
    prefills: list[tuple[int, int, RowSpan]] = []  # (tiles, first row, rows)
    decodes: dict[int, list[tuple[int, RowSpan]]] = {}
    at = 0
    for span in spans:
        if span.count == 1:
            bucket = tile_bucket(-(-(span.start + 1) // tile))
            decodes.setdefault(bucket, []).append((at, span))
        else:
            for first in range(0, span.count, chunk_rows):
                count = min(chunk_rows, span.count - first)
                part = RowSpan(span.start + first, count, span.block_table)
                prefills.append((-(-(part.start + count) // tile), at + first, part))
        at += span.count
    members_of_groups = [(tiles, [(first, part)]) for tiles, first, part in prefills]
    for bucket, members in sorted(decodes.items()):
        member_bytes = 2 * 4 * bucket * tile * layout.kv_heads * layout.head_dim
        limit = max(1, GROUP_BYTES // member_bytes)
        members_of_groups += [
            (bucket, members[first : first + limit]) for first in range(0, len(members), limit)
        ]
    return tuple(
        _make_group(members, tiles, layout, group_size, row_multiple, scratch)
        for tiles, members in members_of_groups
    )


def _make_group(
    members: Sequence[tuple[int, RowSpan]],
    tiles: int,
    layout: KvLayout,
    group_size: int,
    row_multiple: int,
    scratch: Scratch,
) -> AttentionGroup:
    """Group ``members`` (first row, span), all of one ``count``, over ``tiles`` tiles each."""
    count = members[0][1].count
    tile = tile_keys(layout)
    per_member = tiles * tile // layout.block_size
    tables = []
    for _, span in members:
        used = list(span.block_table[: layout.blocks_for(span.start + span.count)])
        tables.append(used + [0] * (per_member - len(used)))
    query_rows = -(-count * group_size // row_multiple) * row_multiple
    # Row r of a member is query token r // group_size; padding rows repeat the last token.
    token = (torch.arange(query_rows) // group_size).clamp_(max=count - 1)
    last_key = torch.tensor([span.start for _, span in members])[:, None] + token
    keys = torch.arange(tiles * tile)
    lengths = torch.tensor([span.start + span.count for _, span in members])
    heads = (len(members), layout.kv_heads, tiles * tile)
    beyond = (keys >= lengths[:, None])[:, None].expand(heads)
    starts = [at for at, _ in members]
    first = starts[0]
    kv_shape = (len(members), layout.kv_heads, per_member, layout.block_size, layout.head_dim)
    return AttentionGroup(
        rows=slice(first, first + len(members) * count)
        if starts == list(range(first, first + len(members) * count, count))
        else (torch.tensor(starts)[:, None] + torch.arange(count)).flatten(),
        members=len(members),
        count=count,
        tiles=tiles,
        blocks=torch.tensor(tables, dtype=torch.int64).flatten(),
        stale=beyond.flatten().nonzero().squeeze(1),
        masked=keys.view(1, 1, tiles, 1, tile) > last_key[:, None, None, :, None],
        k=scratch.take("k", kv_shape),
        v=scratch.take("v", kv_shape),
        queries=scratch.take(
            "queries", (len(members), layout.kv_heads, tiles, query_rows, layout.head_dim)
        ),
        scores=scratch.take("scores", (len(members) * layout.kv_heads * tiles, query_rows, tile)),
    )


def attention_kernels(
    layout: KvLayout,
) -> Iterator[tuple[str, int, Callable[[Tensor], Tensor]]]:
    """The two products of a tile, as maps of query rows: name, width, kernel.

    Each runs in a batch of one, two or three tiles, depending on the number of rows: the size of
    a batch must not matter either.
    """
    tile = tile_keys(layout)
    keys = torch.randn((1, tile, layout.head_dim), generator=torch.Generator().manual_seed(1))
    sizes = f"of head_dim {layout.head_dim} and {tile} keys"

    def product(rows: Tensor, other: Tensor) -> Tensor:
        batch = 1 + rows.shape[0] // 4 % 3
        return torch.bmm(rows.repeat(batch, 1, 1), other.repeat(batch, 1, 1))[-1]

    yield f"scores {sizes}", layout.head_dim, lambda rows: product(rows, keys.transpose(1, 2))
    yield f"weighted values {sizes}", tile, lambda rows: product(rows, keys)


def serial_parts(x: Tensor) -> Sequence[Tensor]:
    """Cut ``[rows, ...]`` so that torch splits no part across threads inside a vector.

    Two threads split an even number of rows between two rows; more of them anywhere.
    """
    if torch.get_num_threads() <= 2:
        return (x,)
    return torch.split(x, max(1, _SERIAL_ELEMENTS // x[0].numel()))


def read_tiles(pool: PagedPool, layer: int, group: AttentionGroup) -> None:
    """Gather a group's K and V into its ``k`` and ``v``.

    V beyond a member's length is zeroed: what lies there is stale, and 0 * NaN is NaN.
    """
    layout = pool.layout
    gathered = pool.layer_words(layer).index_select(0, group.blocks).view(torch.uint8)
    k_bytes = layout.elements * layout.dtype.k_bytes
    scales = pool.scales(layer).index_select(0, group.blocks) if layout.dtype.scaled else None
    shape = (group.members, -1, layout.kv_heads, layout.block_size, layout.head_dim)
    for kv, (raw, dtype, target) in enumerate(
        (
            (gathered[:, :k_bytes], pool.k(layer).dtype, group.k),
            (gathered[:, k_bytes:], pool.v(layer).dtype, group.v),
        )
    ):
        target.copy_(raw.view(dtype).view(shape).transpose(1, 2))
        if scales is not None:
            scale = scales[:, kv].to(torch.float32).view(shape[:-1]).transpose(1, 2)
            target.mul_(scale[..., None])
    group.v.view(-1, layout.head_dim).index_fill_(0, group.stale, 0.0)


def attend(q: Tensor, group: AttentionGroup) -> Tensor:
    """Attention of one group over the ``k`` and ``v`` that ``read_tiles`` has filled.

    ``q`` is ``[members * count, query_heads, head_dim]``; returns ``[members * count, query_heads
    * head_dim]``.
    """
    members, tiles, count = group.members, group.tiles, group.count
    kv_heads, padded, head_dim = group.queries.shape[1], group.queries.shape[3], q.shape[2]
    per_kv = q.shape[1] // kv_heads
    # Scaled, and copied for every tile of its KV head, in one pass.
    torch.mul(
        q.view(members, count, kv_heads, per_kv, head_dim)
        .transpose(1, 2)
        .unsqueeze(2)
        .expand(-1, -1, tiles, -1, -1, -1),
        head_dim**-0.5,
        out=group.queries[:, :, :, : count * per_kv].view(
            members, kv_heads, tiles, count, per_kv, head_dim
        ),
    )
    flat = members * kv_heads * tiles
    k, v = group.k.view(flat, -1, head_dim), group.v.view(flat, -1, head_dim)
    torch.bmm(group.queries.view(flat, padded, head_dim), k.transpose(1, 2), out=group.scores)
    scores = group.scores.view(members, kv_heads, tiles, padded, -1)
    scores.masked_fill_(group.masked, -math.inf)
    scores.sub_(scores.amax(dim=(2, 4), keepdim=True))
    for part in serial_parts(scores.view(-1, padded * scores.shape[-1])):
        part.exp_()
    weights = scores.sum(-1, keepdim=True)
    values = torch.bmm(group.scores, v).view(members, kv_heads, tiles, padded, head_dim)
    total, *others = values.unbind(2)
    norm, *norms = weights.unbind(2)
    for tile_total, tile_norm in zip(others, norms, strict=True):
        total.add_(tile_total)
        norm.add_(tile_norm)
    mean = total.div_(norm)[:, :, : count * per_kv]
    return (
        mean.view(members, kv_heads, count, per_kv, head_dim)
        .transpose(1, 2)
        .reshape(members * count, q.shape[1] * head_dim)
    )
