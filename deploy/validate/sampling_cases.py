"""Logits and rows' parameters for the sampling kernels, and what their tokens are held to.

Used with the emulator and, unchanged, on a card. Tokens must be those of the specification: its
sums are of float64, the kernels' of weights in fixed point, and draws are as good as never so close
to the end of a token's share that this matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from deepinfer.kernels import sampling
from deepinfer.kernels.reference_sampling import sample_reference
from deepinfer.kernels.sampling import RowParams, SampleWorkspace

Logits = npt.NDArray[np.float32]

CUTS: Final = {
    "whole": RowParams(temperature=1.0),
    "top_k": RowParams(temperature=0.9, top_k=40),
    "top_k of one": RowParams(temperature=5.0, top_k=1),
    "a narrow top_k in a wide bin of top_p": RowParams(temperature=100.0, top_k=3, top_p=0.9),
    "top_k of more than there are": RowParams(temperature=0.01, top_k=4000),
    "top_p": RowParams(temperature=1.5, top_p=0.9),
    "tiny top_p": RowParams(temperature=1.0, top_p=1e-9),
    "top_k and top_p": RowParams(temperature=2.0, top_k=300, top_p=0.7),
    "min_p": RowParams(temperature=3.0, min_p=0.05),
    "everything": RowParams(temperature=2.5, top_k=200, top_p=0.8, min_p=0.001),
    "cold": RowParams(temperature=1e-5),
    "hot": RowParams(temperature=100.0, top_p=0.5),
    "colder than doubles": RowParams(temperature=1e-300, top_k=3),
}
"""Every way to cut a distribution, and temperatures from one end to the other."""


def logits_of(rows: int, vocab: int, *, seed: int, spread: float = 3.0) -> Logits:
    """As models make them: a few likely tokens before a broad rest."""
    rng = np.random.default_rng(seed)
    made = rng.normal(0, spread, (rows, vocab)).astype(np.float32)
    made[:, rng.integers(0, vocab, 5)] += 4 * spread
    return made


def sample(logits: Logits, rows: Sequence[RowParams | None], device: str) -> list[int]:
    """Tokens by the kernels; twice, for what the first call leaves behind must not matter.

    The token of a row that is None stays -7.
    """
    on_card = torch.from_numpy(logits.copy()).to(device)
    workspace = SampleWorkspace.allocate(len(rows), logits.shape[1], device)
    params = sampling.pack(rows).to(torch.device(device))
    results: list[list[int]] = []
    for _ in range(2):
        ids = torch.full((len(rows),), -7, dtype=torch.int32, device=device)
        sampling.sample(ids, on_card, params, workspace)
        results.append(ids.tolist())
    assert results[0] == results[1], "a second call chooses otherwise"
    left = on_card.cpu().numpy().view(np.int32)
    assert np.array_equal(left, logits.view(np.int32)), "logits were changed"
    return results[0]


def check(logits: Logits, rows: Sequence[RowParams], device: str) -> list[int]:
    """The tokens, which are the specification's."""
    ids = sample(logits, rows, device)
    wanted = sample_reference(logits, rows).tolist()
    wrong = [i for i in range(len(rows)) if ids[i] != wanted[i]]
    assert not wrong, f"row {wrong[0]}: {ids[wrong[0]]}, must be {wanted[wrong[0]]}"
    return ids


def check_cut(name: str, vocab: int, *, rows: int, device: str) -> None:
    params = [replace(CUTS[name], seed=2**64 - 1 - i, index=i, sequence=i % 3) for i in range(rows)]
    check(logits_of(rows, vocab, seed=len(name)), params, device)


def check_batch(vocab: int, *, device: str) -> None:
    """Rows of a batch do not mind each other, whatever they ask for."""
    logits = logits_of(len(CUTS) + 2, vocab, seed=5)
    rows: list[RowParams | None] = [*CUTS.values(), RowParams(), None]
    together = sample(logits, rows, device)
    assert together[-1] == -7, "a row that was left out is written"
    assert together[-2] == logits[-2].argmax()
    for i, row in enumerate(rows[:-1]):
        assert sample(logits[i : i + 1], [row], device) == [together[i]], f"row {i} alone"


def check_ties(top_k: int, top_p: float, vocab: int, *, device: str) -> None:
    """Four values only: ends of what is kept lie among a quarter of all tokens."""
    logits = np.random.default_rng(3).integers(-2, 2, (8, vocab)).astype(np.float32)
    rows = [RowParams(temperature=0.7, top_k=top_k, top_p=top_p, seed=i) for i in range(8)]
    check(logits, rows, device)


def check_neighbours(*, device: str) -> None:
    """The hottest draw of logits that differ in their last bit only."""
    one = np.float32(17.0)
    logits = np.full((4, 4500), one, dtype=np.float32)
    logits[:, 1000:2000] = np.nextafter(one, np.float32(20), dtype=np.float32)
    rows = [RowParams(temperature=100.0, top_k=900, seed=i) for i in range(4)]
    for token in check(logits, rows, device):
        assert 1000 <= token < 1900


def check_penalties(vocab: int, *, device: str) -> None:
    rng = np.random.default_rng(8)
    logits = logits_of(6, vocab, seed=8)
    ids = np.unique(rng.integers(0, vocab, 700))
    seen = (ids, rng.integers(0, 4, ids.size))
    likeliest = int(logits[0].argmax())
    rows = [
        RowParams(repetition=50.0, seen=(np.array([likeliest]), np.array([1]))),
        RowParams(temperature=1.0, repetition=1.3, seen=seen, seed=1),
        RowParams(temperature=1.0, presence=1.5, seen=seen, seed=2, top_k=50),
        RowParams(temperature=1.0, frequency=-1.25, seen=seen, seed=3, top_p=0.9),
        RowParams(temperature=1.2, top_p=0.9, seed=4),
        RowParams(repetition=0.01, frequency=0.3, presence=0.1, seen=seen),
    ]
    assert check(logits, rows, device)[0] != likeliest


def check_bad_rows(vocab: int, *, device: str) -> None:
    """NaN, +inf and nothing finite are told of; -inf beside something finite is no reason."""
    logits = logits_of(7, vocab, seed=1)
    middle = vocab // 2
    logits[1, vocab - 1] = np.nan
    logits[2, 3] = np.inf
    logits[3] = -np.inf
    logits[4] = -np.inf
    logits[4, middle] = -3.5
    logits[5, :-1] = -np.inf
    for row in (RowParams(), RowParams(temperature=1.0, top_k=5, top_p=0.9)):
        ids = check(logits, [row] * 7, device)
        bad = [i for i, token in enumerate(ids) if token == -1]
        assert bad == [1, 2, 3], f"rows {bad} are said to be bad, must be 1, 2 and 3"
        assert ids[4:6] == [middle, vocab - 1]
    greedy = torch.zeros(7, dtype=torch.int32, device=device)
    workspace = SampleWorkspace.allocate(7, vocab, device)
    sampling.argmax(greedy, torch.from_numpy(logits).to(device), workspace)
    assert greedy.tolist() == sample_reference(logits, [RowParams()] * 7).tolist()


def check_strided(vocab: int, *, device: str) -> None:
    """Rows that lie apart; what is between them would be chosen."""
    logits = logits_of(3, vocab, seed=vocab)
    wide = torch.full((3, vocab + 3), 99.0, device=device)
    wide[:, :vocab] = torch.from_numpy(logits)
    rows = [RowParams(), RowParams(temperature=1.0), RowParams(temperature=1.0, top_p=0.5)]
    ids = torch.zeros(3, dtype=torch.int32, device=device)
    workspace = SampleWorkspace.allocate(4, vocab, device)
    params = sampling.pack(rows).to(torch.device(device))
    sampling.sample(ids, wide[:, :vocab], params, workspace)
    assert ids.tolist() == sample_reference(logits, rows).tolist()
