"""Which pages of the slab are free.

Pages are numbered from 0 and handed out lowest first: payloads tend to lie in runs of adjacent
pages, and the shell, which maps slabs as far as the highest page ever used, maps few.
"""

from __future__ import annotations

import heapq


class PagePool:
    """Free pages of a slab of ``total`` pages, of which those from ``touched`` on were never used.

    Who has the others is their holders' business; ``StoreCore.check`` adds it all up.
    """

    __slots__ = ("_returned", "total", "touched")

    def __init__(self, total: int) -> None:
        self.total = total
        self.touched = 0
        self._returned: list[int] = []  # a heap; every entry is below touched

    @property
    def free(self) -> int:
        """Pages that could be taken now."""
        return self.total - self.touched + len(self._returned)

    def take(self, count: int) -> tuple[int, ...]:
        """Take ``count`` pages, in ascending order; the caller has looked at ``free``."""
        assert 0 <= count <= self.free, (count, self.free)
        reused = min(count, len(self._returned))
        pages = [heapq.heappop(self._returned) for _ in range(reused)]
        fresh = range(self.touched, self.touched + count - reused)
        self.touched = fresh.stop
        return (*pages, *fresh)

    def give_back(self, pages: tuple[int, ...]) -> None:
        """Make pages free again."""
        for page in pages:
            assert 0 <= page < self.touched, (page, self.touched)
            heapq.heappush(self._returned, page)

    def check(self, held: list[int]) -> None:
        """Free pages and ``held`` ones (every holder's, in any order) are each page once."""
        assert 0 <= self.touched <= self.total, (self.touched, self.total)
        assert self.free + len(held) == self.total, (self.free, len(held), self.total)
        assert sorted([*self._returned, *held]) == list(range(self.touched))
