"""``paged_prefill`` against its specification, in the emulator.

Tolerance: rounding P and the result to halves costs about 2^-12 of the largest value.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from deepinfer.deploy.validate.decode_cases import FORMATS, Kind
from deepinfer.deploy.validate.prefill_cases import Case
from deepinfer.kernels import prefill
from deepinfer.kernels.prefill import (
    PrefillSpan,
    PrefillSplit,
    hopper_spec,
    paged_prefill,
    plan_prefill,
    prefill_spec,
    split_for,
    tile_rows_for,
)
from kernels.simt.build import COMPILER, emulator

EMULATED = [
    *itertools.product(FORMATS.values(), [128], [64, 128]),
    *itertools.product([FORMATS["fp16"]], [64], [64, 128]),
    (FORMATS["int8"], 64, 128),
    (FORMATS["fp16"], 96, 128),
    (FORMATS["fp8"], 96, 128),
]
"""(format, head_dim, tile_rows) of the instances that are run here."""

HOPPER = [
    *itertools.product([FORMATS["fp16"]], [64, 128]),
    (FORMATS["int8"], 128),
    (FORMATS["fp8"], 64),
    (FORMATS["fp8_e5m2"], 64),
    (FORMATS["k16v8"], 128),
]
"""(format, head_dim) on Hopper; these are also compiled for it here."""


@pytest.fixture(scope="module")
def emulated() -> Iterator[None]:
    if COMPILER is None:
        pytest.skip("needs g++")
    specs = [prefill_spec(*instance) for instance in EMULATED]
    with emulator([*specs, *(hopper_spec(*instance) for instance in HOPPER)]):
        yield


def check(
    case: Case, tile_rows: int, *, hopper: bool = False, part_tokens: int | None = None
) -> None:
    expected = case.expected()
    out = case.run(tile_rows, hopper=hopper, part_tokens=part_tokens)
    cosine, error = case.errors(out, expected)
    assert cosine >= 0.999999
    assert error <= max(0.001, float(expected[1:-1].abs().max()) * 2.0**-10)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("tile_rows", [64, 128])
@pytest.mark.parametrize("dtype", list(FORMATS))
def test_formats(dtype: str, tile_rows: int) -> None:
    parts = ((37, 18), (0, 3), (63, 2))
    check(Case(dtype, head_dim=128, kv_heads=2, group=8, parts=parts), tile_rows)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "int8"), (96, "fp16"), (96, "fp8")])
def test_head_dims(head_dim: int, dtype: str) -> None:
    check(Case(dtype, head_dim=head_dim, group=4, block_size=32, parts=((5, 40), (70, 1))), 128)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("group", [1, 3, 7, 16])
def test_groups(group: int) -> None:
    check(Case(group=group, kv_heads=2, parts=((0, 1), (17, 30), (130, 5))), 128)


@pytest.mark.usefixtures("emulated")
def test_long_span_of_one_head_uses_many_tiles() -> None:
    check(Case(group=1, parts=((11, 200),)), 64)


@pytest.mark.usefixtures("emulated")
def test_large_scores_raise_the_reference() -> None:
    # Scores of +-50 in the exponent of 2: the running maximum must be raised again and again.
    check(Case(group=2, parts=((0, 200),), gain=30.0), 64)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize(
    ("kind", "gain"),
    [("saturated", 1.0), ("scales", 1.0), ("tiny", 1.0), ("large_k", 1.0), ("normal", 30.0)],
)
def test_int8_at_the_ends_of_its_range(kind: Kind, gain: float, hopper: bool) -> None:
    parts = ((0, 40), (150, 9))
    case = Case("int8", 128, 1, 8, parts=parts, gain=gain, kind=kind)
    assert case.judge(case.run(128, hopper=hopper), case.expected()).problem is None


@pytest.mark.usefixtures("emulated")
def test_result_does_not_depend_on_how_a_prompt_is_cut() -> None:
    case = Case("fp16", group=3, parts=((0, 150),), gain=8.0)
    whole = case.run(128)
    chunks = [
        PrefillSpan(1 + first, rows, first, 0) for first, rows in ((0, 41), (41, 1), (42, 108))
    ]
    assert torch.equal(case.run(64, chunks), whole)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "block_size", "parts"),
    [
        ("fp16", 128, 8, 16, ((37, 18), (0, 3), (300, 2), (500, 20))),
        ("fp16", 64, 1, 16, ((11, 200), (127, 2))),
        ("int8", 128, 7, 32, ((140, 10), (0, 5), (390, 20))),
        ("fp8", 64, 3, 256, ((0, 150), (300, 1))),
        ("fp8_e5m2", 64, 4, 16, ((250, 35),)),
        ("k16v8", 128, 7, 16, ((140, 10), (600, 2))),
    ],
)
def test_hopper(
    dtype: str, head_dim: int, group: int, block_size: int, parts: tuple[tuple[int, int], ...]
) -> None:
    check(Case(dtype, head_dim, 2, group, block_size, parts, gain=4.0), 128, hopper=True)


@pytest.mark.usefixtures("emulated")
def test_hopper_result_does_not_depend_on_how_a_prompt_is_cut() -> None:
    case = Case("fp16", group=3, parts=((0, 150),), gain=8.0)
    chunks = [PrefillSpan(1, 41, 0, 0), PrefillSpan(42, 1, 41, 0), PrefillSpan(43, 108, 42, 0)]
    assert torch.equal(case.run(128, chunks, hopper=True), case.run(128, hopper=True))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("dtype", "head_dim", "tile_rows", "group", "hopper"),
    [
        ("fp16", 128, 128, 8, True),
        ("int8", 128, 128, 7, True),
        ("fp16", 64, 128, 1, True),
        ("int8", 128, 128, 7, False),
        ("fp16", 96, 128, 1, False),
    ],
)
def test_parts_of_a_context(
    dtype: str, head_dim: int, tile_rows: int, group: int, hopper: bool
) -> None:
    # Of 8 tokens in 3 parts, of some in one, and of a tile whose rows end in different units.
    parts = ((640, 8), (0, 20), (250, 140 // group))
    case = Case(dtype, head_dim, 2, group, 16, parts, gain=4.0)
    check(case, tile_rows, hopper=hopper, part_tokens=256)


def test_plan_cuts_contexts_into_parts() -> None:
    split = PrefillSplit(256, kv_heads=2, head_dim=64)
    plan = plan_prefill([PrefillSpan(0, 1, 640, 0)], group=8, tile_rows=64, split=split)
    assert plan.tiles.tolist() == [
        [0, 0, 0 | 2 << 16, 0 << 8 | 0 << 4 | 2],
        [0, 0, 2 | 4 << 16, 0 << 8 | 1 << 4 | 2],
        [0, 0, 4 | 6 << 16, 0 << 8 | 2 << 4 | 2],
    ]
    assert plan.partials is not None
    assert plan.partials.shape == (6, 64, 72)
    assert plan.tickets is not None
    assert plan.tickets.tolist() == [0] * 6


def test_only_launches_of_few_tiles_are_cut() -> None:
    wanted: dict[str, int] = {
        "group": 8,
        "kv_heads": 2,
        "head_dim": 128,
        "tile_rows": 128,
        "sm_count": 132,
    }
    assert split_for([PrefillSpan(0, 8192, 0, 0)], **wanted) is None
    assert split_for([PrefillSpan(0, 512, 0, 0)], **wanted) is None
    # 64 CTAs of 68 units: two halves each.
    assert split_for([PrefillSpan(0, 512, 8192, 0)], **wanted) == PrefillSplit(34 * 128, 2, 128)
    few = split_for([PrefillSpan(0, 16, 16384, 0)], **wanted)
    assert few is not None
    assert few.tokens < 2048


def test_plan_puts_the_longest_tiles_first_and_covers_every_row() -> None:
    spans = [PrefillSpan(0, 40, 0, 0), PrefillSpan(40, 9, 500, 1)]
    plan = plan_prefill(spans, group=7, tile_rows=64)
    tiles = [tuple(tile) for tile in plan.tiles.tolist()]
    rest = [(0, first, 1 << 16, -1) for first in (256, 192, 128, 64, 0)]
    assert tiles == [(1, 0, 4 << 16, -1), *rest]
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


def test_hopper_kernel_is_for_what_it_was_made() -> None:
    case = Case("fp8", head_dim=96)
    plan = plan_prefill(case.spans, group=8, tile_rows=128)
    out = torch.empty(case.q.shape, dtype=torch.float16)
    with pytest.raises(ValueError, match="hopper: head_dim 96 is not one of"):
        paged_prefill(out, case.q, case.view, plan, case.tables, scale=1.0, hopper=True)
    with pytest.raises(ValueError, match="hopper: tile_rows is 64, not 128"):
        Case("fp16").run(64, hopper=True)


def test_device_specs_are_those_of_the_device() -> None:
    wanted = [prefill_spec(FORMATS["fp16"], 128, tile_rows) for tile_rows in prefill.TILE_ROWS]
    assert list(prefill.device_specs(FORMATS["fp16"], 128, "cpu")) == wanted


def test_specs_are_distinct_and_fit_sm86() -> None:
    specs = list(prefill.specs_for("sm_86"))
    assert len({spec.name for spec in specs}) == len(specs) == 30
    assert max(spec.shared_bytes for spec in specs) <= 99 * 1024
