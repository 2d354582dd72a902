"""From logits to the next token of each sequence.

What a row draws depends on its own logits, parameters, seed, choice and token index, and on
nothing else: not on the batch around it, the order of rows, the device, or how often a step is
retried. So a sequence that is moved, swapped or recomputed goes on with the same tokens, given
the same logits. Every comparison that can tie is settled by the lowest id.

The order of steps is vLLM's: logit bias, stop ids masked until ``min_tokens``, penalties,
temperature, min-p, top-k, top-p, draw. Log-probabilities are those of the raw logits, before any
of that (vLLM's default, ``raw_logprobs``): they say what the model believes, comparable between
requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from deepinfer.kvstore.core.requests import SamplingParams, Token
from deepinfer.workers.philox import uniforms

_Floats = npt.NDArray[np.float64]
_Ids = npt.NDArray[np.int64]

# Counter word 3 names what a number is used for, so that another use never repeats these.
_USE_DRAW = 0
# How many of the most likely tokens are sorted at first when looking for a top-p set.
_TOP_P_FIRST_LOOK = 256


class LogitsError(ValueError):
    """Rows whose logits allow no choice: one is NaN or +inf, or none is finite.

    ``rows`` are the indices of bad rows. Sampling changes nothing, so the caller can fail those
    sequences and sample the others.
    """

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__(f"logits of rows {list(rows)} hold NaN or +inf, or nothing finite")
        self.rows = tuple(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """What chooses the next token of one sequence, besides its logits."""

    params: SamplingParams
    seed: int
    """Of the request, 0 to 2**64 - 1."""
    index: int
    """Which generated token of the sequence this is, from 0."""
    choice: int = 0
    """Which of the request's ``n`` sequences this is: each draws its own numbers."""
    prompt_ids: Sequence[int] = ()
    """Read for the repetition penalty only."""
    output_ids: Sequence[int] = ()
    """The ``index`` tokens generated so far; read for penalties only."""
    stop_token_ids: Sequence[int] = ()
    """Ids that would end the sequence, forbidden while ``index`` < ``min_tokens``."""

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the answer is simply the id of the largest logit."""
        p = self.params
        return p.temperature == 0.0 and p.logprobs is None and not self.is_adjusted

    @property
    def is_adjusted(self) -> bool:
        """Whether its logits are changed before anything is chosen."""
        return bool(self.params.logit_bias) or self.must_go_on or self.has_penalties

    @property
    def must_go_on(self) -> bool:
        """Whether ids that end the sequence are still forbidden."""
        return self.index < self.params.min_tokens and bool(self.stop_token_ids)

    @property
    def has_penalties(self) -> bool:
        """Whether tokens seen before are treated differently from others."""
        p = self.params
        return bool(p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty)


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Token]:
    """Choose the next token of each row.

    ``logits`` float32 [rows, vocab], on any device, left as they are. Probabilities are computed
    in float64 on the host. Raises :class:`LogitsError` for rows that allow no choice, and
    ValueError for a wrong shape or dtype or an id outside the vocabulary.
    """
    if logits.dtype != torch.float32 or logits.ndim != 2 or logits.shape[0] != len(rows):
        raise ValueError(
            f"logits: {logits.dtype} {tuple(logits.shape)}: must be torch.float32 "
            f"[{len(rows)}, vocab]"
        )
    if not rows:
        return []
    # torch.max: of equal largest values the first, and NaN if there is one.
    largest, argmax = logits.max(dim=1)
    finite = torch.isfinite(largest).tolist()
    if not all(finite):
        raise LogitsError([i for i, good in enumerate(finite) if not good])
    greedy: list[int] = argmax.tolist()
    draws = _draws(rows)
    return [
        Token(greedy[i])
        if row.is_plain_greedy
        else _sample_row(logits[i].detach().cpu().numpy(), row, float(draws[i]), i)
        for i, row in enumerate(rows)
    ]


def score(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> list[Token]:
    """Say how likely each row held the token that follows it, and the ``count`` likeliest ones.

    ``logits`` float32 [rows, vocab]; ``token_ids`` [rows]. Each row's numbers are those that
    ``sample`` gives for the same logits. Raises :class:`LogitsError` for rows that hold NaN or +inf
    or nothing finite, and ValueError for an id outside the vocabulary.
    """
    rows = logits.detach().cpu().numpy()
    _checked(token_ids, rows.shape[1], "token_ids")
    finite = np.isfinite(rows.max(axis=1))
    if not finite.all():
        raise LogitsError(np.flatnonzero(~finite).tolist())
    return [
        _with_logprobs(row.astype(np.float64), token_id, count)
        for row, token_id in zip(rows, token_ids, strict=True)
    ]


def _draws(rows: Sequence[SampleRow]) -> _Floats:
    """Return each row's number of [0, 1): float64 [rows]."""
    if all(row.params.temperature == 0.0 for row in rows):
        return np.zeros(len(rows))
    counters = np.array(
        [(row.index & 0xFFFFFFFF, row.index >> 32, row.choice, _USE_DRAW) for row in rows],
        dtype=np.uint32,
    )
    keys = np.array([(row.seed & 0xFFFFFFFF, row.seed >> 32) for row in rows], dtype=np.uint32)
    return uniforms(counters, keys)


def _sample_row(raw: npt.NDArray[np.float32], row: SampleRow, draw: float, i: int) -> Token:
    params = row.params
    raw64 = raw.astype(np.float64)
    adjusted = _adjust(raw64, row, i)
    if params.temperature == 0.0:
        chosen = int(adjusted.argmax())
    else:
        chosen = _draw(adjusted, params, draw)
    if params.logprobs is None:
        return Token(chosen)
    return _with_logprobs(raw64, chosen, params.logprobs)


def _adjust(logits: _Floats, row: SampleRow, i: int) -> _Floats:
    """Apply bias, min-tokens mask and penalties; float64 [vocab], a copy if anything changes."""
    params = row.params
    if not row.is_adjusted:
        return logits
    logits = logits.copy()
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        logits[_checked(ids, logits.size, "logit_bias")] += np.array(biases)
    if row.must_go_on:
        logits[_checked(row.stop_token_ids, logits.size, "stop_token_ids")] = -np.inf
        if not np.isfinite(logits.max()):
            raise LogitsError([i])
    if not row.has_penalties:
        return logits
    output, counts = np.unique(
        _checked(row.output_ids, logits.size, "output_ids"), return_counts=True
    )
    if params.repetition_penalty != 1.0:
        seen = np.union1d(_checked(row.prompt_ids, logits.size, "prompt_ids"), output)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    logits[output] -= params.frequency_penalty * counts + params.presence_penalty
    return logits


def _checked(ids: Sequence[int], vocab: int, name: str) -> _Ids:
    array = np.asarray(ids, dtype=np.int64)
    if array.size and not (array.min() >= 0 and array.max() < vocab):
        raise ValueError(
            f"{name}: {array.min()} to {array.max()}: must be between 0 and {vocab - 1}"
        )
    return array


def _draw(logits: _Floats, params: SamplingParams, draw: float) -> int:
    """Draw from softmax(``logits`` / temperature), cut by min-p, top-k and top-p.

    The ids that are kept divide [0, 1) between them in ascending order; ``draw`` falls into one.
    """
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the largest to -inf
        weights = np.exp((logits - logits.max()) / params.temperature)  # of the most likely: 1
    kept = np.flatnonzero(weights >= params.min_p) if params.min_p else np.flatnonzero(weights)
    if 0 < params.top_k < kept.size:
        kept = np.sort(kept[_most_likely(weights[kept], params.top_k)])
    if params.top_p < 1.0:
        kept = np.sort(kept[_nucleus(weights[kept], params.top_p)])
    ends = np.cumsum(weights[kept])
    # draw < 1, but the product may round up to the total: the last id ends there.
    place = int(np.searchsorted(ends, draw * ends[-1], side="right"))
    return int(kept[min(place, kept.size - 1)])


def _most_likely(weights: _Floats, count: int) -> _Ids:
    """Return the places of the ``count`` largest, best first, ties by the lower place."""
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    if count < weights.size:
        threshold = np.partition(weights, weights.size - count)[weights.size - count]
        places = np.flatnonzero(weights >= threshold)  # may hold more than asked for: ties
    else:
        places = np.arange(weights.size)
    return places[np.argsort(-weights[places], kind="stable")][:count]


def _nucleus(weights: _Floats, top_p: float) -> _Ids:
    """Return the places of the smallest set of largest weights that holds ``top_p`` of the sum."""
    needed = top_p * weights.sum()
    count = min(_TOP_P_FIRST_LOOK, weights.size)
    while True:
        places = _most_likely(weights, count)
        ends = np.cumsum(weights[places])
        if ends[-1] >= needed or count == weights.size:
            break
        count = min(count * 16, weights.size)
    return places[: int(np.searchsorted(ends, needed, side="left")) + 1]


def _with_logprobs(logits: _Floats, chosen: int, count: int) -> Token:
    largest = logits.max()
    logprobs = logits - (largest + np.log(np.exp(logits - largest).sum()))
    top = _most_likely(logits, count)
    return Token(
        chosen,
        float(logprobs[chosen]),
        tuple((int(token_id), float(logprobs[token_id])) for token_id in top),
    )
