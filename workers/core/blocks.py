"""Blocks of the paged pool: who holds which, and which still hold a known prefix.

A block is in exactly one of four places::

    free         nobody refers to it and its contents mean nothing
    held         one resident or several (a shared prefix) refer to it
    quarantined  nobody refers to it, but a copy or a running step may still touch it
    cached       nobody refers to it, its contents are a known prefix: found again by its hash,
                 evicted in the order it was left when an allocation needs it

Only full blocks are shared, so a shared block is never written again. A block's hash is chained
over its predecessors' (as in vLLM's prefix cache), so equal hashes mean equal tokens from the
first one on; the salt keeps models and KV dtypes apart. Its tag is the worst precision that
computed any of them: an ``exact`` request takes FP16 ones only.

Ids below ``ordinary`` are blocks at all times. Those behind them, the tail, are blocks only while
the weights' lower planes, whose bytes they are, have left the card::

    SHUT --open_tail--> OPEN --close_tail--> CLOSING --shut_tail, once it is empty--> SHUT

A block of the tail is handed out last of all, and what comes free there is kept apart, so that the
tail empties by itself as far as it can.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from enum import Enum
from hashlib import blake2b

from deepinfer.kvstore.core.precision import Precision

DIGEST_BYTES = 16


class Tail(Enum):
    """Whether the ids behind the ordinary ones are blocks."""

    SHUT = "shut"
    OPEN = "open"
    CLOSING = "closing"
    """Those in use still are; none is handed out."""


class BlockManager:
    """Hands out block ids, counts references and pins, and keeps the prefix cache.

    Callers decide first (``available``), then apply: an allocation that does not fit is their bug.
    """

    def __init__(
        self,
        ordinary: int,
        block_size: int,
        *,
        tail_blocks: int = 0,
        salt: bytes = b"",
        prefix_cache: bool = True,
    ) -> None:
        self.ordinary = ordinary
        self.tail_blocks = tail_blocks
        self.tail = Tail.SHUT
        self.tail_held = 0
        """Blocks of the tail that somebody refers to."""
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.root = blake2b(salt, digest_size=DIGEST_BYTES).digest()
        """The hash before any block: the parent of every first block."""
        self.hit_tokens = 0
        """Tokens found in the cache so far (a count, for metrics)."""
        self.query_tokens = 0
        """Tokens looked up in the cache so far."""
        capacity = ordinary + tail_blocks
        self._free = deque(range(ordinary))
        self._free_tail = deque(range(ordinary, capacity))
        self._references = [0] * capacity
        self._pins = [0] * capacity
        self._digest: list[bytes | None] = [None] * capacity
        self._tags = [Precision.FP16] * capacity
        """Of blocks with a digest."""
        self._by_digest: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._cached_tail: OrderedDict[int, None] = OrderedDict()
        self._quarantined = 0
        self._quarantined_tail = 0
        self._shared = 0

    @property
    def blocks_total(self) -> int:
        """Blocks that there are now, those of a closing tail not among them."""
        return self.ordinary + (self.tail_blocks if self.tail is Tail.OPEN else 0)

    @property
    def available(self) -> int:
        """Blocks that an allocation could take now."""
        count = len(self._free) + len(self._cached)
        if self.tail is Tail.OPEN:
            count += len(self._free_tail) + len(self._cached_tail)
        return count

    @property
    def quarantined(self) -> int:
        return self._quarantined + self._quarantined_tail

    @property
    def cached(self) -> int:
        return len(self._cached) + len(self._cached_tail)

    @property
    def held(self) -> int:
        free = len(self._free) + len(self._cached) + self._quarantined
        return self.ordinary - free + self.tail_held

    @property
    def to_move(self) -> int:
        """Blocks of a closing tail that somebody refers to: each needs an ordinary one."""
        return self.tail_held if self.tail is Tail.CLOSING else 0

    def allocate(self, count: int) -> list[int]:
        """``count`` private blocks: free ones first, then the cached ones left longest ago.

        The tail's come after all others, in the same order.
        """
        assert 0 <= count <= self.available, f"{count} blocks wanted, {self.available} available"
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.popleft()
            elif self._cached:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            elif self._free_tail:
                block = self._free_tail.popleft()
            else:
                block, _ = self._cached_tail.popitem(last=False)
                self._forget(block)
            self._take(block)
            blocks.append(block)
        return blocks

    # ---- the tail --------------------------------------------------------------------------

    def open_tail(self) -> None:
        """The planes have left: their bytes are blocks."""
        assert self.tail is Tail.SHUT, f"the tail is {self.tail.value}"
        self.tail = Tail.OPEN

    def close_tail(self) -> None:
        """Hand out no more of the tail, and forget what is only cached there."""
        assert self.tail is Tail.OPEN, f"the tail is {self.tail.value}"
        self.tail = Tail.CLOSING
        for block in range(self.ordinary, self.ordinary + self.tail_blocks):
            if self._references[block] == 0:
                self._forget(block)
        self._free_tail.extend(self._cached_tail)
        self._cached_tail.clear()

    def reopen_tail(self) -> None:
        """The planes stay away for now."""
        assert self.tail is Tail.CLOSING, f"the tail is {self.tail.value}"
        self.tail = Tail.OPEN

    @property
    def tail_empty(self) -> bool:
        """Whether nobody refers to a block of the tail, and no copy or step touches one."""
        return self.tail_held == 0 and self._quarantined_tail == 0

    def shut_tail(self) -> None:
        """Nothing is left in the tail: its bytes may be planes again."""
        assert self.tail is Tail.CLOSING, f"the tail is {self.tail.value}"
        assert self.tail_empty, "the tail is shut while blocks of it are in use"
        self.tail = Tail.SHUT

    def movable(self, block: int) -> bool:
        """Whether the block's contents have to leave a closing tail, and nothing pins it there."""
        closing = self.tail is Tail.CLOSING and block >= self.ordinary
        return closing and self._pins[block] == 0

    def move(self, block: int) -> int:
        """Take an ordinary block in the place of a held one of the tail, for all who refer to it.

        The old one stays pinned until ``unpin``: its contents are yet to be copied. The callers'
        tables are theirs to change.
        """
        assert self.movable(block), f"block {block} cannot be moved"
        count = self._references[block]
        assert count > 0, f"block {block} moved while nobody holds it"
        (target,) = self.allocate(1)
        self._references[target] = count
        digest = self._digest[block]
        if digest is not None:
            self._digest[block] = None
            self._digest[target], self._tags[target] = digest, self._tags[block]
            self._by_digest[digest] = target
        self._references[block] = 0
        self._pins[block] += 1
        self.tail_held -= 1
        self._quarantined_tail += 1
        return target

    # ---- references ------------------------------------------------------------------------

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
                self._leave(block)

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
                self._end_quarantine(block)
                self._retire(block)

    def match(
        self,
        token_ids: Sequence[int],
        available_max: int,
        chain: Sequence[bytes] = (),
        *,
        pure: bool = False,
    ) -> tuple[list[int], list[bytes]]:
        """Take the longest cached prefix: its blocks, one more reference on each, and their hashes.

        ``chain``: hashes of the blocks that the caller has already; only what follows is looked
        for. At most ``len(token_ids) - 1`` tokens are taken: the last one must be computed for its
        logits. A hit on an unreferenced block uses up one of ``available``, and at most
        ``available_max`` of these are used; a hit on a held one uses up none. ``pure``: blocks with
        a tag above FP16 are not looked at.
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
            if found is None or (pure and self._tags[found] is not Precision.FP16):
                break
            cached = self._cached_of(found)
            if found in cached:
                if available_max <= 0:
                    break
                available_max -= 1
                del cached[found]
                self._take(found)
            elif self._references[found] == 0:
                self._end_quarantine(found)
                self._take(found)
            else:
                self._shared += self._references[found] == 1
                self._references[found] += 1
            blocks.append(found)
            digests.append(digest)
        self.hit_tokens += len(blocks) * size
        return blocks, digests

    def tag(self, block: int) -> Precision:
        """The worst precision in the prefix chain of a block that ``match`` has given."""
        return self._tags[block]

    def register(self, block: int, digest: bytes, tag: Precision = Precision.FP16) -> None:
        """Announce that a held block is full and holds the prefix named by ``digest``.

        The first block of a prefix to be announced is the one that is shared, until one with a
        better tag takes its place; equal ones computed beside it stay private.
        """
        assert self._references[block] > 0, f"block {block} registered while nobody holds it"
        if not self.prefix_cache or self._digest[block] is not None:
            return
        known = self._by_digest.get(digest)
        if known is not None:
            if self._tags[known] <= tag:
                return
            unused = self._cached_of(known).pop(known, False) is None
            self._forget(known)
            if unused:
                self._retire(known)
        self._digest[block], self._tags[block] = digest, tag
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
        capacity = self.ordinary + self.tail_blocks
        free, cached = {*self._free, *self._free_tail}, {*self._cached, *self._cached_tail}
        assert len(free) == len(self._free) + len(self._free_tail), "a block is free twice"
        assert not free & cached, "a block is both free and cached"
        held = {b for b in range(capacity) if self._references[b] > 0}
        pinned = {b for b in range(capacity) if self._pins[b] > 0}
        assert not held & (free | cached), "a held block can be allocated"
        assert not pinned & (free | cached), "a pinned block can be allocated"
        quarantined = pinned - held
        tail = set(range(self.ordinary, capacity))
        assert len(quarantined - tail) == self._quarantined, "quarantine is miscounted"
        assert len(quarantined & tail) == self._quarantined_tail, "the tail's is miscounted"
        total = len(free) + len(cached) + len(held) + len(quarantined)
        assert total == capacity, f"{total} blocks accounted for of {capacity}"
        assert len(held) == self.held, "held blocks are miscounted"
        shared = sum(1 for count in self._references if count > 1)
        assert shared == self._shared, "shared blocks are miscounted"
        known = {b: d for b, d in enumerate(self._digest) if d is not None}
        assert {d: b for b, d in known.items()} == self._by_digest, "the cache's two maps differ"
        assert cached <= known.keys(), "a cached block holds no known prefix"
        assert not free & known.keys(), "a free block is still in the cache"
        assert tail.isdisjoint([*self._free, *self._cached]), "a block of the tail is ordinary"
        assert tail.issuperset([*self._free_tail, *self._cached_tail]), "one is not the tail's"
        assert len(held & tail) == self.tail_held, "the tail's held blocks are miscounted"
        if self.tail is not Tail.OPEN:
            assert not self._cached_tail, "a closed tail is cached"
            assert not tail & (known.keys() - held), "a closed tail has what nobody refers to"
        if self.tail is Tail.SHUT:
            assert tail <= free, "a block of the tail is in use while the planes are there"

    def check_tables(self, tables: Iterable[list[int]], pins: Iterable[list[int]]) -> None:
        """Raise AssertionError unless these tables and pins are all there are."""
        capacity = self.ordinary + self.tail_blocks
        references, pinned = [0] * capacity, [0] * capacity
        for table in tables:
            assert len(set(table)) == len(table), f"a block occurs twice in a table: {table}"
            for block in table:
                references[block] += 1
        for blocks in pins:
            for block in blocks:
                pinned[block] += 1
        assert references == self._references, "references are miscounted"
        assert pinned == self._pins, "pins are miscounted"

    def _cached_of(self, block: int) -> OrderedDict[int, None]:
        return self._cached if block < self.ordinary else self._cached_tail

    def _take(self, block: int) -> None:
        """The first reference to a block."""
        assert block < self.ordinary or self.tail is Tail.OPEN, f"{block} is of a closed tail"
        self._references[block] = 1
        self.tail_held += block >= self.ordinary

    def _leave(self, block: int) -> None:
        """The last reference is gone."""
        if block >= self.ordinary:
            self.tail_held -= 1
            if self.tail is Tail.CLOSING:
                self._forget(block)
        if not self._pins[block]:
            self._retire(block)
        elif block < self.ordinary:
            self._quarantined += 1
        else:
            self._quarantined_tail += 1

    def _end_quarantine(self, block: int) -> None:
        if block < self.ordinary:
            self._quarantined -= 1
        else:
            self._quarantined_tail -= 1

    def _retire(self, block: int) -> None:
        if self._digest[block] is not None:
            self._cached_of(block)[block] = None
        elif block < self.ordinary:
            self._free.append(block)
        else:
            self._free_tail.append(block)

    def _forget(self, block: int) -> None:
        digest = self._digest[block]
        if digest is not None:
            self._digest[block] = None
            del self._by_digest[digest]
