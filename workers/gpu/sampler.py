"""Tokens from logits on the card: greedily inside a step's graph, drawn ones right behind it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deepinfer.kernels import sampling
from deepinfer.kernels.sampling import RowParams, SampleWorkspace
from deepinfer.kvstore.core.requests import Token
from deepinfer.workers import sampler
from deepinfer.workers.sampler import LogitsError, SampleRow

SATURATIONS_EVERY: Final = 16
"""Steps between two looks at the count of saturations."""

_Ids = npt.NDArray[np.int64]


class Follower(Protocol):
    """Who goes on while tokens are on their way to the host."""

    def launch(self, rows: Sequence[SampleRow], ids: Tensor) -> bool:
        """``ids`` int32 ``[sequences]`` on the card begin with the tokens of ``rows``, -1: none.

        Returns whether the step's logits are overwritten from here on.
        """
        ...

    def learn(self, tokens: Sequence[int]) -> None:
        """Those tokens have reached the host."""
        ...


class GpuSampler:
    """Chooses tokens; what ``workers.engine.SamplingBackend`` asks for.

    ``logits`` float32 ``[sequences, vocab]`` is the buffer that every step leaves its logits in,
    ``saturations`` int64 ``[1]`` counts K and V elements that were clamped; both on the card.

    Rows that want log-probabilities, a logit bias, or stop ids forbidden are chosen on the host,
    by ``workers.sampler``; all others by ``kernels.sampling``, which means the same.
    """

    def __init__(self, logits: Tensor, saturations: Tensor) -> None:
        rows, vocab = logits.shape
        device = logits.device
        self._pinned = device.type == "cuda"
        self.follower: Follower | None = None
        self._logits = logits
        self._saturations = saturations
        self._workspace = SampleWorkspace.allocate(rows, vocab, device)
        self._ids = torch.zeros(rows, dtype=torch.int32, device=device)
        self._host_ids = torch.zeros(rows, dtype=torch.int32, pin_memory=self._pinned)
        self._host_saturations = torch.zeros(1, dtype=torch.int64, pin_memory=self._pinned)
        self._arrived = torch.cuda.Event() if self._pinned else None  # type: ignore[no-untyped-call]
        self._chosen_for: Tensor | None = None
        self._gone: list[int] | None = None
        self._sent = 0

    @property
    def kv_saturations(self) -> int:
        """K and V elements clamped to the pool's dtype, as of a few steps ago."""
        return int(self._host_saturations)

    def choose_greedily(self, rows: int) -> None:
        """Find the likeliest token of the buffer's first ``rows`` rows; nothing is waited for."""
        sampling.argmax(self._ids[:rows], self._logits[:rows], self._workspace)

    def first(self, rows: int) -> Tensor:
        """The buffer's first rows, for which ``choose_greedily`` was launched."""
        self._chosen_for = self._logits[:rows]
        return self._chosen_for

    def pick(self, places: Tensor) -> Tensor:
        """The rows at ``places`` int64 on the card, of a buffer with all its choices."""
        count = places.shape[0]
        self._ids[:count] = self._ids.index_select(0, places)
        self._chosen_for = self._logits.index_select(0, places)
        return self._chosen_for

    def forget(self) -> None:
        """A new step begins."""
        self._chosen_for = self._gone = None

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Token]:
        """Choose one token for every row of ``logits`` ``[rows, vocab]``; waits for the card.

        Raises LogitsError and ValueError as ``workers.sampler.sample``.
        """
        if self._gone is not None and self._in_buffer(logits):
            first = logits.storage_offset() // self._logits.shape[1]
            return _tokens(self._gone[first : first + len(rows)])
        on_host = [i for i, row in enumerate(rows) if _is_for_the_host(row)]
        if logits is not self._chosen_for or not all(row.is_plain_greedy for row in rows):
            params = sampling.pack(
                [None if _is_for_the_host(row) else _params(row) for row in rows],
                pinned=self._pinned,
            )
            sampling.sample(
                self._ids[: len(rows)], logits, params.to(logits.device), self._workspace
            )
        if on_host:
            return self._finish_on_host(logits, rows, on_host)
        self._send(len(rows))
        overwritten = self.follower is not None and self.follower.launch(rows, self._ids)
        ids = self._receive(len(rows))
        if overwritten and self.follower is not None:
            self.follower.learn(ids)
            # Whoever is told of a bad row asks again, row by row.
            self._gone = ids if min(ids) < 0 else None
        return _tokens(ids)

    def _finish_on_host(
        self, logits: Tensor, rows: Sequence[SampleRow], on_host: Sequence[int]
    ) -> list[Token]:
        """Choose the rows ``on_host`` there; the others' ids are on their way."""
        self._send(len(rows))
        index = torch.tensor(on_host, dtype=torch.int64).to(logits.device)
        chosen = sampler.sample(logits.index_select(0, index), [rows[i] for i in on_host])
        ids = self._receive(len(rows))
        for i, token in zip(on_host, chosen, strict=True):
            ids[i] = token.id
        tokens = _tokens(ids)
        for i, token in zip(on_host, chosen, strict=True):
            tokens[i] = token
        if self.follower is not None:
            self._host_ids[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
            self._ids[: len(ids)].copy_(self._host_ids[: len(ids)], non_blocking=True)
            if self.follower.launch(rows, self._ids):
                self.follower.learn(ids)
        return tokens

    def _send(self, count: int) -> None:
        """Start copying the first ids to the host, and now and then the count of saturations."""
        self._host_ids[:count].copy_(self._ids[:count], non_blocking=True)
        self._sent += 1
        if self._sent % SATURATIONS_EVERY == 1:
            self._host_saturations.copy_(self._saturations, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def _receive(self, count: int) -> list[int]:
        if self._arrived is not None:
            self._arrived.synchronize()
        ids: list[int] = self._host_ids[:count].tolist()
        return ids

    def _in_buffer(self, logits: Tensor) -> bool:
        return logits.untyped_storage().data_ptr() == self._logits.untyped_storage().data_ptr()


def _tokens(ids: Sequence[int]) -> list[Token]:
    bad = [i for i, token_id in enumerate(ids) if token_id < 0]
    if bad:
        raise LogitsError(bad)
    return [Token(token_id) for token_id in ids]


def _is_for_the_host(row: SampleRow) -> bool:
    params = row.params
    return params.logprobs is not None or bool(params.logit_bias) or row.must_go_on


def _params(row: SampleRow) -> RowParams:
    params = row.params
    return RowParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        seed=row.seed,
        index=row.index,
        sequence=row.choice,
        seen=_seen(row) if row.has_penalties else None,
    )


def _seen(row: SampleRow) -> tuple[_Ids, _Ids]:
    """Rising ids that penalties are about, and how often each occurred in the output."""
    ids, counts = np.unique(np.asarray(row.output_ids, dtype=np.int64), return_counts=True)
    if row.params.repetition_penalty == 1.0:
        return ids, counts
    together = np.union1d(_distinct(tuple(row.prompt_ids)), ids)
    found = np.zeros(len(together), dtype=np.int64)
    found[np.searchsorted(together, ids)] = counts
    return together, found


@functools.lru_cache(maxsize=256)
def _distinct(ids: tuple[int, ...]) -> _Ids:
    return np.unique(np.asarray(ids, dtype=np.int64))
