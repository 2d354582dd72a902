"""A nested model on a card as a worker opens it: its graphs, its planes in the pool, its costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deepinfer.deploy.bench.kernel_nested_model import logits_of_steps
from deepinfer.deploy.bench.kernel_steps import let_go
from deepinfer.deploy.bench.random_weights import random_model
from deepinfer.kernels.linear_w8a8 import CAPABILITY_MIN
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.gpu.card import find_card
from deepinfer.workers.gpu.opening import OpenedGpu, StepSizes, open_gpu
from deepinfer.workers.gpu.runner import GpuRunner
from deepinfer.workers.gpu.settings import GpuSettings, NestedSettings
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.decoder import Decoder, kv_layout
from deepinfer.workers.model.nested import nest
from deepinfer.workers.model.runner import ModelRunner, SequenceSlice
from deepinfer.workers.pool import PagedPool

pytestmark = pytest.mark.gpu

TINY = ModelConfig(
    family="qwen2", vocab_size=512, hidden_size=256, intermediate_size=688, layers=3, heads=4,
    kv_heads=1, head_dim=64, max_positions=512, rms_eps=1e-6, rope_theta=1e4,
    tied_embeddings=True, qkv_bias=True,
)  # fmt: skip


def opened(config: ModelConfig = TINY, **options: bool | int) -> OpenedGpu:
    plain = random_model(config, device="cuda")
    return open_gpu(
        find_card(),
        nest(plain) if options else plain,
        kv_layout(config, resolve_kv_dtype("fp16"), 16),
        GpuSettings(fill_card=False, probe=False),
        StepSizes(rows=128, sequences=16),
        64,
        nested=NestedSettings(**options) if options else None,  # type: ignore[arg-type]
    )


@pytest.fixture(autouse=True)
def _card_is_left_empty() -> Iterator[None]:
    yield
    let_go()


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("tied", [True, False])
def test_planes_leave_and_come_back_and_fp16_is_plains_bit_for_bit(tied: bool) -> None:
    config = replace(TINY, tied_embeddings=tied)
    fp16 = logits_of_steps(opened(config).runner)
    found = opened(config, shed=True, shed_head=True, levels=3)
    runner, planes = found.runner, found.planes
    assert planes is not None
    assert len(runner.costs) == 3
    assert runner.costs[0].rows[0] == 1
    assert any("shedding frees" in note for note in found.notes)
    tail = range(found.blocks, found.blocks + planes.tail_blocks)
    assert same(logits_of_steps(runner), fp16)
    fp8 = logits_of_steps(runner, 2)
    assert not same(fp8, fp16)
    planes.shed()
    with pytest.raises(ValueError, match="lower planes are not on the card"):
        logits_of_steps(runner, 1)
    found.pool.storage[tail.start : tail.stop] = 0xFF
    assert same(logits_of_steps(runner, 2), fp8)
    in_tail, elsewhere = (
        runner.forward([SequenceSlice([5, 6, 7], 0, (block,), True)], 2).clone()
        for block in (tail[-1], 3)
    )
    assert torch.equal(in_tail, elsewhere)
    planes.restore()()
    assert same(logits_of_steps(runner), fp16)


def test_a_model_that_starts_shed_has_its_upper_planes_only() -> None:
    both, upper = opened(levels=2), opened(start_shed=True)
    assert upper.planes is None
    assert upper.budget.lower < both.budget.lower / 2
    assert same(logits_of_steps(upper.runner, 1), logits_of_steps(both.runner, 1))


def test_w8a8_of_a_card_is_that_of_the_cpu() -> None:
    """Of a large step. Halves here and floats there are rounded to different codes now and then."""
    card = find_card()
    if card.capability < CAPABILITY_MIN:
        with pytest.raises(ValueError, match="products of FP8 with FP8 need"):
            opened(w8a8=True)
        return
    config = replace(TINY, layers=1)
    model = nest(random_model(config))
    found = open_gpu(
        card,
        model,
        kv_layout(config, resolve_kv_dtype("fp16"), 16),
        GpuSettings(fill_card=False, probe=False),
        StepSizes(rows=256, sequences=16),
        64,
        nested=NestedSettings(w8a8=True),
    )
    assert any("129 rows or more are W8A8" in note for note in found.notes)
    backend = CpuBackend()
    layout = found.pool.layout
    decoder = Decoder(model, backend, w8a8_rows=1)
    cpu = ModelRunner(decoder, PagedPool(layout, 64), backend)
    ids = torch.randint(0, 512, (200,), generator=torch.Generator().manual_seed(4)).tolist()
    part = SequenceSlice(ids, 0, range(13), True)

    def logits(runner: ModelRunner | GpuRunner, level: int) -> Tensor:
        seen: list[Tensor] = []
        rows = [range(200)]
        runner.forward_and_score(
            [part], rows, lambda _i, _f, x: seen.append(x.cpu().clone()), level
        )
        return torch.cat(seen)

    fp8, wanted, on_card = logits(cpu, 1), logits(cpu, 2), logits(found.runner, 2)
    effect, found_effect, between, half = (
        float(each.square().mean().sqrt())
        for each in (wanted - fp8, on_card - fp8, on_card - wanted, logits(found.runner, 1) - fp8)
    )
    assert half < 0.2 * effect
    assert 0.8 < found_effect / effect < 1.25
    assert between < 0.95 * effect, "roundings of its own would be 1.4 of it"
    again = logits(found.runner, 2)
    assert torch.equal(again, on_card), "the same graphs, the same bits"
