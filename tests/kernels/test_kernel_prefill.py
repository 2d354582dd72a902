"""``paged_prefill`` against its specification, in the emulator and on pools laid out as workers do.

Every byte of the pool that belongs to no attended token is poison: a NaN code, or an infinite
scale. Tolerance: rounding P and the result to halves costs about 2^-12 of the largest value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from deepinfer.kernels import attention, prefill, reference_prefill
from deepinfer.kernels.attention import KvView
from deepinfer.kernels.prefill import PrefillSpan, paged_prefill, plan_prefill, tile_rows_for
from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.workers.pool import PagedPool
from kernels.simt.build import COMPILER, emulator
from torch import Tensor

FORMATS = {
    "fp16": attention.KV_FP16,
    "int8": attention.KV_INT8,
    "fp8": attention.KV_E4M3,
    "fp8_e5m2": attention.KV_E5M2,
    "k16v8": attention.KV_K16V8,
}
LAYER = 1

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@dataclass
class Case:
    """Random q, a poisoned pool and tables for some (start, rows) of one request each."""

    dtype: str = "fp16"
    head_dim: int = 64
    kv_heads: int = 1
    group: int = 8
    block_size: int = 16
    parts: tuple[tuple[int, int], ...] = ((0, 20),)
    gain: float = 1.0

    def __post_init__(self) -> None:
        torch.manual_seed(1234)
        layout = KvLayout(
            resolve_kv_dtype(self.dtype), 2, self.kv_heads, self.head_dim, self.block_size
        )
        columns = [-(-(start + rows) // self.block_size) for start, rows in self.parts]
        ids = torch.randperm(sum(columns) + 3)
        pool = PagedPool(layout, len(ids))
        pool.storage.fill_(0x7F)  # NaN in half, E4M3 and E5M2
        k, v = pool.k(LAYER), pool.v(LAYER)
        if self.dtype == "int8":
            pool.scales(LAYER).fill_(math.inf)
        # A number beyond every pool: an id that must not be used for reading.
        self.tables = torch.full((len(columns), max(columns) + 1), 1 << 30, dtype=torch.int32)
        self.spans: list[PrefillSpan] = []
        row = 1
        for at, (start, rows) in enumerate(self.parts):
            first = sum(columns[:at])
            chosen = ids[first : first + columns[at]]
            self.tables[at, : columns[at]] = chosen.int()
            for token in range(start + rows):
                block, offset = int(chosen[token // self.block_size]), token % self.block_size
                for which, pages in enumerate((k, v)):
                    values = torch.randn(self.kv_heads, self.head_dim)
                    if self.dtype == "int8":
                        scale = (values.abs().amax(-1) / 127).half()
                        pool.scales(LAYER)[block, which, :, offset] = scale
                        values = (values / scale.float()[:, None]).round().clamp(-127, 127)
                    word = torch.int16 if pages.dtype == torch.float16 else torch.uint8
                    pages.view(word)[block, :, offset] = values.to(pages.dtype).view(word)
            self.spans.append(PrefillSpan(row, rows, start, at))
            row += rows
        self.pool = pool
        heads = self.kv_heads * self.group
        # Rows of q lie inside wider rows, as slices of the QKV product do.
        wide = torch.full((row + 1, (heads + 2) * self.head_dim), math.nan, dtype=torch.float16)
        self.q = wide[:, : heads * self.head_dim].view(row + 1, heads, self.head_dim)
        self.q[1:-1] = self.gain * torch.randn(row - 1, heads, self.head_dim)
        self.view = KvView(
            pool.storage,
            layout.block_bytes,
            layout.k_offset(LAYER),
            layout.v_offset(LAYER),
            layout.k_scale_offset(LAYER) if self.dtype == "int8" else 0,
            self.kv_heads,
            self.head_dim,
            self.block_size,
            FORMATS[self.dtype],
        )

    def run(self, tile_rows: int, spans: list[PrefillSpan] | None = None) -> Tensor:
        out = torch.full(self.q.shape, 7.0, dtype=torch.float16)
        plan = plan_prefill(spans or self.spans, group=self.group, tile_rows=tile_rows)
        with emulator():
            paged_prefill(out, self.q, self.view, plan, self.tables, scale=self.head_dim**-0.5)
        return out

    def expected(self) -> Tensor:
        return reference_prefill.paged_prefill(
            self.q,
            self.pool.k(LAYER),
            self.pool.v(LAYER),
            self.pool.scales(LAYER) if self.dtype == "int8" else None,
            self.tables,
            [(span.row, span.rows, span.start, span.table) for span in self.spans],
            scale=self.head_dim**-0.5,
        )

    def check(self, tile_rows: int) -> None:
        out, expected = self.run(tile_rows), self.expected()
        assert (out[0] == 7).all() and (out[-1] == 7).all(), "wrote rows of no span"
        got, want = out[1:-1].double(), expected[1:-1]
        assert torch.isfinite(got).all()
        cosine = torch.nn.functional.cosine_similarity(got, want, dim=-1)
        assert float(cosine.min()) >= 0.999999
        largest = float(want.abs().max())
        assert float((got - want).abs().max()) <= max(0.001, largest * 2.0**-10)


@needs_compiler
@pytest.mark.parametrize("tile_rows", [64, 128])
@pytest.mark.parametrize("dtype", list(FORMATS))
def test_formats(dtype: str, tile_rows: int) -> None:
    Case(dtype, head_dim=128, kv_heads=2, group=8, parts=((37, 18), (0, 3), (63, 2))).check(
        tile_rows
    )


@needs_compiler
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "int8"), (96, "fp16"), (96, "fp8")])
def test_head_dims(head_dim: int, dtype: str) -> None:
    Case(dtype, head_dim=head_dim, group=4, block_size=32, parts=((5, 40), (70, 1))).check(128)


@needs_compiler
@pytest.mark.parametrize("group", [1, 3, 7, 16])
def test_groups(group: int) -> None:
    Case(group=group, kv_heads=2, parts=((0, 1), (17, 30), (130, 5))).check(128)


@needs_compiler
def test_long_span_of_one_head_uses_many_tiles() -> None:
    Case(group=1, parts=((11, 200),)).check(64)


@needs_compiler
def test_large_scores_raise_the_reference() -> None:
    # Scores of +-50 in the exponent of 2: the running maximum must be raised again and again.
    Case(group=2, parts=((0, 200),), gain=30.0).check(64)


@needs_compiler
def test_result_does_not_depend_on_how_a_prompt_is_cut() -> None:
    case = Case("fp8", group=3, parts=((0, 150),), gain=8.0)
    whole = case.run(128)
    chunks = [
        PrefillSpan(1 + first, rows, first, 0) for first, rows in ((0, 41), (41, 1), (42, 108))
    ]
    assert torch.equal(case.run(64, chunks), whole)


def test_plan_puts_the_longest_tiles_first_and_covers_every_row() -> None:
    spans = [PrefillSpan(0, 40, 0, 0), PrefillSpan(40, 9, 500, 1)]
    plan = plan_prefill(spans, group=7, tile_rows=64)
    tiles = [tuple(tile) for tile in plan.tiles.tolist()]
    assert tiles[0] == (1, 0) and tiles[1:] == [(0, first) for first in (256, 192, 128, 64, 0)]
    assert (plan.rows, plan.tables, plan.tokens) == (49, 2, 509)
    assert plan.spans.tolist() == [[0, 40, 0, 0], [40, 9, 500, 1]]


def test_small_launches_take_the_smaller_tiles() -> None:
    spans = [PrefillSpan(0, 512, 8192, 0)]
    assert tile_rows_for(spans, group=8, kv_heads=2, sm_count=132) == 64
    assert tile_rows_for(spans, group=8, kv_heads=2, sm_count=64) == 128


@pytest.mark.parametrize(
    ("spans", "group", "tile_rows", "message"),
    [
        ([], 1, 64, "spans is empty"),
        ([PrefillSpan(0, 0, 0, 0)], 1, 64, r"spans\[0\].rows must be at least 1, got 0"),
        ([PrefillSpan(0, 1, -1, 0)], 1, 64, r"spans\[0\].start must be at least 0, got -1"),
        ([PrefillSpan(0, 1, 0, 0)], 17, 64, "group must be in 1..16, got 17"),
        ([PrefillSpan(0, 1, 0, 0)], 1, 96, r"tile_rows 96 is not one of \(64, 128\)"),
    ],
)
def test_bad_plans_are_refused(
    spans: list[PrefillSpan], group: int, tile_rows: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_prefill(spans, group=group, tile_rows=tile_rows)


def test_arguments_are_checked_by_name() -> None:
    case = Case(parts=((0, 20),))
    plan = plan_prefill(case.spans, group=8, tile_rows=64)
    out = torch.empty(case.q.shape, dtype=torch.float16)

    def refused(message: str, **changed: Tensor) -> None:
        args = {"out": out, "q": case.q, "tables": case.tables} | changed
        with pytest.raises(ValueError, match=message):
            paged_prefill(args["out"], args["q"], case.view, plan, args["tables"], scale=1.0)

    refused("q must be float16", q=case.q.float())
    refused("q must have contiguous heads", q=case.q.transpose(0, 1).contiguous().transpose(0, 1))
    refused("out must be contiguous float16", out=out[:-1])
    refused("spans reach to row 21, q has 20 rows", q=case.q[:20], out=out[:20])
    refused("block_tables must be int32", tables=case.tables.long())
    refused("at least 1 rows and 2 columns", tables=case.tables[:, :1])
    with pytest.raises(ValueError, match="scale must be positive"):
        paged_prefill(out, case.q, case.view, plan, case.tables, scale=0.0)


def test_specs_are_distinct_and_fit_sm86() -> None:
    specs = list(prefill.specs())
    assert len({spec.name for spec in specs}) == len(specs) == 30
    assert max(spec.shared_bytes for spec in specs) <= 99 * 1024
