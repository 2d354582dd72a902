"""The block manager against a model that counts everything anew each time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepinfer.workers.core.blocks import BlockManager

TOTAL = 7
SIZE = 2

tokens_lists = st.lists(st.integers(0, 2), min_size=1, max_size=10)


class Blocks(RuleBasedStateMachine):
    """Tables of residents and pins of copies, beside the manager that should know them.

    ``contents`` is what each block was last announced to hold: a whole prefix.
    """

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(TOTAL, SIZE, salt=b"m")
        self.tables: list[list[int]] = []
        self.pins: list[list[int]] = []
        self.contents: dict[int, tuple[int, ...]] = {}

    @property
    def held(self) -> set[int]:
        return {block for table in self.tables for block in table}

    @property
    def pinned(self) -> set[int]:
        return {block for table in self.pins for block in table}

    @property
    def known(self) -> dict[tuple[int, ...], int]:
        return {prefix: block for block, prefix in self.contents.items()}

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.manager.available))
        table = self.manager.allocate(count)
        assert len(set(table)) == count
        assert not set(table) & (self.held | self.pinned), "a block in use was handed out"
        for block in table:
            self.contents.pop(block, None)
        self.tables.append(table)

    @rule(tokens=tokens_lists)
    def fill(self, tokens: list[int]) -> None:
        """Like a prefill: take what is cached, allocate the rest, announce the full blocks."""
        available = self.manager.available
        blocks, chain = self.manager.match(tokens, available)
        expected = []
        for end in range(SIZE, len(tokens), SIZE):
            found = self.known.get(tuple(tokens[:end]))
            if found is None:
                break
            expected.append(found)
        assert blocks == expected, "not the longest cached prefix"
        assert available - self.manager.available == len(set(blocks) - self.held - self.pinned)
        missing = -(-len(tokens) // SIZE) - len(blocks)
        if missing > self.manager.available:
            self.manager.release(blocks)
            return
        fresh = self.manager.allocate(missing)
        for block in fresh:
            self.contents.pop(block, None)
        table = blocks + fresh
        self.tables.append(table)
        for index in range(len(blocks), len(tokens) // SIZE):
            parent = chain[-1] if chain else self.manager.root
            start = index * SIZE
            chain.append(self.manager.digest(parent, tokens[start : start + SIZE]))
            self.manager.register(table[index], chain[-1])
            prefix = tuple(tokens[: start + SIZE])
            if prefix not in self.known:
                self.contents[table[index]] = prefix

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.tables.remove(table)
        self.manager.release(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.manager.pin(table)
        self.pins.append(list(table))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.pins))
        self.pins.remove(table)
        self.manager.unpin(table)

    @invariant()
    def everything_adds_up(self) -> None:
        manager = self.manager
        manager.check()
        manager.check_tables(self.tables, self.pins)
        held, pinned = self.held, self.pinned
        assert manager.held == len(held)
        assert manager.quarantined == len(pinned - held)
        assert manager.cached == len(self.contents.keys() - held - pinned)
        assert manager.available == TOTAL - len(held | pinned)
        for table in self.tables:
            others = [other for other in self.tables if other is not table]
            shared = {block for other in others for block in other}
            assert manager.private(table) == len(set(table) - shared)


TestBlocks = Blocks.TestCase


@given(tokens=st.lists(st.integers(0, 1), min_size=SIZE + 1, max_size=12))
def test_a_salt_keeps_prefixes_apart(tokens: list[int]) -> None:
    one, other = BlockManager(8, SIZE, salt=b"a"), BlockManager(8, SIZE, salt=b"b")
    assert one.digest(one.root, tokens[:SIZE]) != other.digest(other.root, tokens[:SIZE])


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    manager = BlockManager(3, 1)
    table = manager.allocate(3)
    chain = manager.root
    for block, token in zip(table, [5, 6, 7], strict=True):
        chain = manager.digest(chain, [token])
        manager.register(block, chain)
    manager.release(table)
    assert manager.allocate(1) == [table[2]]
    assert manager.match([5, 6, 7, 8], available_max=3)[0] == table[:2]


def test_the_last_token_is_never_taken_from_the_cache() -> None:
    manager = BlockManager(2, 2)
    (block,) = manager.allocate(1)
    manager.register(block, manager.digest(manager.root, [1, 2]))
    assert manager.match([1, 2], available_max=2) == ([], [])
    assert manager.match([1, 2, 3], available_max=0)[0] == [block], "a held block costs nothing"
    manager.release([block])
    manager.release([block])
    assert manager.match([1, 2, 3], available_max=0) == ([], []), "a cached one does"


def test_without_a_prefix_cache_nothing_is_found_and_nothing_is_kept() -> None:
    manager = BlockManager(2, 1, prefix_cache=False)
    table = manager.allocate(2)
    manager.register(table[0], manager.digest(manager.root, [9]))
    manager.release(table)
    assert manager.match([9, 9], available_max=2) == ([], [])
    assert manager.cached == 0


def test_misuse_is_caught() -> None:
    manager = BlockManager(1, 1)
    with pytest.raises(AssertionError, match="2 blocks wanted, 1 available"):
        manager.allocate(2)
    with pytest.raises(AssertionError, match="released more often than taken"):
        manager.release([0])
    with pytest.raises(AssertionError, match="unpinned more often than pinned"):
        manager.unpin([0])
