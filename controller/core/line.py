"""The lines in which sequences wait, one for each capacity class and rank, as heaps."""

from __future__ import annotations

from heapq import heappop, heappush

from deepinfer.controller.core.sequences import Place, Rank, Sequence
from deepinfer.kvstore.core.ids import Seq


class Line:
    """Who waits, in order. Items of sequences that have left are dropped when they come up.

    A sequence stands in the line of the smallest capacity that can hold it; ``None`` takes those
    that no pool can hold.
    """

    def __init__(self) -> None:
        self._heaps: dict[int, tuple[list[Place], list[Place], list[Place]]] = {}
        self._members: dict[Seq, Sequence] = {}
        self.unfit: dict[Seq, Sequence] = {}
        self.moved = False
        """Someone has come or gone since this was last cleared."""

    def __len__(self) -> int:
        return len(self._members)

    def add(self, sequence: Sequence, place: Place, capacity: int | None) -> None:
        """Put a sequence in line; ``capacity`` is its class, None if there is no such class."""
        assert sequence.queued is None, f"{sequence.seq} is in line already"
        sequence.queued = place
        self.moved = True
        sequence.queue_capacity = capacity
        self._members[sequence.seq] = sequence
        if capacity is None:
            self.unfit[sequence.seq] = sequence
            return
        heaps = self._heaps.get(capacity)
        if heaps is None:
            heaps = self._heaps[capacity] = ([], [], [])
        heappush(heaps[place.rank], place)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of line, if it stands in it."""
        if sequence.queued is not None:
            self.moved = True
            sequence.queued = None
            del self._members[sequence.seq]
            self.unfit.pop(sequence.seq, None)

    def first(self, capacity: int, rank: Rank) -> Sequence | None:
        """The first of one class and rank."""
        heaps = self._heaps.get(capacity)
        if heaps is None:
            return None
        heap = heaps[rank]
        while heap:
            sequence = self._members.get(heap[0].seq)
            if (
                sequence is not None
                and sequence.queued == heap[0]
                and sequence.queue_capacity == capacity
            ):
                return sequence
            heappop(heap)
        return None

    def heads(self, capacities: list[int]) -> list[tuple[Place, Sequence, int]]:
        """The first of each class, whatever its rank, in order; with the class's index."""
        found = []
        for index, capacity in enumerate(capacities):
            for rank in Rank:
                sequence = self.first(capacity, rank)
                if sequence is not None and sequence.queued is not None:
                    found.append((sequence.queued, sequence, index))
                    break
        found.sort(key=lambda item: item[0])
        return found

    def members(self) -> list[Sequence]:
        """Everyone in line, in no particular order."""
        return list(self._members.values())

    def clear(self) -> None:
        """Empty every line; used to build them anew when the classes have changed."""
        for sequence in self._members.values():
            sequence.queued = None
        self._heaps.clear()
        self._members.clear()
        self.unfit.clear()

    def check(self) -> None:
        for seq, sequence in self._members.items():
            assert sequence.seq == seq
            assert sequence.queued is not None, f"{seq}: in line without a place"
            assert (sequence.queue_capacity is None) == (seq in self.unfit), seq
            if sequence.queue_capacity is not None:
                heap = self._heaps[sequence.queue_capacity][sequence.queued.rank]
                assert sequence.queued in heap, f"{seq}: its place is lost"
