"""What a measurement on a card says of the card."""

from __future__ import annotations

from importlib import metadata
from typing import Any, Final

import torch

from deepinfer.kernels.compiler import device_target
from deepinfer.workers.gpu.card import Card

_PACKAGES: Final = (
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "flashinfer-python",
    "triton",
)


def card_facts(card: Card) -> dict[str, Any]:
    """Name, size and target of the card, and versions of what compiles for it."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "name": card.name,
        "capability": ".".join(map(str, card.capability)),
        "multiprocessors": card.multiprocessors,
        "memory_bytes": card.bytes_total,
        "l2_bytes": torch.cuda.get_device_properties(card.index).L2_cache_size,
        "target": device_target(),
        "cuda": torch.version.cuda,
        "versions": versions,
    }
