"""A pool whose tail comes and goes: what is held survives, and nothing of a shut tail is in use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepinfer.workers.core.blocks import BlockManager, Tail

ORDINARY, TAIL, SIZE = 5, 4, 2


class TailedPool(RuleBasedStateMachine):
    """Tables with a value written into each block, as residents and copies would use them."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(ORDINARY, SIZE, tail_blocks=TAIL, salt=b"m")
        self.tables: list[list[int]] = []
        self.written: list[list[int]] = []
        """What each table's blocks must hold."""
        self.pool = [0] * (ORDINARY + TAIL)
        self.pins: list[list[int]] = []
        self.values = 0

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        ordinary = len(self.manager._free) + len(self.manager._cached)
        count = data.draw(st.integers(0, self.manager.available))
        table = self.manager.allocate(count)
        tail = [block for block in table if block >= ORDINARY]
        assert len(tail) == max(0, count - ordinary), "the tail comes last of all"
        assert not tail or self.manager.tail is Tail.OPEN
        self._keep(table)

    def _keep(self, table: list[int]) -> None:
        for block in table:
            self.values += 1
            self.pool[block] = self.values
        self.tables.append(table)
        self.written.append([self.pool[block] for block in table])

    @rule(tokens=st.lists(st.integers(0, 1), min_size=3, max_size=8))
    def fill(self, tokens: list[int]) -> None:
        """A prefill: what is cached is shared, the rest is computed and announced."""
        manager = self.manager
        shared, chain = self._match(tokens)
        missing = -(-len(tokens) // SIZE) - len(shared)
        if missing > manager.available:
            manager.release(shared)
            return
        fresh = manager.allocate(missing)
        for block in fresh:
            self.values += 1
            self.pool[block] = self.values
        table = shared + fresh
        for index in range(len(shared), len(tokens) // SIZE):
            parent = chain[-1] if chain else manager.root
            chain.append(manager.digest(parent, tokens[index * SIZE : (index + 1) * SIZE]))
            manager.register(table[index], chain[-1])
        self.tables.append(table)
        self.written.append([self.pool[block] for block in table])

    def _match(self, tokens: list[int]) -> tuple[list[int], list[bytes]]:
        found = self.manager.match(tokens, self.manager.available)
        return found[0], found[1]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.manager.release(self.tables.pop(index))
        self.written.pop(index)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        table = list(data.draw(st.sampled_from(self.tables)))
        self.manager.pin(table)
        self.pins.append(table)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.manager.unpin(self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))))

    @precondition(lambda self: self.manager.tail is Tail.SHUT)
    @rule()
    def open(self) -> None:
        self.manager.open_tail()

    @precondition(lambda self: self.manager.tail is Tail.OPEN)
    @rule()
    def close(self) -> None:
        self.manager.close_tail()

    @precondition(lambda self: self.manager.tail is Tail.CLOSING)
    @rule()
    def reopen(self) -> None:
        self.manager.reopen_tail()

    @precondition(lambda self: self.manager.tail is Tail.CLOSING and self.manager.available)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        held = sorted({b for table in self.tables for b in table if self.manager.movable(b)})
        if not held:
            return
        block = data.draw(st.sampled_from(held))
        target = self.manager.move(block)
        assert target < ORDINARY
        self.pool[target] = self.pool[block]
        for table in self.tables:
            if block in table:
                table[table.index(block)] = target
        self.pins.append([block])  # until the step that copies it has ended

    @precondition(lambda self: self.manager.tail is Tail.CLOSING and self.manager.tail_empty)
    @rule()
    def shut(self) -> None:
        self.manager.shut_tail()
        self.pool[ORDINARY:] = [-1] * TAIL  # planes

    @invariant()
    def nothing_is_lost(self) -> None:
        assert [[self.pool[block] for block in table] for table in self.tables] == self.written
        self.manager.check()
        self.manager.check_tables(self.tables, self.pins)


TestTailedPool = TailedPool.TestCase


@given(st.integers(1, ORDINARY + TAIL))
def test_the_whole_capacity_can_be_had_while_the_tail_is_open(count: int) -> None:
    manager = BlockManager(ORDINARY, SIZE, tail_blocks=TAIL)
    manager.open_tail()
    assert manager.allocate(count) == list(range(count))
    assert manager.blocks_total == ORDINARY + TAIL


def test_what_cannot_be_is_an_error_of_the_caller() -> None:
    manager = BlockManager(ORDINARY, SIZE, tail_blocks=TAIL)
    with pytest.raises(AssertionError, match="6 blocks wanted, 5 available"):
        manager.allocate(6)
    with pytest.raises(AssertionError, match="the tail is shut"):
        manager.close_tail()
    manager.open_tail()
    manager.allocate(ORDINARY + 1)
    manager.close_tail()
    with pytest.raises(AssertionError, match="while blocks of it are in use"):
        manager.shut_tail()
