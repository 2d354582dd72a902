"""Numbers that a checkpoint must not hold, refused by their place and value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from deepinfer.workers.model.weights import CheckpointError, RowLookup

_AT_ONCE: Final = 1 << 22
"""Elements looked at together: what looking at them takes is as much memory again."""


def in_half(tensor: Tensor) -> Tensor:
    """``tensor`` as float16, rounded to nearest; ValueError for what that cannot hold."""
    halves = tensor.to(torch.float16)
    _refuse(tensor, halves, "float16 holds finite numbers within ±65504")
    return halves


def check_finite(tensor: Tensor) -> None:
    """Raise ValueError for NaN and infinities."""
    _refuse(tensor, tensor, "must be a finite number")


def finite_read(read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """``read``, which raises CheckpointError for a tensor with NaN or infinities, by its name."""

    def checked(name: str) -> Tensor:
        tensor = read(name)
        with naming(name):
            width = max(1, tensor[:1].numel()) if tensor.ndim else 1
            for start in range(0, len(tensor) if tensor.ndim else 1, max(1, _AT_ONCE // width)):
                part = tensor[start : start + max(1, _AT_ONCE // width)] if tensor.ndim else tensor
                _refuse(part, part, "must be a finite number", start)
        return tensor

    return checked


def check_rows(name: str, rows: RowLookup, shape: tuple[int, ...]) -> None:
    """The same of a matrix that is only ever looked up by rows, without having all of it."""
    step = max(1, _AT_ONCE // max(1, shape[1]))
    with naming(name):
        for start in range(0, shape[0], step):
            part = rows(torch.arange(start, min(start + step, shape[0])))
            _refuse(part, part, "must be a finite number", start)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Make a ValueError the CheckpointError of the tensor called ``name``."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"tensor {name}: {error}") from error


def _refuse(tensor: Tensor, rounded: Tensor, allowed: str, first: int = 0) -> None:
    """Raise ValueError with the first of ``tensor`` that is not finite in ``rounded``.

    ``first``: the number of its first row, if it is a part of another.
    """
    # A comparison that NaN fails too; a sum could overflow, and a mask takes memory.
    if not tensor.numel() or bool(rounded.abs().amax() < torch.inf):
        return
    place = (~rounded.isfinite()).nonzero()[0].tolist()
    shown = [place[0] + first, *place[1:]] if place else place
    raise ValueError(f"{shown} = {float(tensor[tuple(place)]):g}: {allowed}")
