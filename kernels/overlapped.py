"""Launches that may begin while the kernel before them in the stream still runs.

CuPy's launch has no attributes, so this calls the driver itself: programmatic stream
serialisation, of Hopper and later. Such a kernel must call ``wait_for_inputs`` of
``csrc/primitives.cuh`` in every thread, before it reads what another kernel writes and before it
writes anything; and it must read that with ``ld_cg``, since what an SM's L1 has may be from before
the wait. Under graph capture the edge from the kernel ahead becomes a programmatic one.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Final

import numpy as np

TARGET_MIN: Final = 90
"""The first ``sm_*`` or ``compute_*`` whose kernels can wait."""

_SERIALIZATION: Final = 6
"""``CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION``."""

_SCALARS: Final[dict[type, type[ctypes._SimpleCData[int]] | type[ctypes._SimpleCData[float]]]] = {
    np.int32: ctypes.c_int32,
    np.uint32: ctypes.c_uint32,
    np.int64: ctypes.c_int64,
    np.uint64: ctypes.c_uint64,
    np.float32: ctypes.c_float,
}


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``: an id, and a union of 64 bytes at 8 of which one integer is set."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def launch(
    function: int,
    grid: tuple[int, int, int],
    threads: int,
    values: Sequence[int | np.generic],
    shared_bytes: int,
    stream: int,
) -> None:
    """``function`` and ``stream`` are the driver's handles; an int in ``values`` is an address.

    Raises RuntimeError with the driver's code if it refuses.
    """
    held = [
        ctypes.c_void_p(value) if isinstance(value, int) else _SCALARS[type(value)](value.item())
        for value in values
    ]
    parameters = (ctypes.c_void_p * len(held))(*(ctypes.addressof(each) for each in held))
    attribute = _Attribute(_SERIALIZATION, 0, 1)
    block = (ctypes.c_uint * 3)(threads, 1, 1)
    config = _Config(
        (ctypes.c_uint * 3)(*grid), block, shared_bytes, stream, ctypes.addressof(attribute), 1
    )
    code = _driver().cuLaunchKernelEx(
        ctypes.byref(config), ctypes.c_void_p(function), parameters, None
    )
    if code:
        raise RuntimeError(f"cuLaunchKernelEx returned {code}")
