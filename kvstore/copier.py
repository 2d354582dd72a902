"""Copies and hashes between a store's mapped pages and a worker's memory; runs in threads.

What goes into a store is copied in one thread: the store hashes behind it, and both together take
what memory gives. What comes out is cut into parts of whole hash groups, and two threads each take
the next part as they come to it: it does not matter when the second of them gets a processor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple

from deepinfer.kvstore.copying import SpreadWriter, chunks, copy
from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.hashing import GroupHasher, Groups, payload_hash
from deepinfer.kvstore.host_pool import PageMap
from deepinfer.kvstore.transfers import STEP_BYTES, Source, Stopped, fill_step

SHARE_BYTES = 4 << 20
"""From here on a payload is copied out in two threads; with less, to start the second takes what
it saves."""
WRITTEN_BYTES = 3 << 20
"""A writer tells the store how far it has come after every second step or so: what the store hashes
then is still in a cache that both share."""


class _Part(NamedTuple):
    """Whole groups of a payload: what to copy, where to, and what its hashes must be."""

    pages: Sequence[int]
    views: list[memoryview]
    hashes: tuple[int, ...]
    payload_bytes: int


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
        block = 0
        step = fill_step(draft)
        for run in page_map.runs(pages):
            for begin in range(0, len(run), step):
                if stop.is_set():
                    raise Stopped
                buffer = run[begin : begin + step]
                source(block, buffer)
                hash_behind(buffer)
                block += len(buffer) // draft.block_bytes
        return hasher.fill_in(draft)
    for page, view in zip(pages, source, strict=True):
        if stop.is_set():
            raise Stopped
        copy(page_map.page(page), view)
        hash_behind(view)
    return hasher.fill_in(draft)


class CopyOut:
    """One payload's way out of a store's pages, in as many threads as call ``some``.

    ``views`` are bytes, as many as the payload's in total. ``stop`` ends it at the next part.
    """

    def __init__(
        self,
        page_map: PageMap,
        pages: Sequence[int],
        manifest: Manifest,
        views: Sequence[memoryview],
        stop: threading.Event,
    ) -> None:
        self._map = page_map
        self._group_bytes = manifest.group_bytes
        self._parts = _parts(pages, manifest, views)
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
        while self.good:
            with self._taking:
                part = next(self._parts, None)
            if part is None:
                return
            if self._stop.is_set():
                raise Stopped
            if not self._copy(part):
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
        hasher = GroupHasher(Groups(part.payload_bytes, self._group_bytes))
        for run in self._map.runs(part.pages):
            for piece in writer.write(run):
                hasher.update(piece)
        return tuple(hasher.hashes) == part.hashes


def _parts(
    pages: Sequence[int], manifest: Manifest, views: Sequence[memoryview]
) -> Iterator[_Part]:
    groups = max(1, STEP_BYTES // manifest.group_bytes)
    blocks = groups * manifest.group_blocks
    for number, targets in enumerate(chunks(views, groups * manifest.group_bytes)):
        yield _Part(
            pages[number * blocks : (number + 1) * blocks],
            targets,
            manifest.group_hashes[number * groups : (number + 1) * groups],
            sum(map(len, targets)),
        )
