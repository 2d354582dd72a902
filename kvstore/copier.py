"""Copies and hashes between a store's mapped pages and a worker's memory; runs in threads.

What goes into a store is copied in one thread: the store hashes behind it, and both together take
what memory gives. What comes out is cut into parts of whole hash groups, and two threads each take
the next part as they come to it: it does not matter when the second of them gets a processor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing
from typing import NamedTuple

from deepinfer.kvstore.copying import SpreadWriter, chunks, copy
from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.hashing import GroupHasher, Groups, payload_hash
from deepinfer.kvstore.host_pool import PageMap
from deepinfer.kvstore.transfers import (
    STEP_BYTES,
    Source,
    Stopped,
    Take,
    fill_step,
    filled,
    give,
)

SHARE_BYTES = 4 << 20
"""From here on a payload is copied out in two threads; with less, to start the second takes what
it saves."""
WRITTEN_BYTES = 3 << 20
"""A writer tells the store how far it has come after every second step or so: what the store hashes
then is still in a cache that both share."""


class _Part(NamedTuple):
    """Whole groups of a payload: what to copy, where to, and what its hashes must be."""

    first_block: int
    pages: Sequence[int]
    views: list[memoryview]
    hashes: tuple[int, ...]


def copy_in(
    page_map: PageMap,
    pages: Sequence[int],
    draft: Manifest,
    source: Source,
    stop: threading.Event,
    written: Callable[[int], None],
) -> Manifest:
    """Copy a payload into ``pages``; return its manifest with the hashes.

    ``written`` hears now and then how many bytes are there; ``stop`` ends it at the next step.
    Raises Stopped, and what ``source`` raises.
    """
    hasher = GroupHasher(draft)
    told = 0

    def hash_behind(piece: memoryview) -> None:
        nonlocal told
        hasher.update(piece)
        count = hasher.hashed_bytes
        if count - told >= WRITTEN_BYTES and count < draft.payload_bytes:
            written(count)  # but not the end: it is ``finish_put``'s to say
            told = count

    if callable(source):
        step = fill_step(draft)
        buffers = (
            run[begin : begin + step]
            for run in page_map.runs(pages)
            for begin in range(0, len(run), step)
        )
        with closing(filled(draft, source, buffers, stop)) as ready:
            for buffer in ready:
                hash_behind(buffer)
        return hasher.fill_in(draft)
    for page, view in zip(pages, source, strict=True):
        if stop.is_set():
            raise Stopped
        copy(page_map.page(page), view)
        hash_behind(view)
    return hasher.fill_in(draft)


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
        self._parts = _parts(pages, manifest, [] if callable(target) else target)
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

    def rest(self, other: Future[None]) -> None:
        """``some``, and then wait for the one that ``other`` runs. Raises Stopped."""
        try:
            self.some()
        finally:
            if not other.cancel():
                wait([other])
        if not other.cancelled():
            other.result()

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
        give(self._take, part.first_block, runs, size, self._stop, waits)
        return True

    def _hasher(self, part: _Part) -> GroupHasher:
        size = len(part.pages) * self._manifest.block_bytes
        return GroupHasher(Groups(size, self._manifest.group_bytes))


def _parts(
    pages: Sequence[int], manifest: Manifest, views: Sequence[memoryview]
) -> Iterator[_Part]:
    """The parts; their views are empty where there are none."""
    groups = max(1, STEP_BYTES // manifest.group_bytes)
    blocks = groups * manifest.group_blocks
    targets = chunks(views, groups * manifest.group_bytes)
    for number, first in enumerate(range(0, manifest.blocks, blocks)):
        yield _Part(
            first,
            pages[first : first + blocks],
            next(targets, []),
            manifest.group_hashes[number * groups : (number + 1) * groups],
        )
