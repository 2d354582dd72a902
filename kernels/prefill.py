"""Prefill attention over the paged KV cache: the plan of a launch, checks, launch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.attention import (
    GROUP_MAX,
    HEAD_DIMS,
    KV_FORMATS,
    KV_FP16,
    KV_INT8,
    KV_K16V8,
    KvView,
)
from deepinfer.kernels.compiler import KernelSpec, device_target, launch

TILE_TOKENS: Final = 64
"""Tokens of a K or V tile (``TILE`` in ``prefill_attention.cu``)."""

TILE_ROWS: Final = (64, 128)
"""Packed rows (tokens times heads of a group) that a CTA may compute."""

HOPPER_HEAD_DIMS: Final = (64, 128)
"""Head dimensions of the kernel for Hopper's warpgroup products."""

HOPPER_TILE_ROWS: Final = 128
"""Packed rows that its CTAs compute."""

_HOPPER_TILE: Final = 128
"""Tokens of its K and V tiles (``TILE`` in ``prefill_hopper.cu``)."""

_HOPPER_TARGET: Final = "sm_90a"

_ALIGNMENT: Final = 16
_TILES_MAX: Final = 65535

PART_UNIT: Final = 128
"""Parts of a context begin at multiples of it (``PART_UNIT`` in ``prefill_parts.cuh``)."""

_PARTS_MAX: Final = 16
_TOKENS_MAX: Final = PART_UNIT * 0x7FFF
_PART_COST: Final = 3
"""What a CTA costs besides its tokens, in units: its begin, its end, and the merge."""


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Consecutive tokens of one request in a step.

    ``row`` is its first row of ``q`` and ``out``, ``rows`` how many it has (at least 1), ``start``
    the tokens cached before it (row i sits at position ``start + i``), ``table`` its row of the
    block tables.
    """

    row: int
    rows: int
    start: int
    table: int


@dataclass(frozen=True, slots=True)
class PrefillSplit:
    """Cuts contexts into parts of about ``tokens`` tokens (a multiple of ``PART_UNIT``, at least
    twice that), a CTA each, for launches of few tiles over long contexts. Deterministic, but a
    result's bits then depend on where it is cut. ``kv_heads`` and ``head_dim`` are the pool's.
    """

    tokens: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.tokens < 2 * PART_UNIT or self.tokens % PART_UNIT:
            raise ValueError(
                f"PrefillSplit.tokens must be a multiple of {PART_UNIT} from {2 * PART_UNIT}, got "
                f"{self.tokens}"
            )


@dataclass(frozen=True, slots=True)
class PrefillSpans:
    """What the CTAs of a launch do, on the device; made by ``plan_prefill``."""

    tiles: Tensor
    """int32 ``[tiles, 4]``: span, first packed row, first and end of the tokens in units (16 bits
    each), part as in ``prefill_parts.cuh``; most work first."""
    spans: Tensor
    """int32 ``[spans, 4]``: ``PrefillSpan``'s fields in their order."""
    group: int
    tile_rows: int
    rows: int
    """Rows of ``q`` that the spans reach to."""
    tables: int
    """Rows of the block tables that the spans reach to."""
    tokens: int
    """Most tokens (cached and new) of a span."""
    split: PrefillSplit | None = None
    partials: Tensor | None = None
    """float32, of the parts of all heads; with it ``tickets``, int32 zeros, which launches leave
    as zeros: launches of one plan follow each other on a stream."""
    tickets: Tensor | None = None


def tile_rows_for(spans: Sequence[PrefillSpan], *, group: int, kv_heads: int, sm_count: int) -> int:
    """128 packed rows a CTA, which read K and V half as often, unless that leaves SMs idle."""
    tiles = sum(-(-span.rows * group // TILE_ROWS[-1]) for span in spans)
    return TILE_ROWS[-1] if tiles * kv_heads >= sm_count else TILE_ROWS[0]


def plan_for(
    spans: Sequence[PrefillSpan],
    *,
    group: int,
    kv_heads: int,
    head_dim: int,
    sm_count: int,
    device: torch.device,
) -> PrefillSpans:
    """``plan_prefill`` with the tiles and parts that end first on ``sm_count`` multiprocessors."""
    split = split_for(
        spans,
        group=group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tile_rows=TILE_ROWS[-1],
        sm_count=sm_count,
    )
    tile_rows = TILE_ROWS[-1]
    if split is None and not _chooses_hopper(device, head_dim):
        tile_rows = tile_rows_for(spans, group=group, kv_heads=kv_heads, sm_count=sm_count)
    return plan_prefill(spans, group=group, tile_rows=tile_rows, split=split, device=device)


def split_for(
    spans: Sequence[PrefillSpan],
    *,
    group: int,
    kv_heads: int,
    head_dim: int,
    tile_rows: int,
    sm_count: int,
) -> PrefillSplit | None:
    """The parts that end first on ``sm_count`` multiprocessors, None for whole contexts.

    Only launches of fewer CTAs than multiprocessors are cut.
    """
    units: list[int] = []
    for span in spans:
        packed = span.rows * group
        if (len(units) + packed // tile_rows) * kv_heads >= sm_count:
            return None
        units += [
            _units(span.start + (min(first + tile_rows, packed) - 1) // group + 1)
            for first in range(0, packed, tile_rows)
        ]
    longest = max(units)
    best, least = None, longest + _PART_COST
    for parts in range(2, _PARTS_MAX + 1):
        size = -(-longest // parts)
        if size < 2 * _PART_COST:
            break
        ctas = kv_heads * sum(min(_PARTS_MAX, -(-each // size)) for each in units)
        cost = -(-ctas // sm_count) * (size + _PART_COST)
        if cost < least:
            best, least = PrefillSplit(size * PART_UNIT, kv_heads, head_dim), cost
    return best


def _units(tokens: int) -> int:
    return -(-tokens // PART_UNIT)


def plan_prefill(
    spans: Sequence[PrefillSpan],
    *,
    group: int,
    tile_rows: int,
    split: PrefillSplit | None = None,
    device: torch.device | str = "cpu",
) -> PrefillSpans:
    """Cut spans into tiles of ``tile_rows`` packed rows, those with most tokens first.

    ``group`` is the number of query heads to a KV head. Without ``split`` results depend neither
    on ``tile_rows`` nor on which spans share a launch, bit for bit. Raises ValueError naming the
    field.
    """
    if tile_rows not in TILE_ROWS:
        raise ValueError(f"tile_rows {tile_rows} is not one of {TILE_ROWS}")
    if not 1 <= group <= GROUP_MAX:
        raise ValueError(f"group must be in 1..{GROUP_MAX}, got {group}")
    if not spans:
        raise ValueError("spans is empty")
    tiles: list[tuple[int, int, int, int, int]] = []
    partials = 0
    for at, span in enumerate(spans):
        for name, value, least in (
            ("row", span.row, 0),
            ("rows", span.rows, 1),
            ("start", span.start, 0),
            ("table", span.table, 0),
        ):
            if value < least:
                raise ValueError(f"spans[{at}].{name} must be at least {least}, got {value}")
        if span.start + span.rows > _TOKENS_MAX:
            raise ValueError(
                f"spans[{at}] reaches to token {span.start + span.rows}, at most {_TOKENS_MAX}"
            )
        packed = span.rows * group
        for first in range(0, packed, tile_rows):
            attended = span.start + (min(first + tile_rows, packed) - 1) // group + 1
            units = _units(attended)
            parts = 1
            if split is not None:
                parts = min(_PARTS_MAX, -(-units * PART_UNIT // split.tokens))
            if parts == 1:
                tiles.append((-attended, at, first, units << 16, -1))
                continue
            for part in range(parts):
                begin, end = part * units // parts, (part + 1) * units // parts
                work = min(attended, end * PART_UNIT) - begin * PART_UNIT
                which = partials << 8 | part << 4 | parts - 1
                tiles.append((-work, at, first, begin | end << 16, which))
            partials += parts
    if len(tiles) > _TILES_MAX:
        raise ValueError(f"spans make {len(tiles)} tiles, at most {_TILES_MAX} fit a launch")
    tiles.sort()
    fields = [each for span in spans for each in (span.row, span.rows, span.start, span.table)]
    host = torch.tensor(fields + [each for tile in tiles for each in tile[1:]], dtype=torch.int32)
    if torch.device(device).type == "cuda":
        host = host.pin_memory()  # else the copy waits for everything on the stream
    both = host.to(device, non_blocking=True)
    plan = PrefillSpans(
        both[len(fields) :].view(-1, 4),
        both[: len(fields)].view(-1, 4),
        group,
        tile_rows,
        max(span.row + span.rows for span in spans),
        max(span.table for span in spans) + 1,
        max(span.start + span.rows for span in spans),
    )
    if split is None or not partials:
        return plan
    heads = partials * split.kv_heads
    return dataclasses.replace(
        plan,
        split=split,
        partials=torch.empty(heads, tile_rows, split.head_dim + 8, device=device),
        tickets=torch.zeros(heads, dtype=torch.int32, device=device),
    )


def paged_prefill(
    out: Tensor,
    q: Tensor,
    kv: KvView,
    spans: PrefillSpans,
    block_tables: Tensor,
    *,
    scale: float,
    hopper: bool | None = None,
) -> None:
    """``out = softmax(q K^T * scale) V`` of every span, causal, over the paged cache.

    ``out`` float16 ``[rows, heads, head_dim]``, contiguous; ``q`` the same, where rows may be
    further apart (a slice of the QKV rows); ``block_tables`` int32 ``[rows, columns]``, rows may be
    further apart. K and V of the spans' own tokens must have been written to the pool. Rows that
    belong to no span keep their contents. Query head ``h`` reads KV head ``h // group``.
    Specification: ``reference_prefill.paged_prefill``.

    On a card of compute capability 9.0 there are kernels of their own for ``HOPPER_HEAD_DIMS``
    and plans of ``HOPPER_TILE_ROWS``, which ``hopper`` False avoids and True asks for anywhere.
    Raises ValueError naming the argument.
    """
    _check(out, q, kv, spans, block_tables)
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    if hopper and kv.head_dim not in HOPPER_HEAD_DIMS:
        raise ValueError(f"hopper: head_dim {kv.head_dim} is not one of {HOPPER_HEAD_DIMS}")
    if hopper and spans.tile_rows != HOPPER_TILE_ROWS:
        raise ValueError(f"hopper: tile_rows is {spans.tile_rows}, not {HOPPER_TILE_ROWS}")
    if hopper is None:
        hopper = spans.tile_rows == HOPPER_TILE_ROWS and _chooses_hopper(out.device, kv.head_dim)
    if hopper:
        spec = hopper_spec(kv.format, kv.head_dim)
    else:
        spec = prefill_spec(kv.format, kv.head_dim, spans.tile_rows)
    args = (
        out,
        q,
        np.int64(q.stride(0)),
        kv.storage,
        np.int64(kv.block_bytes),
        np.int64(kv.k_offset),
        np.int64(kv.v_offset),
        np.int64(kv.scale_offset),
        np.int32(kv.block_size.bit_length() - 1),
        np.int32(kv.kv_heads),
        np.int32(spans.group),
        spans.tiles,
        spans.spans,
        block_tables,
        np.int32(block_tables.stride(0)),
        np.float32(scale * math.log2(math.e)),
        spans.partials,
        spans.tickets,
    )
    grid = (kv.kv_heads, spans.tiles.shape[0], 1)
    launch(spec, grid, args, shared_bytes=spec.shared_bytes)


def prefill_spec(
    kv_format: int, head_dim: int, tile_rows: int, *, warps: int | None = None
) -> KernelSpec:
    """The instance of ``paged_prefill`` for a pool and a number of packed rows a CTA.

    ``warps`` of a CTA (4 or 8) are one to 16 rows unless given: two warps a scheduler hide each
    other's softmax even where shared memory admits one CTA (compute capability 8.6).
    """
    warps = warps or tile_rows // 16
    k_codes, v_codes = kv_format not in (KV_FP16, KV_K16V8), kv_format != KV_FP16
    halves, codes = TILE_TOKENS * head_dim * 2, TILE_TOKENS * head_dim
    # The sums of `Prefill` in prefill_attention.cu: Q, K and V as halves, staged codes, scales,
    # block ids and jobs.
    shared = tile_rows * head_dim * 2
    shared += halves if k_codes else 2 * halves
    shared += halves if v_codes else 2 * halves
    shared += codes * (k_codes + v_codes)
    shared += 8 * TILE_TOKENS if kv_format == KV_INT8 else 0
    shared += 48 + 16 * warps
    return KernelSpec(
        "prefill_attention.cu",
        f"paged_prefill<{kv_format}, {head_dim}, {tile_rows // (16 * warps)}, {warps}>",
        32 * warps,
        shared,
    )


def hopper_spec(kv_format: int, head_dim: int) -> KernelSpec:
    """As ``prefill_spec``, on Hopper; it compiles for ``sm_90a`` alone."""
    k_codes, v_codes = kv_format not in (KV_FP16, KV_K16V8), kv_format != KV_FP16
    # The sums of `Hopper` in prefill_hopper.cu: Q, two tiles each of K and V, staged codes twice,
    # scales, barriers, a ticket.
    shared = (HOPPER_TILE_ROWS + 4 * _HOPPER_TILE) * head_dim * 2
    shared += 2 * _HOPPER_TILE * head_dim * (k_codes + v_codes)
    shared += 16 * _HOPPER_TILE if kv_format == KV_INT8 else 0
    shared += 64 + 16
    return KernelSpec(
        "prefill_hopper.cu",
        f"paged_prefill_hopper<{kv_format}, {head_dim}>",
        2 * HOPPER_TILE_ROWS + 128,
        shared,
    )


def _chooses_hopper(device: torch.device, head_dim: int) -> bool:
    return head_dim in HOPPER_HEAD_DIMS and _is_hopper(device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and device_target() == _HOPPER_TARGET


def device_specs(kv_format: int, head_dim: int, device: torch.device | str) -> Iterator[KernelSpec]:
    """What plans of ``plan_for`` need over such a pool: compile it before the first request."""
    if _chooses_hopper(torch.device(device), head_dim):
        yield hopper_spec(kv_format, head_dim)
        return
    for tile_rows in TILE_ROWS:
        yield prefill_spec(kv_format, head_dim, tile_rows)


def specs_for(target: str) -> Iterator[KernelSpec]:
    """Every kernel instance that this module launches where kernels are compiled for ``target``."""
    for kv_format, head_dim in itertools.product(KV_FORMATS, HEAD_DIMS):
        if target == _HOPPER_TARGET and head_dim in HOPPER_HEAD_DIMS:
            yield hopper_spec(kv_format, head_dim)
            continue
        for tile_rows in TILE_ROWS:
            yield prefill_spec(kv_format, head_dim, tile_rows)


def _check(out: Tensor, q: Tensor, kv: KvView, spans: PrefillSpans, block_tables: Tensor) -> None:
    heads = kv.kv_heads * spans.group
    shape = f"float16 [rows, {heads}, {kv.head_dim}]"
    if q.dim() != 3 or q.dtype != torch.float16 or q.shape[1:] != (heads, kv.head_dim):
        raise ValueError(f"q must be {shape}, got {_describe(q)}")
    if (
        q.stride(2) != 1
        or q.stride(1) != kv.head_dim
        or q.stride(0) % 8
        or q.data_ptr() % _ALIGNMENT
    ):
        raise ValueError(
            f"q must have contiguous heads, and rows at multiples of 16 bytes, got strides "
            f"{q.stride()} at {q.data_ptr():#x}"
        )
    if out.dtype != torch.float16 or out.shape != q.shape or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous float16 {list(q.shape)} as q, got {_describe(out)}"
        )
    if out.data_ptr() % _ALIGNMENT:
        raise ValueError(f"out must be at a multiple of 16 bytes, got {out.data_ptr():#x}")
    if spans.rows > q.shape[0]:
        raise ValueError(f"spans reach to row {spans.rows}, q has {q.shape[0]} rows")
    if block_tables.dim() != 2 or block_tables.dtype != torch.int32 or block_tables.stride(1) != 1:
        raise ValueError(
            f"block_tables must be int32 [rows, columns] with contiguous rows, got "
            f"{_describe(block_tables)}"
        )
    if spans.split is not None and (spans.split.kv_heads, spans.split.head_dim) != (
        kv.kv_heads,
        kv.head_dim,
    ):
        raise ValueError(
            f"spans.split is for {spans.split.kv_heads} KV heads of {spans.split.head_dim}, kv has "
            f"{kv.kv_heads} of {kv.head_dim}"
        )
    columns = -(-spans.tokens // kv.block_size)
    if block_tables.shape[0] < spans.tables or block_tables.shape[1] < columns:
        raise ValueError(
            f"block_tables must have at least {spans.tables} rows and {columns} columns "
            f"({spans.tokens} tokens of {kv.block_size} a block), got {list(block_tables.shape)}"
        )
    for name, tensor in (
        ("q", q),
        ("kv.storage", kv.storage),
        ("spans.tiles", spans.tiles),
        ("block_tables", block_tables),
    ):
        if tensor.device != out.device:
            raise ValueError(f"{name} is on {tensor.device}, out is on {out.device}")


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"
