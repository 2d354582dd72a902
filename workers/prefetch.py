"""Payloads in host memory ahead of their swap-in, so that it need not wait for the network.

One buffer holds them, one after the other: it is made when the first payload comes, in the size of
the longest so far, and kept, for to pin memory holds up a card's steps. A payload has the buffer
from the moment it begins to arrive until its fetch has ended or it is called off; the next waits.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from deepinfer.kvstore.client import StoreClient
from deepinfer.kvstore.core.ids import Ticket
from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.core.messages import StoreStatus
from deepinfer.workers.core.events import PrefetchPayload

log = logging.getLogger(__name__)

Register = Callable[[int, int], Callable[[], None] | None]
"""``register(address, size)`` pins memory; returns what undoes that, None where it cannot be."""


class Arrived(NamedTuple):
    """A payload that is there, and was found right when it came."""

    manifest: Manifest
    payload: memoryview


class HostBuffer:
    """Page-aligned memory that only grows, pinned where there is a card."""

    def __init__(self, register: Register | None) -> None:
        self._register = register
        self._unpin: Callable[[], None] | None = None
        self._memory: memoryview | None = None

    def room(self, size: int) -> memoryview:
        """``size`` bytes; what was in them before is lost. Takes long when it has to grow."""
        if self._memory is None or len(self._memory) < size:
            self.close()
            array = np.frombuffer(mmap.mmap(-1, size), np.uint8)  # unmapped with its last view
            if self._register is not None:
                self._unpin = self._register(array.ctypes.data, size)
            self._memory = array.data
        return self._memory[:size]

    def close(self) -> None:
        """Give the memory back; nothing may be copying from it."""
        unpin, self._unpin = self._unpin, None
        if unpin is not None:
            unpin()
        self._memory = None


@dataclass(slots=True, eq=False)
class _Entry:
    task: asyncio.Task[None] | None = None
    begun: bool = False
    """It has the buffer."""
    arrived: asyncio.Future[Arrived | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Prefetcher:
    """Performs ``PrefetchPayload``; belongs to one event loop.

    A payload is named by its whole ticket, run and order included: those bytes never change.
    """

    def __init__(self, register: Register | None, block_bytes: int) -> None:
        self._buffer = HostBuffer(register)
        self._block_bytes = block_bytes
        self._turn = asyncio.Lock()
        self._entries: dict[Ticket, _Entry] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def tickets(self) -> tuple[Ticket, ...]:
        """Those that are held, on their way, or in line for the buffer."""
        return tuple(self._entries)

    def begin(self, effect: PrefetchPayload, client: StoreClient | None) -> None:
        """Fetch the payload, when those before it have left the buffer."""
        if client is None or effect.ticket in self._entries:
            return
        entry = self._entries[effect.ticket] = _Entry()
        task = entry.task = asyncio.ensure_future(self._hold(entry, effect, client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def payload(self, ticket: Ticket) -> Arrived | None:
        """The payload once it has come; None if it does not. It stays until ``drop``.

        One that waits for the buffer is as far away as it was: None, at once.
        """
        entry = self._entries.get(ticket)
        if entry is None or not entry.begun:
            return None
        await asyncio.wait((entry.arrived,))
        return entry.arrived.result()

    def drop(self, ticket: Ticket) -> None:
        """Let the payload go, or stop it; nothing may be copying from it."""
        entry = self._entries.pop(ticket, None)
        if entry is not None and entry.task is not None:
            entry.task.cancel()

    async def close(self) -> None:
        """Let everything go."""
        for ticket in list(self._entries):
            self.drop(ticket)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._buffer.close)

    async def _hold(self, entry: _Entry, effect: PrefetchPayload, client: StoreClient) -> None:
        """Have the buffer until cancelled; or until it is clear that nothing comes."""
        try:
            async with self._turn:
                entry.begun = True
                payload = await _to_the_end(
                    lambda: self._buffer.room(effect.blocks * self._block_bytes)
                )
                arrived = await self._fetch(effect.ticket, client, payload)
                if arrived is not None:
                    entry.arrived.set_result(arrived)
                    await asyncio.Event().wait()
        except Exception:
            log.exception("%s cannot be fetched ahead", effect.ticket)
        finally:
            if not entry.arrived.done():
                entry.arrived.set_result(None)

    async def _fetch(
        self, ticket: Ticket, client: StoreClient, payload: memoryview
    ) -> Arrived | None:
        def into(manifest: Manifest) -> list[memoryview] | None:
            return [payload] if manifest.payload_bytes == len(payload) else None

        result = await client.get(ticket, into)
        if result.status is StoreStatus.OK and result.manifest is not None:
            return Arrived(result.manifest, payload)
        log.info("%s is not fetched ahead: %s: %s", ticket, result.status.value, result.detail)
        return None


async def _to_the_end(work: Callable[[], memoryview]) -> memoryview:
    """Run ``work`` in a thread and never leave while it runs, not even when cancelled."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()
