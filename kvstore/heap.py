"""The C library's heap, told to keep what payload messages free.

gRPC makes and frees several buffers of a chunk's length for every chunk. glibc gives such a buffer
back to the system at once and asks for it again with the next chunk; clearing and mapping its pages
then costs more than all that is done with them. It would raise its thresholds by itself after a
larger buffer was freed once: to the values below, and no further.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD = -1  # <malloc.h>
_M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD_BYTES = 32 << 20
"""glibc's DEFAULT_MMAP_THRESHOLD_MAX on 64 bits: only larger buffers are mappings of their own."""
TRIM_THRESHOLD_BYTES = 2 * MMAP_THRESHOLD_BYTES
"""Freed memory that each end of the heap may keep."""


def keep_freed_buffers() -> bool:
    """Set both thresholds for this process; False where the C library knows no such setting."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc: then its own ways hold
        return False
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    done: list[int] = [
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
        mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
    ]
    return done == [1, 1]
