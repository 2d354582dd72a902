"""The paged pool: typed views, block copies, runs."""

from __future__ import annotations

import pytest
import torch

from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.workers.pool import BlockRun, Buffer, PagedPool, merge_runs

DTYPES = ("fp16", "int8", "fp8", "fp8_e5m2", "k16v8")


def pool(name: str = "int8", *, num_blocks: int = 12) -> PagedPool:
    layout = KvLayout(resolve_kv_dtype(name), layers=3, kv_heads=2, head_dim=6, block_size=5)
    made = PagedPool(layout, num_blocks)
    made.storage.copy_(
        torch.randint(
            0,
            256,
            made.storage.shape,
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(3),
        )
    )
    return made


@pytest.mark.parametrize("name", DTYPES)
def test_views_lie_where_the_layout_says(name: str) -> None:
    made = pool(name)
    made.check()
    layout = made.layout
    block, layer, head, token, dim = 7, 2, 1, 3, 4
    element = (head * layout.block_size + token) * layout.head_dim + dim
    for view, offset, size in (
        (made.k(layer), layout.k_offset(layer), layout.dtype.k_bytes),
        (made.v(layer), layout.v_offset(layer), layout.dtype.v_bytes),
    ):
        at = offset + element * size
        stored = made.storage[block, at : at + size]
        assert torch.equal(view[block, head, token, dim : dim + 1].view(torch.uint8), stored)
    words = made.layer_words(layer)[block].view(torch.uint8)
    start = layout.k_offset(layer)
    assert torch.equal(words, made.storage[block, start : start + layout.layer_stride])
    row = made.v_words(layer)[block, head, token].view(torch.uint8)
    assert torch.equal(row, made.v(layer)[block, head, token].view(torch.uint8))


def test_scales_lie_where_the_layout_says() -> None:
    made = pool("int8")
    layout = made.layout
    at = layout.v_scale_offset(1) + (1 * layout.block_size + 2) * 2
    assert torch.equal(made.scales(1)[4, 1, 1, 2:3].view(torch.uint8), made.storage[4, at : at + 2])
    with pytest.raises(ValueError, match="k16v8 stores no scales"):
        pool("k16v8").scales(0)


def test_writing_through_a_view_touches_only_its_block() -> None:
    made = pool("fp16")
    before = made.storage.clone()
    made.k(1)[5] = 1.5
    changed = (made.storage != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == [5]


@pytest.mark.parametrize(
    ("ids", "runs"),
    [
        ([], []),
        ([4], [(4, 1)]),
        ([4, 5, 6], [(4, 3)]),
        ([6, 5, 4], [(6, 1), (5, 1), (4, 1)]),
        ([0, 1, 3, 4, 2, 7], [(0, 2), (3, 2), (2, 1), (7, 1)]),
    ],
)
def test_adjacent_ids_merge_into_runs(ids: list[int], runs: list[tuple[int, int]]) -> None:
    assert list(merge_runs(ids)) == [BlockRun(first, count) for first, count in runs]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("kind", ["tensor", "bytearray", "memoryview"])
def test_a_copy_out_and_in_moves_the_bits_to_other_blocks(name: str, kind: str) -> None:
    source, target = pool(name), pool(name)
    ids, others = [3, 4, 5, 0, 11], [9, 1, 2, 3, 8]
    size = source.layout.payload_bytes(len(ids))
    tensor, array = torch.empty(size, dtype=torch.uint8), bytearray(size)
    buffers: dict[str, Buffer] = {
        "tensor": tensor,
        "bytearray": array,
        "memoryview": memoryview(array),
    }
    buffer = buffers[kind]
    source.copy_out(ids, buffer)
    untouched = [0, 4, 5, 6, 7, 10, 11]
    before = target.storage[untouched].clone()
    target.copy_in(others, buffer)
    assert torch.equal(target.storage[others], source.storage[ids])
    assert torch.equal(target.storage[untouched], before)


def test_read_only_bytes_can_be_copied_in_but_not_out() -> None:
    made = pool()
    payload = bytes(range(256)) * made.layout.payload_bytes(2)
    payload = payload[: made.layout.payload_bytes(2)]
    made.copy_in([2, 7], payload)
    assert made.storage[[2, 7]].flatten().numpy().tobytes() == payload
    with pytest.raises(ValueError, match="target is read-only"):
        made.copy_out([2, 7], payload)


def test_no_blocks_are_no_bytes() -> None:
    made = pool()
    before = made.storage.clone()
    made.copy_out([], bytearray())
    made.copy_in([], b"")
    assert torch.equal(made.storage, before)


def test_bad_copies_name_what_is_wrong() -> None:
    made = pool(num_blocks=4)
    size = made.layout.block_bytes
    with pytest.raises(ValueError, match=f"target has {size - 1} bytes, 1 blocks need .* {size}"):
        made.copy_out([0], bytearray(size - 1))
    with pytest.raises(ValueError, match=r"block id 4 is outside 0\.\.3"):
        made.copy_out([4], bytearray(size))
    with pytest.raises(ValueError, match=r"block id -1 is outside 0\.\.3"):
        made.copy_in([-1], bytes(size))
    with pytest.raises(ValueError, match="names a block twice"):
        made.copy_in([1, 1], bytes(2 * size))
    with pytest.raises(ValueError, match="contiguous uint8 tensor"):
        made.copy_in([1], torch.zeros(size, dtype=torch.int8))
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        PagedPool(made.layout, 0)


def test_one_block_is_a_view_of_its_bytes() -> None:
    made = pool()
    made.block(3).zero_()
    assert not made.storage[3].any()
    assert made.storage[4].any()
