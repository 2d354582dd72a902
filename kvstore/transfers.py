"""What both paths to a store have in common: payloads given and taken, copying in threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import NamedTuple, TypeVar

from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.core.messages import StoreStatus

Wait = Callable[[], None]
"""Returns when a copy that was begun has ended; always called, in the thread that began it."""
Fill = Callable[[int, memoryview], Wait | None]
"""``fill(first_block, buffer)`` writes that block and those behind it, as many whole blocks as the
buffer holds. It returns when the bytes are there; or sooner, and then what waits for them. Called
in a thread, in ascending order; over gRPC perhaps all over again, for the same bytes: first they
are hashed, then they are sent."""
Source = Sequence[memoryview] | Fill
"""A payload's blocks, or what writes them."""
Take = Callable[[int, memoryview], Wait | None]
"""``take(first_block, buffer)`` reads that block and those behind it, as many whole blocks as the
buffer holds, or begins to, and then returns what waits until they are read. Their hashes are right;
but a part behind them may still prove wrong, and then nothing that was taken is to be used. Called
in threads, perhaps in two at once, in any order."""
OnMap = Callable[[int, int], Callable[[], None] | None]
"""``on_map(address, length)`` hears of each mapped slab (to register it as pinned memory); what it
returns is called before the slab is unmapped. Called in a thread."""
Into = Callable[[Manifest], Sequence[memoryview] | Take | None]
"""Given the manifest, the buffers to copy to, ``payload_bytes`` in total, or what takes the payload
from where it lies; None refuses it."""

AHEAD = 4
"""Steps of a ``Fill`` that are begun before the first of them is waited for."""
STEP_BYTES = 2 << 20
"""A copy can be stopped between steps of about this length. Not much less: from about 1 MiB on the
C library writes around the processor's cache, which halves what a long copy takes."""
LONG_STEP_BYTES = 16 << 20
"""So long a step of a long payload may be, if whoever is asked for it copies beside the caller: a
card copies blocks together within a step only."""
LONG_BYTES = 256 << 20
"""From here on a payload is long: what a processor has just copied of it is in no cache anyway."""
_T = TypeVar("_T")


class Stopped(Exception):
    """The store revoked the put, or its caller gave up."""


class Outcome(NamedTuple):
    """What became of a put or get."""

    status: StoreStatus
    manifest: Manifest | None
    detail: str


def step_bytes(payload_bytes: int, block_bytes: int) -> int:
    """Bytes that a ``Fill`` or a ``Take`` is asked for at once: whole blocks."""
    step = STEP_BYTES if payload_bytes < LONG_BYTES else LONG_STEP_BYTES
    return max(1, step // block_bytes) * block_bytes


async def in_thread(executor: Executor, stop: threading.Event, work: Callable[[], _T]) -> _T:
    """Run ``work`` in a thread and never leave while it runs: when cancelled, stop it first.

    A copy that nobody waits for would go on writing into pages that are someone else's by then.
    ``run_in_executor`` and ``shield`` would do, at two more turns of the loop.
    """
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not waiter.done():
            waiter.set_result(None)

    job = executor.submit(work)
    job.add_done_callback(lambda _: loop.call_soon_threadsafe(wake))
    cancelled: asyncio.CancelledError | None = None
    while not job.done():
        try:
            await waiter
        except asyncio.CancelledError as error:
            stop.set()
            cancelled, waiter = error, loop.create_future()
    if cancelled is not None:
        raise cancelled  # whatever became of the work
    return job.result()


def give(
    take: Take,
    first_block: int,
    buffers: Iterable[memoryview],
    block_bytes: int,
    stop: threading.Event,
    waits: ExitStack,
    *,
    step: int = STEP_BYTES,
) -> None:
    """Have the buffers taken, about ``step`` bytes at once.

    When ``waits`` is left, all are, or are let alone. Raises Stopped, and what ``take`` raises.
    """
    step = max(1, step // block_bytes) * block_bytes
    for buffer in buffers:
        for begin in range(0, len(buffer), step):
            if stop.is_set():
                raise Stopped
            part = buffer[begin : begin + step]
            wait = take(first_block, part)
            if wait is not None:
                waits.callback(wait)
            first_block += len(part) // block_bytes
