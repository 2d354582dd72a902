"""Inputs for the pointwise kernels, and what their outputs are held to.

Used with the emulator and, unchanged, on a card. Outputs are NaN and pools are filled with ones
before a kernel runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels import attention, pointwise, reference_pointwise
from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.workers.backends.base import RowSpan
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.pool import PagedPool

FORMATS: Final = {
    "fp16": attention.KV_FP16,
    "int8": attention.KV_INT8,
    "fp8": attention.KV_E4M3,
    "fp8_e5m2": attention.KV_E5M2,
    "k16v8": attention.KV_K16V8,
}
_LAYERS: Final = 2
_LAYER: Final = 1
_EPS: Final = 1e-6


def normal(*shape: int, device: str, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def poison(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device=device)


def assert_rounded(out: Tensor, exact: Tensor) -> None:
    """``out`` half is ``exact`` rounded, of which float32 arithmetic knew all but its own error.

    That error is at most 2^-19 of the value (``__expf`` of -17 is the worst) plus 2^-21 of the
    largest value of the row (sums that cancel).
    """
    assert out.dtype == torch.float16
    assert torch.isfinite(out).all()
    wide = exact.double()
    unit = 2.0 ** (torch.frexp(wide.abs().clamp(min=2.0**-14)).exponent.double() - 11)
    largest = wide.abs().amax(-1, keepdim=True)
    allowed = 0.5 * unit + wide.abs() * 2.0**-19 + largest * 2.0**-21
    worst = float(((out.double() - wide).abs() / allowed).max())
    assert worst <= 1, f"error is {worst:.3f} of what is allowed"


def assert_float32(out: Tensor, exact: Tensor) -> None:
    """``out`` is ``exact`` within a few float32 roundings."""
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact, rtol=2.0**-21, atol=0)


def check_embed(rows: int, columns: int, *, device: str = "cpu") -> None:
    embedding = normal(19, columns, device=device).half()
    embedding[3, 1] = 60000  # times its gamma: beyond half's range
    gamma = (1 + normal(columns, device=device, seed=1)).half()
    gamma[1] = -2
    token_ids = (torch.arange(rows, dtype=torch.int32, device=device) * 7 + 3) % 19
    residual = poison(rows, columns, dtype=torch.float32, device=device)
    hidden = poison(rows, columns, dtype=torch.float16, device=device)
    sumsq = poison(rows, -(-columns // 16), dtype=torch.float32, device=device)
    pointwise.embed(residual, hidden, sumsq, token_ids, embedding, gamma)
    expected, scaled, sums = reference_pointwise.embed(token_ids, embedding, gamma)
    assert torch.equal(residual.double(), expected)
    assert_rounded(hidden, scaled)
    assert float(hidden[0, 1]) == -65504
    assert_float32(sumsq, sums)
    residual.fill_(math.nan)
    pointwise.embed(residual, None, None, token_ids, embedding, None)
    assert torch.equal(residual.double(), expected)


def check_norms(rows: int, columns: int, *, device: str = "cpu") -> None:
    residual = normal(rows, columns, device=device) * 300
    residual[0, 2] = 24346.0
    residual[1:2] *= 1e-6  # as small as the square root of eps
    branch = normal(rows, columns, device=device, seed=1).half()
    gamma = (1 + normal(columns, device=device, seed=2)).half()
    gamma[2] = 60000
    out = poison(rows, columns, dtype=torch.float16, device=device)
    pointwise.rms_norm(out, residual, gamma, _EPS)
    assert_rounded(out, reference_pointwise.rms_norm(residual, gamma, _EPS))
    out.fill_(math.nan)
    total, expected = reference_pointwise.residual_add_norm(residual, branch, gamma, _EPS)
    pointwise.residual_add_norm(out, residual, branch, gamma, _EPS)
    torch.testing.assert_close(residual.double(), total, rtol=0, atol=2.0**-9)  # half an ulp
    assert_rounded(out, expected)


def check_swiglu(rows: int, width: int, *, device: str = "cpu") -> None:
    gate_up = (normal(rows, 2 * width, device=device) * 6).half()
    gate_up[0, :8] = torch.tensor([0, -0.0, 65504, -65504, -17, -88, 300, 1e-7])
    gate_up[0, 8:16] = torch.tensor([1, 1, 2, 65504, 65504, 65504, 300, 300])
    out = poison(rows, width, dtype=torch.float16, device=device)
    pointwise.swiglu(out, gate_up)
    assert_rounded(out, reference_pointwise.swiglu(gate_up))
    assert float(out[0, 2]) == 65504


def check_copy_blocks(block_bytes: int, *, device: str = "cpu") -> None:
    storage = torch.randint(0, 256, (9, block_bytes), dtype=torch.uint8).to(device)
    pairs = torch.tensor([(8, 0), (3, 5), (8, 2)], dtype=torch.int32, device=device)
    expected = storage.clone()
    expected[[0, 5, 2]] = storage[[8, 3, 8]]
    pointwise.copy_blocks(storage, pairs)
    assert torch.equal(storage, expected)


@dataclass(frozen=True, slots=True)
class Rope:
    """A shape of ``rope_kv_write``."""

    head_dim: int
    rotary_dim: int
    heads: int
    kv_heads: int
    block_size: int
    normed: bool


ROPES: Final = (
    Rope(64, 64, 3, 1, 16, False),
    Rope(96, 96, 4, 4, 16, False),
    Rope(128, 128, 8, 2, 32, True),
    Rope(128, 32, 2, 1, 16, False),
    Rope(96, 36, 5, 1, 32, True),
)


def check_rope_kv_write(dtype: str, shape: Rope, *, device: str = "cpu") -> None:
    """Against float64 for q, and against the CPU backend, byte for byte, for the whole pool."""
    spans = [RowSpan(0, 5, (4,)), RowSpan(31, 2, (6, 1, 7)), RowSpan(17, 1, (5, 3))]
    # Padding between the rows of the second span, and at the end.
    positions = torch.tensor([0, 1, 2, 3, 4, 31, -1, 32, 17, -1], dtype=torch.int32, device=device)
    sequences = torch.tensor([0, 0, 0, 0, 0, 1, 9, 1, 2, 9], dtype=torch.int32, device=device)
    tables = torch.full((3, 5), 1 << 30, dtype=torch.int32, device=device)
    for row, span in enumerate(spans):
        tables[row, : len(span.block_table)] = torch.tensor(span.block_table, dtype=torch.int32)
    real = positions >= 0
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    qkv = normal(len(positions), width, device=device)
    qkv = (qkv * 2.0 ** (5 * normal(len(positions), 1, device=device, seed=3))).half()
    heads = qkv.view(len(positions), -1, shape.head_dim)
    heads[1, -2 * shape.kv_heads :] *= 2.0**-16  # scales at their floor, codes of subnormals
    heads[3, -2 * shape.kv_heads :] = 0
    if not shape.normed:
        heads[2] = 60000  # beyond every 8-bit code, and rotated beyond half
    qkv[~real] = math.nan
    given = qkv.clone()
    half = shape.rotary_dim // 2
    angles = torch.arange(40)[:, None] * 10000.0 ** -(torch.arange(half) / half)
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    norm = (1 + 0.3 * normal(2, shape.head_dim, device=device, seed=4)).half()
    q_norm, k_norm = (norm[0], norm[1]) if shape.normed else (None, None)
    q, exact_k, v = reference_pointwise.rope_qkv(
        given[real],
        positions[real],
        cos,
        sin,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=_EPS,
    )

    def stored(name: str) -> tuple[PagedPool, Tensor, int]:
        pool = _pool(name, shape, device)
        changed, count = given.clone(), torch.full((1,), 5, device=device)
        pointwise.rope_kv_write(
            changed,
            _view(pool),
            positions,
            sequences,
            tables[:, :4],
            cos,
            sin,
            heads=shape.heads,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=_EPS,
            saturations=count,
        )
        return pool, changed, int(count) - 5

    halves, changed, _ = stored("fp16")
    result = changed.view(len(positions), -1, shape.head_dim)
    assert_rounded(result[real, : shape.heads], q)
    assert torch.equal(result[real, shape.heads :], heads[real, shape.heads :])
    assert changed[~real].isnan().all()

    at = [
        (span.block_table[i // shape.block_size], i % shape.block_size)
        for span in spans
        for i in range(span.start, span.start + span.count)
    ]
    blocks, offsets = (list(each) for each in zip(*at, strict=True))
    k16, v16 = (each(_LAYER)[blocks, :, offsets] for each in (halves.k, halves.v))
    assert_rounded(k16, reference_pointwise.saturated(exact_k))
    assert torch.equal(v16.double(), v)

    pool, _, clamped = stored(dtype)
    expected = _pool(dtype, shape, "cpu")
    backend = CpuBackend(threads=torch.get_num_threads())
    plan = backend.plan(spans, expected.layout, shape.heads)
    backend.kv_write(expected, _LAYER, k16.float().cpu(), v16.float().cpu(), plan)
    assert torch.equal(pool.storage.cpu(), expected.storage)
    # The CPU backend, given halves, sees all that was clamped but what went beyond half.
    beyond = expected.k(_LAYER).dtype in (torch.float16, torch.int8)
    assert clamped == backend.kv_saturations + beyond * int((exact_k.abs() > 65504).sum())
    assert shape.normed or clamped > 0


def _pool(dtype: str, shape: Rope, device: str) -> PagedPool:
    layout = KvLayout(
        resolve_kv_dtype(dtype), _LAYERS, shape.kv_heads, shape.head_dim, shape.block_size
    )
    pool = PagedPool(layout, 9, device)
    pool.storage.fill_(0xFF)
    return pool


def _view(pool: PagedPool) -> attention.KvView:
    layout = pool.layout
    return attention.KvView(
        pool.storage,
        layout.block_bytes,
        layout.k_offset(_LAYER),
        layout.v_offset(_LAYER),
        layout.k_scale_offset(_LAYER) if layout.dtype.scaled else 0,
        layout.kv_heads,
        layout.head_dim,
        layout.block_size,
        FORMATS[layout.dtype.name],
    )
