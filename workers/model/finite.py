"""Numbers that a checkpoint must not hold, refused by their place and value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from deepinfer.workers.model.weights import CheckpointError


def in_half(tensor: Tensor) -> Tensor:
    """``tensor`` as float16, rounded to nearest; ValueError for what that cannot hold."""
    halves = tensor.to(torch.float16)
    _refuse(tensor, halves, "float16 holds finite numbers within ±65504")
    return halves


def check_finite(tensor: Tensor) -> None:
    """Raise ValueError for NaN and infinities."""
    _refuse(tensor, tensor, "must be a finite number")


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Make a ValueError the CheckpointError of the tensor called ``name``."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"tensor {name}: {error}") from error


def _refuse(tensor: Tensor, rounded: Tensor, allowed: str) -> None:
    """Raise ValueError with the first of ``tensor`` that is not finite in ``rounded``."""
    # A comparison that NaN fails too; a sum could overflow, and a mask takes memory.
    if not tensor.numel() or bool(rounded.abs().amax() < torch.inf):
        return
    place = (~rounded.isfinite()).nonzero()[0].tolist()
    raise ValueError(f"{place} = {float(tensor[tuple(place)]):g}: {allowed}")
