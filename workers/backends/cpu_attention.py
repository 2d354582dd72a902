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

    ``rows`` indexes their rows, int64 ``[members * count]``; ``blocks`` their block ids, padded
    with block 0 to whole tiles, int64 ``[members * tiles * blocks a tile]``; ``lengths`` the valid
    keys of each; ``masked`` is bool ``[members, 1, tiles, padded query rows, tile keys]``.
    """

    rows: Tensor
    blocks: Tensor
    lengths: tuple[int, ...]
    count: int
    tiles: int
    masked: Tensor


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
    spans: Sequence[RowSpan], layout: KvLayout, *, group_size: int, row_multiple: int
) -> tuple[AttentionGroup, ...]:
    """Split a step's spans into groups: prefill chunks one by one, decodes by like length.

    ``group_size`` is the number of query heads that share a KV head.
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
            for first in range(0, span.count, CHUNK_ROWS):
                count = min(CHUNK_ROWS, span.count - first)
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
        _make_group(members, tiles, layout, group_size, row_multiple)
        for tiles, members in members_of_groups
    )


def _make_group(
    members: Sequence[tuple[int, RowSpan]],
    tiles: int,
    layout: KvLayout,
    group_size: int,
    row_multiple: int,
) -> AttentionGroup:
    """Group ``members`` (first row, span), all of one ``count``, over ``tiles`` tiles each."""
    count = members[0][1].count
    tile = tile_keys(layout)
    blocks = torch.zeros((len(members), tiles * tile // layout.block_size), dtype=torch.int64)
    lengths = []
    for row, (_, span) in enumerate(members):
        used = layout.blocks_for(span.start + span.count)
        blocks[row, :used] = torch.tensor(span.block_table[:used], dtype=torch.int64)
        lengths.append(span.start + span.count)
    query_rows = -(-count * group_size // row_multiple) * row_multiple
    # Row r of a member is query token r // group_size; padding rows repeat the last token.
    token = (torch.arange(query_rows) // group_size).clamp_(max=count - 1)
    last_key = torch.tensor([span.start for _, span in members])[:, None] + token
    keys = torch.arange(tiles * tile).view(1, 1, tiles, 1, tile)
    starts = torch.tensor([at for at, _ in members])
    return AttentionGroup(
        rows=(starts[:, None] + torch.arange(count)).flatten(),
        blocks=blocks.flatten(),
        lengths=tuple(lengths),
        count=count,
        tiles=tiles,
        masked=keys > last_key[:, None, None, :, None],
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


def read_tiles(pool: PagedPool, layer: int, group: AttentionGroup) -> tuple[Tensor, Tensor]:
    """Gather a group's K and V as float32 ``[members * kv_heads * tiles, tile keys, head_dim]``.

    V beyond a member's length is zeroed: what lies there is stale, and 0 * NaN is NaN.
    """
    layout = pool.layout
    members = len(group.lengths)
    blocks = group.blocks.numel() // members
    gathered = pool.layer_words(layer).index_select(0, group.blocks).view(torch.uint8)
    k_bytes = layout.elements * layout.dtype.k_bytes
    scales = pool.scales(layer).index_select(0, group.blocks) if layout.dtype.scaled else None
    shape = (members, blocks, layout.kv_heads, layout.block_size, layout.head_dim)
    tiles: list[Tensor] = []
    for kv, (raw, dtype) in enumerate(
        (
            (gathered[:, :k_bytes], pool.k(layer).dtype),
            (gathered[:, k_bytes:], pool.v(layer).dtype),
        )
    ):
        source = raw.view(dtype).view(shape).transpose(1, 2)
        target = torch.empty(source.shape, dtype=torch.float32)
        target.copy_(source)
        if scales is not None:
            scale = scales[:, kv].to(torch.float32).view(shape[:-1]).transpose(1, 2)
            target.mul_(scale[..., None])
        tiles.append(target)
    k, v = tiles
    keys = v.view(members, layout.kv_heads, blocks * layout.block_size, layout.head_dim)
    for member, length in enumerate(group.lengths):
        keys[member, :, length:].zero_()
    flat = (members * layout.kv_heads * group.tiles, -1, layout.head_dim)
    return k.view(flat), v.view(flat)


def attend(q: Tensor, k: Tensor, v: Tensor, group: AttentionGroup) -> Tensor:
    """Attention of one group; ``q`` is scaled, ``[members * count, query_heads, head_dim]``.

    Returns ``[members * count, query_heads * head_dim]``.
    """
    members, tiles, count = len(group.lengths), group.tiles, group.count
    padded = group.masked.shape[3]
    heads, head_dim = q.shape[1], q.shape[2]
    kv_heads = k.shape[0] // (members * tiles)
    per_kv = heads // kv_heads
    real = count * per_kv
    rows = torch.zeros((members, kv_heads, 1, padded, head_dim), dtype=torch.float32)
    rows[:, :, 0, :real] = (
        q.view(members, count, kv_heads, per_kv, head_dim).transpose(1, 2).flatten(2, 3)
    )
    rows = rows.expand(-1, -1, tiles, -1, -1).reshape(-1, padded, head_dim)
    scores = torch.bmm(rows, k.transpose(1, 2)).view(members, kv_heads, tiles, padded, -1)
    scores.masked_fill_(group.masked, -math.inf)
    scores.sub_(scores.amax(dim=(2, 4), keepdim=True))
    for part in serial_parts(scores.view(-1, padded * scores.shape[-1])):
        part.exp_()
    weights = scores.sum(-1, keepdim=True)
    values = torch.bmm(scores.view(-1, padded, scores.shape[-1]), v)
    values = values.view(members, kv_heads, tiles, padded, head_dim)
    total, norm = values[:, :, 0], weights[:, :, 0]
    for tile in range(1, tiles):
        total.add_(values[:, :, tile])
        norm.add_(weights[:, :, tile])
    mean = total.div_(norm)[:, :, :real]
    return (
        mean.view(members, kv_heads, count, per_kv, head_dim)
        .transpose(1, 2)
        .reshape(members * count, heads * head_dim)
    )
