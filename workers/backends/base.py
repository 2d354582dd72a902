"""What a device must be able to do for the decoder: the interface of every backend.

Rows are tokens. A forward pass flattens the slices of all requests into ``rows`` consecutive rows
(padded to ``Plan.padded_rows``), so every operation but attention is blind to requests.

*The same answer.* A row's result may depend on that row and its own request's KV alone: not on
which other rows share the step, nor on how its request was cut into chunks. A backend that cannot
promise it for some shape must change the shape (pad) or refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.kvstore.core.layout import KvLayout
from deepinfer.kvstore.core.requests import Token
from deepinfer.workers.pool import PagedPool
from deepinfer.workers.sampler import SampleRow


@dataclass(frozen=True, slots=True)
class RowSpan:
    """The consecutive rows of one request in a step.

    ``count`` tokens at positions ``start .. start + count - 1``; ``block_table`` covers all
    positions below ``start + count``, of which the first ``start`` are cached already.
    """

    start: int
    count: int
    block_table: Sequence[int]


class Plan(Protocol):
    """What a backend prepares once a step and every layer then uses (opaque to the model)."""

    @property
    def rows(self) -> int:
        """Real rows of the step."""
        ...

    @property
    def padded_rows(self) -> int:
        """Rows that linear layers see; those beyond ``rows`` are padding and write no KV."""
        ...

    @property
    def positions(self) -> Tensor:
        """Position of every padded row, int64 ``[padded_rows]``."""
        ...


class Linear(Protocol):
    """A weight in the layout its backend computes with (opaque to the model)."""

    @property
    def in_features(self) -> int:
        """Width of the input."""
        ...

    @property
    def out_features(self) -> int:
        """Width of the output."""
        ...


class Backend(Protocol):
    """One device's arithmetic. All tensors live on ``device``; activations are float32.

    Attention accumulates in float32 whatever the storage, and the residual stream is float32.
    """

    @property
    def name(self) -> str:
        """Short name for logs and status, e.g. ``cpu``."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        ...

    @property
    def kv_saturations(self) -> int:
        """K and V elements that did not fit the pool's dtype and were clamped, since start."""
        ...

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Take over a weight ``[out_features, in_features]`` and a bias ``[out_features]``."""
        ...

    def calibrate(self, linears: Sequence[Linear], layout: KvLayout) -> None:
        """Measure, once before the first step, what *the same answer* needs on this machine.

        Raises RuntimeError when no row padding gives every row the same bits.
        """
        ...

    def plan(self, spans: Sequence[RowSpan], layout: KvLayout, query_heads: int) -> Plan:
        """Prepare a step over ``spans``; their order is the order of rows."""
        ...

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        """``x @ weight.T + bias``: ``[rows, in_features]`` to ``[rows, out_features]``.

        Any number of rows; fewer than the backend pads to are padded inside.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis."""
        ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the halves of ``x`` ``[rows, heads, head_dim]`` by ``[rows, head_dim / 2]``."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """``silu(gate) * up`` of ``[rows, 2 * width]``, gate first."""
        ...

    def kv_write(self, pool: PagedPool, layer: int, k: Tensor, v: Tensor, plan: Plan) -> None:
        """Store K and V ``[padded_rows, kv_heads, head_dim]`` of the step in the pool's dtype.

        int8: scale = max(float16(absmax / 127), 2^-14) a token and head, q = round(x / scale)
        with that rounded scale, clamped to ±127. Other dtypes clamp to the largest finite value,
        then cast; what was clamped counts in ``kv_saturations``.
        """
        ...

    def attention(self, pool: PagedPool, layer: int, q: Tensor, plan: Plan) -> Tensor:
        """Causal attention of every row over its request's KV, read from the pool.

        ``q`` ``[padded_rows, query_heads, head_dim]``; returns ``[padded_rows, query_heads *
        head_dim]``. The step's own K and V must have been written before. Padding rows are 0.
        """
        ...

    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Token]:
        """Choose one token for every row of ``logits`` ``[rows, vocab]``."""
        ...
