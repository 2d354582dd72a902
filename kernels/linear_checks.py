"""Checks of the arguments of kernels; each names the argument in its ValueError."""

from __future__ import annotations

import torch
from torch import Tensor


def check_tensor(
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,
    shape: tuple[int | None, ...],
    device: torch.device | None = None,
) -> None:
    """Refuse another type, shape (None: any size), device, or a tensor that is not contiguous."""
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


def float32_bias(name: str, bias: Tensor | None, weight: Tensor) -> Tensor | None:
    """``bias`` half or float32, one value a row of ``weight``, as float32."""
    if bias is None:
        return None
    if bias.dtype not in (torch.float16, torch.float32):
        raise ValueError(f"{name} is {bias.dtype}, it must be torch.float16 or torch.float32")
    check_tensor(name, bias, bias.dtype, (weight.shape[0],), weight.device)
    return bias.float()
