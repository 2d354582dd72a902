"""KV dtype names, block bytes and offsets (K1, K2)."""

from __future__ import annotations

import itertools

import pytest

from deepinfer.kvstore.core.layout import (
    KV_DTYPE_NAMES,
    ComputeDtype,
    KvLayout,
    resolve_kv_dtype,
)


def layout(name: str, **overrides: int) -> KvLayout:
    sizes = {"layers": 36, "kv_heads": 2, "head_dim": 128, "block_size": 16} | overrides
    return KvLayout(resolve_kv_dtype(name), **sizes)


@pytest.mark.parametrize(
    ("name", "block_bytes"),
    [
        ("fp16", 589_824),
        ("auto", 589_824),
        ("int8", 299_520),
        ("i8", 299_520),
        ("fp8", 294_912),
        ("e4m3", 294_912),
        ("fp8_e5m2", 294_912),
        ("e5m2", 294_912),
        ("k16v8", 442_368),
    ],
)
def test_block_bytes_of_qwen_3b(name: str, block_bytes: int) -> None:
    assert layout(name).block_bytes == block_bytes


def test_unknown_dtype_lists_the_legal_names() -> None:
    with pytest.raises(ValueError, match="'fp4' is not one of") as caught:
        resolve_kv_dtype("fp4")
    for name in KV_DTYPE_NAMES:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("compute", "storage"), [("fp16", "float16"), ("fp32", "float16"), ("bf16", "bfloat16")]
)
def test_unquantised_storage_is_sixteen_bits(compute: ComputeDtype, storage: str) -> None:
    for name in ("auto", "fp16", "k16v8"):
        dtype = resolve_kv_dtype(name, compute_dtype=compute)
        assert dtype.k_storage == storage
        assert dtype.k_bytes == 2


def test_aliases_resolve_to_equal_dtypes() -> None:
    for one, other in [("fp16", "auto"), ("int8", "i8"), ("fp8", "e4m3"), ("fp8_e5m2", "e5m2")]:
        assert resolve_kv_dtype(one) == resolve_kv_dtype(other)


@pytest.mark.parametrize("name", ["fp16", "int8", "fp8", "fp8_e5m2", "k16v8"])
def test_regions_tile_the_block_without_gap_or_overlap(name: str) -> None:
    kv = layout(name, layers=3, kv_heads=3, head_dim=6, block_size=5)
    regions = []
    for layer in range(kv.layers):
        regions.append((kv.k_offset(layer), kv.elements * kv.dtype.k_bytes))
        regions.append((kv.v_offset(layer), kv.elements * kv.dtype.v_bytes))
        if kv.dtype.scaled:
            regions.append((kv.k_scale_offset(layer), kv.scale_elements * 2))
            regions.append((kv.v_scale_offset(layer), kv.scale_elements * 2))
    regions.sort()
    assert regions[0][0] == 0
    for (start, size), (following, _) in itertools.pairwise(regions):
        assert start + size == following
    assert sum(regions[-1]) == kv.block_bytes


def test_every_region_is_aligned_to_its_element() -> None:
    for name in ("fp16", "int8", "k16v8"):
        kv = layout(name, layers=3, kv_heads=1, head_dim=2, block_size=1)
        assert kv.block_bytes % kv.dtype.k_bytes == 0
        for layer in range(kv.layers):
            assert kv.k_offset(layer) % kv.dtype.k_bytes == 0
            if kv.dtype.scaled:
                assert kv.v_scale_offset(layer) % 2 == 0


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    kv = layout("int8")
    assert kv.blocks_for(tokens) == blocks
    assert kv.payload_bytes(blocks) == blocks * 299_520


@pytest.mark.parametrize("field", ["layers", "kv_heads", "head_dim", "block_size"])
@pytest.mark.parametrize("value", [0, -4, True, 2.0])
def test_bad_sizes_name_field_and_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"KvLayout\.{field} .* got {value!r}"):
        layout("fp16", **{field: value})  # type: ignore[arg-type]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim must be even, got 63"):
        layout("fp16", head_dim=63)
    with pytest.raises(ValueError, match="tokens must not be negative, got -1"):
        layout("fp16").blocks_for(-1)
    with pytest.raises(ValueError, match="blocks must not be negative, got -1"):
        layout("fp16").payload_bytes(-1)
    with pytest.raises(ValueError, match=r"layer 36 is outside 0\.\.35"):
        layout("fp16").v_offset(36)
    with pytest.raises(ValueError, match="fp16 stores no scales"):
        layout("fp16").k_scale_offset(0)
    with pytest.raises(ValueError, match="compute_dtype 'int4' is not one of fp16, bf16, fp32"):
        resolve_kv_dtype("fp16", compute_dtype="int4")  # type: ignore[arg-type]


def test_fingerprint_separates_every_layout_that_differs_in_bytes() -> None:
    prints = {
        layout(name, **sizes).fingerprint()
        for name in ("fp16", "int8", "fp8", "fp8_e5m2", "k16v8")
        for sizes in ({}, {"layers": 35}, {"kv_heads": 4}, {"head_dim": 64}, {"block_size": 32})
    }
    bf16 = KvLayout(resolve_kv_dtype("fp16", compute_dtype="bf16"), 36, 2, 128, 16)
    assert len(prints | {bf16.fingerprint()}) == 26
    assert layout("fp16").fingerprint() == layout("auto").fingerprint()
