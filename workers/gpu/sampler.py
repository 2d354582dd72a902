"""Tokens from logits on the card: greedily inside a step's graph, anything else after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.kvstore.core.requests import Token
from deepinfer.workers import sampler
from deepinfer.workers.sampler import LogitsError, SampleRow


class Follower(Protocol):
    """Who goes on while tokens are on their way to the host."""

    def launch(self, rows: Sequence[SampleRow], ids: Tensor) -> bool:
        """``ids`` int64 ``[sequences]`` on the card begin with the tokens of ``rows``.

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
    """

    def __init__(self, logits: Tensor, saturations: Tensor) -> None:
        rows, device = logits.shape[0], logits.device
        pinned = device.type == "cuda"
        self.follower: Follower | None = None
        self._logits = logits
        self._saturations = saturations
        self._best = torch.zeros(rows, dtype=torch.float32, device=device)
        self._ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._host_best = torch.zeros(rows, dtype=torch.float32, pin_memory=pinned)
        self._host_ids = torch.zeros(rows, dtype=torch.int64, pin_memory=pinned)
        self._host_saturations = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)
        self._arrived = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self._chosen_for: Tensor | None = None
        self._gone: list[int | None] | None = None

    @property
    def kv_saturations(self) -> int:
        """K and V elements clamped to the pool's dtype, as of the last step that chose tokens."""
        return int(self._host_saturations)

    def choose_greedily(self, rows: int) -> None:
        """Find the likeliest token of the buffer's first ``rows`` rows; nothing is waited for."""
        torch.max(self._logits[:rows], dim=1, out=(self._best[:rows], self._ids[:rows]))

    def first(self, rows: int) -> Tensor:
        """The buffer's first rows, for which ``choose_greedily`` was launched."""
        self._chosen_for = self._logits[:rows]
        return self._chosen_for

    def pick(self, places: Tensor) -> Tensor:
        """The rows at ``places`` int64 on the card, of a buffer with all its choices."""
        count = places.shape[0]
        self._best[:count] = self._best.index_select(0, places)
        self._ids[:count] = self._ids.index_select(0, places)
        self._chosen_for = self._logits.index_select(0, places)
        return self._chosen_for

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Token]:
        """Choose one token for every row of ``logits`` ``[rows, vocab]``; waits for the card.

        Raises LogitsError and ValueError as ``workers.sampler.sample``.
        """
        greedy = all(row.is_plain_greedy for row in rows)
        if self._gone is not None and greedy and self._in_buffer(logits):
            first = logits.storage_offset() // self._logits.shape[1]
            return _tokens(self._gone[first : first + len(rows)])
        self._host_saturations.copy_(self._saturations, non_blocking=True)
        if logits is not self._chosen_for or not greedy:
            tokens = sampler.sample(logits, rows)
            self._follow(rows, tokens)
            return tokens
        count = len(rows)
        self._host_best[:count].copy_(self._best[:count], non_blocking=True)
        self._host_ids[:count].copy_(self._ids[:count], non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        overwritten = self.follower is not None and self.follower.launch(rows, self._ids)
        if self._arrived is not None:
            self._arrived.synchronize()
        best, ids = self._host_best[:count].tolist(), self._host_ids[:count].tolist()
        if overwritten and self.follower is not None:
            self.follower.learn(ids)
        found = [i if math.isfinite(b) else None for i, b in zip(ids, best, strict=True)]
        # Whoever is told of a bad row asks again, row by row.
        self._gone = found if overwritten and None in found else None
        return _tokens(found)

    def forget(self) -> None:
        """A new step begins."""
        self._chosen_for = self._gone = None

    def _follow(self, rows: Sequence[SampleRow], tokens: Sequence[Token]) -> None:
        if self.follower is None:
            return
        ids = [token.id for token in tokens]
        self._host_ids[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
        self._ids[: len(ids)].copy_(self._host_ids[: len(ids)], non_blocking=True)
        if self.follower.launch(rows, self._ids):
            self.follower.learn(ids)

    def _in_buffer(self, logits: Tensor) -> bool:
        return logits.untyped_storage().data_ptr() == self._logits.untyped_storage().data_ptr()


def _tokens(ids: Sequence[int | None]) -> list[Token]:
    bad = [i for i, token_id in enumerate(ids) if token_id is None]
    if bad:
        raise LogitsError(bad)
    return [Token(token_id) for token_id in ids if token_id is not None]
