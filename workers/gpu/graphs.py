"""CUDA graphs of decode steps: one for each number of rows and each length of context.

A step is padded to the next bucket of both. All graphs share one pool of memory and the buffers
that they were captured over; they are captured once, before the first request.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

ROW_BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Rows (sequences) that graphs are captured for; steps with more run eagerly."""

WIDE_ROWS_STEP: Final = 64
"""Fewer rows cost as much: weights are read once."""

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


def wide_buckets(rows_max: int) -> Iterator[int]:
    """Rows that pieces of wide steps are captured for: 64 apart, then an eighth to a quarter."""
    rows = WIDE_ROWS_STEP
    while rows < rows_max:
        yield rows
        rows += max(WIDE_ROWS_STEP, 1 << (rows.bit_length() - 3))
    yield rows_max


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


class Recorder:
    """Captures launches into graphs that share one pool of memory, on a stream of their own."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def record(self, step: Callable[[], None]) -> StepGraph:
        """Capture what ``step`` launches; it runs once for real first.

        That run loads what is loaded on first use, which a capture does not allow.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
            finally:
                graph.capture_end()
            graph.instantiate()
        torch.cuda.current_stream().wait_stream(self._stream)
        return StepGraph(graph, _count_nodes(graph))


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """A recorder. Captures allow no calls that free CUDA's objects, so nothing is collected."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield Recorder()
    finally:
        if enabled:
            gc.enable()


class DecodeGraphs:
    """Graphs of whole decode steps. ``step(bucket)`` launches what a bucket's graph is to hold."""

    def __init__(self, recorder: Recorder, step: Callable[[Bucket], None]) -> None:
        self._recorder = recorder
        self._step = step
        self._graphs: dict[Bucket, StepGraph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def kernels(self, bucket: Bucket) -> int:
        """Kernels a step of ``bucket``."""
        return self._graphs[bucket].kernels

    def capture(self, bucket: Bucket) -> None:
        """Capture one bucket, over whatever the inputs are."""
        self._graphs[bucket] = self._recorder.record(lambda: self._step(bucket))

    def replay(self, bucket: Bucket) -> None:
        """Launch a captured step on the current stream."""
        self._graphs[bucket].graph.replay()


class PieceGraphs:
    """Graphs of the pieces of wide steps: all that lies between two layers' attention.

    Attention itself is launched as it comes, for its grid depends on the prompts; the rest is nine
    launches a layer less. ``step(index, rows)`` launches piece ``index`` of ``pieces``.
    """

    def __init__(self, recorder: Recorder, pieces: int, step: Callable[[int, int], None]) -> None:
        self._recorder = recorder
        self._pieces = pieces
        self._step = step
        self._graphs: dict[int, list[StepGraph]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._graphs.values()))

    def capture(self, rows: int) -> None:
        """Capture the pieces of steps of ``rows`` rows, over whatever the inputs are."""
        self._graphs[rows] = [
            self._recorder.record(functools.partial(self._step, index, rows))
            for index in range(self._pieces)
        ]

    def bucket(self, rows: int) -> int | None:
        """The rows that a step of ``rows`` is padded to; None: it is not captured."""
        return min((each for each in self._graphs if each >= rows), default=None)

    def kernels(self, rows: int) -> int:
        """Kernels of all pieces of a bucket."""
        return sum(each.kernels for each in self._graphs[rows])

    def replay(self, rows: int, index: int) -> None:
        """Launch a captured piece on the current stream."""
        self._graphs[rows][index].graph.replay()


def _count_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Nodes of a captured graph, as the driver counts them."""
    count = ctypes.c_size_t()
    status = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(
        ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)
    )
    if status != 0:
        raise RuntimeError(f"cuGraphGetNodes failed with CUDA error {status}")
    return count.value
