"""The CPU backend: float32 arithmetic over a paged pool, in torch, with no loop over tokens.

*The same answer* rests on four things, the first two measured by ``calibrate``:

* Linear layers see a multiple of ``row_multiple`` rows. oneDNN (and MKL) then sum every row in the
  same order however many rows there are.
* Attention works on tiles of a fixed number of keys, and on a multiple of ``row_multiple`` query
  rows. Maxima are exact in any order, tiles are added one after another, and a masked key or tile
  adds exactly zero: so a row's result depends on its own keys alone.
* K and V are always read back from the pool, the step's own too.
* Elementwise functions whose vector and scalar code differ in the last bit (silu) only see rows
  that are whole vectors, and are never split across threads inside a vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.kvstore.core.layout import KvLayout
from deepinfer.kvstore.core.requests import Token
from deepinfer.workers import sampler
from deepinfer.workers.backends.base import Linear, Plan, RowSpan
from deepinfer.workers.pool import PagedPool
from deepinfer.workers.sampler import SampleRow

ROW_MULTIPLES: Final = (4, 8, 16)
"""Row paddings that ``calibrate`` tries, cheapest first."""

TILE_KEYS: Final = 64
"""Keys of one attention tile, rounded up to whole blocks and vectors."""

CHUNK_ROWS: Final = 128
"""Query tokens handled at once: bounds the score matrix of a long prefill chunk."""

GROUP_BYTES: Final = 4 << 20
"""Float32 K and V of one group of decoding requests: what a cache holds (measured best)."""

INT8_SCALE_MIN: Final = 2.0**-14
"""The smallest normal float16: a subnormal scale would lose its precision."""

VECTOR_WIDTH: Final = 32
"""Elements of one unrolled float32 vector iteration in torch's elementwise kernels."""

_FLOAT16_MAX: Final = torch.finfo(torch.float16).max
_SERIAL_ELEMENTS: Final = 32_768  # torch splits larger elementwise work across threads


class CpuLinear:
    """A float32 weight, packed for oneDNN where torch has it, else row-major ``[out, in]``."""

    __slots__ = ("_bias", "_packed", "_weight", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None, *, packed: bool) -> None:
        self.out_features, self.in_features = (int(size) for size in weight.shape)
        weight = weight.to(torch.float32).contiguous()
        self._bias = None if bias is None else bias.to(torch.float32).contiguous()
        self._packed = packed
        # The hint is the batch the layout is made for; every batch computes from it.
        self._weight: Tensor = (
            torch.ops.mkldnn._reorder_linear_weight(weight, ROW_MULTIPLES[0]) if packed else weight
        )

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        biases = 0 if self._bias is None else self.out_features
        return 4 * (self.in_features * self.out_features + biases)

    def __call__(self, x: Tensor) -> Tensor:
        """``[rows, in_features]`` to ``[rows, out_features]``, rows as given."""
        if self._packed:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return result
        return F.linear(x, self._weight, self._bias)


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


@dataclass(frozen=True, slots=True, eq=False)
class CpuPlan:
    """One step: where every row's KV goes, and what it attends."""

    rows: int
    padded_rows: int
    positions: Tensor
    slot_blocks: Tensor
    """Block of each real row, int64 ``[rows, 1]``."""
    slot_offsets: Tensor
    """Offset of each real row in its block, int64 ``[rows, 1]``."""
    heads: Tensor
    """0 .. kv_heads - 1, int64 ``[1, kv_heads]``."""
    groups: tuple[AttentionGroup, ...]


class CpuBackend:
    """``Backend`` for the CPU.

    ``threads`` is torch's intra-op thread count, set for the whole process. The default suits
    several workers on one machine: OpenMP's threads spin at every barrier, and two of them on
    cores that are not free were seen to run 20 times slower than one. Only the engine thread may
    call a backend.

    Raises ValueError for ``threads`` below 1.
    """

    def __init__(self, *, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"CpuBackend.threads must be at least 1, got {threads}")
        torch.set_num_threads(threads)
        self.row_multiple = ROW_MULTIPLES[0]
        self._packs = _has_packed_linear()
        self._saturations = 0

    @property
    def name(self) -> str:
        """``cpu``."""
        return "cpu"

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def kv_saturations(self) -> int:
        """K and V elements clamped to the pool's dtype since start."""
        return self._saturations

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> CpuLinear:
        """Pack a weight ``[out_features, in_features]``; see ``Backend.pack_linear``."""
        return CpuLinear(weight, bias, packed=self._packs)

    def calibrate(self, linears: Sequence[Linear], layout: KvLayout) -> None:
        """Choose the smallest of ``ROW_MULTIPLES`` with which every row's bits are its own."""
        shapes: dict[tuple[int, int], CpuLinear] = {}
        for linear in linears:
            assert isinstance(linear, CpuLinear)
            shapes.setdefault((linear.in_features, linear.out_features), linear)
        kernels: list[tuple[str, int, Callable[[Tensor], Tensor]]] = [
            (f"linear {width} to {rows}", width, linear) for (width, rows), linear in shapes.items()
        ]
        kernels += _attention_kernels(layout)
        failed: list[str] = []
        for multiple in ROW_MULTIPLES:
            failed = [
                name
                for name, width, kernel in kernels
                if not rows_are_independent(kernel, width, multiple)
            ]
            if not failed:
                self.row_multiple = multiple
                return
        raise RuntimeError(
            f"batching would change answers: with {torch.get_num_threads()} threads no padding "
            f"to {', '.join(map(str, ROW_MULTIPLES))} rows makes the bits of a row its own in "
            f"{', '.join(failed)}"
        )

    def plan(self, spans: Sequence[RowSpan], layout: KvLayout, query_heads: int) -> CpuPlan:
        """Lay out a step; see ``Backend.plan``."""
        rows = sum(span.count for span in spans)
        padded = self._pad(rows)
        positions = torch.zeros(padded, dtype=torch.int64)
        slot_blocks = torch.empty(rows, dtype=torch.int64)
        decoding: dict[int, list[tuple[int, RowSpan]]] = {}
        groups: list[AttentionGroup] = []
        group_size = query_heads // layout.kv_heads
        tile = tile_keys(layout)
        at = 0
        for span in spans:
            end = span.start + span.count
            place = torch.arange(span.start, end)
            positions[at : at + span.count] = place
            table = torch.tensor(span.block_table[: layout.blocks_for(end)], dtype=torch.int64)
            slot_blocks[at : at + span.count] = table[place // layout.block_size]
            if span.count == 1:
                bucket = tile_bucket(-(-end // tile))
                decoding.setdefault(bucket, []).append((at, span))
            else:
                for start in range(0, span.count, CHUNK_ROWS):
                    count = min(CHUNK_ROWS, span.count - start)
                    part = RowSpan(span.start + start, count, span.block_table)
                    tiles = -(-(part.start + count) // tile)
                    groups.append(self._group([(at + start, part)], tiles, layout, group_size))
            at += span.count
        for bucket, members in sorted(decoding.items()):
            tiles_bytes = 2 * 4 * bucket * tile * layout.kv_heads * layout.head_dim
            limit = max(1, GROUP_BYTES // tiles_bytes)
            for first in range(0, len(members), limit):
                part_of_bucket = members[first : first + limit]
                groups.append(self._group(part_of_bucket, bucket, layout, group_size))
        return CpuPlan(
            rows=rows,
            padded_rows=padded,
            positions=positions,
            slot_blocks=slot_blocks[:, None],
            slot_offsets=(positions[:rows] % layout.block_size)[:, None],
            heads=torch.arange(layout.kv_heads)[None],
            groups=tuple(groups),
        )

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        """``x @ weight.T + bias``, padding the rows where needed."""
        assert isinstance(weight, CpuLinear)
        rows = x.shape[0]
        missing = self._pad(rows) - rows
        if not missing:
            return weight(x)
        return weight(F.pad(x, (0, 0, 0, missing)))[:rows]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last axis in float32."""
        scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        return (x * scale).mul_(weight)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the two halves of the last axis; a new tensor."""
        first, second = x.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        result = torch.empty(x.shape, dtype=torch.float32)
        low, high = result.chunk(2, dim=-1)
        torch.mul(first, cos, out=low).sub_(second * sin)
        torch.mul(second, cos, out=high).add_(first * sin)
        return result

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up``; the width must be a multiple of ``VECTOR_WIDTH``."""
        gate, up = gate_up.chunk(2, dim=-1)
        width = gate.shape[1]
        assert width % VECTOR_WIDTH == 0, f"width {width} would leave a scalar tail"
        result = torch.empty(gate.shape, dtype=torch.float32)
        for source, target in zip(_serial_parts(gate), _serial_parts(result), strict=True):
            torch.ops.aten.silu.out(source, out=target)
        return result.mul_(up)

    def kv_write(self, pool: PagedPool, layer: int, k: Tensor, v: Tensor, plan: Plan) -> None:
        """Quantise and scatter the step's K and V; see ``Backend.kv_write``."""
        assert isinstance(plan, CpuPlan)
        index = (plan.slot_blocks, plan.heads, plan.slot_offsets)
        for kv, (values, typed, words) in enumerate(
            (
                (k, pool.k(layer), pool.k_words(layer)),
                (v, pool.v(layer), pool.v_words(layer)),
            )
        ):
            values = values[: plan.rows]
            if typed.dtype == torch.int8:
                stored, scale = quantise_int8(values)
                pool.scales(layer)[plan.slot_blocks, kv, plan.heads, plan.slot_offsets] = scale
            else:
                stored = self._saturating_cast(values, typed.dtype)
            words[index] = stored.view(words.dtype)

    def attention(self, pool: PagedPool, layer: int, q: Tensor, plan: Plan) -> Tensor:
        """Tiled attention over the pool; see ``Backend.attention``."""
        assert isinstance(plan, CpuPlan)
        heads, head_dim = q.shape[1], q.shape[2]
        result = torch.zeros((plan.padded_rows, heads * head_dim), dtype=torch.float32)
        scaled = q * head_dim**-0.5
        for group in plan.groups:
            k, v = _read_tiles(pool, layer, group)
            result[group.rows] = _attend(scaled[group.rows], k, v, group)
        return result

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Token]:
        """Choose one token a row, by the worker's sampler."""
        return sampler.sample(logits, rows)

    def _pad(self, rows: int) -> int:
        return -(-rows // self.row_multiple) * self.row_multiple

    def _group(
        self,
        members: Sequence[tuple[int, RowSpan]],
        tiles: int,
        layout: KvLayout,
        group_size: int,
    ) -> AttentionGroup:
        count = members[0][1].count
        tile = tile_keys(layout)
        blocks = torch.zeros((len(members), tiles * tile // layout.block_size), dtype=torch.int64)
        lengths = []
        for row, (_, span) in enumerate(members):
            used = layout.blocks_for(span.start + span.count)
            blocks[row, :used] = torch.tensor(span.block_table[:used], dtype=torch.int64)
            lengths.append(span.start + span.count)
        query_rows = self._pad(count * group_size)
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

    def _saturating_cast(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        limit = torch.finfo(dtype).max
        if not float(values.abs().amax()) <= limit:
            clamped = values.clamp(-limit, limit)
            self._saturations += int((clamped != values).sum())
            values = clamped
        return values.to(dtype)


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


def quantise_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise ``[..., head_dim]`` to int8 with one float16 scale ``[...]`` a vector."""
    scale = (values.abs().amax(-1) / 127).clamp_(INT8_SCALE_MIN, _FLOAT16_MAX).to(torch.float16)
    quantised = (values / scale.to(torch.float32)[..., None]).round_().clamp_(-127, 127)
    return quantised.to(torch.int8), scale


def rows_are_independent(kernel: Callable[[Tensor], Tensor], width: int, multiple: int) -> bool:
    """Whether a row's bits survive every batch size (in multiples) and every place in it.

    ``kernel`` maps ``[rows, width]`` to ``[rows, anything]``.
    """
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn((16 * multiple, width), generator=generator)
    expected = torch.cat([kernel(part) for part in torch.split(probe, multiple)])
    for factor in (2, 3, 5, 8, 16):
        rows = factor * multiple
        if not torch.equal(kernel(probe[:rows].contiguous()), expected[:rows]):
            return False
    same = kernel(probe[:1].expand(3 * multiple, width).contiguous())
    return torch.equal(same, expected[:1].expand_as(same))


def _attention_kernels(
    layout: KvLayout,
) -> Iterable[tuple[str, int, Callable[[Tensor], Tensor]]]:
    """The two products of a tile, as maps of query rows: name, width, kernel."""
    tile = tile_keys(layout)
    keys = torch.randn((1, tile, layout.head_dim), generator=torch.Generator().manual_seed(1))
    sizes = f"of head_dim {layout.head_dim} and {tile} keys"
    yield (
        f"scores {sizes}",
        layout.head_dim,
        lambda rows: torch.bmm(rows[None], keys.transpose(1, 2))[0],
    )
    yield f"weighted values {sizes}", tile, lambda rows: torch.bmm(rows[None], keys)[0]


def _serial_parts(x: Tensor) -> Sequence[Tensor]:
    """Cut ``[rows, ...]`` so that torch splits no part across threads inside a vector.

    Two threads split an even number of rows between two rows; more of them anywhere.
    """
    if torch.get_num_threads() <= 2:
        return (x,)
    return torch.split(x, max(1, _SERIAL_ELEMENTS // x[0].numel()))


def _has_packed_linear() -> bool:
    operators: Any = torch.ops.mkldnn
    return torch._C._has_mkldnn and all(
        hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )


def _read_tiles(pool: PagedPool, layer: int, group: AttentionGroup) -> tuple[Tensor, Tensor]:
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


def _attend(q: Tensor, k: Tensor, v: Tensor, group: AttentionGroup) -> Tensor:
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
    for part in _serial_parts(scores.view(-1, padded * scores.shape[-1])):
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
