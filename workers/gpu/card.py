"""The card: whether there is one that can serve, and what its driver says of its memory."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Final

import torch

CAPABILITY_MIN: Final = (8, 0)
"""The kernels are made of ``mma.m16n8k16`` and ``cp.async``."""


class GpuUnavailableError(ValueError):
    """No GPU worker can run here; says what to install, or what to use instead."""


class GpuMemoryError(ValueError):
    """The card has less memory than was asked for; says both numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One CUDA device as a worker sees it."""

    index: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    bytes_total: int

    @property
    def device(self) -> torch.device:
        """For torch."""
        return torch.device("cuda", self.index)


def count_cards() -> int:
    """CUDA devices that this process may use; 0 where torch has no CUDA. Makes no context."""
    return torch.cuda.device_count()


def find_card(index: int = 0) -> Card:
    """Look at a card and at what its kernels need.

    Raises:
        GpuUnavailableError: torch has no CUDA, the driver shows no such card, the card is older
            than SM80, or CuPy is missing.
    """
    instead = "or serve with --device cpu"
    if torch.version.cuda is None:
        raise GpuUnavailableError(
            f"torch {torch.__version__} is built without CUDA: install a CUDA build of it "
            f"(pip install torch --index-url https://download.pytorch.org/whl/cu130), {instead}"
        )
    if count_cards() <= index:
        raise GpuUnavailableError(
            f"no CUDA device {index}: the driver shows {count_cards()}: install NVIDIA's driver, "
            f"look at CUDA_VISIBLE_DEVICES, {instead}"
        )
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    if capability < CAPABILITY_MIN:
        raise GpuUnavailableError(
            f"{properties.name} is SM{capability[0]}{capability[1]}: the kernels need SM80 "
            f"(A100, RTX 30xx, A10) or newer: use such a card, {instead}"
        )
    if importlib.util.find_spec("cupy") is None:
        major = torch.version.cuda.partition(".")[0]
        raise GpuUnavailableError(
            f"CuPy is missing, which compiles the kernels: pip install "
            f"'deepinfer-cluster[cuda{major}]', {instead}"
        )
    return Card(
        index=index,
        name=properties.name,
        capability=capability,
        multiprocessors=properties.multi_processor_count,
        bytes_total=properties.total_memory,
    )
