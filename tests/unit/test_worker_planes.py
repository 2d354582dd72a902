"""Lower planes of a nested model on the CPU: they leave, their memory holds KV, they come back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.nested import nest
from deepinfer.workers.model.runner import ModelRunner, SequenceSlice
from deepinfer.workers.planes import CpuPlanes, release_pages, tail_blocks
from deepinfer.workers.pool import PagedPool
from support.nested_models import LLAMA, half_model

ORDINARY = 8
TOKENS = (7, 3, 40, 21, 9, 0, 33, 5)


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Worker:
    """A nested model, its pool with a tail, and its planes."""

    def __init__(self, *, head: bool = False) -> None:
        self.model = nest(half_model(LLAMA))
        self.layout = KvLayout(
            resolve_kv_dtype("fp16"), LLAMA.layers, LLAMA.kv_heads, LLAMA.head_dim, 4
        )
        backend = CpuBackend()
        self.decoder = Decoder(self.model, backend)
        self.tail = tail_blocks(self.decoder, self.layout.block_bytes, head=head)
        self.pool = PagedPool(self.layout, ORDINARY + self.tail)
        self.runner = ModelRunner(self.decoder, self.pool, backend)
        self.planes = CpuPlanes(
            self.decoder,
            self.model.weights,
            self.runner,
            self.pool,
            ORDINARY,
            head=head,
            threads=1,
        )

    def logits(self, level: int, table: tuple[int, ...] = (0, 1)) -> Tensor:
        return self.runner.forward([SequenceSlice(TOKENS, 0, table, True)], level)


@pytest.mark.parametrize("head", [False, True])
def test_planes_leave_and_come_back_bit_for_bit(head: bool) -> None:
    worker = Worker(head=head)
    fp16, fp8 = worker.logits(0), worker.logits(1)
    assert not torch.equal(fp16, fp8), "or nothing below is shown"

    worker.planes.shed()
    with pytest.raises(ValueError, match="level = 0: must be 1 or more without planes"):
        worker.logits(0)
    block = ORDINARY + worker.tail // 2
    in_tail = worker.logits(1, (block, block + 1))
    assert torch.equal(in_tail, fp8), "the tail holds KV like any other block"

    worker.planes.restore()
    assert torch.equal(worker.logits(0), fp16)
    assert torch.equal(worker.logits(1), fp8)
    assert worker.pool.storage[block].count_nonzero() == 0, "the tail's pages went back"


def test_the_tail_is_what_the_packed_values_take() -> None:
    without, with_head = Worker(), Worker(head=True)
    layers = sum(x.in_features * x.out_features for x in without.decoder.linears()[:-1])
    assert without.tail == 4 * layers // without.layout.block_bytes
    head = with_head.decoder.linears()[-1]
    assert with_head.tail == (
        4 * (layers + head.in_features * head.out_features) // without.layout.block_bytes
    )
    assert without.planes.tail_blocks == without.tail
    assert without.planes.return_ms >= 1


def test_a_copy_back_that_fails_leaves_the_planes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    fp16, fp8 = worker.logits(0), worker.logits(1)
    worker.planes.shed()
    read = type(worker.model.weights).read

    def broken(self: object, name: str) -> Tensor:
        if "layers.1" in name:
            raise OSError(f"{name}: the disk is gone")
        return read(self, name)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(type(worker.model.weights), "read", broken)
        with pytest.raises(OSError, match="the disk is gone"):
            worker.planes.restore()
    with pytest.raises(ValueError, match="without planes"):
        worker.logits(0)
    assert torch.equal(worker.logits(1), fp8)
    worker.planes.restore()
    assert torch.equal(worker.logits(0), fp16)


def test_without_planes_from_the_start_only_the_top_level_is_packed() -> None:
    worker = Worker()
    fp8 = worker.logits(1)
    backend = CpuBackend()
    decoder = Decoder(worker.model, backend, upper_only=True)
    runner = ModelRunner(decoder, PagedPool(worker.layout, ORDINARY), backend)
    assert torch.equal(runner.forward([SequenceSlice(TOKENS, 0, (0, 1), True)], 1), fp8)
    assert decoder.linears()[0] is decoder._layers[0][1].qkv


def test_moved_blocks_are_read_where_they_are_now() -> None:
    worker = Worker()
    worker.planes.shed()
    first = worker.logits(1, (ORDINARY, ORDINARY + 1))
    worker.runner.move_blocks([(ORDINARY, 5), (ORDINARY + 1, 3)])
    worker.pool.storage[ORDINARY:] = 255
    step = SequenceSlice((TOKENS[-1],), len(TOKENS) - 1, (5, 3), True)
    assert torch.equal(worker.runner.forward([step], 1), first)


def test_pages_go_back_only_as_whole_ones() -> None:
    memory = torch.full((3, 5000), 7, dtype=torch.uint8)
    release_pages(memory[0])
    assert memory[1:].eq(7).all()
    release_pages(memory[:0])
