"""What every kernel must compute, said plainly: float64, loops, no tricks.

These functions *are* the specification (one for each kernel or backend operation); kernels and
backends are tested against them. Nothing at run time uses them.

Shapes: ``tokens`` rows; K and V per token ``[tokens, kv_heads, head_dim]``; paged K and V
``[blocks, kv_heads, block_size, head_dim]`` with scales ``[blocks, kv_heads, block_size]``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

INT8_SCALE_MIN = 2.0**-14
"""Smallest normal float16."""

INT8_SCALE_MAX = 65504.0
"""Largest finite float16."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: ``[rows, in]`` and ``[out, in]`` to float64 ``[rows, out]``."""
    result = x.double() @ weight.double().T
    return result if bias is None else result + bias.double()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, float64."""
    wide = x.double()
    return wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


def rope(x: Tensor, positions: Sequence[int], inverse_frequencies: Sequence[float]) -> Tensor:
    """Rotate ``(x[i], x[i + half])`` by ``position * inverse_frequencies[i]``.

    ``x`` ``[rows, heads, head_dim]``; float64 of the same shape.
    """
    half = x.shape[-1] // 2
    wide, result = x.double(), torch.empty(x.shape, dtype=torch.float64)
    for row, position in enumerate(positions):
        for pair, frequency in enumerate(inverse_frequencies):
            cos, sin = math.cos(position * frequency), math.sin(position * frequency)
            low, high = wide[row, :, pair], wide[row, :, pair + half]
            result[row, :, pair] = low * cos - high * sin
            result[row, :, pair + half] = high * cos + low * sin
    return result


def silu_mul(gate_up: Tensor) -> Tensor:
    """``gate * sigmoid(gate) * up`` of ``[rows, 2 * width]``, gate first; float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def quantise_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """INT8 with one float16 scale for each vector of the last axis.

    scale = max(float16(absmax / 127), 2^-14), at most 65,504; q = round(value / scale), half to
    even, clamped to ±127, with the *rounded* scale. Returns int8 ``[..., head_dim]`` and float16
    ``[...]``.
    """
    flat = values.reshape(-1, values.shape[-1])
    quantised = torch.empty(flat.shape, dtype=torch.int8)
    scales = torch.empty(flat.shape[0], dtype=torch.float16)
    for row, vector in enumerate(flat):
        # One float32 division, then one rounding to float16: what a kernel does.
        scale = (vector.float().abs().max() / 127).to(torch.float16)
        scales[row] = min(max(float(scale), INT8_SCALE_MIN), INT8_SCALE_MAX)
        for column, value in enumerate((vector.float() / scales[row].float()).tolist()):
            quantised[row, column] = max(-127, min(127, round(value)))
    return quantised.view(values.shape), scales.view(values.shape[:-1])


def saturating_cast(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    """Clamp to the largest finite value of ``dtype``, then cast.

    Returns the tensor and how many elements were clamped.
    """
    limit = torch.finfo(dtype).max
    wide = values.double()
    clamped = torch.where(wide > limit, limit, torch.where(wide < -limit, -limit, wide))
    return clamped.to(torch.float32).to(dtype), int((clamped != wide).sum())


def kv_write(
    pages: Tensor, scales: Tensor | None, values: Tensor, slots: Sequence[tuple[int, int]]
) -> int:
    """Store K (or V) of some tokens in place; returns how many elements were clamped.

    ``pages`` is paged K or V in its storage dtype, ``scales`` its float16 scales (int8 only);
    token ``i`` goes to block and offset ``slots[i]``.
    """
    clamped = 0
    for token, (block, offset) in enumerate(slots):
        if scales is not None:
            quantised, scale = quantise_int8(values[token])
            pages[block, :, offset] = quantised
            scales[block, :, offset] = scale
            continue
        stored, count = saturating_cast(values[token], pages.dtype)
        clamped += count
        pages.view(_bits(pages.dtype))[block, :, offset] = stored.view(_bits(pages.dtype))
    return clamped


def kv_read(
    pages: Tensor, scales: Tensor | None, block_table: Sequence[int], tokens: int
) -> Tensor:
    """The first ``tokens`` tokens of one request, float64 ``[tokens, kv_heads, head_dim]``."""
    block_size = pages.shape[2]
    rows = []
    for token in range(tokens):
        block, offset = block_table[token // block_size], token % block_size
        row = pages[block, :, offset].to(torch.float64)
        if scales is not None:
            row = row * scales[block, :, offset, None].double()
        rows.append(row)
    return torch.stack(rows)


def attention(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """Causal attention of one request's rows at positions ``start ...``, float64.

    ``q`` ``[rows, heads, head_dim]``, ``k`` and ``v`` ``[tokens, kv_heads, head_dim]``; query head
    ``h`` reads KV head ``h // (heads // kv_heads)``; scores are scaled by ``head_dim^-0.5``.
    """
    rows, heads, head_dim = q.shape
    per_kv = heads // k.shape[1]
    result = torch.empty((rows, heads, head_dim), dtype=torch.float64)
    for row in range(rows):
        keys = start + row + 1
        for head in range(heads):
            scores = k[:keys, head // per_kv].double() @ q[row, head].double() * head_dim**-0.5
            weights = torch.softmax(scores, dim=0)
            result[row, head] = weights @ v[:keys, head // per_kv].double()
    return result


def _bits(dtype: torch.dtype) -> torch.dtype:
    """An integer type of the same width: torch's index operations do not know float8."""
    return torch.uint8 if dtype.itemsize == 1 else torch.int16
