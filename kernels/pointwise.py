"""What is not a product or attention: embedding, norms, RoPE with the KV write, SwiGLU, copies.

Activations are half, the residual float32. Every function checks its tensors and raises ValueError
naming the one that does not fit; ``kernels.reference_pointwise`` says exactly what each computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.attention import KV_FORMATS, KvView
from deepinfer.kernels.compiler import KernelSpec, launch
from deepinfer.kernels.nested import NestedWeight

COLUMNS_MAX: Final = 8192
"""The widest row that ``rms_norm`` and ``residual_add_norm`` hold in registers."""

_SUM_COLUMNS: Final = 16
"""Columns of one partial sum of squares; as ``kernels.linear`` writes them."""
_ROPE_WARPS: Final = 4
_COPY_BYTES: Final = 32768
"""Bytes that one CTA of ``copy_blocks`` copies, about."""

_EMBED: Final = KernelSpec("embed.cu", "embed", 128)
_EMBED_NESTED: Final = KernelSpec("embed.cu", "embed_nested", 128)
_RMS_NORM: Final = KernelSpec("rms_norm.cu", "rms_norm", 256)
_RESIDUAL_ADD_NORM: Final = KernelSpec("residual_add_norm.cu", "residual_add_norm", 256)
_SWIGLU: Final = KernelSpec("swiglu.cu", "swiglu", 256)
_COPY_BLOCKS: Final = KernelSpec("copy_blocks.cu", "copy_blocks", 256)
_ROPE_KV_WRITE: Final = {
    kv: KernelSpec("rope_kv_write.cu", f"rope_kv_write<{kv}>", 32 * _ROPE_WARPS, overlaps=True)
    for kv in KV_FORMATS
}


def specs() -> Iterator[KernelSpec]:
    """Every kernel that this module may launch."""
    yield from (_EMBED, _EMBED_NESTED, _RMS_NORM, _RESIDUAL_ADD_NORM, _SWIGLU, _COPY_BLOCKS)
    yield from _ROPE_KV_WRITE.values()


def embed(
    residual: Tensor,
    hidden: Tensor | None,
    sumsq: Tensor | None,
    token_ids: Tensor,
    embedding: Tensor | NestedWeight,
    gamma: Tensor | None,
) -> None:
    """Start a step: ``residual`` float32 ``[rows, columns]`` = rows of ``embedding``.

    ``token_ids`` int32 ``[rows]``, all below ``vocab``; ``embedding`` half ``[vocab, columns]``, or
    nested: then its FP16 values, or those of FP8 if it has no lower plane.
    With ``hidden`` half ``[rows, columns]``, ``gamma`` half ``[columns]`` and ``sumsq`` float32
    ``[rows, ceil(columns / 16)]`` (all three, or none) the first norm is begun as
    ``linear_residual`` does it: ``hidden = residual * gamma``, saturating, and sums of squares.
    ``columns`` is a multiple of 8.
    """
    device = residual.device
    _check("residual", residual, torch.float32, (None, None), device)
    rows, columns = residual.shape
    _check_columns(columns, 8, None)
    _check("token_ids", token_ids, torch.int32, (rows,), device)
    table: tuple[Tensor | None, ...]
    if isinstance(embedding, NestedWeight):
        _check("embedding.upper", embedding.upper, torch.uint8, (None, columns), device)
        spec = _EMBED_NESTED
        table = (
            embedding.upper,
            embedding.lower,
            embedding.row_shift,
            embedding.outlier_starts,
            embedding.outlier_columns,
            embedding.outlier_values,
        )
    else:
        _check("embedding", embedding, torch.float16, (None, columns), device)
        spec, table = _EMBED, (embedding,)
    partials = -(-columns // _SUM_COLUMNS)
    if hidden is not None and sumsq is not None and gamma is not None:
        _check("hidden", hidden, torch.float16, (rows, columns), device)
        _check("sumsq", sumsq, torch.float32, (rows, partials), device)
        _check("gamma", gamma, torch.float16, (columns,), device)
    elif not (hidden is None and sumsq is None and gamma is None):
        raise ValueError("hidden, sumsq and gamma must all be given, or none of them")
    if rows == 0:
        return
    launch(
        spec,
        (rows, 1, 1),
        (
            residual,
            hidden,
            sumsq,
            token_ids,
            *table,
            gamma,
            np.int32(columns),
            np.int32(partials),
        ),
    )


def rms_norm(out: Tensor, residual: Tensor, gamma: Tensor, eps: float) -> None:
    """``out`` half = ``residual / sqrt(mean(residual^2) + eps) * gamma``, saturating.

    ``residual`` float32 ``[rows, columns]``, ``gamma`` half ``[columns]``; ``columns`` is a
    multiple of 4 up to ``COLUMNS_MAX``.
    """
    rows, columns = _check_norm(out, residual, gamma)
    if rows:
        launch(
            _RMS_NORM,
            (rows, 1, 1),
            (out, residual, gamma, np.int32(columns), np.float32(eps)),
        )


def residual_add_norm(
    out: Tensor, residual: Tensor, branch: Tensor, gamma: Tensor, eps: float
) -> None:
    """``residual += branch`` (half ``[rows, columns]``), then ``rms_norm`` of it into ``out``."""
    rows, columns = _check_norm(out, residual, gamma)
    _check("branch", branch, torch.float16, (rows, columns), residual.device)
    if rows:
        launch(
            _RESIDUAL_ADD_NORM,
            (rows, 1, 1),
            (out, residual, branch, gamma, np.int32(columns), np.float32(eps)),
        )


def swiglu(out: Tensor, gate_up: Tensor) -> None:
    """``out`` half ``[rows, width]`` = ``silu(gate) * up``, saturating.

    ``gate_up`` half ``[rows, 2 width]`` has eight columns of gate, eight of up, and so on, as
    ``linear.interleave_gate_up`` orders them; ``width`` is a multiple of 8.
    """
    _check("out", out, torch.float16, (None, None), out.device)
    rows, width = out.shape
    _check_columns(width, 8, None)
    _check("gate_up", gate_up, torch.float16, (rows, 2 * width), out.device)
    eights = rows * width // 8
    if eights:
        launch(_SWIGLU, (-(-eights // _SWIGLU.threads), 1, 1), (out, gate_up, np.int64(eights)))


def rope_kv_write(
    qkv: Tensor,
    kv: KvView,
    positions: Tensor,
    sequences: Tensor,
    block_tables: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    saturations: Tensor | None = None,
) -> None:
    """Norm and rotate q and k, and store k and v of every row in the pool.

    ``qkv`` half ``[rows, (heads + 2 kv_heads) * head_dim]``: q is replaced by its result, k and v
    are left as they are. ``positions`` int32 ``[rows]``: the token's place in its sequence, below
    the length of ``cos``; negative marks padding, of which nothing is written. ``sequences`` int32
    ``[rows]``: the row of ``block_tables`` (int32 ``[sequences, blocks]``, rows may be strided).
    ``cos`` and ``sin`` float32 ``[positions, rotary_dim / 2]`` rotate dimensions ``(i, i +
    rotary_dim / 2)``; ``rotary_dim`` is a multiple of 4. ``q_norm`` and ``k_norm`` half
    ``[head_dim]`` are weights of an RMS norm over each head, before the rotation.

    k and v are rounded to half, then stored as ``kv.format`` says, bit for bit as the CPU backend
    stores those halves. ``saturations`` int64 ``[1]`` grows by the number of elements that were
    clamped (NaN counts).
    """
    device = qkv.device
    _check("qkv", qkv, torch.float16, (None, None), device)
    rows, width = qkv.shape
    if heads < 1 or width != (heads + 2 * kv.kv_heads) * kv.head_dim:
        raise ValueError(
            f"qkv has {width} columns; {heads} query heads and twice {kv.kv_heads} KV heads of "
            f"{kv.head_dim} need {(heads + 2 * kv.kv_heads) * kv.head_dim}"
        )
    _check("kv.storage", kv.storage, torch.uint8, (None, kv.block_bytes), device)
    _check("positions", positions, torch.int32, (rows,), device)
    _check("sequences", sequences, torch.int32, (rows,), device)
    if (
        block_tables.dtype != torch.int32
        or block_tables.dim() != 2
        or block_tables.stride(1) != 1
        or block_tables.device != device
    ):
        raise ValueError(
            f"block_tables must be int32 [sequences, blocks] with adjacent columns on {device}, "
            f"got {_describe(block_tables)}"
        )
    _check("cos", cos, torch.float32, (None, None), device)
    _check("sin", sin, torch.float32, (cos.shape[0], cos.shape[1]), device)
    rotary_dim = 2 * cos.shape[1]
    if rotary_dim % 4 or rotary_dim > kv.head_dim:
        raise ValueError(
            f"cos has {cos.shape[1]} columns: rotary_dim = {rotary_dim} must be a multiple of 4 up "
            f"to head_dim = {kv.head_dim}"
        )
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            _check(name, norm, torch.float16, (kv.head_dim,), device)
    if saturations is not None:
        _check("saturations", saturations, torch.int64, (1,), device)
    if rows == 0:
        return
    launch(
        _ROPE_KV_WRITE[kv.format],
        (rows, -(-(heads + 2 * kv.kv_heads) // _ROPE_WARPS), 1),
        (
            qkv,
            kv.storage,
            positions,
            sequences,
            block_tables,
            cos,
            sin,
            q_norm,
            k_norm,
            saturations,
            np.int32(heads),
            np.int32(kv.kv_heads),
            np.int32(kv.head_dim),
            np.int32(rotary_dim),
            np.float32(eps),
            np.int32(block_tables.stride(0)),
            np.int32(kv.block_size.bit_length() - 1),
            np.int64(kv.block_bytes),
            np.int64(kv.k_offset),
            np.int64(kv.v_offset),
            np.int64(kv.scale_offset),
        ),
    )


def copy_blocks(storage: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks of a pool: ``pairs`` int32 ``[count, 2]`` of (from, to) ids.

    ``storage`` uint8 ``[blocks, block_bytes]``, ``block_bytes`` a multiple of 16. No id may be
    both a source and a target, or a target twice.
    """
    device = storage.device
    _check("storage", storage, torch.uint8, (None, None), device)
    _check("pairs", pairs, torch.int32, (None, 2), device)
    block_bytes = storage.shape[1]
    if block_bytes % 16 or storage.data_ptr() % 16:
        raise ValueError(
            f"storage's address and block_bytes must be multiples of 16, got "
            f"{storage.data_ptr():#x} and {block_bytes}"
        )
    if pairs.shape[0] == 0 or block_bytes == 0:
        return
    launch(
        _COPY_BLOCKS,
        (pairs.shape[0], -(-block_bytes // _COPY_BYTES), 1),
        (storage, pairs, np.int64(block_bytes // 16)),
    )


def _check_norm(out: Tensor, residual: Tensor, gamma: Tensor) -> tuple[int, int]:
    device = residual.device
    _check("residual", residual, torch.float32, (None, None), device)
    rows, columns = residual.shape
    _check_columns(columns, 4, COLUMNS_MAX)
    _check("out", out, torch.float16, (rows, columns), device)
    _check("gamma", gamma, torch.float16, (columns,), device)
    return rows, columns


def _check_columns(columns: int, multiple: int, most: int | None) -> None:
    if columns == 0 or columns % multiple or (most is not None and columns > most):
        limit = "" if most is None else f" up to {most}"
        raise ValueError(f"rows must have a multiple of {multiple}{limit} columns, got {columns}")


def _check(
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    device: torch.device,
) -> None:
    fits = (
        tensor.dtype == dtype
        and tensor.dim() == len(shape)
        and all(
            want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
        )
        and tensor.is_contiguous()
        and tensor.device == device
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{name} must be contiguous {dtype} [{wanted}] on {device}, got {_describe(tensor)}"
        )


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
