"""What both paths to a store have in common: payloads given and taken, copying in threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple, TypeVar

from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.core.messages import StoreStatus

Fill = Callable[[int, memoryview], None]
"""``fill(first_block, buffer)`` writes that block and those behind it, as many whole blocks as the
buffer holds, and returns when the bytes are there. Called in a thread, in ascending order; over
gRPC perhaps all over again, for the same bytes: first they are hashed, then they are sent."""
Source = Sequence[memoryview] | Fill
"""A payload's blocks, or what writes them."""
OnMap = Callable[[int, int], Callable[[], None] | None]
"""``on_map(address, length)`` hears of each mapped slab (to register it as pinned memory); what it
returns is called before the slab is unmapped. Called in a thread."""
Into = Callable[[Manifest], Sequence[memoryview] | None]
"""Given the manifest, the buffers to copy to, ``payload_bytes`` in total; None refuses it."""

STEP_BYTES = 2 << 20
"""A copy can be stopped between steps of about this length. Not much less: from about 1 MiB on the
C library writes around the processor's cache, which halves what a long copy takes."""
_T = TypeVar("_T")


class Stopped(Exception):
    """The store revoked the put, or its caller gave up."""


class Outcome(NamedTuple):
    """What became of a put or get."""

    status: StoreStatus
    manifest: Manifest | None
    detail: str


def fill_step(draft: Manifest) -> int:
    """Bytes that a ``Fill`` is asked for at once: whole blocks."""
    return max(1, STEP_BYTES // draft.block_bytes) * draft.block_bytes


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
