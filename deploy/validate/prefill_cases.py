"""Inputs of ``paged_prefill``: random q, K and V in a pool laid out as workers do, and poison.

Every byte of the pool that belongs to no attended token is poison: NaN codes, infinite scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels import attention, reference_prefill
from deepinfer.kernels.attention import KvView
from deepinfer.kernels.prefill import PrefillSpan, paged_prefill, plan_prefill
from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.workers.pool import PagedPool

FORMATS = {
    "fp16": attention.KV_FP16,
    "int8": attention.KV_INT8,
    "fp8": attention.KV_E4M3,
    "fp8_e5m2": attention.KV_E5M2,
    "k16v8": attention.KV_K16V8,
}
LAYER = 1
UNTOUCHED = 7.0
"""What ``Case.run`` fills ``out`` with; its first and last row belong to no span."""


@dataclass
class Case:
    """Some (start, rows) of one request each; ``gain`` multiplies q, and so the scores."""

    dtype: str = "fp16"
    head_dim: int = 64
    kv_heads: int = 1
    group: int = 8
    block_size: int = 16
    parts: tuple[tuple[int, int], ...] = ((0, 20),)
    gain: float = 1.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        torch.manual_seed(1234)
        layout = KvLayout(
            resolve_kv_dtype(self.dtype), 2, self.kv_heads, self.head_dim, self.block_size
        )
        columns = [-(-(start + rows) // self.block_size) for start, rows in self.parts]
        ids = torch.randperm(sum(columns) + 3, device=self.device)
        self.pool = PagedPool(layout, len(ids), self.device)
        self.pool.storage.fill_(0x7F)  # NaN in half, E4M3 and E5M2
        if self.dtype == "int8":
            self.pool.scales(LAYER).fill_(math.inf)
        # A number beyond every pool: an id that must not be used for reading.
        self.tables = torch.full(
            (len(columns), max(columns) + 1), 1 << 30, dtype=torch.int32, device=self.device
        )
        self.spans: list[PrefillSpan] = []
        row = 1
        for at, (start, rows) in enumerate(self.parts):
            chosen = ids[sum(columns[:at]) : sum(columns[: at + 1])]
            self.tables[at, : columns[at]] = chosen.int()
            self._write(chosen, start + rows)
            self.spans.append(PrefillSpan(row, rows, start, at))
            row += rows
        heads = self.kv_heads * self.group
        # Rows of q lie inside wider rows, as slices of the QKV product do.
        wide = torch.full(
            (row + 1, (heads + 2) * self.head_dim),
            math.nan,
            dtype=torch.float16,
            device=self.device,
        )
        self.q = wide[:, : heads * self.head_dim].view(row + 1, heads, self.head_dim)
        self.q[1:-1] = self.gain * torch.randn(row - 1, heads, self.head_dim, device=self.device)
        self.view = KvView(
            self.pool.storage,
            layout.block_bytes,
            layout.k_offset(LAYER),
            layout.v_offset(LAYER),
            layout.k_scale_offset(LAYER) if self.dtype == "int8" else 0,
            self.kv_heads,
            self.head_dim,
            self.block_size,
            FORMATS[self.dtype],
        )

    def _write(self, blocks: Tensor, tokens: int) -> None:
        token = torch.arange(tokens, device=self.device)
        block, offset = blocks[token // self.block_size], token % self.block_size
        for which, pages in enumerate((self.pool.k(LAYER), self.pool.v(LAYER))):
            values = torch.randn(tokens, self.kv_heads, self.head_dim, device=self.device)
            if self.dtype == "int8":
                scale = (values.abs().amax(-1) / 127).half()
                self.pool.scales(LAYER)[block, which, :, offset] = scale
                values = (values / scale.float()[..., None]).round().clamp(-127, 127)
            word = torch.int16 if pages.dtype == torch.float16 else torch.uint8
            pages.view(word)[block, :, offset] = values.to(pages.dtype).view(word)

    def run(
        self, tile_rows: int, spans: list[PrefillSpan] | None = None, *, hopper: bool = False
    ) -> Tensor:
        """What the kernel makes of it."""
        out = torch.full(self.q.shape, UNTOUCHED, dtype=torch.float16, device=self.device)
        plan = plan_prefill(
            spans or self.spans, group=self.group, tile_rows=tile_rows, device=self.device
        )
        scale = self.head_dim**-0.5
        paged_prefill(out, self.q, self.view, plan, self.tables, scale=scale, hopper=hopper)
        return out

    def expected(self) -> Tensor:
        """What it must make of it, float64."""
        return reference_prefill.paged_prefill(
            self.q,
            self.pool.k(LAYER),
            self.pool.v(LAYER),
            self.pool.scales(LAYER) if self.dtype == "int8" else None,
            self.tables,
            [(span.row, span.rows, span.start, span.table) for span in self.spans],
            scale=self.head_dim**-0.5,
        )

    def errors(self, out: Tensor, expected: Tensor) -> tuple[float, float]:
        """Least cosine of a row and head, largest difference; other rows must be untouched."""
        assert (out[[0, -1]] == UNTOUCHED).all(), "wrote other rows"
        got, want = out[1:-1].double(), expected[1:-1]
        assert torch.isfinite(got).all(), "not finite"
        cosine = torch.nn.functional.cosine_similarity(got, want, dim=-1)
        return float(cosine.min()), float((got - want).abs().max())
