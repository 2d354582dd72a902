"""Inputs of ``paged_prefill``: random q, K and V in a pool laid out as workers do, and poison.

Every byte of the pool that belongs to no attended token is poison: NaN codes, infinite scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.deploy.validate import accuracy
from deepinfer.deploy.validate.accuracy import Accuracy, Miss
from deepinfer.deploy.validate.decode_cases import FORMATS, Kind, store
from deepinfer.kernels import attention, reference_prefill
from deepinfer.kernels.attention import KvView
from deepinfer.kernels.prefill import PrefillSpan, PrefillSplit, paged_prefill, plan_prefill
from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.workers.pool import PagedPool

LAYER = 1
UNTOUCHED = 7.0
"""What ``Case.run`` fills ``out`` with; its first and last row belong to no span."""


@dataclass
class Case:
    """Some (start, rows) of one request each; ``gain`` multiplies q, and so the scores.

    ``kind`` is what ``decode_cases`` calls so.
    """

    dtype: str = "fp16"
    head_dim: int = 64
    kv_heads: int = 1
    group: int = 8
    block_size: int = 16
    parts: tuple[tuple[int, int], ...] = ((0, 20),)
    gain: float = 1.0
    device: str = "cpu"
    kind: Kind = "normal"

    def __post_init__(self) -> None:
        self._random = torch.Generator(self.device).manual_seed(1234)
        layout = KvLayout(
            resolve_kv_dtype(self.dtype), 2, self.kv_heads, self.head_dim, self.block_size
        )
        columns = [-(-(start + rows) // self.block_size) for start, rows in self.parts]
        ids = torch.randperm(sum(columns) + 3, generator=self._random, device=self.device)
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
        if self.kind == "large_k":
            self.gain *= 0.05
        shape = (row - 1, heads, self.head_dim)
        self.q[1:-1] = self.gain * torch.randn(shape, generator=self._random, device=self.device)
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
            shape = (tokens, self.kv_heads, self.head_dim)
            values = torch.randn(shape, generator=self._random, device=self.device)
            codes, scales = store(values, pages.dtype, self.kind, which == 0, self._random)
            if scales is not None:
                self.pool.scales(LAYER)[block, which, :, offset] = scales
            word = torch.int16 if pages.dtype == torch.float16 else torch.uint8
            pages.view(word)[block, :, offset] = codes.view(word)

    def run(
        self,
        tile_rows: int,
        spans: list[PrefillSpan] | None = None,
        *,
        hopper: bool = False,
        part_tokens: int | None = None,
    ) -> Tensor:
        """What the kernel makes of it, contexts cut into parts of ``part_tokens`` if given."""
        out = torch.full(self.q.shape, UNTOUCHED, dtype=torch.float16, device=self.device)
        split = part_tokens and PrefillSplit(part_tokens, self.kv_heads, self.head_dim)
        plan = plan_prefill(
            spans or self.spans,
            group=self.group,
            tile_rows=tile_rows,
            split=split or None,
            device=self.device,
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

    def judge(self, out: Tensor, expected: Tensor) -> Accuracy:
        """``out`` beside float64; raises Miss for a row that belongs to no span."""
        if not bool((out[[0, -1]] == UNTOUCHED).all()):
            raise Miss(f"{self}: wrote rows of no span")
        e5m2 = self.view.format == attention.KV_E5M2
        return accuracy.attention(str(self), out[1:-1], expected[1:-1], e5m2=e5m2)

    def errors(self, out: Tensor, expected: Tensor) -> tuple[float, float]:
        """Least cosine of a row and head, largest difference; NaN where something is not finite."""
        found = self.judge(out, expected)
        return found.row_cosine, found.error

    def __str__(self) -> str:
        return (
            f"{self.dtype} {self.kind} d{self.head_dim} {self.kv_heads}x{self.group} block "
            f"{self.block_size} spans {self.parts} gain {self.gain:g}"
        )
