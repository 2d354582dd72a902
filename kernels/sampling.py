"""Token ids from logits: the likeliest, or drawn after penalties, min-p, top-k and top-p.

Equal in meaning to sampling on the host in float64: the same order of steps, ties settled by the
lowest id, the same Philox number for each (seed, index, sequence). Sums are of weights in fixed
point of 2^-44, so that a draw differs only where the host's float64 sums are as close to it; and
it does not depend on the batch, the card, or how often it is repeated.

``kernels.reference_sampling`` says exactly what is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.kernels.compiler import KernelSpec, launch

VOCAB_MAX: Final = 1 << 18
"""So many weights fit a 64-bit sum."""

_THREADS: Final = 256
_SLICE: Final = 2048
_BINS: Final = 2048
_LEVELS: Final = 4
_NARROW_CTAS: Final = 1024
"""Of all rows; a histogram costs a CTA about as much as two slices do."""
_STATES: Final = 8
_REALS: Final = 6
_WHOLES: Final = 7
_SKIP, _GREEDY, _DRAW = range(3)
_TOP_K, _TOP_P, _CHOICE = range(3)

_SCAN, _NARROW, _FIND = (
    {
        penalties: KernelSpec("sampling.cu", f"{name}<{str(penalties).lower()}>", _THREADS)
        for penalties in (False, True)
    }
    for name in ("sample_scan", "sample_narrow", "sample_find")
)


def specs() -> Iterator[KernelSpec]:
    """Every kernel that this module may launch."""
    for kernels in (_SCAN, _NARROW, _FIND):
        yield from kernels.values()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParams:
    """What chooses one row's token. ``temperature`` 0: the likeliest, after penalties."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    """Divides positive logits of the ids in ``seen``, multiplies others."""
    presence: float = 0.0
    """Taken from logits of ids that occurred in the output."""
    frequency: float = 0.0
    """The same, times how often they did."""
    seed: int = 0
    """0 to 2**64 - 1."""
    index: int = 0
    sequence: int = 0
    seen: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None
    """Rising token ids, and how often each occurred in the output: 0 in the prompt only. To be
    given with penalties."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedParams:
    """Rows' parameters in arrays; on the host from ``pack``, on the card after ``to``."""

    reals: Tensor
    """float64 ``[rows, 6]``"""
    wholes: Tensor
    """int64 ``[rows, 7]``"""
    seen: Tensor
    """int32 ``[ids, 2]``; empty: nobody has penalties."""
    draws: bool
    top_k: bool
    top_p: bool
    """Whether any row draws, and what then cuts its tokens."""

    def to(self, device: torch.device) -> PackedParams:
        """The same on a card; from pinned memory, nothing is waited for."""
        return PackedParams(
            self.reals.to(device, non_blocking=True),
            self.wholes.to(device, non_blocking=True),
            self.seen.to(device, non_blocking=True),
            self.draws,
            self.top_k,
            self.top_p,
        )


def pack(rows: Sequence[RowParams | None], *, pinned: bool = False) -> PackedParams:
    """Put rows' parameters into arrays; a row that is None is left out: its id is not written."""
    reals = torch.zeros((len(rows), _REALS), dtype=torch.float64, pin_memory=pinned)
    wholes = torch.zeros((len(rows), _WHOLES), dtype=torch.int64, pin_memory=pinned)
    reals_out, wholes_out = reals.numpy(), wholes.numpy()
    lists: list[npt.NDArray[np.int32]] = []
    at = 0
    draws = top_k = top_p = False
    for i, row in enumerate(rows):
        if row is None:
            continue
        drawn = row.temperature > 0
        reals_out[i] = (
            row.temperature,
            row.min_p,
            row.top_p,
            row.repetition,
            row.presence,
            row.frequency,
        )
        end = at
        if row.seen is not None and len(row.seen[0]):
            lists.append(np.stack(row.seen, axis=1).astype(np.int32))
            end += len(row.seen[0])
        seed = row.seed - (1 << 64) if row.seed >> 63 else row.seed
        mode = _DRAW if drawn else _GREEDY
        wholes_out[i] = (mode, seed, row.index, row.sequence, row.top_k, at, end)
        at = end
        draws |= drawn
        top_k |= drawn and row.top_k > 0
        top_p |= drawn and row.top_p < 1.0
    seen = torch.zeros((at, 2), dtype=torch.int32, pin_memory=pinned and at > 0)
    if lists:
        np.concatenate(lists, out=seen.numpy())
    return PackedParams(reals, wholes, seen, draws, top_k, top_p)


@dataclass(frozen=True, slots=True, eq=False)
class SampleWorkspace:
    """What passes leave for each other, for one stream; zero between calls where it must be."""

    states: Tensor
    """int64 ``[rows, 8]``"""
    counts: Tensor
    """int32 ``[rows, bins]``"""
    sums: Tensor
    """int64 ``[rows, bins]``"""
    slice_reals: Tensor
    """float64 ``[rows, slices]``"""
    slice_ids: Tensor
    """int32 ``[rows, slices]``"""
    tickets: Tensor
    """int32 ``[rows]``"""

    @classmethod
    def allocate(cls, rows: int, vocab: int, device: torch.device | str) -> SampleWorkspace:
        """For up to ``rows`` rows of up to ``vocab`` logits; about 26 KB a row."""
        slices = -(-vocab // _SLICE)
        return cls(
            torch.zeros((rows, _STATES), dtype=torch.int64, device=device),
            torch.zeros((rows, _BINS), dtype=torch.int32, device=device),
            torch.zeros((rows, _BINS), dtype=torch.int64, device=device),
            torch.zeros((rows, slices), dtype=torch.float64, device=device),
            torch.zeros((rows, slices), dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )


def argmax(ids: Tensor, logits: Tensor, workspace: SampleWorkspace) -> None:
    """``ids`` int32 ``[rows]`` = the lowest id of each row's largest logit.

    ``logits`` float32 ``[rows, vocab]`` with adjacent columns. A row with NaN or +inf, or without
    anything finite, gets -1.
    """
    rows, vocab = _check(ids, logits, workspace)
    if rows:
        _scan(ids, logits, vocab, None, workspace)


def sample(ids: Tensor, logits: Tensor, params: PackedParams, workspace: SampleWorkspace) -> None:
    """``ids`` int32 ``[rows]`` = each row's token, -1 as ``argmax`` gives it.

    ``logits`` float32 ``[rows, vocab]`` with adjacent columns; ``params`` of as many rows. Ids of
    rows that ``pack`` left out stay as they are. Which passes are launched depends on what
    ``params`` says of all rows; everything else is read on the card.

    Raises ValueError naming the tensor that does not fit.
    """
    rows, vocab = _check(ids, logits, workspace)
    _check_tensor("params.reals", params.reals, torch.float64, (rows, _REALS), logits)
    _check_tensor("params.wholes", params.wholes, torch.int64, (rows, _WHOLES), logits)
    _check_tensor("params.seen", params.seen, torch.int32, (params.seen.shape[0], 2), logits)
    if not rows:
        return
    _scan(ids, logits, vocab, params, workspace)
    if not params.draws:
        return
    if params.top_k:
        _cut(_TOP_K, ids, logits, vocab, params, workspace)
    if params.top_p:
        _cut(_TOP_P, ids, logits, vocab, params, workspace)
    _find(_CHOICE, ids, logits, vocab, params, workspace)


def _scan(
    ids: Tensor,
    logits: Tensor,
    vocab: int,
    params: PackedParams | None,
    workspace: SampleWorkspace,
) -> None:
    seen = params.seen if params is not None and len(params.seen) else None
    launch(
        _SCAN[seen is not None],
        _grid(logits, vocab),
        (
            ids,
            *_row_arguments(logits, vocab, params, seen),
            None if params is None else workspace.states,
            workspace.slice_reals,
            workspace.slice_ids,
            workspace.tickets,
        ),
    )


def _cut(
    phase: int,
    ids: Tensor,
    logits: Tensor,
    vocab: int,
    params: PackedParams,
    workspace: SampleWorkspace,
) -> None:
    """Find the last token that is kept, digit by digit."""
    seen = params.seen if len(params.seen) else None
    slices, rows, _ = _grid(logits, vocab)
    grid = min(slices, max(1, _NARROW_CTAS // rows)), rows, 1
    for level in range(_LEVELS):
        launch(
            _NARROW[seen is not None],
            grid,
            (
                np.int32(phase),
                np.int32(level),
                *_row_arguments(logits, vocab, params, seen),
                workspace.states,
                workspace.counts,
                workspace.sums,
                workspace.tickets,
            ),
        )
    _find(phase, ids, logits, vocab, params, workspace)


def _find(
    phase: int,
    ids: Tensor,
    logits: Tensor,
    vocab: int,
    params: PackedParams,
    workspace: SampleWorkspace,
) -> None:
    seen = params.seen if len(params.seen) else None
    launch(
        _FIND[seen is not None],
        _grid(logits, vocab),
        (
            np.int32(phase),
            ids,
            *_row_arguments(logits, vocab, params, seen),
            workspace.states,
            workspace.slice_reals,  # 64 bits a slice, here of sums
            workspace.tickets,
        ),
    )


def _row_arguments(
    logits: Tensor, vocab: int, params: PackedParams | None, seen: Tensor | None
) -> tuple[Tensor | np.generic | None, ...]:
    return (
        logits,
        np.int64(logits.stride(0)),
        np.int32(vocab),
        None if params is None else params.reals,
        None if params is None else params.wholes,
        seen,
    )


def _grid(logits: Tensor, vocab: int) -> tuple[int, int, int]:
    return -(-vocab // _SLICE), logits.shape[0], 1


def _check(ids: Tensor, logits: Tensor, workspace: SampleWorkspace) -> tuple[int, int]:
    if logits.dtype != torch.float32 or logits.ndim != 2 or logits.stride(1) != 1:
        raise ValueError(
            f"logits: {logits.dtype} {tuple(logits.shape)} with strides {logits.stride()}: must be "
            "torch.float32 [rows, vocab] with adjacent columns"
        )
    rows, vocab = logits.shape
    if not 1 <= vocab <= VOCAB_MAX:
        raise ValueError(f"logits: {vocab} columns: must be between 1 and {VOCAB_MAX}")
    _check_tensor("ids", ids, torch.int32, (rows,), logits)
    room, slices = workspace.slice_ids.shape
    if room < rows or slices * _SLICE < vocab:
        raise ValueError(
            f"workspace: for {room} rows of {slices * _SLICE} logits, must be for {rows} of {vocab}"
        )
    if workspace.slice_ids.device != logits.device:
        raise ValueError(f"workspace: on {workspace.slice_ids.device}, logits on {logits.device}")
    return rows, vocab


def _check_tensor(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], logits: Tensor
) -> None:
    if (
        tensor.dtype != dtype
        or tuple(tensor.shape) != shape
        or not tensor.is_contiguous()
        or tensor.device != logits.device
    ):
        raise ValueError(
            f"{name}: {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: must be {dtype} "
            f"{shape}, contiguous, on {logits.device}"
        )
