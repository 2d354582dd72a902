"""Gives freed memory back to the system, which C libraries do only when asked."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Return what was freed to the system, where the C library can (glibc).

    Packing a model frees as much as it keeps, in pieces just small enough for glibc's heap to
    hold on to; SmolLM2 then occupies a tenth more than its weights.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
