"""Linear layers of a few rows: FP16 and 4-bit weights, with what follows them in the same kernel.

Every function computes ``x @ weight.T`` for ``x`` half ``[M, K]`` with M up to ``max_rows(weight)``
and finishes it in one of four ways; ``kernels.reference_linear`` says exactly what they mean.
Sums are FP32 in an order that depends on N, K and the card, not on M: a row's result is the same
bits alone and in a batch.

RMSNorm is split: whoever writes the residual also writes ``h = residual * gamma`` as half, and
FP32 sums of the residual's squares; the linear that reads ``h`` multiplies its result by
``rstd = rsqrt(sum / K + eps)``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from deepinfer.kernels.compiler import KernelSpec, launch

TILE_ROWS: Final = 16
"""Rows of a weight that one tensor-core tile takes."""

F16_ROWS_MAX: Final = 16
W4_ROWS_MAX: Final = 64

_NORM, _SWIGLU, _RESIDUAL, _LOGITS = range(4)
_NIBBLE_BYTES: Final = ((0, 2), (4, 6), (1, 3), (5, 7))
"""Which two of a word's eight elements each byte holds, low nibble first."""
_ZERO_MAX: Final = 16
"""Zero points are 4-bit, plus one in GPTQ's first format."""


@dataclass(frozen=True, slots=True, eq=False)
class F16Weight:
    """``weight`` half ``[N, K]`` contiguous, ``bias`` half or float32 ``[N]`` (kept as float32).

    K is a multiple of 32.
    """

    weight: Tensor
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        _check("F16Weight.weight", self.weight, torch.float16, (None, None))
        _check_width("F16Weight.weight", self.weight.shape[1])
        object.__setattr__(self, "bias", _bias("F16Weight.bias", self.bias, self.weight))

    @property
    def rows(self) -> int:
        """N."""
        return self.weight.shape[0]

    @property
    def columns(self) -> int:
        """K."""
        return self.weight.shape[1]

    @property
    def device(self) -> torch.device:
        return self.weight.device


@dataclass(frozen=True, slots=True, eq=False)
class W4Weight:
    """4-bit weights: ``scales[n, k // group] * (code[n, k] - zeros[n, k // group])``.

    ``codes`` int32 ``[N, K' / 8]`` with K' = K rounded up to 128, in the order that ``pack_w4``
    writes and ``csrc/w4.cuh`` documents; ``scales`` half ``[N, K / group]``; ``zeros`` uint8 of the
    same shape, 0 to 16, or None for 8 everywhere; ``bias`` half or float32 ``[N]`` (kept as
    float32). ``group`` is a power of two from 32 up that divides K.
    """

    codes: Tensor
    scales: Tensor
    group: int
    zeros: Tensor | None = None
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        if self.group < 32 or self.group & (self.group - 1):
            raise ValueError(
                f"W4Weight.group must be a power of two from 32 up, got {self.group}"
            )
        _check("W4Weight.scales", self.scales, torch.float16, (None, None))
        _check_width("W4Weight.scales times group", self.columns)
        words = (self.columns + 127) // 128 * 16
        _check("W4Weight.codes", self.codes, torch.int32, (self.rows, words), self.device)
        if self.zeros is not None:
            shape = (self.scales.shape[0], self.scales.shape[1])
            _check("W4Weight.zeros", self.zeros, torch.uint8, shape, self.device)
        object.__setattr__(self, "bias", _bias("W4Weight.bias", self.bias, self.scales))

    @property
    def rows(self) -> int:
        """N."""
        return self.scales.shape[0]

    @property
    def columns(self) -> int:
        """K."""
        return self.scales.shape[1] * self.group

    @property
    def device(self) -> torch.device:
        return self.scales.device


Weight = F16Weight | W4Weight


@dataclass(frozen=True, slots=True)
class Plan:
    """How a launch is cut: 16 ``row_tiles`` rows of W and 8 ``column_tiles`` rows of X a CTA,
    K over ``warps`` warps, each with ``depth`` steps of weights in flight, and ``ahead`` (0 or 1)
    of X."""

    column_tiles: int
    row_tiles: int
    warps: int
    depth: int
    ahead: int

    @property
    def arguments(self) -> str:
        """The template arguments."""
        return ", ".join(
            str(value)
            for value in (self.column_tiles, self.row_tiles, self.warps, self.depth, self.ahead)
        )


# By (few tiles of rows for the card's SMs, column tiles).
_F16_PLANS: Final = {
    (True, 1): Plan(1, 1, 16, 2, 0),
    (True, 2): Plan(2, 1, 16, 2, 0),
    (False, 1): Plan(1, 1, 8, 4, 0),
    (False, 2): Plan(2, 1, 8, 4, 0),
}
_W4_PLANS: Final = {
    (True, 1): Plan(1, 1, 16, 2, 0),
    (True, 2): Plan(2, 1, 16, 2, 0),
    (False, 1): Plan(1, 1, 4, 2, 0),
    (False, 2): Plan(2, 2, 4, 2, 0),
}


def max_rows(weight: Weight) -> int:
    """The most rows of ``x`` that the functions of this module take with ``weight``."""
    return F16_ROWS_MAX if isinstance(weight, F16Weight) else W4_ROWS_MAX


def partials(rows: int) -> int:
    """How many sums of squares a row gets from ``linear_residual`` with a weight of ``rows``."""
    return -(-rows // TILE_ROWS)


def plan_for(weight: Weight, m: int, sm_count: int) -> Plan:
    """The measured best cut for ``m`` rows; ``warps`` (the order of the sums) ignores ``m``."""
    narrow = partials(weight.rows) <= 2 * sm_count
    table = _F16_PLANS if isinstance(weight, F16Weight) else _W4_PLANS
    return table[narrow, 1 if m <= 8 else 2]


def specs() -> Iterator[KernelSpec]:
    """Every kernel that this module may launch."""
    for plan in _F16_PLANS.values():
        yield _f16_spec(plan)
    for plan in _W4_PLANS.values():
        for group_chunks in (1, 2, 4):
            yield _w4_spec(group_chunks, plan)
    yield _EXPAND


def linear_norm(
    out: Tensor,
    x: Tensor,
    weight: Weight,
    *,
    sumsq: Tensor | None = None,
    eps: float = 0.0,
    plan: Plan | None = None,
) -> None:
    """``out`` half ``[M, N]`` = ``(x @ weight.T) * rstd + bias``, saturating.

    ``sumsq`` float32 ``[M, partials]`` gives ``rstd``; None means ``rstd = 1``. ``plan`` overrides
    ``plan_for``. Raises ValueError naming the argument that does not fit.
    """
    m = _rows(x, weight)
    _check("out", out, torch.float16, (m, weight.rows), x.device)
    _run(_NORM, out, x, weight, sumsq=sumsq, eps=eps, plan=plan)


def linear_logits(
    out: Tensor,
    x: Tensor,
    weight: Weight,
    *,
    sumsq: Tensor | None = None,
    eps: float = 0.0,
    plan: Plan | None = None,
) -> None:
    """As ``linear_norm`` with ``out`` float32 ``[M, N]``."""
    m = _rows(x, weight)
    _check("out", out, torch.float32, (m, weight.rows), x.device)
    _run(_LOGITS, out, x, weight, sumsq=sumsq, eps=eps, plan=plan)


def linear_swiglu(
    out: Tensor,
    x: Tensor,
    weight: Weight,
    *,
    sumsq: Tensor | None = None,
    eps: float = 0.0,
    plan: Plan | None = None,
) -> None:
    """``out`` half ``[M, N / 2]`` = ``silu(gate) * up``, saturating.

    ``weight``'s rows are those of ``interleave_gate_up``; gate and up are each
    ``(x @ weight.T) * rstd + bias``, as in ``linear_norm``.
    """
    m = _rows(x, weight)
    if weight.rows % TILE_ROWS:
        raise ValueError(
            f"weight has {weight.rows} rows; gate and up interleaved in eights have a multiple "
            f"of {TILE_ROWS}"
        )
    _check("out", out, torch.float16, (m, weight.rows // 2), x.device)
    _run(_SWIGLU, out, x, weight, sumsq=sumsq, eps=eps, plan=plan)


def linear_residual(
    out: Tensor,
    residual: Tensor,
    sumsq_out: Tensor,
    x: Tensor,
    weight: Weight,
    gamma: Tensor,
    *,
    plan: Plan | None = None,
) -> None:
    """``residual += x @ weight.T + bias``, and the start of the norm that follows.

    ``residual`` float32 ``[M, N]`` in place; ``out`` half ``[M, N]`` = ``residual * gamma``,
    saturating; ``gamma`` half ``[N]``; ``sumsq_out`` float32 ``[M, partials(N)]``: sums of the new
    residual's squares over 16 columns each.
    """
    m, n = _rows(x, weight), weight.rows
    _check("out", out, torch.float16, (m, n), x.device)
    _check("residual", residual, torch.float32, (m, n), x.device)
    _check("sumsq_out", sumsq_out, torch.float32, (m, partials(n)), x.device)
    _check("gamma", gamma, torch.float16, (n,), x.device)
    _run(
        _RESIDUAL,
        out,
        x,
        weight,
        residual=residual,
        gamma=gamma,
        sumsq_out=sumsq_out,
        plan=plan,
    )


def interleave_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Rows 0-7 of ``gate``, 0-7 of ``up``, 8-15 of ``gate``, ...: ``[I, ...]`` twice to ``[2 I, ...]``.

    For weights, biases, and each tensor of a packed 4-bit weight alike. I is a multiple of 8.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"gate is {gate.dtype} {list(gate.shape)}, up {up.dtype} {list(up.shape)}: they must "
            f"be alike"
        )
    if gate.shape[0] % 8:
        raise ValueError(f"gate has {gate.shape[0]} rows, which is no multiple of 8")
    pair = [tensor.reshape(-1, 8, *tensor.shape[1:]) for tensor in (gate, up)]
    return torch.stack(pair, dim=1).reshape(2 * gate.shape[0], *gate.shape[1:])


def pack_w4(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    *,
    bias: Tensor | None = None,
) -> W4Weight:
    """The kernels' form of a 4-bit weight, on the device of ``codes``.

    ``codes`` uint8 ``[N, K]``, 0 to 15; ``scales`` half ``[N, K / group]``, from whose width the
    group follows; ``zeros`` of the same shape, integers 0 to 16 of any dtype, or None for 8.
    """
    _check("codes", codes, torch.uint8, (None, None))
    rows, columns = codes.shape
    _check("scales", scales, torch.float16, (rows, None), codes.device)
    if columns % scales.shape[1]:
        raise ValueError(
            f"scales has {scales.shape[1]} groups, which do not divide the {columns} columns of "
            f"codes"
        )
    if codes.numel() and int(codes.max()) > 15:
        raise ValueError(f"codes must be 0..15, has {int(codes.max())}")
    packed_zeros = None if zeros is None else _zeros(zeros, scales)
    padded = torch.nn.functional.pad(codes, (0, -columns % 128))
    # k = 128 block + 32 chunk + 8 lane + element; a lane's four words lie together.
    elements = padded.reshape(rows, -1, 4, 4, 8).transpose(2, 3)
    pairs = [elements[..., low] | (elements[..., high] << 4) for low, high in _NIBBLE_BYTES]
    words = torch.stack(pairs, dim=-1).contiguous().view(torch.int32).reshape(rows, -1)
    return W4Weight(words, scales, columns // scales.shape[1], packed_zeros, bias)


def unpack_w4(weight: W4Weight) -> Tensor:
    """The codes ``pack_w4`` was given: uint8 ``[N, K]``."""
    pairs = weight.codes.view(torch.uint8).reshape(weight.rows, -1, 4, 4, 4)
    elements = torch.empty(*pairs.shape[:-1], 8, dtype=torch.uint8, device=pairs.device)
    for byte, (low, high) in enumerate(_NIBBLE_BYTES):
        elements[..., low] = pairs[..., byte] & 15
        elements[..., high] = pairs[..., byte] >> 4
    return elements.transpose(2, 3).reshape(weight.rows, -1)[:, : weight.columns].contiguous()


def expand_w4(out: Tensor, weight: W4Weight, row0: int) -> None:
    """``out`` half ``[n, K]`` = rows ``row0 ... row0 + n - 1`` of ``weight``, each value rounded once."""
    _check("out", out, torch.float16, (None, weight.columns), weight.device)
    rows = out.shape[0]
    if row0 < 0 or row0 + rows > weight.rows:
        raise ValueError(
            f"row0 = {row0} and the {rows} rows of out pass the {weight.rows} rows of weight"
        )
    if rows == 0:
        return
    threads = rows * (-(-weight.columns // 128) * 4)
    launch(
        _EXPAND,
        (-(-threads // _EXPAND.threads), 1, 1),
        [
            out,
            weight.codes,
            weight.scales,
            weight.zeros,
            np.int32(weight.group.bit_length() - 1),
            np.int32(row0),
            np.int32(rows),
            np.int32(weight.columns),
        ],
    )


_EXPAND: Final = KernelSpec("expand_w4.cu", "expand_w4", 256)


def _f16_spec(plan: Plan) -> KernelSpec:
    return KernelSpec("gemm_f16.cu", f"linear_f16<{plan.arguments}>", 32 * plan.warps)


def _w4_spec(group_chunks: int, plan: Plan) -> KernelSpec:
    name = f"linear_w4<{group_chunks}, {plan.arguments}>"
    return KernelSpec("gemm_w4.cu", name, 32 * plan.warps)


@functools.cache
def _sm_count(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _run(
    epilogue: int,
    out: Tensor,
    x: Tensor,
    weight: Weight,
    *,
    sumsq: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    gamma: Tensor | None = None,
    sumsq_out: Tensor | None = None,
    plan: Plan | None,
) -> None:
    m, n = x.shape[0], weight.rows
    if sumsq is not None:
        _check("sumsq", sumsq, torch.float32, (m, None), x.device)
    cut = plan_for(weight, m, _sm_count(x.device)) if plan is None else plan
    if isinstance(weight, F16Weight):
        spec = _f16_spec(cut)
        planes: list[Tensor | np.generic | None] = [weight.weight]
    else:
        spec = _w4_spec(min(weight.group // 32, 4), cut)
        shift = np.int32(weight.group.bit_length() - 1)
        planes = [weight.codes, weight.scales, weight.zeros, shift]
    grid = (-(-m // (8 * cut.column_tiles)), -(-n // (TILE_ROWS * cut.row_tiles)), 1)
    launch(
        spec,
        grid,
        [
            *planes,
            x,
            np.int32(m),
            np.int32(n),
            np.int32(weight.columns),
            np.int32(epilogue),
            out,
            weight.bias,
            sumsq,
            np.int32(0 if sumsq is None else sumsq.shape[1]),
            np.float32(eps),
            residual,
            gamma,
            sumsq_out,
        ],
    )


def _rows(x: Tensor, weight: Weight) -> int:
    _check("x", x, torch.float16, (None, weight.columns), weight.device)
    m, most = x.shape[0], max_rows(weight)
    if not 1 <= m <= most:
        raise ValueError(
            f"x has {m} rows; with {type(weight).__name__} this kernel takes 1 to {most}"
        )
    return m


def _check(
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    device: torch.device | None = None,
) -> None:
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}, it must be {dtype}")
    sizes = zip(tensor.shape, shape, strict=False)
    if tensor.ndim != len(shape) or any(want not in (None, size) for size, want in sizes):
        raise ValueError(f"{name} has shape {list(tensor.shape)}, it must be [{wanted}]")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}, it must be contiguous")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the other tensors on {device}")
    if tensor.data_ptr() % 16 and tensor.dtype == torch.float16 and tensor.ndim == 2:
        raise ValueError(f"{name} starts at an address that is no multiple of 16 bytes")


def _check_width(name: str, columns: int) -> None:
    if columns == 0 or columns % 32:
        raise ValueError(f"{name} has {columns} columns, which is no multiple of 32")


def _bias(name: str, bias: Tensor | None, weight: Tensor) -> Tensor | None:
    if bias is None:
        return None
    if bias.dtype not in (torch.float16, torch.float32):
        raise ValueError(f"{name} is {bias.dtype}, it must be torch.float16 or torch.float32")
    _check(name, bias, bias.dtype, (weight.shape[0],), weight.device)
    return bias.float()


def _zeros(zeros: Tensor, scales: Tensor) -> Tensor:
    if zeros.shape != scales.shape or zeros.device != scales.device:
        raise ValueError(
            f"zeros is {list(zeros.shape)} on {zeros.device}, scales {list(scales.shape)} on "
            f"{scales.device}: they must be alike"
        )
    codes = zeros.to(torch.uint8)
    if bool((codes.to(zeros.dtype) != zeros).any()) or int(codes.max()) > _ZERO_MAX:
        raise ValueError(f"zeros must be integers from 0 to {_ZERO_MAX}")
    return codes.contiguous()
