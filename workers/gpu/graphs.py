"""CUDA graphs of decode steps: one for each number of rows and each length of context.

A step is padded to the next bucket of both. All graphs share one pool of memory and the buffers
that they were captured over; they are captured once, before the first request.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

ROW_BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Rows (sequences) that graphs are captured for; steps with more run eagerly."""

CONTEXT_BUCKETS: Final = (512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Tokens of the longest sequence; beyond the last one buckets go on doubling."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """What a decode step is padded to."""

    rows: int
    context: int


def context_bucket(tokens: int, limit: int) -> int:
    """The bucket of a step whose longest sequence has ``tokens``; ``limit`` is the longest ever."""
    bucket = CONTEXT_BUCKETS[0]
    while bucket < tokens:
        bucket *= 2
    return min(bucket, max(limit, CONTEXT_BUCKETS[0]))


def row_bucket(rows: int) -> int | None:
    """The bucket of a step of ``rows``; None: there is none."""
    place = bisect_left(ROW_BUCKETS, rows)
    return ROW_BUCKETS[place] if place < len(ROW_BUCKETS) else None


def buckets(rows_max: int, context_max: int) -> Iterator[Bucket]:
    """Every bucket that steps of up to ``rows_max`` rows and ``context_max`` tokens need."""
    contexts = [context_bucket(1, context_max)]
    while contexts[-1] < context_max:
        contexts.append(context_bucket(contexts[-1] + 1, context_max))
    for rows in ROW_BUCKETS:
        # The largest first: what it needs of shared memory, the others find there.
        yield from (Bucket(rows, context) for context in reversed(contexts))
        if rows >= rows_max:
            return


@dataclass(frozen=True, slots=True, eq=False)
class StepGraph:
    """One captured step."""

    graph: torch.cuda.CUDAGraph
    kernels: int
    """Kernels and copies that a replay launches."""


class DecodeGraphs:
    """Graphs by bucket. ``step(bucket)`` launches what a bucket's graph is to hold."""

    def __init__(self, step: Callable[[Bucket], None]) -> None:
        self._step = step
        self._graphs: dict[Bucket, StepGraph] = {}
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def kernels(self, bucket: Bucket) -> int:
        """Kernels a step of ``bucket``."""
        return self._graphs[bucket].kernels

    def capture(self, bucket: Bucket) -> None:
        """Capture one bucket; the step runs once for real first, over whatever the inputs are.

        That run loads what is loaded on first use, which a capture does not allow.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._step(bucket)
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._step(bucket)
            finally:
                graph.capture_end()
            graph.instantiate()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._graphs[bucket] = StepGraph(graph, _count_nodes(graph))

    def replay(self, bucket: Bucket) -> None:
        """Launch a captured step on the current stream."""
        self._graphs[bucket].graph.replay()


def _count_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Nodes of a captured graph, as the driver counts them."""
    count = ctypes.c_size_t()
    status = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(
        ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)
    )
    if status != 0:
        raise RuntimeError(f"cuGraphGetNodes failed with CUDA error {status}")
    return count.value
