"""Rounding with no data to calibrate with: FP16 weights to W4A16, and activations to FP8."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deepinfer.workers.model.quantized import ZERO_SYMMETRIC, QuantizedTensor

DIVISORS: Final = (7.0, 7.5, 8.0, 8.5, 9.0, 9.5, 10.0, 10.5)
"""A group's scale is its largest magnitude divided by one of these."""

E4M3_MAX: Final = 448.0
"""The largest code of E4M3."""

_LOWEST: Final = -8
_HIGHEST: Final = 7
_ELEMENTS_AT_ONCE: Final = 1 << 22
_SCALE_MIN: Final = 2.0**-24
"""The smallest positive float16."""


def round_to_nearest(weight: Tensor, group: int) -> QuantizedTensor:
    """Symmetric 4-bit weights of ``weight`` ``[N, K]``, ``group`` inputs a scale.

    Codes are the nearest to ``weight / scale``, from -8 to 7 (stored plus 8). Of the scales that
    ``DIVISORS`` give a group, rounded to float16, it gets the one with the least squared error:
    cutting the largest weights a little short can make all others finer.
    """
    rows, columns = weight.shape
    assert columns % group == 0
    at_once = max(1, _ELEMENTS_AT_ONCE // columns)
    parts = [
        _rounded(weight[start : start + at_once].to(torch.float32).reshape(-1, group))
        for start in range(0, rows, at_once)
    ]
    codes = torch.cat([part[0] for part in parts]).view(rows, columns)
    scales = torch.cat([part[1] for part in parts]).view(rows, columns // group)
    return QuantizedTensor(codes, scales)


def round_rows_to_e4m3(x: Tensor) -> Tensor:
    """``x`` float32 ``[rows, columns]`` as codes of E4M3 times a scale for each row say it.

    A row's largest magnitude becomes the largest code, so that nothing saturates and no scale
    overflows, as ``kernels.linear_w8a8.quantize_rows`` does it on a card. Float32.
    """
    largest = x.abs().amax(dim=-1, keepdim=True)
    scales = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
    return (x / scales).to(torch.float8_e4m3fn).float().mul_(scales)


def _rounded(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 ``[n, group]`` and scales float16 ``[n]`` of float32 ``[n, group]``."""
    largest = groups.abs().amax(dim=-1)
    codes = torch.zeros_like(groups)
    scales = torch.zeros_like(largest)
    least = torch.full_like(largest, torch.inf)
    for divisor in DIVISORS:
        # As it will be stored: a group of zeros needs some scale too.
        scale = (largest / divisor).to(torch.float16).float().clamp_(min=_SCALE_MIN)
        nearest = (groups / scale[:, None]).round_().clamp_(_LOWEST, _HIGHEST)
        error = (nearest * scale[:, None]).sub_(groups).square_().sum(dim=-1)
        better = error < least
        least = torch.where(better, error, least)
        scales = torch.where(better, scale, scales)
        codes = torch.where(better[:, None], nearest, codes)
    return codes.add_(ZERO_SYMMETRIC).to(torch.uint8), scales.to(torch.float16)
