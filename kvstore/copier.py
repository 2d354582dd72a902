"""Copies and hashes between a store's mapped pages and a worker's memory; runs in threads.

Buffers that go into a store are copied in one thread: the store hashes behind it, and both together
take what memory gives. Whatever else is long is cut into parts of whole hash groups, and several
threads each take the next part as they come to it: it does not matter when a thread gets a
processor.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from deepinfer.kvstore.copying import SpreadWriter, chunks, copy
from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.hashing import GroupHasher, Groups, payload_hash, with_hashes
from deepinfer.kvstore.host_pool import PageMap
from deepinfer.kvstore.transfers import (
    AHEAD,
    STEP_BYTES,
    Fill,
    Source,
    Stopped,
    Take,
    Wait,
    give,
    step_bytes,
)

SHARE_BYTES = 4 << 20
"""From here on a payload is copied out in several threads; with less, to start the second takes
what it saves."""
FILL_SHARE_BYTES = 16 << 20
"""From here on a payload that a function writes is hashed in several threads."""
WRITTEN_BYTES = 2 << 20
"""A writer tells the store how far it has come when it has written so much more, or twice that of a
payload that is shared: what the store hashes then is still in a cache that both have, and little is
left for it to do at the end."""
FILL_THREADS = min(4, max(1, len(os.sched_getaffinity(0)) // 4))
"""That hash one payload on its way in: one does 8 to 15 GB/s, less than a card's bus carries. But
steps, and the store's own hashing at the same time, want processors too."""
THREADS = max(2, FILL_THREADS)
"""That copy one payload out, when the store has nothing to do."""


class _Part(NamedTuple):
    """Whole groups of a payload: what to copy, where to, and what its hashes must be."""

    first_block: int
    pages: Sequence[int]
    views: list[memoryview]
    hashes: tuple[int, ...]


class _Filling(NamedTuple):
    """A part that is being written by a ``Fill``."""

    number: int
    runs: list[memoryview]
    waits: list[Wait]

    def wait(self) -> None:
        """Return when nothing of it is being written."""
        while self.waits:
            self.waits[0]()
            del self.waits[0]


class CopyIn:
    """One payload's way into a store's pages, in as many threads as call ``some``.

    ``written`` hears now and then how many bytes are there, from the first on without a gap;
    ``stop`` ends it at the next part.
    """

    def __init__(
        self,
        page_map: PageMap,
        pages: Sequence[int],
        draft: Manifest,
        source: Source,
        stop: threading.Event,
        written: Callable[[int], None],
    ) -> None:
        self._map = page_map
        self._pages = pages
        self._draft = draft
        self._source = source
        self._stop = stop
        self._written = written
        step = step_bytes(draft.payload_bytes, draft.block_bytes)
        self._groups = max(1, round(step / draft.group_bytes))
        self._parts = enumerate(_parts(pages, draft, [], self._groups))
        self._hashes = [0] * len(draft.group_hashes)
        self._taking = threading.Lock()
        self._broken = False
        self._telling = threading.Lock()
        shared = draft.payload_bytes >= FILL_SHARE_BYTES
        self._helpers = FILL_THREADS - 1 if shared else 0
        self._tell_bytes = 2 * WRITTEN_BYTES if shared else WRITTEN_BYTES
        self._ended: set[int] = set()
        self._in_order = self._told = 0

    def run(self, executor: Executor) -> Manifest:
        """Copy all of it, with help from the executor's threads; the manifest with its hashes.

        Nothing is being written any more when this returns or raises: Stopped, and what the source
        raises.
        """
        if not callable(self._source):
            return self._copy(self._source)
        ahead = max(1, AHEAD // (self._helpers + 1))
        some = partial(self._some, self._source, ahead)
        join(submit(executor, self._helpers, some), some)
        return with_hashes(self._draft, self._hashes)

    def _copy(self, source: Sequence[memoryview]) -> Manifest:
        hasher = GroupHasher(self._draft)
        for page, view in zip(self._pages, source, strict=True):
            if self._stop.is_set():
                raise Stopped
            copy(self._map.page(page), view)
            hasher.update(view)
            self._tell(hasher.hashed_bytes)
        return hasher.fill_in(self._draft)

    def _some(self, fill: Fill, ahead: int) -> None:
        """Have parts written, ``ahead`` of the one that is waited for, and hash them."""
        under_way: deque[_Filling] = deque()
        try:
            while self._begin(fill, under_way):
                while under_way and (not under_way[-1].waits or len(under_way) > ahead):
                    self._end(under_way)
            while under_way:
                self._end(under_way)
        except BaseException:
            self._broken = True
            raise
        finally:
            for filling in under_way:
                filling.wait()

    def _begin(self, fill: Fill, under_way: deque[_Filling]) -> bool:
        """Begin the next part; whether there was one. One thread at a time, so in their order."""
        with self._taking:
            number, part = next(self._parts, (0, None))
            if part is None or self._broken:
                return False
            if self._stop.is_set():
                raise Stopped
            filling = _Filling(number, list(self._map.runs(part.pages)), [])
            under_way.append(filling)
            block = part.first_block
            for run in filling.runs:
                wait = fill(block, run)
                if wait is not None:
                    filling.waits.append(wait)
                block += len(run) // self._draft.block_bytes
            return True

    def _end(self, under_way: deque[_Filling]) -> None:
        """Wait for the first part and hash it."""
        filling = under_way[0]
        filling.wait()
        under_way.popleft()
        hasher = GroupHasher(Groups(sum(map(len, filling.runs)), self._draft.group_bytes))
        for run in filling.runs:
            hasher.update(run)
        first = filling.number * self._groups
        self._hashes[first : first + len(hasher.hashes)] = hasher.hashes
        with self._telling:
            self._ended.add(filling.number)
            while self._in_order in self._ended:
                self._ended.remove(self._in_order)
                self._in_order += 1
            self._tell(self._in_order * self._groups * self._draft.group_bytes)

    def _tell(self, count: int) -> None:
        whole = self._draft.payload_bytes
        # Not of the end: it is ``finish_put``'s to say.
        if count - self._told >= self._tell_bytes and count < whole:
            self._written(count)
            self._told = count


class CopyOut:
    """One payload's way out of a store's pages, in as many threads as call ``some``.

    ``target`` are views of bytes, as many as the payload's in total, or takes the blocks from the
    pages themselves once they are checked. ``stop`` ends it at the next part.
    """

    def __init__(
        self,
        page_map: PageMap,
        pages: Sequence[int],
        manifest: Manifest,
        target: Sequence[memoryview] | Take,
        stop: threading.Event,
    ) -> None:
        self._map = page_map
        self._manifest = manifest
        self._take = target if callable(target) else None
        self._step = STEP_BYTES
        if callable(target):
            self._step = step_bytes(manifest.payload_bytes, manifest.block_bytes)
        groups = max(1, self._step // manifest.group_bytes)
        self._parts = _parts(pages, manifest, [] if callable(target) else target, groups)
        self._taking = threading.Lock()
        self._stop = stop
        self._wrong = threading.Event()
        if payload_hash(manifest) != manifest.payload_hash:
            self._wrong.set()

    @property
    def good(self) -> bool:
        """Whether nothing was wrong so far; once all is copied, whether it is what was written."""
        return not self._wrong.is_set()

    def some(self) -> None:
        """Copy and check parts until none is left to take or one is wrong. Raises Stopped."""
        with ExitStack() as waits:
            while self.good:
                with self._taking:
                    part = next(self._parts, None)
                if part is None:
                    return
                if self._stop.is_set():
                    raise Stopped
                good = self._copy(part) if self._take is None else self._give(part, waits)
                if not good:
                    self._wrong.set()

    def _copy(self, part: _Part) -> bool:
        """Copy a part and check the copy while it is still in the processor's cache."""
        writer = SpreadWriter(part.views)
        hasher = self._hasher(part)
        for run in self._map.runs(part.pages):
            for piece in writer.write(run):
                hasher.update(piece)
        return tuple(hasher.hashes) == part.hashes

    def _give(self, part: _Part, waits: ExitStack) -> bool:
        """Check a part where it lies, and have it taken from there while the next is checked."""
        assert self._take is not None
        hasher = self._hasher(part)
        runs = list(self._map.runs(part.pages))
        for run in runs:
            hasher.update(run)
        if tuple(hasher.hashes) != part.hashes:
            return False
        size = self._manifest.block_bytes
        give(self._take, part.first_block, runs, size, self._stop, waits, step=self._step)
        return True

    def _hasher(self, part: _Part) -> GroupHasher:
        size = len(part.pages) * self._manifest.block_bytes
        return GroupHasher(Groups(size, self._manifest.group_bytes))


def submit(executor: Executor, helpers: int, some: Callable[[], None]) -> list[Future[None]]:
    """Have ``some`` run in as many of the executor's threads."""
    return [executor.submit(some) for _ in range(helpers)]


def join(others: Sequence[Future[None]], some: Callable[[], None]) -> None:
    """Run ``some`` here too, and wait for the others that have begun. Raises what it raised."""
    try:
        some()
    finally:
        begun = [other for other in others if not other.cancel()]
        wait(begun)
    for other in begun:
        other.result()


def _parts(
    pages: Sequence[int], manifest: Manifest, views: Sequence[memoryview], groups: int
) -> Iterator[_Part]:
    """Parts of ``groups`` groups; their views are empty where there are none."""
    blocks = groups * manifest.group_blocks
    targets = chunks(views, groups * manifest.group_bytes)
    for number, first in enumerate(range(0, manifest.blocks, blocks)):
        yield _Part(
            first,
            pages[first : first + blocks],
            next(targets, []),
            manifest.group_hashes[number * groups : (number + 1) * groups],
        )
