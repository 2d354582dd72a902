"""The weights' lower planes leave the card when KV needs their bytes, and come back.

::

    HELD --wanted--> SHEDDING --PlanesShed--> OPEN --not wanted--> CLOSING --empty--> RESTORING
     ^                                         ^                                          |
     |                                         +--------- PlanesRestored, not ok ---------+
     +----------------------------- PlanesRestored, ok -----------------------------------+

The controller says what it wants with every answer to a report; an ``exact`` request that is here
outweighs it, for it cannot take a step before the planes are back. Until then every step runs at
the top level (``level_min``). In CLOSING the blocks of the tail that are in use move into ordinary
ones, a few before each step; where there is no room the pool is short of blocks, which makes the
controller swap somebody out.
"""

from __future__ import annotations

from deepinfer.kvstore.core.shed import ShedLevel, ShedState
from deepinfer.kvstore.core.states import State
from deepinfer.workers.core.blocks import Tail
from deepinfer.workers.core.events import (
    PlanesRestored,
    RestorePlanes,
    ShedPlanes,
    StepPlan,
)
from deepinfer.workers.core.roster import Roster
from deepinfer.workers.core.sequence import Resident

MOVES_MAX = 64
"""Blocks moved before one step: a copy within the card that takes a fraction of a step's time."""


class Shedding:
    """Drives the planes out and back. Told of every event's end by ``settle``."""

    def __init__(self, roster: Roster) -> None:
        config = roster.config
        self._roster = roster
        self._top = config.levels - 1
        self._asked = False
        """In SHEDDING: the shell has been asked, and its planes' bytes may be gone."""
        self._retry_ms = 0
        self._backoff_ms = config.restore_retry_ms
        self.state = ShedState.LOCKED if config.start_shed else ShedState.HELD
        self.since_ms = 0
        """When the state began."""

    @property
    def level_min(self) -> int:
        """The lowest level that a step may be planned at."""
        return 0 if self.state is ShedState.HELD else self._top

    def level(self) -> ShedLevel | None:
        """What the controller is told; None from a worker whose planes always stay."""
        config = self._roster.config
        if not config.tail_blocks and self.state is not ShedState.LOCKED:
            return None
        return ShedLevel(self.state, config.blocks_total, config.tail_blocks, config.return_ms)

    def may_step(self, resident: Resident) -> bool:
        """Whether a resident may take part in steps at the levels that are possible now."""
        return self.state is ShedState.HELD or not _exact(resident)

    # ---- events ----------------------------------------------------------------------------

    def planes_shed(self, now_ms: int) -> None:
        """Nothing on the card reads the planes any more."""
        if self.state is ShedState.SHEDDING and self._asked:
            self._roster.blocks.open_tail()
            self._roster.counters.sheds += 1
            self._enter(ShedState.OPEN, now_ms)

    def planes_restored(self, event: PlanesRestored, now_ms: int) -> None:
        """The copy back has ended: every byte is right, or the planes are as far away as before."""
        if self.state is not ShedState.RESTORING:
            return
        config, counters = self._roster.config, self._roster.counters
        if event.ok:
            counters.planes_returns += 1
            self._backoff_ms = config.restore_retry_ms
            self._enter(ShedState.HELD, now_ms)
            return
        counters.planes_return_failures += 1
        self._retry_ms = now_ms + self._backoff_ms
        self._backoff_ms = min(2 * self._backoff_ms, config.restore_retry_max_ms)
        self._roster.blocks.open_tail()
        self._enter(ShedState.OPEN, now_ms)

    def settle(self, running: StepPlan | None, now_ms: int) -> None:
        """Go as far as is possible now; ``running`` is the step in flight."""
        if self.level() is None or self.state is ShedState.LOCKED:
            return
        before = None
        while before is not self.state:
            before = self.state
            self._advance(running, now_ms)

    def _advance(self, running: StepPlan | None, now_ms: int) -> None:
        roster, blocks = self._roster, self._roster.blocks
        rule = roster.rule
        wanted = rule is not None and rule.shed and not self._exact_here()
        if self.state is ShedState.HELD and wanted:
            self._asked = False
            self._enter(ShedState.SHEDDING, now_ms)
        elif self.state is ShedState.SHEDDING and not self._asked:
            if not wanted:
                self._enter(ShedState.HELD, now_ms)
            elif running is None or running.level >= self._top:
                self._asked = True
                roster.out.append(ShedPlanes())
        elif self.state is ShedState.OPEN and not wanted and now_ms >= self._retry_ms:
            blocks.close_tail()
            self._cut_promises()
            self._enter(ShedState.CLOSING, now_ms)
        elif self.state is ShedState.CLOSING and wanted:
            blocks.reopen_tail()
            self._enter(ShedState.OPEN, now_ms)
        elif self.state is ShedState.CLOSING and blocks.tail_empty:
            blocks.shut_tail()
            roster.out.append(RestorePlanes())
            self._enter(ShedState.RESTORING, now_ms)

    def _enter(self, state: ShedState, now_ms: int) -> None:
        self.state, self.since_ms = state, now_ms
        self._roster.changed = True

    def _exact_here(self) -> bool:
        return any(_exact(resident) for resident in self._roster.residents.values())

    def _cut_promises(self) -> None:
        """What was promised may have been the tail's: the latest go back to the controller."""
        roster = self._roster
        for resident in sorted(roster.residents.values(), key=lambda r: -r.arrival):
            if roster.spare >= 0:
                return
            if resident.promised and not resident.blocks:
                roster.send_back(resident)
            elif resident.promised:
                roster.redeem(resident)

    # ---- moves -----------------------------------------------------------------------------

    def moves(self) -> tuple[tuple[tuple[int, int], ...], tuple[Resident, ...]]:
        """Give the tail's blocks ordinary ones: (from, to) pairs, and whose tables changed.

        Called while no step is in flight. The pairs are copied before the next step, to whose end
        the old blocks stay out of use. Blocks under a copy, or of whoever is being swapped, wait.
        """
        roster, blocks = self._roster, self._roster.blocks
        if not blocks.to_move:
            return (), ()
        if roster.spare < 0:
            self._trim()
        holders: dict[int, list[Resident]] = {}
        for resident in roster.residents.values():
            for block in resident.blocks:
                if blocks.movable(block):
                    holders.setdefault(block, []).append(resident)
        pairs: list[tuple[int, int]] = []
        moved: dict[int, Resident] = {}
        for block, owners in holders.items():
            if len(pairs) == MOVES_MAX or blocks.available <= roster.promised:
                break
            if any(owner.leaving or owner.entering for owner in owners):
                continue
            target = blocks.move(block)
            pairs.append((block, target))
            for owner in owners:
                owner.blocks[owner.blocks.index(block)] = target
                moved[owner.arrival] = owner
        roster.keep_for_step([block for block, _ in pairs])
        roster.counters.blocks_moved += len(pairs)
        return tuple(pairs), tuple(moved.values())

    def _trim(self) -> None:
        """Whoever waits for the planes needs no blocks yet but those with KV."""
        for resident in self._roster.residents.values():
            if resident.ready and not self.may_step(resident):
                keep = self._roster.config.blocks_for(resident.computed)
                self._roster.release(resident, keep)

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        blocks, state = self._roster.blocks, self.state
        expected = {ShedState.OPEN: Tail.OPEN, ShedState.CLOSING: Tail.CLOSING}
        assert blocks.tail is expected.get(state, Tail.SHUT), f"{state}, tail {blocks.tail}"


def _exact(resident: Resident) -> bool:
    """Whether the resident has to compute in FP16, and still computes."""
    record = resident.record
    return record is not None and record.exact and resident.state is not State.FINISHED
