"""Copies beside steps on a card that does nothing before it must (see ``LazyDevice``)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.kvstore.host_pool import Slab
from deepinfer.workers.gpu import copying
from deepinfer.workers.gpu.copy_device import CudaCopyDevice
from deepinfer.workers.gpu.copying import CardCopies
from deepinfer.workers.pool import PagedPool, Wait
from support.copy_device import LazyDevice

LAYOUT = KvLayout(resolve_kv_dtype("int8"), 2, 2, 8, 4)
SIZE = LAYOUT.block_bytes
BLOCKS = 8


class Card:
    """A pool on such a card, block ``i`` full of ``i + 1``, and a registered slab."""

    def __init__(self, *, registered: bool = True) -> None:
        self.device = LazyDevice()
        self.copies = CardCopies(self.device)
        self.pool = PagedPool(LAYOUT, BLOCKS, copies=self.copies)
        for block in range(BLOCKS):
            self.pool.storage[block] = block + 1
        self.slab = np.zeros(BLOCKS * SIZE, np.uint8)
        self.undo = (
            self.copies.register(self.slab.ctypes.data, self.slab.size) if registered else None
        )

    def view(self, blocks: int, at: int = 0) -> memoryview:
        return self.slab.data[at * SIZE : (at + blocks) * SIZE]

    def step(self, block: int, value: int) -> None:
        """A step that writes the block."""

        def write() -> None:
            self.pool.storage[block] = value

        self.device.launch(write)

    def held(self) -> list[int]:
        """The first byte of every block, all of whose bytes must be the same."""
        assert bool((self.pool.storage == self.pool.storage[:, :1]).all())
        return [int(value) for value in self.pool.storage[:, 0]]

    def slab_held(self, blocks: int) -> list[int]:
        parts = self.slab.reshape(BLOCKS, SIZE)[:blocks]
        assert bool((parts == parts[:, :1]).all())
        return [int(value) for value in parts[:, 0]]


@pytest.fixture(params=["registered", "staged"])
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Card:
    monkeypatch.setattr(copying, "STAGING_BYTES", SIZE // 3)  # a block is several pieces
    return Card(registered=request.param == "registered")


def finish(wait: Wait | None) -> None:
    if wait is not None:
        wait()


def test_a_victims_copy_waits_for_its_last_step_and_for_no_other(card: Card) -> None:
    card.step(3, 70)
    fence = card.pool.fence()
    card.step(5, 71)
    finish(card.pool.begin_out([3, 4, 1], card.view(3), fence))
    assert card.slab_held(3) == [70, 5, 2]
    assert card.device.steps_done() == 1, "the others' step is not waited for"


def test_a_copy_into_blocks_waits_for_whoever_had_them(card: Card) -> None:
    card.slab[: 2 * SIZE] = np.repeat(np.array([80, 81], np.uint8), SIZE)
    card.step(2, 60)
    fence = card.pool.fence()
    finish(card.pool.begin_in([2, 6], card.view(2), fence))
    card.device.finish()
    assert card.held() == [1, 2, 80, 4, 5, 6, 81, 8]


def test_whoever_waited_finds_the_bytes_there(card: Card) -> None:
    card.slab[: 3 * SIZE] = np.repeat(np.array([90, 91, 92], np.uint8), SIZE)
    finish(card.pool.begin_in([7, 0, 1], card.view(3), card.pool.fence()))
    assert card.held() == [91, 92, 3, 4, 5, 6, 7, 90]
    card.pool.copy_out([0, 7], card.view(2, at=4))
    assert card.slab_held(6)[4:] == [91, 90]
    assert card.device.in_flight() == 0


def test_to_begin_a_copy_is_not_to_wait_for_it() -> None:
    card = Card()
    wait = card.pool.begin_out([3], card.view(1), card.pool.fence())
    assert wait is not None
    assert card.slab_held(1) == [0]
    wait()
    assert card.slab_held(1) == [4]


@pytest.mark.parametrize(
    ("block_ids", "runs"),
    [
        ((0, 1, 2, 3), [(0, 4)]),
        ((3, 4, 1), [(3, 2), (1, 1)]),
        ((5, 3, 1), [(5, 1), (3, 1), (1, 1)]),
        ((7,), [(7, 1)]),
    ],
)
def test_adjacent_blocks_are_one_copy(
    block_ids: Sequence[int], runs: list[tuple[int, int]]
) -> None:
    card = Card()
    card.pool.copy_out(block_ids, card.view(len(block_ids)))
    base, host = card.pool.storage.data_ptr(), card.slab.ctypes.data
    at = 0
    expected = []
    for first, count in runs:
        expected.append((host + at * SIZE, base + first * SIZE, count * SIZE))
        at += count
    assert card.device.copied() == expected
    assert card.slab_held(len(block_ids)) == [block + 1 for block in block_ids]


class Scattered(Card):
    """A card whose ring buffers take three blocks, and a slab for more blocks than a pool has."""

    IDS = (6, 4, 2, 0, 7, 5, 3, 1, 6, 7, 0)
    """Ten runs; out only."""
    INTO = (39, 20, 21, 37, 30, 31, 32, 33, 28, 26, 24, 22, 18, 16)
    """Eleven runs, one of them longer than a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagedPool(LAYOUT, 40, copies=self.copies)
        for block in range(40):
            self.pool.storage[block] = block + 1
        self.slab = np.zeros(20 * SIZE, np.uint8)
        self.copies.register(self.slab.ctypes.data, self.slab.size)

    def entries(self, *kinds: str) -> list[tuple[object, ...]]:
        return [entry for entry in self.device.log if entry[0] in kinds]


@pytest.fixture
def scattered(monkeypatch: pytest.MonkeyPatch) -> Scattered:
    monkeypatch.setattr(copying, "RING_BYTES", 3 * SIZE + 1)
    return Scattered()


def test_many_runs_are_gathered_and_cross_the_bus_together(scattered: Scattered) -> None:
    card = scattered
    card.step(0, 55)
    fence = card.pool.fence()
    card.step(4, 56)
    wait = card.pool.begin_out(card.IDS, card.view(11), fence)
    assert wait is not None
    assert not card.slab.any(), "to begin is not to wait"
    wait()
    assert card.slab[: 11 * SIZE : SIZE].tolist() == [7, 5, 3, 55, 8, 6, 4, 2, 7, 8, 55]
    assert card.device.steps_done() == 1
    assert card.device.in_flight() == 0
    # Each on its own stream: first the gather, then the copy from that stream's buffer.
    row = card.pool.storage.data_ptr() + 40 * SIZE
    host = card.slab.ctypes.data
    order = [(entry[0], entry[2]) for entry in card.entries("rows")]
    assert order == [("rows", 0), ("rows", 1), ("rows", 0), ("rows", 1)]
    assert [entry[0] for entry in card.entries("rows", "copy")] == ["rows", "copy"] * 4
    buffers = [row, row + 3 * SIZE] * 2
    assert card.device.copied() == [
        (host + at * SIZE, buffer, blocks * SIZE)
        for buffer, at, blocks in zip(buffers, (0, 3, 6, 8), (3, 3, 2, 3), strict=True)
    ]


def test_what_comes_in_is_scattered_behind_its_copy(scattered: Scattered) -> None:
    card = scattered
    card.slab[:] = np.repeat(np.arange(100, 120, dtype=np.uint8), SIZE)
    card.step(37, 60)  # whoever had the block
    wait = card.pool.begin_in(card.INTO, card.view(14), card.pool.fence())
    card.slab[14 * SIZE :] = 0
    finish(wait)
    card.slab[:] = 0  # nobody reads it any more
    card.device.finish()
    expected = list(range(1, 41))
    for at, block in enumerate(card.INTO):
        expected[block] = 100 + at
    assert card.held() == expected
    kinds = [entry[0] for entry in card.entries("rows", "copy")]
    assert kinds == ["copy", "rows", "copy", "copy", "copy", "rows", "copy", "rows"]
    sizes = [size // SIZE for _, _, size in card.device.copied()]
    assert sizes == [3, 1, 4, 3, 3]
    (pairs,) = card.entries("pairs")
    # Behind the two buffers of the way out; what is not gathered is not among them.
    assert [source for source, _ in pairs[2]] == [46, 47, 48, 49, 50, 51, 46, 47, 48]  # type: ignore[attr-defined]
    assert [target for _, target in pairs[2]] == [39, 20, 21, 28, 26, 24, 22, 18, 16]  # type: ignore[attr-defined]


def test_a_buffers_gather_and_its_copy_are_not_parted_by_another_thread(
    scattered: Scattered, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = scattered
    device, plain = card.device, card.device.copy_rows
    between = threading.Event()
    other: list[threading.Thread] = []
    host = np.zeros(9 * SIZE, np.uint8)
    card.copies.register(host.ctypes.data, host.size)
    second = (38, 36, 34, 32, 30, 28, 26, 24, 22)

    def begin() -> None:
        finish(card.pool.begin_out(second, host.data, card.pool.fence()))

    def slowly(*args: Any) -> None:
        plain(*args)
        if not other:
            other.append(threading.Thread(target=begin))
            other[0].start()
            between.wait(0.1)  # were there nothing to stop it, it would be through by then

    monkeypatch.setattr(device, "copy_rows", slowly)
    finish(card.pool.begin_out(card.IDS, card.view(11), card.pool.fence()))
    other[0].join()
    assert card.slab[: 11 * SIZE : SIZE].tolist() == [block + 1 for block in card.IDS]
    assert host[::SIZE].tolist() == [block + 1 for block in second]


@pytest.mark.parametrize("left", range(8))
def test_a_gather_that_fails_leaves_nothing_under_way(scattered: Scattered, left: int) -> None:
    card = scattered
    card.device.copies_left = left
    with pytest.raises(RuntimeError, match="the bus is broken"):
        card.pool.begin_out(card.IDS, card.view(11), card.pool.fence())
    assert card.device.in_flight() == 0
    card.device.copies_left = 100
    card.pool.copy_out(card.IDS, card.view(11))
    assert card.slab[: 11 * SIZE : SIZE].tolist() == [block + 1 for block in card.IDS]


def test_blocks_that_cannot_be_gathered_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for ring, multiple in ((2 * SIZE - 1, 16), (3 * SIZE, SIZE + 1)):
        monkeypatch.setattr(copying, "RING_BYTES", ring)
        monkeypatch.setattr(copying, "COPY_BYTES_MULTIPLE", multiple)
        card = Scattered()
        card.pool.copy_out(card.IDS, card.view(11))
        assert card.slab[: 11 * SIZE : SIZE].tolist() == [block + 1 for block in card.IDS]
        assert card.pool._memory.shape == (40, SIZE)
        kinds = [entry[0] for entry in card.device.log]
        assert kinds == ["wait"] * 2 + ["copy"] * 10 + ["synchronize"] * 2


def test_memory_that_is_not_registered_goes_through_pinned_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copying, "STAGING_BYTES", 100)
    card = Card(registered=False)
    card.pool.copy_out([0, 1, 4], card.view(3))
    assert card.slab_held(3) == [1, 2, 5]
    pieces = card.device.copied()
    buffers = sorted({target for target, _, _ in pieces})
    assert len(buffers) == copying.LANE_BUFFERS
    slab = range(card.slab.ctypes.data, card.slab.ctypes.data + card.slab.size)
    assert not any(buffer in slab for buffer in buffers)
    assert max(size for _, _, size in pieces) == 100
    assert sum(size for _, _, size in pieces) == 3 * SIZE
    # Two pieces are under way before the first is waited for.
    kinds = [entry[0] for entry in card.device.log]
    assert kinds[:5] == ["wait", "copy", "copy", "synchronize", "copy"]


def test_a_slab_that_cannot_be_pinned_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    card = Card(registered=False)
    card.device.pinnable = 5
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert card.copies.register(card.slab.ctypes.data, card.slab.size) is None
    (record,) = caplog.records
    assert "cannot be pinned (" in record.getMessage()
    assert f"{card.slab.size} bytes are too many" in record.getMessage()
    caplog.clear()
    card.pool.copy_out([2, 3], card.view(2))
    card.pool.copy_in([5], card.view(1))
    assert [r.getMessage().partition(" (")[0] for r in caplog.records] == ["nothing can be pinned"]
    assert card.slab_held(2) == [3, 4]
    assert card.held()[5] == 3


def test_a_slab_is_registered_until_it_is_undone() -> None:
    card = Card()
    assert card.device.registered == {card.slab.ctypes.data: card.slab.size}
    assert card.undo is not None
    card.undo()
    assert card.device.registered == {}
    card.pool.copy_out([6], card.view(1))
    assert card.slab_held(1) == [7]
    assert card.device.copied()[0][0] != card.slab.ctypes.data, "it is staged now"


def test_what_a_failed_copy_had_begun_is_waited_for(card: Card) -> None:
    card.pool.copy_out([0], card.view(1, at=7))  # has the buffers pinned
    card.device.copies_left = 2
    with pytest.raises(RuntimeError, match="the bus is broken"):
        finish(card.pool.begin_out([1, 3, 5], card.view(3), card.pool.fence()))
    assert card.device.in_flight() == 0
    card.device.copies_left = 1000
    for _ in range(copying.LANES + 1):  # and no staging buffer is lost
        card.pool.copy_out([1, 3, 5], card.view(3))
    assert card.slab_held(3) == [2, 4, 6]


def test_bytes_that_cannot_be_written_are_kept_until_they_are_read(card: Card) -> None:
    wait = card.pool.begin_in([4], bytes([33]) * SIZE, card.pool.fence())
    torch.zeros(SIZE, dtype=torch.uint8)  # takes the memory, were it free
    finish(wait)
    assert card.held()[4] == 33


@pytest.mark.gpu
def test_scattered_blocks_on_a_card() -> None:
    """Four buffers' worth of blocks, in an order of their own, there and back."""
    device = torch.device("cuda")
    layout = KvLayout(resolve_kv_dtype("fp16"), 36, 2, 128, 16)
    copies = CardCopies(CudaCopyDevice(device))
    pool = PagedPool(layout, 200, device, copies)
    pool.storage.random_(0, 256)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1)).tolist()
    there, back = order[:60], order[60:120]
    slab = Slab.create("a test", layout.payload_bytes(60))
    undo = copies.register(np.frombuffer(slab.view, np.uint8).ctypes.data, slab.length)
    assert undo is not None
    slow = torch.ones(4096, 4096, device=device)
    for _ in range(20):
        slow = slow @ slow
    pool.storage[there[20]] = 77
    others = order[120:]
    kept = pool.storage[others].clone()
    finish(pool.begin_out(there, slab.view, pool.fence()))
    finish(pool.begin_in(back, slab.view, pool.fence()))
    assert torch.equal(pool.storage[back], pool.storage[there])
    assert torch.equal(pool.storage[others], kept)
    assert bool((pool.storage[back[20]] == 77).all())
    undo()
    slab.close()


@pytest.mark.gpu
@pytest.mark.parametrize("registered", [True, False])
def test_on_a_card(registered: bool) -> None:
    """Bytes there and back, and a fence behind a step that takes a while."""
    device = torch.device("cuda")
    copies = CardCopies(CudaCopyDevice(device))
    pool = PagedPool(LAYOUT, BLOCKS, device, copies)
    pool.storage.random_(0, 256)
    slab = Slab.create("a test", 1 << 20)
    undo = copies.register(np.frombuffer(slab.view, np.uint8).ctypes.data, slab.length)
    assert undo is not None
    host = slab.view[: 3 * SIZE] if registered else memoryview(bytearray(3 * SIZE))
    slow = torch.ones(4096, 4096, device=device)
    for _ in range(20):
        slow = slow @ slow
    pool.storage[4] = 77
    finish(pool.begin_out([3, 4, 1], host, pool.fence()))
    finish(pool.begin_in([0, 7, 6], host, pool.fence()))
    assert torch.equal(pool.storage[[0, 7, 6]], pool.storage[[3, 4, 1]])
    assert bool((pool.storage[7] == 77).all())
    undo()
    slab.close()
