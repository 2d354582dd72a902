"""The card: whether there is one that can serve, and what its driver says of its memory."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from dataclasses import dataclass
from typing import Final

import torch

CAPABILITY_MIN: Final = (8, 0)
"""The kernels are made of ``mma.m16n8k16`` and ``cp.async``."""

# Of CUdevice_attribute.
_MULTIPROCESSORS: Final = 16
_CAPABILITY_MAJOR: Final = 75
_CAPABILITY_MINOR: Final = 76


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
    """CUDA devices that this process may use; 0 where there is no driver."""
    driver = _driver()
    count = ctypes.c_int()
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def find_card(index: int = 0) -> Card:
    """Look at a card and at what its kernels need.

    Only the driver is asked, and for nothing that makes a context: the launcher, which looks as
    well, would hold hundreds of MiB of the card.

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
    card = describe_card(index)
    if card.capability < CAPABILITY_MIN:
        raise GpuUnavailableError(
            f"{card.name} is SM{card.capability[0]}{card.capability[1]}: the kernels need SM80 "
            f"(A100, RTX 30xx, A10) or newer: use such a card, {instead}"
        )
    if importlib.util.find_spec("cupy") is None:
        major = torch.version.cuda.partition(".")[0]
        raise GpuUnavailableError(
            f"CuPy is missing, which compiles the kernels: pip install "
            f"'deepinfer-cluster[cuda{major}]', {instead}"
        )
    return card


def describe_card(index: int) -> Card:
    """A card that ``count_cards`` counts."""
    driver = _driver()
    assert driver is not None, "a driver has counted it"
    device, size = ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    _check(driver.cuDeviceGet(ctypes.byref(device), index))
    _check(driver.cuDeviceGetName(name, len(name), device))
    _check(driver.cuDeviceTotalMem_v2(ctypes.byref(size), device))

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        _check(driver.cuDeviceGetAttribute(ctypes.byref(value), number, device))
        return value.value

    return Card(
        index=index,
        name=name.value.decode(errors="replace"),
        capability=(attribute(_CAPABILITY_MAJOR), attribute(_CAPABILITY_MINOR)),
        multiprocessors=attribute(_MULTIPROCESSORS),
        bytes_total=size.value,
    )


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if driver.cuInit(0) else driver


def _check(status: int) -> None:
    if status:
        raise GpuUnavailableError(
            f"the CUDA driver failed with error {status} when asked for a card: serve with "
            "--device cpu"
        )
