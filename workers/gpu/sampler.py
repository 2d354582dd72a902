"""Tokens from logits on the card: greedily inside a step's graph, anything else after it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.kvstore.core.requests import Token
from deepinfer.workers import sampler
from deepinfer.workers.sampler import LogitsError, SampleRow


class GpuSampler:
    """Chooses tokens; what ``workers.engine.SamplingBackend`` asks for.

    ``logits`` float32 ``[sequences, vocab]`` is the buffer that every step leaves its logits in,
    ``saturations`` int64 ``[1]`` counts K and V elements that were clamped; both on the card.
    """

    def __init__(self, logits: Tensor, saturations: Tensor) -> None:
        rows, device = logits.shape[0], logits.device
        pinned = device.type == "cuda"
        self._logits = logits
        self._saturations = saturations
        self._best = torch.zeros(rows, dtype=torch.float32, device=device)
        self._ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._host_best = torch.zeros(rows, dtype=torch.float32, pin_memory=pinned)
        self._host_ids = torch.zeros(rows, dtype=torch.int64, pin_memory=pinned)
        self._host_saturations = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)
        self._done = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    @property
    def kv_saturations(self) -> int:
        """K and V elements clamped to the pool's dtype, as of the last step that chose tokens."""
        return int(self._host_saturations)

    def choose_greedily(self, rows: int) -> None:
        """Find the likeliest token of the buffer's first ``rows`` rows; nothing is waited for."""
        torch.max(self._logits[:rows], dim=1, out=(self._best[:rows], self._ids[:rows]))

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Token]:
        """Choose one token for every row of ``logits`` ``[rows, vocab]``; waits for the card.

        Raises LogitsError and ValueError as ``workers.sampler.sample``.
        """
        whole = logits.data_ptr() == self._logits.data_ptr() and logits.shape[0] == len(rows)
        self._host_saturations.copy_(self._saturations, non_blocking=True)
        if not (whole and all(row.is_plain_greedy for row in rows)):
            return sampler.sample(logits, rows)
        count = len(rows)
        self._host_best[:count].copy_(self._best[:count], non_blocking=True)
        self._host_ids[:count].copy_(self._ids[:count], non_blocking=True)
        if self._done is not None:
            self._done.record()
            self._done.synchronize()
        bad = [
            i for i, best in enumerate(self._host_best[:count].tolist()) if not math.isfinite(best)
        ]
        if bad:
            raise LogitsError(bad)
        return [Token(token_id) for token_id in self._host_ids[:count].tolist()]
