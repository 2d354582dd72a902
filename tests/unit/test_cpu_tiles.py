"""Linear layers on a CPU see few different numbers of rows, and no row's bits depend on which."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.workers.backends.cpu import (
    LARGEST_TILE_ROWS,
    ROW_MULTIPLES,
    TILE_ROWS,
    CpuBackend,
    CpuLinear,
)


@pytest.mark.parametrize(("deterministic", "most"), [(False, 20), (True, 16)])
def test_few_numbers_of_rows_are_multiplied(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool, most: int
) -> None:
    """oneDNN keeps code for each: a worker's memory would grow with every new batch for hours."""
    backend = CpuBackend(deterministic=deterministic)
    seen: set[int] = set()

    def note(_: CpuLinear, x: torch.Tensor) -> torch.Tensor:
        seen.add(x.shape[0])
        return x

    monkeypatch.setattr(CpuLinear, "__call__", note)
    weight: Any = CpuLinear(torch.eye(8), None, packed=False)
    for rows in range(1, LARGEST_TILE_ROWS + 100):
        x = torch.arange(rows * 8.0).reshape(rows, 8)
        assert torch.equal(backend.linear(x, weight), x)
    assert len(seen) <= most
    assert max(seen) == (TILE_ROWS if deterministic else LARGEST_TILE_ROWS)


def test_rows_keep_their_bits_in_any_tile() -> None:
    backend = CpuBackend()
    backend.row_multiple = ROW_MULTIPLES[-1]  # enough on any CPU, where 4 may not be
    weight = backend.pack_linear(torch.randn(96, 64), None)
    x = torch.randn(LARGEST_TILE_ROWS + 77, 64)
    alone = torch.cat([backend.linear(row, weight) for row in torch.split(x, 1)])
    for rows in (5, 64, 65, 127, 300, len(x)):
        assert torch.equal(backend.linear(x[:rows], weight), alone[:rows])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_cpu_whose_sums_depend_on_the_number_of_rows_serves_with_one_number(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    def by_batch(self: CpuLinear, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + x.shape[0] * 2**-20)

    monkeypatch.setattr(CpuLinear, "__call__", by_batch)
    backend = CpuBackend(deterministic=deterministic)
    assert backend.small_tiles == deterministic
    weight: Any = CpuLinear(torch.eye(8), None, packed=False)
    backend.calibrate([weight], KvLayout(resolve_kv_dtype("fp16"), 1, 1, 8, 16))
    assert (backend.row_multiple, backend.small_tiles) == (TILE_ROWS, True)
    x = torch.randn(200, 8)
    alone = torch.cat([backend.linear(row[None], weight) for row in x])
    assert torch.equal(backend.linear(x, weight), alone)


def test_a_cpu_whose_large_products_differ_multiplies_in_small_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def by_size(self: CpuLinear, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + (x.shape[0] > TILE_ROWS) * 2**-20)

    monkeypatch.setattr(CpuLinear, "__call__", by_size)
    backend = CpuBackend()
    weight: Any = CpuLinear(torch.eye(8), None, packed=False)
    backend.calibrate([weight], KvLayout(resolve_kv_dtype("fp16"), 1, 1, 8, 16))
    assert backend.small_tiles
    assert backend.row_multiple < TILE_ROWS


def test_a_row_whose_bits_depend_on_its_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_place(self: CpuLinear, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + torch.arange(len(x))[:, None] * 2**-20)

    monkeypatch.setattr(CpuLinear, "__call__", by_place)
    weight: Any = CpuLinear(torch.eye(8), None, packed=False)
    with pytest.raises(RuntimeError, match="batching would change answers"):
        CpuBackend().calibrate([weight], KvLayout(resolve_kv_dtype("fp16"), 1, 1, 8, 16))
