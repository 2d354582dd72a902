"""4-bit weights in the one form that every packing of a checkpoint is turned into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

ZERO_SYMMETRIC: Final = 8
"""The code that means 0 where there are no zero points."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A weight ``[N, K]``: ``scales[n, g] * (codes[n, k] - zeros[n, g])`` with g = k // group.

    ``codes`` uint8 ``[N, K]``, 0 to 15; ``scales`` float16 ``[N, K / group]``; ``zeros`` uint8 of
    the same shape, 0 to 16, or None for 8 everywhere. All contiguous, on one device.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.codes.dtype == torch.uint8
        assert self.scales.dtype == torch.float16
        assert self.scales.shape[0] == self.codes.shape[0]
        assert self.codes.shape[1] % self.scales.shape[1] == 0
        assert self.zeros is None or self.zeros.dtype == torch.uint8
        assert self.zeros is None or self.zeros.shape == self.scales.shape

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def dequantised(self) -> Tensor:
        """float32 ``[N, K]``; exact, for scales have 11 bits and the differences five."""
        values = self.codes.to(torch.float32).view(*self.scales.shape, self.group)
        values -= ZERO_SYMMETRIC if self.zeros is None else self.zeros[..., None].float()
        values *= self.scales[..., None].float()
        return values.view(self.codes.shape)

    def rows(self, begin: int, end: int) -> QuantizedTensor:
        """Rows ``begin .. end - 1``."""
        zeros = None if self.zeros is None else self.zeros[begin:end]
        return QuantizedTensor(self.codes[begin:end], self.scales[begin:end], zeros)

    def padded(self, rows: int) -> QuantizedTensor:
        """With ``rows`` rows of zeros below."""
        tensors = [
            None if tensor is None else torch.nn.functional.pad(tensor, (0, 0, 0, rows))
            for tensor in (self.codes, self.scales, self.zeros)
        ]
        codes, scales, zeros = tensors
        assert codes is not None
        assert scales is not None
        return QuantizedTensor(codes, scales, zeros)

    def regrouped(self, group: int) -> QuantizedTensor:
        """The same weight with smaller groups: ``group`` divides the present one."""
        times = self.group // group
        assert times * group == self.group
        if times == 1:
            return self
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(times, dim=1)
        return QuantizedTensor(self.codes, self.scales.repeat_interleave(times, dim=1), zeros)


def stack(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Weights of equal K one below the other, in the smallest group that any has."""
    if len(parts) == 1:
        return parts[0]
    group = min(part.group for part in parts)
    parts = [part.regrouped(group) for part in parts]
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat(
            [
                torch.full_like(part.scales, ZERO_SYMMETRIC, dtype=torch.uint8)
                if part.zeros is None
                else part.zeros
                for part in parts
            ]
        )
    return QuantizedTensor(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        zeros,
    )
