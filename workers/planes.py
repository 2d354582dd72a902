"""The weights' lower planes leave the device, and come back; here for the CPU.

``workers/core/shedding.py`` decides when, ``workers/shell.py`` calls. On a card the planes lie in
the pool's tail (``workers/gpu/planes.py``). The CPU computes from packed copies of the weights, one
with their FP16 and one with their FP8 values: to shed is to give up the first, and the tail's pages
take memory of the system only once they are written. To restore is to pack again, from the planes
in the checkpoint, on a thread of its own beside the steps.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from typing import Final, Protocol

import torch
from torch import Tensor

from deepinfer.proto.failpoints import Failpoints
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.heap import trim_heap
from deepinfer.workers.model.runner import ModelRunner
from deepinfer.workers.model.weights import WeightSource
from deepinfer.workers.pool import PagedPool, Wait

MADV_DONTNEED: Final = 4
FLOAT_BYTES: Final = 4
"""Of a packed weight on the CPU."""


class Planes(Protocol):
    """Lower planes that may leave. Every method may block, and is called off the event loop."""

    @property
    def tail_blocks(self) -> int:
        """Blocks that the pool has more while the planes are away, behind the ordinary ones."""
        ...

    @property
    def return_ms(self) -> int:
        """How long a copy back takes, about."""
        ...

    def shed(self) -> None:
        """Return when nothing reads the planes any more; no step below the top level follows."""
        ...

    def restore(self) -> Wait | None:
        """Bring the planes back; what is returned, if anything, waits for them.

        Nobody uses the tail. Raises whatever went wrong; then the planes are as far away as before.
        """
        ...


class CpuPlanes:
    """The packed FP16 values of a nested model, whose memory is the pool's tail meanwhile.

    ``pool`` has the tail behind ``ordinary`` blocks. ``head``: those of the LM head leave too.
    """

    def __init__(
        self,
        decoder: Decoder,
        weights: WeightSource,
        runner: ModelRunner,
        pool: PagedPool,
        ordinary: int,
        *,
        head: bool,
        threads: int,
        failpoints: Failpoints | None = None,
    ) -> None:
        self._failpoints = failpoints or Failpoints()
        self._decoder = decoder
        self._weights = weights
        self._runner = runner
        self._tail = pool.storage[ordinary:]
        self._head = head
        self._threads = threads
        release_pages(self._tail)
        began = time.monotonic()
        decoder.pack_planes(weights, range(1))
        layer_ms = (time.monotonic() - began) * 1e3
        self.return_ms = max(1, round(layer_ms * decoder.config.layers))
        """As a layer's packing at the start took."""

    @property
    def tail_blocks(self) -> int:
        """Blocks that fit into the packed FP16 values' memory."""
        return len(self._tail)

    def shed(self) -> None:
        """Give the packed FP16 values back to the system."""
        self._runner.level_min = self._runner.levels - 1
        self._decoder.drop_planes(head=self._head)
        trim_heap()

    def restore(self) -> None:
        """Pack them again, layer by layer, where the tail's pages were."""
        release_pages(self._tail)
        # Packing runs beside the engine's thread; torch counts threads for each thread.
        torch.set_num_threads(self._threads)
        decoder = self._decoder
        try:
            if self._head:
                decoder.pack_head(self._weights)
            for layer in range(decoder.config.layers):
                decoder.pack_planes(self._weights, range(layer, layer + 1))
                self._failpoints.hit("mid_return")
        except Exception:
            decoder.drop_planes(head=self._head)
            raise
        finally:
            trim_heap()
        self._runner.level_min = 0


def tail_blocks(decoder: Decoder, block_bytes: int, *, head: bool) -> int:
    """Whole blocks in the memory of the decoder's packed FP16 values."""
    linears = decoder.linears()
    if not head:
        linears = linears[:-1]
    size = sum(linear.in_features * linear.out_features * FLOAT_BYTES for linear in linears)
    return size // block_bytes


def release_pages(memory: Tensor) -> None:
    """Give the memory's whole pages back to the system until they are written (Linux only)."""
    if sys.platform != "linux" or memory.numel() == 0:
        return
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        if madvise(start, end - start, MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise of the pool's tail failed")
