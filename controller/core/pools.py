"""Workers' pools: what is free there, and which worker has the most room.

Capacities and room are compared in tokens, because pools may differ in block size. Workers of one
capacity form a class; the index is one heap a class with lazy deletion, so that a report costs
O(log workers).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush

from deepinfer.controller.core.peers import Link
from deepinfer.controller.core.planes import Planes
from deepinfer.kvstore.core.ids import NodeId, Seq, WorkerId, WorkerRef
from deepinfer.kvstore.core.messages import ResidentLevel, Usage, WorkerReport
from deepinfer.kvstore.core.precision import PrecisionLevel


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return -(-tokens // block_size)


class Worker:
    """One worker, by id: the levels of its current life, and what is on its way there."""

    __slots__ = ("alive", "block_bytes", "block_size", "blocks_free", "blocks_short",
                 "blocks_total", "cold", "deaf_until_ms", "drain_until_ms", "draining", "earmarks",
                 "full_blocks", "held", "id", "jobs", "link", "node", "open_posted",
                 "ordered_drain", "pending", "planes", "precision", "ref", "residents",
                 "room_posted", "room_tried", "says_draining", "silent", "stalled", "usage",
                 "watch_ms")  # fmt: skip

    def __init__(self, worker: WorkerId) -> None:
        self.id = worker
        self.link = Link()
        self.ref = WorkerRef(worker, self.link.incarnation)
        """This life's name."""
        self.alive = False
        self.silent = False
        """Suspected: nothing new is placed there."""
        self.node = NodeId("")
        self.block_size = 1
        self.block_bytes = 0
        self.blocks_total = 0
        self.blocks_free = 0
        self.blocks_short = 0
        self.planes: Planes | None = None
        """Of nested weights: where the lower planes are, and whether they should be away."""
        self.stalled = False
        self.precision: PrecisionLevel | None = None
        """Of nested weights; None: they are not."""
        self.draining = False
        """Nothing new is placed there, and residents leave."""
        self.ordered_drain = False
        self.says_draining = False
        """It refuses whatever new order may still be on its way."""
        self.drain_until_ms: int | None = None
        """Then those leave too who could go nowhere else; None: never."""
        self.residents: dict[Seq, ResidentLevel] = {}
        self.usage: tuple[Usage, ...] = ()
        self.pending: dict[Seq, int] = {}
        """Blocks of placements that no report has shown yet."""
        self.earmarks: dict[Seq, int] = {}
        """Blocks set aside for newcomers for whom room is being made."""
        self.jobs: dict[Seq, int] = {}
        """Swap-outs and preemptions under way, with the private blocks they will free."""
        self.cold: dict[Seq, None] = {}
        """Sequences swapped out or preempted here that are not resident again."""
        self.full_blocks: dict[Seq, int] = {}
        """Blocks that residents and pending may come to need (``reserve="full"`` only)."""
        self.held = False
        """It refused a placement: nothing more before its next report."""
        self.deaf_until_ms: int | None = None
        """It lets orders go unconfirmed: nothing new until then."""
        self.room_tried = False
        """No victims could be found here; looked at again with its next report."""
        self.watch_ms: int | None = None
        self.open_posted: int | None = None
        self.room_posted: int | None = None

    @property
    def capacity_tokens(self) -> int:
        """What the pool can hold at most, with the blocks that shedding gains."""
        if self.planes is None:
            return self.blocks_total * self.block_size
        level = self.planes.level
        return (level.ordinary_blocks + level.tail_blocks) * self.block_size

    @property
    def ordinary_tokens(self) -> int:
        """What it can hold while the lower planes are on the card."""
        blocks = self.blocks_total if self.planes is None else self.planes.level.ordinary_blocks
        return blocks * self.block_size

    @property
    def takes_new(self) -> bool:
        return (
            self.alive
            and self.deaf_until_ms is None
            and not (self.silent or self.draining or self.held)
        )

    def uncommitted_blocks(self, reserve_full: bool, but: Seq | None = None) -> int:
        """Free blocks that no resident, placement under way or earmark (but ``but``'s) waits for.

        Negative while room is being made.
        """
        free = self.blocks_free - self.blocks_short - sum(self.pending.values())
        if reserve_full:
            free = min(free, self.blocks_total - sum(self.full_blocks.values()))
        ahead = sum(self.earmarks.values())
        if but is not None:
            ahead -= self.earmarks.get(but, 0)
        return free - ahead

    def neighbours(self, but: Seq | None = None) -> int:
        """Sequences that run here or are about to."""
        count = len(self.residents) + len(self.earmarks)
        for seq in self.pending:
            count += seq not in self.residents
        return count - (but is not None and but in self.earmarks)

    def open_blocks(self, growth_reserve: int, reserve_full: bool) -> int:
        """Blocks that a placement may take now, with the growth reserve left over.

        The reserve is one share a neighbour, so it is waived on an empty worker.
        """
        blocks = self.uncommitted_blocks(reserve_full)
        return blocks if reserve_full else blocks - growth_reserve * self.neighbours()

    def learn(self, report: WorkerReport) -> None:
        """Take over the report's numbers (not its residents)."""
        if report.incarnation != self.ref.incarnation:
            self.ref = WorkerRef(self.id, report.incarnation)
        self.node = report.node
        self.block_size = report.block_size
        self.block_bytes = report.block_bytes
        self.blocks_total = report.blocks_total
        self.blocks_free = report.blocks_free
        self.blocks_short = report.blocks_short
        self.stalled = report.stalled
        self.precision = report.precision
        self.says_draining = report.draining
        self.draining = report.draining or self.ordered_drain
        self.usage = report.usage
        self.alive = True
        self.silent = False
        self.held = False
        self.room_tried = False

    def lose(self) -> None:
        """Forget the life: nothing of it can be counted on."""
        self.alive = False
        self.deaf_until_ms = None
        if self.planes is not None:
            self.planes.lose()
        self.blocks_free = self.blocks_short = 0
        self.stalled = False
        self.draining = self.ordered_drain = self.says_draining = False
        self.drain_until_ms = None
        self.usage = ()
        self.residents.clear()
        self.pending.clear()
        self.jobs.clear()
        self.full_blocks.clear()

    def check(self) -> None:
        assert not self.alive or self.ref.incarnation == self.link.incarnation, self.id
        assert all(blocks >= 0 for blocks in self.pending.values()), self.id
        assert len(self.earmarks) <= 1, f"{self.id}: room is made for one newcomer at a time"
        assert self.alive or not (self.residents or self.pending or self.jobs), self.id
        for seq in self.jobs:
            assert seq in self.residents, f"{self.id}: a swap-out of {seq}, which is not here"


class _Class:
    """Workers of one capacity, with two heaps of (-room in tokens, id)."""

    __slots__ = ("open", "room", "workers")

    def __init__(self) -> None:
        self.workers: dict[WorkerId, Worker] = {}
        self.open: list[tuple[int, WorkerId]] = []
        self.room: list[tuple[int, WorkerId]] = []


class Pools:
    """Every worker by id, and the index of room."""

    def __init__(self, growth_reserve: int, reserve_full: bool) -> None:
        self.workers: dict[WorkerId, Worker] = {}
        self.capacities: list[int] = []
        """Sorted capacities (tokens) that a worker has, dead ones too while they may come back."""
        self.generation = 0
        """Counts changes of ``capacities``."""
        self.roomier = False
        """Some worker has more room, or room could be made there, since this was last cleared."""
        self._stale: dict[WorkerId, Worker] = {}
        self._classes: dict[int, _Class] = {}
        self._class_of: dict[WorkerId, int] = {}
        self._growth_reserve = growth_reserve
        self._reserve_full = reserve_full

    def get(self, worker: WorkerId) -> Worker:
        """The record of a worker, made if it is new."""
        found = self.workers.get(worker)
        if found is None:
            found = self.workers[worker] = Worker(worker)
        return found

    def of(self, ref: WorkerRef) -> Worker | None:
        """The record of this very life, if it is alive."""
        found = self.workers.get(ref.worker)
        if found is None or not found.alive or found.ref != ref:
            return None
        return found

    def forget(self, worker: WorkerId) -> None:
        """The worker has left for good; its capacity no longer counts."""
        self._leave_class(worker)
        self._stale.pop(worker, None)
        del self.workers[worker]

    def touch(self, worker: Worker) -> None:
        """Note that something about the worker has changed."""
        self._stale[worker.id] = worker

    def refresh(self) -> None:
        """Bring the index up to date; whoever reads it calls this first."""
        if self._stale:
            for worker in self._stale.values():
                self._index(worker)
            self._stale.clear()

    def _index(self, worker: Worker) -> None:
        capacity = worker.capacity_tokens
        if capacity <= 0:
            self._leave_class(worker.id)
            return
        if self._class_of.get(worker.id) != capacity:
            self._leave_class(worker.id)
            self._enter_class(worker, capacity)
        members = self._classes[capacity]
        tokens: int | None = None
        if worker.takes_new:
            blocks = worker.open_blocks(self._growth_reserve, self._reserve_full)
            tokens = blocks * worker.block_size
        if tokens != worker.open_posted:
            before, worker.open_posted = worker.open_posted, tokens
            if tokens is not None:
                if before is None or tokens > before:
                    self.roomier = True
                _push(members.open, (-tokens, worker.id), members.workers, "open_posted")
        in_hand = worker.cold or worker.earmarks or worker.jobs or worker.pending
        if in_hand or worker.room_tried or not worker.residents:
            tokens = None
        if tokens != worker.room_posted:
            worker.room_posted = tokens
            if tokens is not None:
                self.roomier = True
                _push(members.room, (-tokens, worker.id), members.workers, "room_posted")

    def index_for(self, tokens: int) -> int:
        """Index of the smallest class that holds ``tokens``; ``len(capacities)`` if none does."""
        self.refresh()
        return bisect_left(self.capacities, tokens)

    def roomiest(self, low: int, high: int) -> Worker | None:
        """Of the classes in [low, high), the worker with the most room to place into."""
        self.refresh()
        best: tuple[int, WorkerId] | None = None
        for capacity in self.capacities[low:high]:
            members = self._classes[capacity]
            while members.open:
                top = members.open[0]
                worker = members.workers.get(top[1])
                if worker is not None and worker.open_posted == -top[0]:
                    best = top if best is None else min(best, top)
                    break
                heappop(members.open)
        return None if best is None else self.workers[best[1]]

    def clearable(self, low: int, high: int) -> Worker | None:
        """Of the classes in [low, high), the worker where making room is likely to take least."""
        self.refresh()
        best: tuple[int, WorkerId] | None = None
        for capacity in self.capacities[low:high]:
            members = self._classes[capacity]
            while members.room:
                top = members.room[0]
                worker = members.workers.get(top[1])
                if worker is not None and worker.room_posted == -top[0]:
                    best = top if best is None else min(best, top)
                    break
                heappop(members.room)
        return None if best is None else self.workers[best[1]]

    def largest(self) -> Worker | None:
        """A worker of the largest capacity, alive or expected back."""
        self.refresh()
        if not self.capacities:
            return None
        return next(iter(self._classes[self.capacities[-1]].workers.values()))

    def _enter_class(self, worker: Worker, capacity: int) -> None:
        if capacity not in self._classes:
            self._classes[capacity] = _Class()
            insort(self.capacities, capacity)
            self.generation += 1
        self._classes[capacity].workers[worker.id] = worker
        self._class_of[worker.id] = capacity

    def _leave_class(self, worker: WorkerId) -> None:
        capacity = self._class_of.pop(worker, None)
        if capacity is None:
            return
        members = self._classes[capacity]
        record = members.workers.pop(worker)
        record.open_posted = record.room_posted = None
        if not members.workers:
            del self._classes[capacity]
            self.capacities.remove(capacity)
            self.generation += 1

    def check(self) -> None:
        self.refresh()
        assert self.capacities == sorted(self._classes)
        for worker in self.workers.values():
            worker.check()
            if worker.open_posted is not None:
                members = self._classes[worker.capacity_tokens]
                assert (-worker.open_posted, worker.id) in members.open, worker.id
                blocks = worker.open_blocks(self._growth_reserve, self._reserve_full)
                assert worker.open_posted == blocks * worker.block_size, worker.id
            assert (worker.open_posted is not None) == (
                worker.takes_new and worker.capacity_tokens > 0
            ), worker.id


def _push(
    heap: list[tuple[int, WorkerId]],
    item: tuple[int, WorkerId],
    workers: dict[WorkerId, Worker],
    posted: str,
) -> None:
    """Push, and throw stale items out when they outnumber the workers."""
    heappush(heap, item)
    if len(heap) > 4 * len(workers) + 64:
        heap[:] = [
            (-tokens, worker.id)
            for worker in workers.values()
            if (tokens := getattr(worker, posted)) is not None
        ]
        heapify(heap)
