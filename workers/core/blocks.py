"""Blocks of the paged pool: who holds which, and which still hold a known prefix.

A block is in exactly one of four places::

    free         nobody refers to it and its contents mean nothing
    held         one resident or several (a shared prefix) refer to it
    quarantined  nobody refers to it, but a copy or a running step may still touch it
    cached       nobody refers to it, its contents are a known prefix: found again by its hash,
                 evicted in the order it was left when an allocation needs it

Only full blocks are shared, so a shared block is never written again. A block's hash is chained
over its predecessors' (as in vLLM's prefix cache), so equal hashes mean equal tokens from the
first one on; the salt keeps models and precisions apart.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


class BlockManager:
    """Hands out block ids, counts references and pins, and keeps the prefix cache.

    Callers decide first (``available``), then apply: an allocation that does not fit is their bug.
    """

    def __init__(
        self, blocks_total: int, block_size: int, *, salt: bytes = b"", prefix_cache: bool = True
    ) -> None:
        self.blocks_total = blocks_total
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.root = blake2b(salt, digest_size=DIGEST_BYTES).digest()
        """The hash before any block: the parent of every first block."""
        self.hit_tokens = 0
        """Tokens found in the cache so far (a count, for metrics)."""
        self.query_tokens = 0
        """Tokens looked up in the cache so far."""
        self._free = deque(range(blocks_total))
        self._references = [0] * blocks_total
        self._pins = [0] * blocks_total
        self._digest: list[bytes | None] = [None] * blocks_total
        self._by_digest: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._quarantined = 0
        self._shared = 0

    @property
    def available(self) -> int:
        """Blocks that an allocation could take now."""
        return len(self._free) + len(self._cached)

    @property
    def quarantined(self) -> int:
        return self._quarantined

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def held(self) -> int:
        return self.blocks_total - len(self._free) - len(self._cached) - self._quarantined

    def allocate(self, count: int) -> list[int]:
        """``count`` private blocks: free ones first, then the cached ones left longest ago."""
        assert 0 <= count <= self.available, f"{count} blocks wanted, {self.available} available"
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.popleft()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference on each block of a table, listed from the first token on.

        Released from the end, so that of one prefix the tail is evicted before the head.
        """
        for block in reversed(blocks):
            count = self._references[block] - 1
            assert count >= 0, f"block {block} released more often than taken"
            self._references[block] = count
            if count == 1:
                self._shared -= 1
            elif count == 0:
                if self._pins[block]:
                    self._quarantined += 1
                else:
                    self._retire(block)

    def pin(self, blocks: Iterable[int]) -> None:
        """Keep held blocks out of use, even when released, until as many ``unpin`` calls."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} pinned by nobody who holds it"
            self._pins[block] += 1

    def unpin(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            count = self._pins[block] - 1
            assert count >= 0, f"block {block} unpinned more often than pinned"
            self._pins[block] = count
            if count == 0 and self._references[block] == 0:
                self._quarantined -= 1
                self._retire(block)

    def match(
        self, token_ids: Sequence[int], available_max: int, chain: Sequence[bytes] = ()
    ) -> tuple[list[int], list[bytes]]:
        """Take the longest cached prefix: its blocks, one more reference on each, and their hashes.

        ``chain``: hashes of the blocks that the caller has already; only what follows is looked
        for. At most ``len(token_ids) - 1`` tokens are taken: the last one must be computed for its
        logits. A hit on an unreferenced block uses up one of ``available``, and at most
        ``available_max`` of these are used; a hit on a held one uses up none.
        """
        blocks: list[int] = []
        digests: list[bytes] = []
        if not self.prefix_cache:
            return blocks, digests
        self.query_tokens += len(token_ids)
        size = self.block_size
        digest = chain[-1] if chain else self.root
        for start in range(len(chain) * size, len(token_ids) - size, size):
            digest = self.digest(digest, token_ids[start : start + size])
            found = self._by_digest.get(digest)
            if found is None:
                break
            if found in self._cached:
                if available_max <= 0:
                    break
                available_max -= 1
                del self._cached[found]
            elif self._references[found] == 0:
                self._quarantined -= 1
            elif self._references[found] == 1:
                self._shared += 1
            self._references[found] += 1
            blocks.append(found)
            digests.append(digest)
        self.hit_tokens += len(blocks) * size
        return blocks, digests

    def register(self, block: int, digest: bytes) -> None:
        """Announce that a held block is full and holds the prefix named by ``digest``.

        The first block of a prefix to be announced is the one that is shared; equal ones computed
        beside it stay private.
        """
        assert self._references[block] > 0, f"block {block} registered while nobody holds it"
        if self.prefix_cache and digest not in self._by_digest and self._digest[block] is None:
            self._digest[block] = digest
            self._by_digest[digest] = block

    def digest(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """The hash of a full block, given its predecessor's (``root`` for the first)."""
        assert len(token_ids) == self.block_size, "only full blocks have a hash"
        content = ",".join(map(str, token_ids)).encode()
        return blake2b(parent + content, digest_size=DIGEST_BYTES).digest()

    def private(self, blocks: Sequence[int]) -> int:
        """How many of one table's blocks nobody else refers to."""
        if not self._shared:
            return len(blocks)
        references = self._references
        return sum(1 for block in blocks if references[block] == 1)

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is both free and cached"
        held = {b for b in range(self.blocks_total) if self._references[b] > 0}
        pinned = {b for b in range(self.blocks_total) if self._pins[b] > 0}
        assert not held & (free | cached), "a held block can be allocated"
        assert not pinned & (free | cached), "a pinned block can be allocated"
        quarantined = pinned - held
        assert len(quarantined) == self._quarantined, "quarantine is miscounted"
        total = len(free) + len(cached) + len(held) + len(quarantined)
        assert total == self.blocks_total, f"{total} blocks accounted for of {self.blocks_total}"
        shared = sum(1 for count in self._references if count > 1)
        assert shared == self._shared, "shared blocks are miscounted"
        known = {b: d for b, d in enumerate(self._digest) if d is not None}
        assert {d: b for b, d in known.items()} == self._by_digest, "the cache's two maps differ"
        assert cached <= known.keys(), "a cached block holds no known prefix"
        assert not free & known.keys(), "a free block is still in the cache"

    def check_tables(self, tables: Iterable[list[int]], pins: Iterable[list[int]]) -> None:
        """Raise AssertionError unless these tables and pins are all there are."""
        references, pinned = [0] * self.blocks_total, [0] * self.blocks_total
        for table in tables:
            assert len(set(table)) == len(table), f"a block occurs twice in a table: {table}"
            for block in table:
                references[block] += 1
        for blocks in pins:
            for block in blocks:
                pinned[block] += 1
        assert references == self._references, "references are miscounted"
        assert pinned == self._pins, "pins are miscounted"

    def _retire(self, block: int) -> None:
        if self._digest[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def _forget(self, block: int) -> None:
        digest = self._digest[block]
        if digest is not None:
            self._digest[block] = None
            del self._by_digest[digest]
