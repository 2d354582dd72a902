"""Paged decode, emulated, against ``kernels.reference_decode``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch

from deepinfer.deploy.validate import decode_cases
from deepinfer.deploy.validate.decode_cases import FORMATS, Kind
from deepinfer.kernels import attention, reference, reference_decode
from deepinfer.kernels.attention import DecodeWorkspace, KvView, partition_for, partitions
from kernels.simt.build import COMPILER, emulator

needs_emulator = pytest.mark.skipif(COMPILER is None, reason="needs g++")

# Of 30 instances the ones that differ in how rows are cut into grains and heads into columns.
INSTANCES = [
    ("fp16", 128, 8),
    ("fp16", 96, 12),
    ("int8", 128, 7),
    ("int8", 64, 16),
    ("fp8", 96, 3),
    ("fp8_e5m2", 64, 1),
    ("k16v8", 128, 4),
]
BULK = [("fp16", 128, 8), ("int8", 64, 7), ("fp8", 96, 12), ("k16v8", 128, 4)]
LENGTHS = [77, 0, 1, 16, 250]  # partial tiles, a padding row, a single token, a whole tile


@pytest.fixture(scope="module")
def emulated() -> Iterator[None]:
    specs = [attention.decode_spec(FORMATS[name], dim, group) for name, dim, group in INSTANCES]
    specs += [
        attention.decode_spec(FORMATS[name], dim, group, bulk=True) for name, dim, group in BULK
    ]
    with emulator(specs):
        yield


@needs_emulator
@pytest.mark.usefixtures("emulated")
class TestEmulated:
    @pytest.mark.parametrize(("dtype", "head_dim", "group"), INSTANCES)
    @pytest.mark.parametrize("block_size", [16, 32])
    def test_every_partition_keeps_the_accuracy_rule(
        self, dtype: str, head_dim: int, group: int, block_size: int
    ) -> None:
        case = decode_cases.make(
            dtype, LENGTHS, head_dim=head_dim, group=group, block_size=block_size, columns=18
        )
        expected = case.expected()
        for partition in (48, 64, 256, 1024):
            assert decode_cases.error(case, case.run(partition), expected) is None

    @pytest.mark.parametrize("kind", ["large_k", "saturated", "tiny"])
    @pytest.mark.parametrize(("dtype", "head_dim", "group"), INSTANCES)
    def test_adverse_values_keep_the_accuracy_rule(
        self, dtype: str, head_dim: int, group: int, kind: Kind
    ) -> None:
        case = decode_cases.make(dtype, [93, 16, 201], head_dim=head_dim, group=group, kind=kind)
        expected = case.expected()
        for partition in (64, 208):
            assert decode_cases.error(case, case.run(partition), expected) is None

    @pytest.mark.parametrize(("head_dim", "group"), [(128, 7), (64, 16)])
    def test_int8_scales_over_their_whole_range(self, head_dim: int, group: int) -> None:
        case = decode_cases.make("int8", [93, 201], head_dim=head_dim, group=group, kind="scales")
        assert decode_cases.error(case, case.run(64), case.expected()) is None

    @pytest.mark.parametrize(
        ("dtype", "head_dim", "group"), [each for each in INSTANCES if each[0] != "fp16"]
    )
    def test_every_v_code_is_exact(self, dtype: str, head_dim: int, group: int) -> None:
        # With one token the output is its V. 256 codes on the heads' dims, two rows.
        kv_heads = 256 // head_dim if 256 % head_dim == 0 else 3
        case = decode_cases.make(dtype, [1, 1], head_dim=head_dim, kv_heads=kv_heads, group=group)
        codes = torch.arange(kv_heads * head_dim).remainder(256).to(torch.uint8)
        for row in range(2):
            stored = codes.roll(row).view(case.v.dtype).view(kv_heads, head_dim)
            finite = torch.where(stored.float().isfinite(), stored.float(), 0.0)
            stored = finite.to(case.v.dtype)
            block = int(case.block_tables[row, 0])
            case.v.view(torch.uint8)[block, :, 0] = stored.view(torch.uint8)
            if case.scales is not None:
                case.scales[block, 1, :, 0] = 0.5
        assert torch.equal(case.run(16).double(), case.expected())

    @pytest.mark.parametrize(("dtype", "head_dim", "group"), BULK)
    @pytest.mark.parametrize("block_size", [16, 32])
    def test_bulk_copies_bring_the_same(
        self, dtype: str, head_dim: int, group: int, block_size: int
    ) -> None:
        case = decode_cases.make(
            dtype, [*LENGTHS, 700], head_dim=head_dim, group=group, block_size=block_size
        )
        expected = case.expected()
        for partition in (48, 1024):
            out = case.run(partition, bulk=True)
            assert decode_cases.error(case, out, expected) is None

    def test_a_warp_with_more_tiles_than_lanes(self) -> None:
        case = decode_cases.make("int8", [2300], head_dim=64, group=16, kv_heads=1)
        assert decode_cases.error(case, case.run(4096), case.expected()) is None

    def test_launches_with_equal_inputs_give_equal_bits(self) -> None:
        case = decode_cases.make("fp16", LENGTHS)
        workspace = DecodeWorkspace.allocate(5, 16, 128, 4, "cpu")
        workspace.partial_out.fill_(math.nan)  # what another launch may leave
        workspace.partial_ml.fill_(math.nan)
        first = case.run(64, workspace)
        assert not workspace.tickets.any()
        assert torch.equal(case.run(64, workspace), first)
        other = decode_cases.make("fp16", [33, 250, 0, 5, 100], seed=1)
        assert decode_cases.error(other, other.run(64, workspace), other.expected()) is None

    def test_a_length_beyond_the_table_leaves_no_ticket_behind(self) -> None:
        case = decode_cases.make("fp16", [40])
        short = dataclasses.replace(case, block_tables=case.block_tables[:, :2])
        workspace = DecodeWorkspace.allocate(1, 16, 128, 2, "cpu")
        out = short.run(16, workspace)
        assert not workspace.tickets.any()
        whole = dataclasses.replace(short, lens=torch.tensor([32], dtype=torch.int32))
        assert decode_cases.error(whole, out, whole.expected()) is None

    def test_rows_do_not_depend_on_what_else_is_in_the_batch(self) -> None:
        case = decode_cases.make("fp8", LENGTHS, head_dim=96, group=3)
        whole = case.run(64)
        alone = dataclasses.replace(
            case, q=case.q[4:], block_tables=case.block_tables[4:], lens=case.lens[4:]
        )
        assert torch.equal(alone.run(64)[0], whole[4])


@pytest.mark.parametrize(("target", "bulk"), [("sm_90a", True), ("sm_86", False)])
@pytest.mark.parametrize("group", [8, 9])
def test_device_specs_are_what_launches_there_need(
    target: str, bulk: bool, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "device_target", lambda: target)
    monkeypatch.setattr(attention, "_copies_in_bulk", attention._copies_in_bulk.__wrapped__)
    for name, head_dim in (("fp16", 128), ("int8", 64)):
        wanted = attention.decode_spec(FORMATS[name], head_dim, group, bulk=bulk)
        assert list(attention.device_specs(FORMATS[name], head_dim, group, "cuda")) == [wanted]
        assert wanted in set(attention.specs_for(target))


def test_the_specification_agrees_with_the_plain_one() -> None:
    case = decode_cases.make("int8", [21, 40], head_dim=64, group=2)
    assert case.scales is not None
    for row, tokens in enumerate(case.lens.tolist()):
        table = case.block_tables[row].tolist()
        k = reference.kv_read(case.k, case.scales[:, 0], table, tokens)
        v = reference.kv_read(case.v, case.scales[:, 1], table, tokens)
        plain = reference.attention(case.q[row : row + 1], k, v, tokens - 1)
        torch.testing.assert_close(case.expected()[row], plain[0], rtol=1e-12, atol=1e-12)


def test_the_accuracy_rule_refuses_what_it_should() -> None:
    case = decode_cases.make("fp16", [40, 0], head_dim=64, group=1)
    expected = case.expected()
    exact = expected.half()
    assert decode_cases.error(case, exact, expected) is None
    for row, factor in ((0, 1.01), (0, math.nan)):
        wrong = exact.clone()
        wrong[row, 1, 3] *= factor
        wrong[row, 1, 4] += 0.002 if factor > 1 else 0
        assert decode_cases.error(case, wrong, expected) is not None
    wrong = exact.clone()
    wrong[1, 0, 0] = 1e-4
    assert "padding" in (decode_cases.error(case, wrong, expected) or "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 9}, "format 9"),
        ({"head_dim": 80}, "head_dim 80"),
        ({"block_size": 24}, "block_size must be a power of two"),
        ({"block_size": 8}, "block_size must be a power of two"),
        ({"kv_heads": 0}, "kv_heads must be at least 1"),
        ({"block_bytes": 4096}, "block_bytes is 4096"),
        ({"k_offset": 8}, "k_offset must be a multiple of 16"),
        ({"v_offset": 1 << 20}, "v_offset must be a multiple of 16"),
        ({"scale_offset": -16}, "scale_offset must be a multiple of 16"),
    ],
)
def test_a_view_that_does_not_fit_is_refused(changes: dict[str, int], message: str) -> None:
    view = decode_cases.make("int8", [5]).kv
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(view, **changes)  # type: ignore[arg-type]


def test_storage_of_another_type_is_refused() -> None:
    view = decode_cases.make("fp16", [5]).kv
    with pytest.raises(ValueError, match=r"storage must be contiguous uint8"):
        dataclasses.replace(view, storage=view.storage.view(torch.int8))


def _arguments(view: KvView, rows: int = 2, heads: int = 16) -> dict[str, object]:
    return {
        "out": torch.empty(rows, heads, 128, dtype=torch.float16),
        "q": torch.empty(rows, heads, 128, dtype=torch.float16),
        "kv": view,
        "block_tables": torch.zeros(rows, 4, dtype=torch.int32),
        "lens": torch.ones(rows, dtype=torch.int32),
        "scale": 0.1,
        "partition": 32,
        "workspace": DecodeWorkspace.allocate(rows, heads, 128, 2, "cpu"),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.empty(2, 16, 64, dtype=torch.float16)}, r"q must be float16 \[rows"),
        ({"q": torch.empty(2, 16, 128)}, r"q must be float16 \[rows"),
        ({"q": torch.empty(0, 16, 128, dtype=torch.float16)}, "q has no rows"),
        ({"q": torch.empty(2, 15, 128, dtype=torch.float16)}, "q has 15 heads for 2"),
        ({"q": torch.empty(2, 34, 128, dtype=torch.float16)}, "q has 34 heads for 2"),
        ({"q": torch.empty(2, 128, 16, dtype=torch.float16).mT}, "contiguous heads"),
        ({"out": torch.empty(2, 16, 128)}, "out must be contiguous float16"),
        ({"block_tables": torch.zeros(2, 4)}, "block_tables must be int32"),
        ({"block_tables": torch.zeros(3, 4, dtype=torch.int32)}, "block_tables must be int32"),
        ({"lens": torch.ones(2)}, r"lens must be contiguous int32 \[2\]"),
        ({"lens": torch.ones(3, dtype=torch.int32)}, r"lens must be contiguous int32 \[2\]"),
        ({"partition": 24}, "partition must be a multiple of 16, got 24"),
        ({"partition": 16}, "workspace is too small"),
        ({"block_tables": torch.zeros(2, 150, dtype=torch.int32), "partition": 16}, "at most 128"),
        ({"lens": torch.ones(2, dtype=torch.int32, device="meta")}, "lens is on meta"),
        ({"workspace": DecodeWorkspace.allocate(1, 1, 128, 99, "cpu")}, "1 tickets"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    arguments = _arguments(decode_cases.make("fp16", [5]).kv) | changes
    with pytest.raises(ValueError, match=message):
        attention.paged_decode(**arguments)  # type: ignore[arg-type]


def test_partitions_fit_every_bucket() -> None:
    for sm_count in (28, 82, 132):
        for rows in (1, 3, 16, 64, 256):
            for kv_heads in (1, 2, 8, 32):
                for context in (16, 512, 2048, 8192, 32768, 131072):
                    partition = partition_for(rows, kv_heads, context, sm_count)
                    assert partition % attention.TILE_TOKENS == 0
                    assert 1 <= partitions(context, partition) <= attention.PARTITIONS_MAX
    with pytest.raises(ValueError, match="max_context must be at least 1"):
        partition_for(1, 2, 0, 82)


def test_partitions_make_about_one_cta_a_multiprocessor() -> None:
    for rows, context, partition in [
        (64, 2048, 2048),
        (64, 512, 512),
        (40, 2048, 1024),
        (16, 8192, 2048),
        (16, 2048, 512),
        (1, 8192, 256),  # where merging 66 partitions would cost more than it saves
        (1, 2048, 128),
        (1, 512, 64),
    ]:
        assert partition_for(rows, 2, context, 132) == partition


def test_a_workspace_can_be_bounded_by_slots() -> None:
    bounded = DecodeWorkspace.allocate(64, 16, 128, 128, "cpu", max_slots=512)
    assert bounded.partial_out.numel() == 512 * 16 * 128
    assert bounded.tickets.numel() == 64 * 16
    with pytest.raises(ValueError, match="max_rows must be at least 1"):
        DecodeWorkspace.allocate(0, 16, 128, 1, "cpu")


def test_a_length_of_zero_is_zero_in_the_specification() -> None:
    case = decode_cases.make("fp16", [0, 3])
    assert not case.expected()[0].any()
    assert reference_decode.paged_decode(
        case.q, case.k, case.v, None, case.block_tables, case.lens, scale=0.0
    )[1].any()
