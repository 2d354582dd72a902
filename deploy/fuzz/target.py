"""What is fuzzed: something that takes bytes, and the errors that it may answer with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol, TypeAlias

Case: TypeAlias = Callable[[bytes], object]
"""Decodes one input, or makes the calls that it stands for."""


class Shape(Protocol):
    """Knows how an input is made up, and changes it so that some of it stays sense."""

    def mutate(self, data: bytes, rng: Random, others: Sequence[bytes]) -> bytes:
        """Return another input. ``others``: inputs to borrow parts of."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One decoder, or the handlers of one service."""

    name: str
    about: str
    """What is given the bytes."""
    seeds: Callable[[], Sequence[bytes]]
    """Inputs that make sense; not empty."""
    shape: Shape
    open: Callable[[Path], AbstractContextManager[Case]]
    """Prepares it; the folder is empty and in memory where there is such a file system."""
    errors: tuple[type[Exception], ...]
    """What it says it raises. Anything else is a fault."""
    input_bytes_max: int = 1 << 14
    """Longer inputs are cut: they only take longer."""
