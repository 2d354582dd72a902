"""What ``kernels.sampling`` computes, in float64 and with a sort."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deepinfer.kernels.sampling import RowParams

_MASK = (1 << 32) - 1


def sample_reference(
    logits: npt.NDArray[np.float32], rows: Sequence[RowParams]
) -> npt.NDArray[np.int32]:
    """Token ids int32 ``[rows]`` of ``logits`` ``[rows, vocab]``; -1 where there is no choice."""
    return np.array([_row(raw, row) for raw, row in zip(logits, rows, strict=True)], dtype=np.int32)


def uniform(seed: int, index: int, sequence: int) -> float:
    """A row's number of [0, 1): 53 bits of Philox 4x32-10 (Salmon et al., SC 2011)."""
    words = [index & _MASK, index >> 32, sequence, 0]
    key = [seed & _MASK, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [
            (b >> 32) ^ words[1] ^ key[0],
            b & _MASK,
            (a >> 32) ^ words[3] ^ key[1],
            a & _MASK,
        ]
        key = [(key[0] + 0x9E3779B9) & _MASK, (key[1] + 0xBB67AE85) & _MASK]
    return float(words[0] << 21 | words[1] >> 11) * 2.0**-53


def _row(raw: npt.NDArray[np.float32], row: RowParams) -> int:
    if not np.isfinite(raw.max()):
        return -1
    logits = raw.astype(np.float64)
    if row.seen is not None:
        ids, counts = row.seen
        values = logits[ids]
        if row.repetition != 1.0:
            values = np.where(values > 0, values / row.repetition, values * row.repetition)
        often = row.frequency * counts + row.presence
        logits[ids] = np.where(counts > 0, values - often, values)
    if row.temperature == 0.0:
        return int(logits.argmax())
    with np.errstate(over="ignore"):
        weights = np.exp((logits - logits.max()) / row.temperature)
    order = np.argsort(-weights, kind="stable")  # ties by the lower id
    order = order[weights[order] > 0]
    order = order[weights[order] >= row.min_p]
    if row.top_k:
        order = order[: row.top_k]
    if row.top_p < 1.0:
        sums = np.cumsum(weights[order])
        order = order[: int(np.searchsorted(sums, row.top_p * sums[-1])) + 1]
    kept = np.sort(order)
    sums = np.cumsum(weights[kept])
    share = uniform(row.seed, row.index, row.sequence) * sums[-1]
    place = int(np.searchsorted(sums, share, side="right"))
    return int(kept[min(place, kept.size - 1)])
