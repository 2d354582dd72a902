"""Slabs of host memory that several processes map: memfds cut into block-sized pages.

A slab's size never changes (it is sealed), so a mapping of it can never fault. Slabs are added as
pages are first needed and are kept until the pool closes.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence

SLAB_BYTES = 128 << 20
"""Large enough for few registrations of pinned memory, small enough that one never fails whole."""


class Slab:
    """One mapped memfd of ``length`` bytes; ``view`` is all of it. Owns the descriptor."""

    __slots__ = ("_mapping", "fd", "length", "view")

    def __init__(self, fd: int, length: int) -> None:
        self.fd = fd
        self.length = length
        # Populated at once: a page fault for every 4 KiB would halve the speed of the first copy.
        self._mapping = mmap.mmap(fd, length, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.view = memoryview(self._mapping)

    @classmethod
    def create(cls, name: str, length: int) -> Slab:
        """Make a new memfd. Raises OSError when the memory is not there."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, length)  # fails here, not as SIGBUS at some later touch
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(fd, length)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def adopt(cls, fd: int, length: int) -> Slab:
        """Map another process's memfd. Takes ``fd`` over, even when it raises OSError."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if os.fstat(fd).st_size != length or not seals & fcntl.F_SEAL_SHRINK:
                raise OSError(f"slab descriptor is not a sealed memfd of {length} bytes")
            return cls(fd, length)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Unmap and close; where a view into the slab is still out, unmapped when that goes."""
        os.close(self.fd)
        with contextlib.suppress(BufferError):
            self.view.release()
            self._mapping.close()


class PageMap:
    """Pages over slabs: page ``p`` is slab ``p // slab_pages``, slot ``p % slab_pages``."""

    def __init__(self, page_bytes: int, slab_pages: int) -> None:
        self.page_bytes = page_bytes
        self.slab_pages = slab_pages
        self.slabs: list[Slab] = []

    @property
    def pages_mapped(self) -> int:
        """Pages that lie in a mapped slab."""
        return len(self.slabs) * self.slab_pages

    def runs(self, pages: Sequence[int]) -> Iterator[memoryview]:
        """The pages' bytes in order, adjacent pages of one slab as one view."""
        start = 0
        while start < len(pages):
            first = pages[start]
            slab, slot = divmod(first, self.slab_pages)
            stop = start + 1
            while (
                stop < len(pages)
                and pages[stop] == first + (stop - start)
                and slot + (stop - start) < self.slab_pages
            ):
                stop += 1
            begin = slot * self.page_bytes
            yield self.slabs[slab].view[begin : begin + (stop - start) * self.page_bytes]
            start = stop

    def page(self, page: int) -> memoryview:
        """One page's bytes."""
        slab, slot = divmod(page, self.slab_pages)
        begin = slot * self.page_bytes
        return self.slabs[slab].view[begin : begin + self.page_bytes]

    def close(self) -> None:
        """Unmap everything; see ``Slab.close``."""
        while self.slabs:
            self.slabs.pop().close()


class HostPool(PageMap):
    """The store's own pages. Grows slab by slab, as far as pages are used."""

    def __init__(self, *, page_bytes: int, slab_bytes: int = SLAB_BYTES, name: str) -> None:
        super().__init__(page_bytes, max(1, slab_bytes // page_bytes))
        self._name = name
        self._growing = threading.Lock()

    @property
    def slab_bytes(self) -> int:
        """Length of every slab: whole pages, rounded up to what can be mapped."""
        return -(-self.slab_pages * self.page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

    def grow_to(self, pages: int) -> None:
        """Have pages 0 to ``pages`` - 1 mapped. Slow (it zeroes memory): call it in a thread."""
        with self._growing:
            while self.pages_mapped < pages:
                slab = Slab.create(f"{self._name}-{len(self.slabs)}", self.slab_bytes)
                self.slabs.append(slab)
