"""What ``bench kernels --part swap`` does with a pool, without a card."""

from __future__ import annotations

import ctypes
import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from deepinfer.deploy.bench import kernel_swap
from deepinfer.deploy.bench.kernel_report import tables
from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.workers.gpu.copying import CardCopies
from deepinfer.workers.pool import PagedPool
from support.copy_device import LazyDevice

LAYOUT = KvLayout(resolve_kv_dtype("fp16"), 2, 1, 16, 16)
COUNT = 40
BLOCKS = range(10, 10 + 2 * COUNT)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> PagedPool:
    monkeypatch.setattr(kernel_swap, "_FEW_ROUNDS", 3)
    monkeypatch.setattr(kernel_swap, "_LONG_ROUNDS", 2)
    monkeypatch.setattr(kernel_swap, "_STEPS_ALONE", 5)
    monkeypatch.setattr(kernel_swap, "_BESIDE_S", 0.02)
    made = PagedPool(LAYOUT, BLOCKS.stop, copies=CardCopies(LazyDevice()))
    made.storage.random_(0, 256)
    return made


@pytest.fixture
def host(pool: PagedPool) -> memoryview:
    memory = np.zeros(LAYOUT.payload_bytes(COUNT), np.uint8)
    assert pool.copies is not None
    assert pool.copies.register(memory.ctypes.data, memory.size) is not None
    return memory.data


def test_scattered_blocks_are_all_different_and_hardly_neighbours() -> None:
    ids = kernel_swap.scattered(range(100, 4100), 2000)
    assert len(set(ids)) == 2000
    assert set(ids) <= set(range(100, 4100))
    assert sum(b == a + 1 for a, b in itertools.pairwise(ids)) < 5


def test_every_figure_is_of_a_copy_that_was_made(pool: PagedPool, host: memoryview) -> None:
    orders = {"adjacent": BLOCKS[:COUNT], "scattered": kernel_swap.scattered(BLOCKS, COUNT)}
    rates = {"out": 4e9, "in": 2e9}
    kernel_swap.check_round_trip(pool, host, orders["scattered"], BLOCKS)
    found: dict[str, Any] = {
        "payload_bytes": len(host),
        "memcpy_bytes_per_s": rates,
        "few": list(kernel_swap.few_blocks(pool, host, BLOCKS)),
        "long": list(kernel_swap.long_copies(pool, host, orders, rates)),
        "beside": kernel_swap.beside(pool, host, orders["scattered"], lambda: None),
    }
    assert [(each["order"], each["way"]) for each in found["few"]] == [
        (order, way) for order in ("adjacent", "scattered") for way in ("out", "in")
    ]
    assert len(found["long"]) == 8
    for each in found["long"]:
        assert each["of_memcpy"] == each["bytes_per_s"] / rates[each["way"]]
    assert found["beside"]["alone"]["steps"] == 5
    assert found["beside"]["out"]["bytes_per_s"] > 0
    # The last that went out, adjacent first, is what came in.
    expected = pool.storage[orders["scattered"]]
    assert torch.equal(torch.frombuffer(host, dtype=torch.uint8).view(COUNT, -1), expected)
    assert json.loads(json.dumps(found)) == found
    console = Console(width=200, record=True)
    for shown in tables("swap", found):
        console.print(shown)
    text = console.export_text()
    assert "scattered, in steps" in text
    assert "a swap out" in text


def test_a_copy_that_changes_a_byte_is_found(
    pool: PagedPool, host: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LazyDevice.synchronize

    def damaging(self: LazyDevice, event: Any) -> None:
        plain(self, event)
        ctypes.memset(torch.frombuffer(host, dtype=torch.uint8).data_ptr() + 7, 1, 1)
        ctypes.memset(torch.frombuffer(host, dtype=torch.uint8).data_ptr() + 8, 2, 1)

    monkeypatch.setattr(LazyDevice, "synchronize", damaging)
    with pytest.raises(RuntimeError, match="came back changed"):
        kernel_swap.check_round_trip(pool, host, BLOCKS[:COUNT], BLOCKS)


def test_what_fails_beside_the_steps_is_raised(pool: PagedPool) -> None:
    unpinned = memoryview(bytearray(3))
    with pytest.raises(ValueError, match="need exactly"):
        kernel_swap.beside(pool, unpinned, BLOCKS[:COUNT], lambda: None)
