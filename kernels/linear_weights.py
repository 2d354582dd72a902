"""Weights as the linear kernels read them, and how to make them.

Output rows are N, input columns K, throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels.linear_checks import check_tensor, float32_bias
from deepinfer.kernels.nested import NestedWeight

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
        check_tensor("F16Weight.weight", self.weight, torch.float16, (None, None))
        _check_width("F16Weight.weight", self.weight.shape[1])
        object.__setattr__(self, "bias", float32_bias("F16Weight.bias", self.bias, self.weight))

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
            raise ValueError(f"W4Weight.group must be a power of two from 32 up, got {self.group}")
        check_tensor("W4Weight.scales", self.scales, torch.float16, (None, None))
        _check_width("W4Weight.scales times group", self.columns)
        words = (self.columns + 127) // 128 * 16
        check_tensor("W4Weight.codes", self.codes, torch.int32, (self.rows, words), self.device)
        object.__setattr__(self, "scales", _readable(self.scales))
        if self.zeros is not None:
            shape = (self.scales.shape[0], self.scales.shape[1])
            check_tensor("W4Weight.zeros", self.zeros, torch.uint8, shape, self.device)
            object.__setattr__(self, "zeros", _readable(self.zeros))
        object.__setattr__(self, "bias", float32_bias("W4Weight.bias", self.bias, self.scales))

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


Weight = F16Weight | W4Weight | NestedWeight


def check_mode(weight: Weight, fp8: bool) -> None:
    """Raises ValueError where ``weight`` cannot be computed with in that mode, or by a kernel."""
    if not isinstance(weight, NestedWeight):
        if fp8:
            name = type(weight).__name__
            raise ValueError(f"fp8 is True: weight is {name}, only NestedWeight has an FP8 mode")
        return
    if not fp8 and weight.lower is None:
        raise ValueError("weight.lower is None: without it a NestedWeight has its FP8 mode only")
    _check_width("weight", weight.columns)
    for name, part in (
        ("upper", weight.upper),
        ("lower", weight.lower),
        ("row_shift", weight.row_shift),
    ):
        if part is not None and part.data_ptr() % 16:
            raise ValueError(f"weight.{name} starts at an address that is no multiple of 16 bytes")


def interleave_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Eight rows of ``gate``, eight of ``up``, and so on: twice ``[I, ...]`` to ``[2 I, ...]``.

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
    check_tensor("codes", codes, torch.uint8, (None, None))
    rows, columns = codes.shape
    check_tensor("scales", scales, torch.float16, (rows, None), codes.device)
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


def _check_width(name: str, columns: int) -> None:
    if columns == 0 or columns % 32:
        raise ValueError(f"{name} has {columns} columns, which is no multiple of 32")


def _readable(tensor: Tensor) -> Tensor:
    """``tensor``, or a copy, of which kernels may read the aligned four bytes around any value."""
    size = tensor.numel()
    if tensor.data_ptr() % 4 == 0 and size * tensor.element_size() % 4 == 0:
        return tensor
    padded = tensor.new_zeros(size + 3)[:size].view(tensor.shape)
    return padded.copy_(tensor)


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
