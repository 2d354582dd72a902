"""One step ahead: the card computes the likely next step while the host still thinks.

Between two steps the host hears of tokens, decides who runs and plans; a card that waits for that
idles for a good part of a small model's step. So while a step's tokens are on their way to the
host, the step that follows if everybody goes on is launched behind it, with the tokens that the
card has. When the next plan comes, each of its rows that was foreseen is there already: the same
blocks, position and token. Rows that were not are computed as ever. What nobody asks for is
forgotten: it has written KV behind the last token of its own sequence only, into a block that
nobody else reads, where the next token's KV goes anyway.

A step ahead is computed at the level of precision that was announced with the step before it. At
another level it is worth nothing.

A sequence whose next token begins a block that it was not given yet writes to a *spare* block of
the runner's, which is copied over once the real one is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from deepinfer.workers.model.runner import SequenceSlice
from deepinfer.workers.sampler import SampleRow

POOR_MAX: Final = 3
"""So many steps ahead in a row may be *poor*: fewer than half of their rows were asked for."""
PAUSE_STEPS: Final = 32
"""Steps without another try after that: more sequences than seats take turns, for one."""


class Foreseen(NamedTuple):
    """One row of a step ahead: the slice that will ask for it, but for the token."""

    source: int
    """Which of the tokens being chosen now it goes on with."""
    start: int
    block_table: tuple[int, ...]
    spare: int | None
    """The runner's block at the end of the table, if the next real one is not known."""


class Claim(NamedTuple):
    """What of a plan was computed ahead."""

    places: list[int | None]
    """For each slice the row with its logits; None: it is to be computed."""
    copies: list[tuple[int, int]]
    """Spare blocks, and the blocks that they are to be copied to first."""

    @property
    def used(self) -> int:
        """Slices that were computed ahead."""
        return sum(place is not None for place in self.places)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to compute."""
        return None not in self.places


@dataclass(frozen=True, slots=True)
class Ahead:
    """A step that was launched before it was planned, and the tokens that it was given."""

    rows: tuple[Foreseen, ...]
    tokens: tuple[int, ...]
    block_size: int
    pool_copies: int
    """Copies into the pool before it was launched: after another one it is worth nothing."""
    level: int = 0
    """Of the model's levels of precision."""

    def claim(self, slices: Sequence[SequenceSlice]) -> Claim:
        """Find the slices of a plan among the rows."""
        known = {
            _key(row.start, row.block_table, self.block_size): place
            for place, row in enumerate(self.rows)
        }
        places: list[int | None] = []
        copies: list[tuple[int, int]] = []
        for part in slices:
            place = None
            if len(part.token_ids) == 1 and part.logits and part.start:
                table = tuple(part.block_table)
                place = known.get(_key(part.start, table, self.block_size))
                if place is not None and not self._same(place, part.token_ids[0], table):
                    place = None
                elif place is not None and (spare := self.rows[place].spare) is not None:
                    copies.append((spare, table[part.start // self.block_size]))
            places.append(place)
        return Claim(places, copies)

    def _same(self, place: int, token: int, table: tuple[int, ...]) -> bool:
        row = self.rows[place]
        whole = row.start // self.block_size + (row.spare is None)
        return token == self.tokens[place] and table[:whole] == row.block_table[:whole]


class Lookout:
    """Says which step to launch ahead, and what of it a plan asks for.

    ``spares`` are the runner's blocks, one for each sequence of a step; without any, nothing is
    foreseen. No token is at a position beyond ``context``.
    """

    def __init__(self, spares: Sequence[int], block_size: int, context: int) -> None:
        self._spares = tuple(spares)
        self._block_size = block_size
        self._context = context
        self._running: Sequence[SequenceSlice] = ()
        self.level = 0
        """What the step that follows is computed at."""
        self._foreseen: tuple[Foreseen, ...] = ()
        self._ahead: Ahead | None = None
        self._poor = self._pause = 0

    def running(self, slices: Sequence[SequenceSlice], next_level: int = 0) -> None:
        """A plan was launched, as far as it was not ahead; empty: nothing is to follow it."""
        self._running, self.level = slices, next_level

    def foresee(self, rows: Sequence[SampleRow]) -> tuple[Foreseen, ...]:
        """What follows the plan whose tokens ``rows`` choose; empty: cannot be said, or need not.

        Sequences that end by their length, or by the context, are left out. Nothing is foreseen
        while a prompt is computed: its next chunk and everybody's next token are one step.
        """
        slices, self._running = self._running, ()
        if self._pause:
            self._pause -= 1
            return ()
        if not self._spares or len(rows) != len(slices) or not all(s.logits for s in slices):
            return ()
        found: list[Foreseen] = []
        left = iter(self._spares)
        for source, (part, row) in enumerate(zip(slices, rows, strict=True)):
            start = part.start + len(part.token_ids)
            if row.index + 1 >= row.params.max_tokens or start >= self._context:
                continue
            table = tuple(part.block_table)
            spare = None
            if start // self._block_size >= len(table):
                spare = next(left)
                table = (*table, spare)
            found.append(Foreseen(source, start, table, spare))
        self._foreseen = tuple(found)
        return self._foreseen

    def learn(self, tokens: Sequence[int], pool_copies: int) -> None:
        """What was foreseen was launched, after those tokens and so many copies into the pool."""
        self._ahead = Ahead(
            self._foreseen,
            tuple(tokens[row.source] for row in self._foreseen),
            self._block_size,
            pool_copies,
            self.level,
        )

    def claim(
        self, slices: Sequence[SequenceSlice], pool_copies: int, level: int = 0
    ) -> Claim | None:
        """What of a plan was computed ahead; None: nothing."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.pool_copies != pool_copies or ahead.level != level:
            return None
        claim = ahead.claim(slices)
        self._poor = self._poor + 1 if 2 * claim.used < len(ahead.rows) else 0
        if self._poor == POOR_MAX:
            self._poor, self._pause = 0, PAUSE_STEPS
        return claim if claim.used else None

    def forget(self) -> None:
        """Nothing that was computed ahead will be asked for, or should be."""
        self._ahead, self._running = None, ()


def _key(start: int, table: tuple[int, ...], block_size: int) -> tuple[int, int]:
    """What tells sequences of a step apart: the block of the token before ``start``, and it.

    Sequences that share that block, a full one, have the same tokens up to there.
    """
    return start, table[(start - 1) // block_size]
