"""What the kernels of ``pointwise`` must compute, in float64; see there for the arguments.

Inputs are taken as they are; what a kernel stores as half is within half's range here too.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF_MAX = 65504.0


def embed(token_ids: Tensor, embedding: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The residual, ``residual * gamma``, and sums of squares over 16 columns each."""
    residual = embedding[token_ids.long()].double()
    padded = torch.nn.functional.pad(residual, (0, -residual.shape[1] % 16))
    sums = padded.square().reshape(len(residual), -1, 16).sum(2)
    return residual, saturated(residual * gamma.double()), sums


def rms_norm(residual: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """``residual / sqrt(mean(residual^2) + eps) * gamma`` over the last axis."""
    wide = residual.double()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return saturated(wide * rstd * gamma.double())


def residual_add_norm(
    residual: Tensor, branch: Tensor, gamma: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum, and its RMS norm."""
    total = residual.double() + branch.double()
    return total, rms_norm(total, gamma, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of columns interleaved in eights."""
    both = gate_up.double().reshape(gate_up.shape[0], -1, 2, 8)
    gate, up = both[:, :, 0].flatten(1), both[:, :, 1].flatten(1)
    return saturated(gate * torch.sigmoid(gate) * up)


def rope_qkv(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """q ``[rows, heads, head_dim]``, k and v ``[rows, kv_heads, head_dim]`` before rounding.

    k is *not* brought into half's range, so that it shows what saturates. Positions must not be
    negative.
    """
    parts = qkv.double().view(len(qkv), heads + 2 * kv_heads, head_dim)
    q, k, v = parts[:, :heads], parts[:, heads:-kv_heads], parts[:, -kv_heads:]
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    at = positions.long()
    angles = cos[at].double()[:, None], sin[at].double()[:, None]
    return saturated(_rotated(q, *angles)), _rotated(k, *angles), v


def saturated(values: Tensor) -> Tensor:
    """Brought into half's range."""
    return values.clamp(-HALF_MAX, HALF_MAX)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)
