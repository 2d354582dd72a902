"""The lower planes of a nested model in the last blocks of its pool, where KV may take their place.

The planes lie one behind the other in a *tail* of whole blocks. Their addresses never change, so
graphs hold them; in FP8 nothing reads them, and the tail's bytes are blocks like any others. A copy
of the tail is kept in host memory, pinned where that can be had: leaving the card is no copy at
all, and coming back goes beside the steps, in pieces: on the bus a step's inputs, a few KiB, have
to wait for whatever copy is under way.
"""

from __future__ import annotations

import itertools
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from deepinfer.kernels.linear import F16Weight, Weight
from deepinfer.kernels.nested import NestedWeight
from deepinfer.kvstore.core.layout import KvLayout
from deepinfer.workers.gpu.reader import aligned
from deepinfer.workers.gpu.runner import GpuRunner
from deepinfer.workers.gpu.weights import GpuWeights, linears
from deepinfer.workers.pool import Fence, PagedPool, Wait

PIECE_BYTES: Final = 4 << 20
"""Of one copy on the way back: a tenth of a millisecond."""
PIECES: Final = 2
"""So many are under way."""


class PlanesError(RuntimeError):
    """The lower planes cannot come back; says why."""


def sheddable(weights: GpuWeights, *, head: bool) -> list[NestedWeight]:
    """Weights whose lower planes may leave, in the order in which they lie in the tail."""
    found: list[Weight] = [*linears(weights), *([weights.head] if head else [])]
    return [each for each in found if isinstance(each, NestedWeight)]


def tail_bytes(weights: GpuWeights, *, head: bool) -> int:
    """What those planes take, one behind the other."""
    return sum(aligned(each.upper.numel()) for each in sheddable(weights, head=head))


def lower_bytes(weights: GpuWeights) -> int:
    """All lower planes that are on the card."""
    planes = (each.lower for each in sheddable(weights, head=True))
    return sum(plane.nbytes for plane in planes if plane is not None)


class ShelvedPlanes:
    """Lower planes on the host, as the bytes of the tail that they will be: a row for each block.

    ``pin`` pins memory and returns what undoes it, or None where that cannot be.
    """

    def __init__(
        self,
        weights: GpuWeights,
        layout: KvLayout,
        *,
        head: bool,
        pin: Callable[[int, int], Callable[[], None] | None] | None = None,
    ) -> None:
        planes = sheddable(weights, head=head)
        blocks = -(-tail_bytes(weights, head=head) // layout.block_bytes)
        self.rows = torch.zeros((blocks, layout.block_bytes), dtype=torch.uint8)
        undo = None if pin is None else pin(self.rows.data_ptr(), self.rows.numel())
        self.pinned = undo is not None
        if undo is not None:
            weakref.finalize(self, _unpin, undo, self.rows)
        for weight, room in _rooms(planes, self.rows):
            assert weight.lower is not None
            room.copy_(weight.lower)
        self._sum = self._checksum()
        self.head = head

    @property
    def blocks(self) -> int:
        """How many the tail has."""
        return self.rows.shape[0]

    def taken_from(self, weights: GpuWeights) -> GpuWeights:
        """The weights without the planes: who lets go of the others frees their memory."""
        planes = sheddable(weights, head=self.head)
        return _replaced(weights, {id(each): replace(each, lower=None) for each in planes})

    def placed(self, weights: GpuWeights, tail: Tensor) -> GpuWeights:
        """The weights with their planes in ``tail``, uint8 like ``rows``: nothing is copied."""
        planes = sheddable(weights, head=self.head)
        return _replaced(
            weights,
            {id(each): replace(each, lower=room) for each, room in _rooms(planes, tail)},
        )

    def check(self) -> None:
        """Raise PlanesError if a byte is not what it was."""
        if self._checksum() != self._sum:
            raise PlanesError("the host's copy of the lower planes is damaged: level 0 is lost")

    def _checksum(self) -> int:
        """The sum of all 64-bit words, modulo 2^64: as fast as memory is read."""
        return int(self.rows.view(-1).view(torch.int64).sum())


class GpuPlanes:
    """Sends the lower planes away and takes them back; see ``workers.planes``.

    ``first`` is the tail's first block. ``settle`` returns when every step that was launched has
    ended. The planes are copied into the tail here, as every time.
    """

    def __init__(
        self,
        shelved: ShelvedPlanes,
        pool: PagedPool,
        first: int,
        runner: GpuRunner,
        settle: Callable[[], None],
    ) -> None:
        self._shelved = shelved
        self._pool = pool
        self._tail = range(first, first + shelved.blocks)
        self._runner = runner
        self._settle = settle
        began = time.monotonic()
        self.restore()()
        self.return_ms = math.ceil((time.monotonic() - began) * 1e3)
        """How long it took."""

    @property
    def tail_blocks(self) -> int:
        """Blocks that the pool has more while the planes are away."""
        return len(self._tail)

    @property
    def plane_bytes(self) -> int:
        """What the planes alone take of the tail."""
        return sum(
            each.upper.numel()
            for each in sheddable(self._runner.decoder.weights, head=self._shelved.head)
        )

    def shed(self) -> None:
        """Make the tail's bytes free to overwrite; waits for the steps launched so far.

        From here on the runner refuses levels below the last one.
        """
        self._runner.level_min = self._runner.levels - 1
        self._settle()

    def restore(self) -> Wait:
        """Get ready to copy the planes back, behind the steps launched so far.

        Nobody may use the tail's blocks. What is returned copies them; then every level may be
        computed again. Raises PlanesError if the host's copy is damaged.
        """
        self._shelved.check()
        fence = self._pool.fence()

        def restored() -> None:
            self._copy_back(fence)
            self._runner.level_min = 0

        return restored

    def _copy_back(self, fence: Fence) -> None:
        """Copy the tail in, piece by piece, and wait for it."""
        rows, tail = self._shelved.rows, self._tail
        piece = max(1, PIECE_BYTES // rows.shape[1])
        under_way: deque[Wait] = deque()
        for first in range(0, len(tail), piece):
            some = rows[first : first + piece].view(-1)
            wait = self._pool.begin_in(tail[first : first + piece], some, fence, of_sequences=False)
            if wait is not None:
                under_way.append(wait)
            if len(under_way) == PIECES:
                under_way.popleft()()
        for wait in under_way:
            wait()


def _rooms(planes: list[NestedWeight], rows: Tensor) -> Iterator[tuple[NestedWeight, Tensor]]:
    """Each plane's place in a tail, as a view of its shape."""
    flat = rows.view(-1)
    begins = itertools.accumulate((aligned(each.upper.numel()) for each in planes), initial=0)
    for weight, begin in zip(planes, begins, strict=False):
        room = flat[begin : begin + weight.upper.numel()]
        yield weight, room.view(weight.upper.shape)


def _replaced(weights: GpuWeights, others: dict[int, NestedWeight]) -> GpuWeights:
    """The model with some weights in the place of those with such an ``id``."""

    def other(weight: Weight) -> Weight:
        return others.get(id(weight), weight)

    layers = tuple(
        replace(
            layer,
            qkv=other(layer.qkv),
            out=other(layer.out),
            gate_up=other(layer.gate_up),
            down=other(layer.down),
        )
        for layer in weights.layers
    )
    head, embedding = weights.head, weights.embedding
    if not isinstance(head, F16Weight):
        head = others.get(id(head), head)
    if isinstance(embedding, NestedWeight):
        embedding = others.get(id(embedding), embedding)
    return replace(weights, layers=layers, head=head, embedding=embedding)


def _unpin(undo: Callable[[], None], rows: Tensor) -> None:
    """``rows`` stays until its memory is no longer pinned."""
    undo()
    del rows
