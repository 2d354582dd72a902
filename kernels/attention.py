"""Attention over the paged KV cache: checks that name the argument, choice of launch, launch."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.compiler import KernelSpec, device_target, launch

KV_FP16: Final = 0
KV_INT8: Final = 1
KV_E4M3: Final = 2
KV_E5M2: Final = 3
KV_K16V8: Final = 4
"""FP16 K, E4M3 V."""

KV_FORMATS: Final = (KV_FP16, KV_INT8, KV_E4M3, KV_E5M2, KV_K16V8)
"""Formats of a pool, as ``csrc/kv_convert.cuh`` numbers them."""

HEAD_DIMS: Final = (64, 96, 128)
"""Head dimensions that the kernels are compiled for."""

TILE_TOKENS: Final = 16
"""Tokens that a warp takes at once: partitions and blocks are multiples of it."""

GROUP_MAX: Final = 16
"""Most query heads to a KV head."""

PARTITIONS_MAX: Final = 128
"""Most partitions of one sequence (``MAX_PARTITIONS`` of ``decode_attention.cu``)."""

_BULK_TARGET: Final = "sm_90a"
"""Where one thread can ask for a bulk copy; its instances compile for this alone."""

_ALIGNMENT: Final = 16
"""Bytes: what the kernels' widest copies need."""


@dataclass(frozen=True, slots=True)
class KvView:
    """One layer of a paged KV pool.

    ``storage`` is uint8 ``[blocks, block_bytes]``, contiguous. Inside a block, K is at byte
    ``k_offset`` and V at ``v_offset``, each ``[kv_heads, block_size, head_dim]``; for ``KV_INT8``
    (signed codes) the scales are at ``scale_offset``, float16 ``[2 (K, V), kv_heads,
    block_size]``. Raises ValueError naming the field, its value and what is allowed.
    """

    storage: Tensor
    block_bytes: int
    k_offset: int
    v_offset: int
    scale_offset: int
    kv_heads: int
    head_dim: int
    block_size: int
    format: int

    def __post_init__(self) -> None:
        if self.format not in KV_FORMATS:
            raise ValueError(f"KvView.format {self.format} is not one of {KV_FORMATS}")
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"KvView.head_dim {self.head_dim} is not one of {HEAD_DIMS}")
        if self.block_size < TILE_TOKENS or self.block_size & (self.block_size - 1):
            raise ValueError(
                f"KvView.block_size must be a power of two from {TILE_TOKENS}, got "
                f"{self.block_size}"
            )
        if self.kv_heads < 1:
            raise ValueError(f"KvView.kv_heads must be at least 1, got {self.kv_heads}")
        storage = self.storage
        if storage.dtype != torch.uint8 or storage.dim() != 2 or not storage.is_contiguous():
            raise ValueError(
                f"KvView.storage must be contiguous uint8 [blocks, block_bytes], got "
                f"{_describe(storage)}"
            )
        if storage.shape[1] != self.block_bytes:
            raise ValueError(
                f"KvView.block_bytes is {self.block_bytes}, a row of storage has "
                f"{storage.shape[1]} bytes"
            )
        elements = self.kv_heads * self.block_size * self.head_dim
        sizes = {
            "k_offset": elements * (2 if self.format in (KV_FP16, KV_K16V8) else 1),
            "v_offset": elements * (2 if self.format == KV_FP16 else 1),
        }
        if self.format == KV_INT8:
            sizes["scale_offset"] = 2 * self.kv_heads * self.block_size * 2
        if not 0 < self.block_bytes < 1 << 31:
            raise ValueError(f"KvView.block_bytes must be in 1..2^31 - 1, got {self.block_bytes}")
        if self.block_bytes % _ALIGNMENT or storage.data_ptr() % _ALIGNMENT:
            raise ValueError(
                f"KvView.storage's address and block_bytes must be multiples of {_ALIGNMENT}, got "
                f"{storage.data_ptr():#x} and {self.block_bytes}"
            )
        for name, size in sizes.items():
            offset = getattr(self, name)
            if offset % _ALIGNMENT or not 0 <= offset <= self.block_bytes - size:
                raise ValueError(
                    f"KvView.{name} must be a multiple of {_ALIGNMENT} in "
                    f"0..{self.block_bytes - size} ({size} bytes of a block of "
                    f"{self.block_bytes}), got {offset}"
                )


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """What the partitions of ``paged_decode`` leave for the one that merges them.

    One workspace serves one stream. Contents are meaningless between launches, except
    ``tickets``, which are zero.
    """

    partial_out: Tensor
    """float32, flat: ``[rows, kv_heads, partitions, group, head_dim]`` of a launch."""
    partial_ml: Tensor
    """float32, flat: (maximum, weight) for each of ``partial_out``'s vectors."""
    tickets: Tensor
    """int32, flat: ``[rows, kv_heads]``."""

    @classmethod
    def allocate(
        cls,
        max_rows: int,
        heads: int,
        head_dim: int,
        max_partitions: int,
        device: torch.device | str,
        *,
        max_slots: int | None = None,
    ) -> DecodeWorkspace:
        """Room for ``max_rows`` rows and ``max_partitions`` partitions each.

        Where many rows never come with many partitions, ``max_slots`` bounds rows * partitions of
        a launch and with it the memory: ``max_slots * heads * (head_dim + 2) * 4`` bytes.
        """
        for name, value in (
            ("max_rows", max_rows),
            ("heads", heads),
            ("head_dim", head_dim),
            ("max_partitions", max_partitions),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        slots = max_rows * max_partitions
        if max_slots is not None:
            slots = min(slots, max(max_slots, max_rows))
        vectors = slots * heads
        return cls(
            torch.empty(vectors * head_dim, dtype=torch.float32, device=device),
            torch.empty(vectors * 2, dtype=torch.float32, device=device),
            torch.zeros(max_rows * heads, dtype=torch.int32, device=device),
        )


def partitions(max_context: int, partition: int) -> int:
    """Partitions that a sequence of ``max_context`` tokens is cut into."""
    return -(-max_context // partition)


def partition_for(rows: int, kv_heads: int, max_context: int, sm_count: int) -> int:
    """Tokens a partition, for a bucket of ``rows`` rows of up to ``max_context`` tokens.

    As near to one CTA a multiprocessor as whole partitions come, but not so many that merging
    them costs more than it saves. A function of its arguments only: equal buckets sum in equal
    order.
    """
    for name, value in (
        ("rows", rows),
        ("kv_heads", kv_heads),
        ("max_context", max_context),
        ("sm_count", sm_count),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    sequences = rows * kv_heads
    wanted = max(1, (2 * sm_count + sequences) // (2 * sequences))
    tokens = max(
        -(-max_context // wanted),
        math.isqrt(_MERGE_TOKENS * max_context),
        -(-max_context // PARTITIONS_MAX),
    )
    return -(-tokens // _PARTITION_STEP) * _PARTITION_STEP


_MERGE_TOKENS: Final = 8
"""Merging a partition takes a CTA about as long as attending to so many tokens, so of ``n`` tokens
``sqrt(8 n)`` a partition cost least when multiprocessors abound."""

_PARTITION_STEP: Final = 64
"""For one sequence of 512 tokens on an H200, 32 are at most 3 % faster, 128 up to 10 % slower."""


def paged_decode(
    out: Tensor,
    q: Tensor,
    kv: KvView,
    block_tables: Tensor,
    lens: Tensor,
    *,
    scale: float,
    partition: int,
    workspace: DecodeWorkspace,
    bulk: bool | None = None,
) -> None:
    """``out = softmax(q K^T * scale) V``, one query row a sequence, over the paged cache.

    ``out`` float16 ``[rows, heads, head_dim]``, contiguous; ``q`` the same, where rows may be
    further apart (a slice of the QKV rows); ``block_tables`` int32 ``[rows, columns]``, rows may
    be further apart, ``columns * block_size`` being the longest context of the launch; ``lens``
    int32 ``[rows]``: tokens in the cache, the current one included. A row of length 0 is padding:
    it reads no KV and writes zeros. Query head ``h`` reads KV head ``h // (heads // kv_heads)``.
    ``partition`` as from ``partition_for``. Specification: ``reference_decode.paged_decode``.

    The result is the same bits in every launch with the same inputs. Launches that share
    ``workspace`` must be on one stream. ``bulk`` copies KV with Hopper's copy engine, which is the
    default where there is one. Raises ValueError naming the argument.
    """
    rows, heads = _check_decode(out, q, kv, block_tables, lens)
    group = heads // kv.kv_heads
    if partition < TILE_TOKENS or partition % TILE_TOKENS:
        raise ValueError(f"partition must be a multiple of {TILE_TOKENS}, got {partition}")
    parts = partitions(block_tables.shape[1] * kv.block_size, partition)
    if parts > PARTITIONS_MAX:
        raise ValueError(
            f"partition {partition} cuts {block_tables.shape[1] * kv.block_size} tokens into "
            f"{parts} partitions, at most {PARTITIONS_MAX} are allowed"
        )
    vectors = rows * heads * parts
    if workspace.partial_out.numel() < vectors * kv.head_dim or (
        workspace.partial_ml.numel() < 2 * vectors
    ):
        raise ValueError(
            f"workspace is too small for {rows} rows, {heads} heads and {parts} partitions of "
            f"head_dim {kv.head_dim}"
        )
    if workspace.tickets.numel() < rows * kv.kv_heads:
        raise ValueError(
            f"workspace has {workspace.tickets.numel()} tickets, {rows} rows of {kv.kv_heads} KV "
            f"heads need {rows * kv.kv_heads}"
        )
    _same_device(
        out.device,
        q=q,
        storage=kv.storage,
        block_tables=block_tables,
        lens=lens,
        workspace=workspace.partial_out,
    )
    spec = decode_spec(
        kv.format, kv.head_dim, group, bulk=_copies_in_bulk(out.device) if bulk is None else bulk
    )
    args = (
        out,
        workspace.partial_out,
        workspace.partial_ml,
        workspace.tickets,
        q,
        kv.storage,
        block_tables,
        lens,
        np.int64(kv.block_bytes),
        np.int64(kv.k_offset),
        np.int64(kv.v_offset),
        np.int64(kv.scale_offset),
        np.int32(q.stride(0)),
        np.int32(block_tables.stride(0)),
        np.int32(block_tables.shape[1]),
        np.int32(group),
        np.int32((kv.block_size // TILE_TOKENS).bit_length() - 1),
        np.int32(partition),
        np.float32(scale * math.log2(math.e)),
    )
    launch(spec, (kv.kv_heads, rows, parts), args, shared_bytes=spec.shared_bytes)


@functools.cache
def decode_spec(
    kv_format: int,
    head_dim: int,
    group: int,
    *,
    bulk: bool = False,
) -> KernelSpec:
    """The instance of ``paged_decode`` for a pool and ``group`` query heads to a KV head.

    Eight warps keep more bytes under way, and pay where their copies cost few instructions.
    """
    k_bytes = 2 if kv_format in (KV_FP16, KV_K16V8) else 1
    v_bytes = 2 if kv_format == KV_FP16 else 1
    warps = 8 if bulk or k_bytes + v_bytes == 2 else 4
    stages = 2
    columns = 1 if group <= 8 else 2
    stage = TILE_TOKENS * head_dim * (k_bytes + v_bytes)
    if kv_format == KV_INT8:
        stage += 4 * TILE_TOKENS
    sums = warps * 8 * columns * (head_dim + 4) * 4
    parameters = kv_format, head_dim, columns, warps, stages, int(bulk)
    return KernelSpec(
        "decode_attention.cu",
        f"paged_decode<{', '.join(map(str, parameters))}>",
        32 * warps,
        max(warps * stages * stage, sums),
        overlaps=bulk,  # narrow copies of the other kind pass through L1
    )


@functools.cache
def _copies_in_bulk(device: torch.device) -> bool:
    return device.type == "cuda" and device_target() == _BULK_TARGET


def device_specs(
    kv_format: int, head_dim: int, group: int, device: torch.device | str
) -> Iterator[KernelSpec]:
    """What launches over such a pool on ``device`` need: compile it before the first request."""
    yield decode_spec(kv_format, head_dim, group, bulk=_copies_in_bulk(torch.device(device)))


def specs_for(target: str) -> Iterator[KernelSpec]:
    """Every kernel instance that this module launches where kernels are compiled for ``target``."""
    bulk = target == _BULK_TARGET
    for kv_format, head_dim, group in itertools.product(KV_FORMATS, HEAD_DIMS, (8, GROUP_MAX)):
        yield decode_spec(kv_format, head_dim, group, bulk=bulk)


def _check_decode(
    out: Tensor, q: Tensor, kv: KvView, block_tables: Tensor, lens: Tensor
) -> tuple[int, int]:
    """Rows and heads of a decode launch; ValueError names the argument that does not fit."""
    if q.dim() != 3 or q.dtype != torch.float16 or q.shape[2] != kv.head_dim:
        raise ValueError(f"q must be float16 [rows, heads, {kv.head_dim}], got {_describe(q)}")
    rows, heads, head_dim = q.shape
    if not rows:
        raise ValueError("q has no rows")
    if q.stride(2) != 1 or q.stride(1) != head_dim or q.stride(0) % 8 or q.data_ptr() % _ALIGNMENT:
        raise ValueError(
            f"q must have contiguous heads, and rows at multiples of 16 bytes, got strides "
            f"{q.stride()} at {q.data_ptr():#x}"
        )
    if not heads or heads % kv.kv_heads or heads // kv.kv_heads > GROUP_MAX:
        raise ValueError(
            f"q has {heads} heads for {kv.kv_heads} KV heads; it must be a multiple, at most "
            f"{GROUP_MAX} times as many"
        )
    if out.shape != q.shape or out.dtype != torch.float16 or not out.is_contiguous():
        raise ValueError(f"out must be contiguous float16 {list(q.shape)}, got {_describe(out)}")
    if (
        block_tables.dim() != 2
        or block_tables.dtype != torch.int32
        or block_tables.shape[0] != rows
        or not block_tables.shape[1]
        or block_tables.stride(1) != 1
    ):
        raise ValueError(
            f"block_tables must be int32 [{rows}, columns] with adjacent columns, got "
            f"{_describe(block_tables)}"
        )
    if lens.shape != (rows,) or lens.dtype != torch.int32 or not lens.is_contiguous():
        raise ValueError(f"lens must be contiguous int32 [{rows}], got {_describe(lens)}")
    return rows, heads


def _same_device(device: torch.device, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, out on {device}")


def _describe(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
