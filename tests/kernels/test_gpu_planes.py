"""Lower planes that leave the card for KV and come back, kernels emulated, copies late."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.deploy.bench import kernel_nested_model, kernel_report, kernel_steps
from deepinfer.deploy.bench.random_weights import random_model
from deepinfer.kernels.nested import NestedWeight
from deepinfer.kvstore.core.precision import StepCost
from deepinfer.workers.gpu import planes as planes_module
from deepinfer.workers.gpu.budget import MemoryBudget
from deepinfer.workers.gpu.costs import measure_costs
from deepinfer.workers.gpu.opening import OpenedGpu
from deepinfer.workers.gpu.planes import GpuPlanes, PlanesError, lower_bytes, tail_bytes
from deepinfer.workers.gpu.reader import WeightForm
from deepinfer.workers.gpu.runner import GpuRunner
from deepinfer.workers.gpu.weights import layer_weights, linears
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.nested import nest
from deepinfer.workers.model.runner import SequenceSlice
from kernels.simt.build import COMPILER
from support.copy_device import LazyDevice
from support.gpu_runner import Shelf, cpu_runner, emulated_gpu

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

QWEN2 = ModelConfig(
    family="qwen2", vocab_size=96, hidden_size=64, intermediate_size=48, layers=1, heads=2,
    kv_heads=1, head_dim=64, max_positions=512, rms_eps=1e-6, rope_theta=1e4,
    tied_embeddings=True, qkv_bias=True,
)  # fmt: skip
BLOCKS = 32


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(planes_module, "PIECE_BYTES", 2 * 4096)  # two blocks
    with emulated_gpu():
        yield


def nested_runner(config: ModelConfig = QWEN2, levels: int = 2, **options: Any) -> GpuRunner:
    return cpu_runner(config, model=nest(random_model(config)), levels=levels, **options)


def shedding(
    head: bool = False, config: ModelConfig = QWEN2
) -> tuple[GpuRunner, GpuPlanes, LazyDevice]:
    shelf = Shelf(LazyDevice(), head)
    runner = nested_runner(config, blocks=BLOCKS, rows=16, shelf=shelf)
    assert shelf.planes is not None
    return runner, shelf.planes, shelf.device


def decode(runner: GpuRunner, level: int, table: tuple[int, ...], seed: int = 1) -> Tensor:
    """Logits of a chunk of 16 tokens, and of the four after it, in the second block."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, QWEN2.vocab_size, (20,), generator=generator).tolist()
    slices = [SequenceSlice(tokens[:16], 0, table, True)]
    slices += [SequenceSlice(tokens[at : at + 1], at, table, True) for at in (16, 17, 18, 19)]
    return torch.cat([runner.forward([part], level).clone() for part in slices])


@pytest.mark.parametrize("head", [False, True])
def test_kv_takes_the_planes_place_and_fp16_is_as_before_after_their_return(head: bool) -> None:
    runner, planes, device = shedding(head)
    if head:
        runner.capture()  # graphs hold the planes' addresses
    tail = tuple(range(BLOCKS, BLOCKS + planes.tail_blocks))
    assert len(tail) >= 2
    # The tail has room for the planes and for little else.
    computed = tail_bytes(runner.decoder.weights, head=head)
    assert (
        0
        <= runner.pool.layout.payload_bytes(len(tail)) - computed
        < (runner.pool.layout.block_bytes)
    )
    fp16, fp8 = decode(runner, 0, (1, 2)), decode(runner, 1, (3, 4))
    if not head:
        plain = nested_runner(rows=16)
        assert torch.equal(fp16, decode(plain, 0, (1, 2)))
        assert torch.equal(fp8, decode(plain, 1, (3, 4)))
    planes.shed()
    with pytest.raises(ValueError, match="level 0: the lower planes are not on the card"):
        decode(runner, 0, (1, 2))
    # Blocks in the planes' place give what others give.
    assert torch.equal(decode(runner, 1, tail[-2:]), fp8)
    runner.pool.storage[BLOCKS : BLOCKS + len(tail)] = 0xA5
    assert torch.equal(decode(runner, 1, (5, 6)), fp8)
    wait = planes.restore()
    with pytest.raises(ValueError, match="level 0: the lower planes are not on the card"):
        decode(runner, 0, (1, 2))
    copies = runner.pool.copies_in
    wait()
    assert runner.pool.copies_in == copies, "or what was computed ahead would be thrown away"
    assert device.in_flight() == 0
    assert torch.equal(decode(runner, 0, (1, 2)), fp16)
    assert torch.equal(decode(runner, 1, (5, 6)), fp8)


def test_planes_come_back_behind_the_steps_that_used_their_blocks() -> None:
    runner, planes, device = shedding()
    planes.shed()
    seen: list[bool] = []
    before = runner.pool.storage[BLOCKS].clone()
    runner.pool.storage[BLOCKS] = 7
    device.launch(lambda: seen.append(bool((runner.pool.storage[BLOCKS] == 7).all())))
    planes.restore()()
    assert seen == [True]
    assert torch.equal(runner.pool.storage[BLOCKS], before)


def test_shedding_waits_for_steps_that_read_the_planes() -> None:
    _, planes, device = shedding()
    done: list[int] = []
    device.launch(lambda: done.append(1))
    planes.shed()
    assert done == [1]


def test_a_damaged_copy_never_comes_back() -> None:
    runner, planes, _ = shedding()
    planes.shed()
    planes._shelved.rows[0, 5] ^= 1
    with pytest.raises(PlanesError, match="damaged"):
        planes.restore()
    with pytest.raises(ValueError, match="not on the card"):
        decode(runner, 0, (1, 2))
    decode(runner, 1, (1, 2))


def test_memory_that_cannot_be_pinned_will_do() -> None:
    shelf = Shelf(LazyDevice())
    shelf.device.pinnable = 5
    runner = nested_runner(blocks=BLOCKS, shelf=shelf)
    assert shelf.planes is not None
    fp16 = decode(runner, 0, (1, 2))
    shelf.planes.shed()
    runner.pool.storage[BLOCKS : BLOCKS + shelf.planes.tail_blocks] = 0xA5
    shelf.planes.restore()()
    assert torch.equal(decode(runner, 0, (1, 2)), fp16)


def test_blocks_move_out_of_the_tail() -> None:
    runner, planes, _ = shedding()
    planes.shed()
    tail = (BLOCKS, BLOCKS + 1)
    fp8 = decode(runner, 1, tail)
    last = runner.forward([SequenceSlice([5], 20, tail, True)], 1).clone()
    runner.move_blocks([(BLOCKS, 8), (BLOCKS + 1, 3)])
    planes.restore()()
    assert torch.equal(runner.forward([SequenceSlice([5], 20, (8, 3), True)], 1), last)
    assert torch.equal(decode(runner, 1, (8, 3)), fp8)


@pytest.mark.parametrize("head", [False, True])
def test_a_model_may_start_without_its_lower_planes(head: bool) -> None:
    form = WeightForm(upper_only=True, upper_head=head)
    runner = nested_runner(form=form)
    left = runner.decoder.weights.head
    assert isinstance(left, NestedWeight)
    assert (left.lower is None) == head
    assert lower_bytes(runner.decoder.weights) == (0 if head else left.upper.numel())
    assert all(isinstance(each, NestedWeight) for each in linears(runner.decoder.weights))
    runner.warm_up()
    shed, planes, _ = shedding(head)
    planes.shed()
    assert torch.equal(decode(runner, 1, (1, 2)), decode(shed, 1, (1, 2)))
    with pytest.raises(ValueError, match="only 1 is left"):
        decode(runner, 0, (1, 2))


def test_planes_of_an_arena_lie_alone() -> None:
    """What loading needed on its way is not kept by what is left of it."""
    weights = nested_runner().decoder.weights
    for layer in weights.layers:
        for plane in ("upper", "lower"):
            parts = [getattr(each, plane) for each in (layer.qkv, layer.out, layer.down)]
            (_,) = {part.untyped_storage().data_ptr() for part in parts}
            held = sum(getattr(each, plane).numel() for each in layer_weights(layer))
            size = parts[0].untyped_storage().nbytes()
            assert held <= size < held + 4 * 128
    head = weights.head
    assert isinstance(head, NestedWeight)
    assert head.lower is not None
    size = head.upper.numel()
    for tensor in (head.upper, head.lower):
        assert size <= tensor.untyped_storage().nbytes() < size + 128


class FakeTimer:
    """Steps take what their rows say, a token of context a hundredth of it; half in FP8."""

    def __init__(self, runner: GpuRunner) -> None:
        self.runner = runner

    def __call__(self, call: Any, _times: int) -> float:
        seen: list[tuple[int, int, int]] = []
        compute = self.runner._compute

        def spy(slices: Any, level: int) -> Tensor:
            rows = sum(len(part.token_ids) for part in slices)
            seen.append((rows, sum(part.start for part in slices), level))
            return compute(slices, level)

        self.runner._compute = spy  # type: ignore[method-assign]
        try:
            call()
        finally:
            self.runner._compute = compute  # type: ignore[method-assign]
        ((rows, context, level),) = seen
        shares = {0: 1.0, self.runner.levels - 1: 0.5, self.runner.levels: 0.25}
        return (100 + rows + context / 100) * shares[level] * 1e-6


def test_costs_are_those_of_steps_at_each_level() -> None:
    runner = nested_runner(
        replace(QWEN2, layers=3, max_positions=64), levels=4, rows=16, sequences=4
    )
    before = runner.pool.storage[:BLOCKS].clone()
    costs = measure_costs(runner, FakeTimer(runner), limit_s=60)
    assert len(costs) == 4
    assert costs[0].rows == (1, 2, 4, 8, 16)
    assert costs[0].us == tuple(pytest.approx(100 + rows) for rows in costs[0].rows)
    parts = [each.rows * each.columns for each in linears(runner.decoder.weights)]
    layers = sum(parts) / (sum(parts) + 96 * 64)  # the rest is the head
    for cost, share in zip(costs, (0, 2 / 3 * layers, layers, 1), strict=True):
        assert cost.predict(20, 0) == pytest.approx(120 * (1 - share / 2))
        assert cost.us_per_context_token == pytest.approx(0.01 * (1 - share / 2))
    assert torch.equal(runner.pool.storage[:BLOCKS], before)
    large = nested_runner(rows=16, sequences=4, w8a8_rows=8)
    first, last = measure_costs(large, FakeTimer(large), limit_s=60)
    assert first.us == tuple(pytest.approx(100 + rows) for rows in (1, 2, 4, 8, 16))
    w8a8 = {8: 27.0, 16: 29.0}
    assert last.us == tuple(pytest.approx(w8a8.get(rows, 50 + rows / 2)) for rows in first.rows)
    assert measure_costs(cpu_runner(replace(QWEN2, layers=1)), FakeTimer(runner)) == ()
    short = measure_costs(runner, FakeTimer(runner), limit_s=0)
    assert [type(cost) for cost in short] == [StepCost] * 4
    assert len(short[0].rows) < len(costs[0].rows)


def test_the_bench_of_a_nested_model_measures_and_compares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its code, not its figures: in the emulator nothing takes its time."""
    config = replace(QWEN2, layers=1)
    runner, planes, _ = shedding(config=config)
    plain = nested_runner(config, rows=16)
    monkeypatch.setattr(kernel_steps, "_back_to_back", lambda *_: 1e-3)
    monkeypatch.setattr(kernel_steps, "_STEPS", 6)
    monkeypatch.setattr(kernel_nested_model, "_BIT_BATCHES", (1, 4))
    monkeypatch.setattr(kernel_nested_model, "_BIT_STEPS", 3)
    monkeypatch.setattr(kernel_nested_model, "_WARM_STEPS", 2)
    monkeypatch.setattr(kernel_nested_model, "_RESTORES", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 7)
    budget = MemoryBudget(
        card=1 << 30, utilization=1, context=0, weights=50, lower=40, scratch=0, graphs=0
    )
    opened = OpenedGpu(runner, runner.pool, BLOCKS, budget, ("note",), None, planes)
    bits = kernel_nested_model.logits_of_steps(plain)
    found = kernel_nested_model.of_nested(opened, bits, lambda _: None, (1, 2), 32, 3)
    assert all(each["bits"] for each in (found, found["switches"], found["shed"]))
    assert found["step_bytes"][1] < 0.6 * found["step_bytes"][0]
    assert found["switches"]["ahead_used"] >= found["switches"]["steps"] - 3
    plain_figures = {
        "bytes": 90,
        "tensor_bytes": 80,
        "decode": [{"batch": 1, "tokens_per_s": 5.0}] * 2,
    }
    report = {"context": 32, "plain": plain_figures, "nested": found}
    decode, facts = kernel_report.tables("nested-model", report)
    assert decode.row_count == 2
    assert list(facts.columns[1].cells)[-1] == "yes"
