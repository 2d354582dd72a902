"""The bus between host and card: how fast pinned copies go, and how much may be pinned."""

from __future__ import annotations

import importlib
import mmap
import statistics
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

PROBE_BYTES: Final = 128 * 2**20
PIN_PROBE_MAX: Final = 4 * 2**30
"""More is not tried: pinning takes a second for about 20 GB, and the memory of others."""
REPEATS: Final = 5


@dataclass(frozen=True, slots=True)
class Bus:
    """Measured at start-up; bytes a second are medians of copies of ``PROBE_BYTES``."""

    to_card_bytes_s: float
    to_host_bytes_s: float
    pinnable_bytes: int
    """What could be pinned; at ``PIN_PROBE_MAX`` the probe stopped."""

    def line(self) -> str:
        """For people."""
        least = "at least " if self.pinnable_bytes >= PIN_PROBE_MAX else ""
        return (
            f"bus: {self.to_card_bytes_s / 1e9:.1f} GB/s to the card, "
            f"{self.to_host_bytes_s / 1e9:.1f} GB/s to the host; {least}"
            f"{self.pinnable_bytes / 2**20:,.0f} MiB can be pinned"
        )


def probe_bus(device: torch.device, pin_max: int = PIN_PROBE_MAX) -> Bus:
    """Copy both ways from pinned memory, and pin twice as much each time until it is refused.

    Takes a fraction of a second, ``2 * PROBE_BYTES`` of memory and at most ``pin_max`` of the
    host's; all of it is given back.
    """
    host = torch.empty(PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    card = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
    to_card = _rate(card, host)
    to_host = _rate(host, card)
    del host, card
    pinned = PROBE_BYTES
    while pinned < pin_max and _can_pin(min(2 * pinned, pin_max)):
        pinned = min(2 * pinned, pin_max)
    return Bus(to_card, to_host, pinned)


def _rate(target: torch.Tensor, source: torch.Tensor) -> float:
    seconds: list[float] = []
    for _ in range(REPEATS):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return source.numel() / statistics.median(seconds)


def _can_pin(size: int) -> bool:
    if size > available_bytes() // 2:
        return False
    # CuPy's runtime and not torch's: it clears the error that the next kernel would be blamed for.
    runtime: Any = importlib.import_module("cupy.cuda.runtime")
    memory = mmap.mmap(-1, size)
    try:
        address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        runtime.hostRegister(address, size, 0)
        runtime.hostUnregister(address)
        return True
    except runtime.CUDARuntimeError:
        return False
    finally:
        memory.close()


def available_bytes() -> int:
    """Host memory that may be had without swapping."""
    with open("/proc/meminfo", encoding="ascii") as file:
        sizes = dict(line.split(":") for line in file)
    return int(sizes["MemAvailable"].split()[0]) * 1024
