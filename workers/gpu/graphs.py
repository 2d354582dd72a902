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
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import torch

ROW_BUCKETS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
"""Rows (sequences) that graphs are captured for; steps with more run eagerly."""

WIDE_ROWS_STEP: Final = 64
"""Fewer rows cost as much: weights are read once."""

MIXED_ROWS: Final = 16
MIXED_CONTEXT: Final = 4096
"""Of the smaller buckets of ``mixed_bucket``: each costs a graph a layer."""

CONTEXT_BUCKETS: Final = (512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Tokens of the longest sequence; beyond the last one buckets go on doubling."""


K = TypeVar("K", bound=Hashable)


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


def wide_bucket(rows: int, rows_max: int) -> int | None:
    """The bucket of a wide step of ``rows``; None: there is none."""
    return min((each for each in wide_buckets(rows_max) if each >= rows), default=None)


def mixed_bucket(decodes: int, longest: int, sequences: int, context: int) -> Bucket:
    """What attention of a wide step's ``decodes`` is padded to: two sizes of either.

    The ``longest`` of them has so many tokens; no step has more ``sequences`` or ``context``.
    """
    rows = min(MIXED_ROWS, sequences)
    tokens = min(MIXED_CONTEXT, context)
    return Bucket(rows if decodes <= rows else sequences, tokens if longest <= tokens else context)


def mixed_buckets(sequences: int, context: int) -> Iterator[Bucket]:
    """Every bucket that ``mixed_bucket`` returns."""
    for rows in dict.fromkeys((min(MIXED_ROWS, sequences), sequences)):
        for tokens in dict.fromkeys((min(MIXED_CONTEXT, context), context)):
            yield Bucket(rows, tokens)


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
    """Graphs of whole decode steps, for each level of precision a set.

    ``step(bucket, level)`` launches what a graph is to hold.
    """

    def __init__(self, recorder: Recorder, step: Callable[[Bucket, int], None]) -> None:
        self._recorder = recorder
        self._step = step
        self._graphs: dict[tuple[Bucket, int], StepGraph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def kernels(self, bucket: Bucket, level: int = 0) -> int:
        """Kernels a step of ``bucket``."""
        return self._graphs[bucket, level].kernels

    def capture(self, bucket: Bucket, level: int = 0) -> None:
        """Capture one bucket, over whatever the inputs are."""
        step = functools.partial(self._step, bucket, level)
        self._graphs[bucket, level] = self._recorder.record(step)

    def replay(self, bucket: Bucket, level: int = 0) -> None:
        """Launch a captured step on the current stream."""
        self._graphs[bucket, level].graph.replay()


class PieceGraphs(Generic[K]):
    """Graphs of the parts of a wide step that are alike in all of them, for each of some sizes.

    ``step(index, size)`` launches part ``index`` of ``parts``. Sizes for which ``alike(index,
    size)`` is the same have one graph of that part between them.
    """

    def __init__(
        self,
        recorder: Recorder,
        parts: int,
        step: Callable[[int, K], None],
        alike: Callable[[int, K], Hashable] | None = None,
    ) -> None:
        self._recorder = recorder
        self._parts = parts
        self._step = step
        self._alike = alike
        self._known: dict[tuple[int, Hashable], StepGraph] = {}
        self._graphs: dict[K, list[StepGraph]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, size: K) -> bool:
        return size in self._graphs

    def capture(self, size: K) -> None:
        """Capture all parts of a size, over whatever the inputs are."""
        self._graphs[size] = [self._part(index, size) for index in range(self._parts)]

    def kernels(self, size: K) -> int:
        """Kernels of all parts of a size."""
        return sum(each.kernels for each in self._graphs[size])

    def replay(self, size: K, index: int) -> None:
        """Launch a captured part on the current stream."""
        self._graphs[size][index].graph.replay()

    def _part(self, index: int, size: K) -> StepGraph:
        key = (index, size if self._alike is None else self._alike(index, size))
        if key not in self._known:
            self._known[key] = self._recorder.record(functools.partial(self._step, index, size))
        return self._known[key]


def _count_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Nodes of a captured graph, as the driver counts them."""
    count = ctypes.c_size_t()
    status = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(
        ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count)
    )
    if status != 0:
        raise RuntimeError(f"cuGraphGetNodes failed with CUDA error {status}")
    return count.value
