"""What a step tells the card: one packed buffer of int32, written in pinned memory, copied once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.workers.model.runner import SequenceSlice

_Ints = npt.NDArray[np.int32]

_ALIGNMENT = 8
"""Fields begin at multiples of so many integers: 32 bytes."""


@dataclass(frozen=True, slots=True)
class InputShape:
    """Sizes of a step's inputs: rows (tokens), sequences, and columns of the block tables.

    A graph is captured for one shape; smaller steps are padded to it.
    """

    rows: int
    sequences: int
    columns: int


@dataclass(frozen=True, slots=True, eq=False)
class InputViews:
    """A step's inputs on the card; every tensor int32, the parts of one buffer.

    Rows come in the order: sequences with one token, then the chunks of the others.
    """

    token_ids: Tensor
    """``[rows]``"""
    positions: Tensor
    """``[rows]``; -1 marks padding."""
    sequences: Tensor
    """``[rows]``: the row of ``block_tables`` that each belongs to."""
    lens: Tensor
    """``[sequences]``: tokens in the cache after this step; 0 marks padding, and chunks."""
    last_rows: Tensor
    """``[sequences]``: rows whose logits are wanted, in the order of the step's slices."""
    block_tables: Tensor
    """``[sequences, columns]``"""


class StepInputs:
    """Writes steps' inputs. One step's copy must have been read before the next is written.

    Block tables are kept between steps: only what differs is written on the host. ``rows_max``,
    ``sequences_max`` and ``columns_max`` bound every step.
    """

    def __init__(
        self,
        rows_max: int,
        sequences_max: int,
        columns_max: int,
        blocks: int,
        device: torch.device,
    ) -> None:
        self._blocks = blocks
        size = _places(InputShape(rows_max, sequences_max, columns_max))[-1]
        pinned = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self._card = torch.zeros(size, dtype=torch.int32, device=device)
        self._array: _Ints = self._host.numpy()
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self._columns = 0
        self._tables: list[tuple[int, ...]] = []
        self._views: dict[InputShape, tuple[list[_Ints], InputViews]] = {}

    def views(self, shape: InputShape) -> InputViews:
        """Where a step of ``shape`` finds its inputs; always the same addresses."""
        return self._fields(shape)[1]

    def write(
        self,
        slices: Sequence[SequenceSlice],
        order: Sequence[int],
        shape: InputShape,
        *,
        sources: Sequence[int] | None = None,
    ) -> InputViews:
        """Send a step's inputs, padded to ``shape``.

        ``order`` is the order in which slices take rows. ``sources`` stand in the place of
        ``last_rows``, if given. Returns at once: the copy is on torch's current stream.

        Raises ValueError naming the slice whose block table holds an id outside the pool.
        """
        if self._copied is not None:
            self._copied.synchronize()
        (tables, lens, last_rows, ids, positions, sequences), views = self._fields(shape)
        if shape.columns != self._columns:
            self._columns, self._tables = shape.columns, []
        del self._tables[shape.sequences :]  # other fields were written over the rest
        row = 0
        last = [0] * len(slices)
        for place, index in enumerate(order):
            part = slices[index]
            count = len(part.token_ids)
            if count == 1:
                ids[row], positions[row], sequences[row] = part.token_ids[0], part.start, place
            else:
                ids[row : row + count] = part.token_ids
                positions[row : row + count] = np.arange(part.start, part.start + count)
                sequences[row : row + count] = place
            row += count
            last[index] = row - 1
            lens[place] = part.start + 1 if count == 1 else 0
            self._write_table(tables, place, index, tuple(part.block_table))
        ids[row:] = 0
        positions[row:] = -1
        sequences[row:] = 0
        lens[len(order) :] = 0
        if sources is None:
            sources = [at for at, part in zip(last, slices, strict=True) if part.logits]
        last_rows[: len(sources)] = sources
        last_rows[len(sources) :] = 0
        size = _places(shape)[-1]
        self._card[:size].copy_(self._host[:size], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return views

    def _write_table(self, tables: _Ints, place: int, index: int, table: tuple[int, ...]) -> None:
        """Write what differs from the table that this place had before."""
        before = self._tables[place] if place < len(self._tables) else ()
        if table == before:
            return
        known = len(before)
        if len(table) <= known or table[:known] != before:
            known = 0
        new = np.array(table[known : self._columns], dtype=np.int64)
        if new.size and not (new.min() >= 0 and new.max() < self._blocks):
            raise ValueError(
                f"slice {index}: block ids must be in 0..{self._blocks - 1}, got "
                f"{new.min()}..{new.max()}"
            )
        tables[place, known : known + new.size] = new
        if place < len(self._tables):
            self._tables[place] = table
        else:
            self._tables.append(table)

    def _fields(self, shape: InputShape) -> tuple[list[_Ints], InputViews]:
        known = self._views.get(shape)
        if known is not None:
            return known
        places = _places(shape)
        sizes = (
            (shape.sequences, shape.columns),
            (shape.sequences,),
            (shape.sequences,),
            (shape.rows,),
            (shape.rows,),
            (shape.rows,),
        )
        spans = [(at, int(np.prod(size)), size) for at, size in zip(places, sizes, strict=False)]
        arrays = [self._array[at : at + count].reshape(size) for at, count, size in spans]
        tables, lens, last_rows, ids, positions, sequences = (
            self._card[at : at + count].view(size) for at, count, size in spans
        )
        fields = (arrays, InputViews(ids, positions, sequences, lens, last_rows, tables))
        if len(self._views) == _SHAPES_MAX:
            self._views.clear()
        self._views[shape] = fields
        return fields


def on_card(numbers: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A few numbers on a device. Nothing is waited for, as a copy that is not pinned would."""
    host = torch.tensor(numbers, dtype=dtype)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


_SHAPES_MAX = 512
"""Shapes whose views are remembered; steps with prompts come in any number of rows."""


def _places(shape: InputShape) -> list[int]:
    """Where each field begins, and where the last one ends.

    What belongs to sequences comes first: it keeps its place when the number of rows changes.
    """
    places, at = [], 0
    fields = (shape.sequences * shape.columns, *(shape.sequences,) * 2, *(shape.rows,) * 3)
    for size in fields:
        places.append(at)
        at += -(-size // _ALIGNMENT) * _ALIGNMENT
    return [*places, at]
