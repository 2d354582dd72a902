"""Deterministic steps, kernels emulated: every schedule gives the bits of decoding alone.

The reference for all of them is the same request alone, one token a step.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deepinfer.deploy.bench.random_weights import random_model
from deepinfer.kernels.linear import (
    F16Weight,
    Plan,
    Weight,
    Workspace,
    linear_residual,
    pack_w4,
    partials,
    plan_for,
)
from deepinfer.kernels.nested import encode
from deepinfer.workers.gpu import deterministic
from deepinfer.workers.gpu.deterministic import fixed_partition
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.nested import nest
from deepinfer.workers.model.runner import SequenceSlice
from kernels.simt.build import COMPILER
from support.gpu_runner import CPU, cpu_runner, emulated_gpu
from support.schedules import compare_schedules

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

CONFIG = ModelConfig(
    family="qwen2",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=48,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=64,
    max_positions=512,
    rms_eps=1e-6,
    rope_theta=1e4,
    tied_embeddings=True,
    qkv_bias=True,
)
BLOCKS = 16


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(deterministic, "PARTITION_MIN", 64)
    monkeypatch.setattr(deterministic, "WORKSPACE_BYTES", 40_000)  # some ten rows a launch
    monkeypatch.setattr(deterministic, "ROWS_MAX", 32)
    with emulated_gpu():
        yield


@pytest.mark.parametrize(
    ("dtype", "weights", "captured"),
    [
        pytest.param("fp16", "f16", True, marks=pytest.mark.slow),
        ("fp8", "nested", False),
        pytest.param("int8", "f16", False, marks=pytest.mark.slow),
    ],
)
def test_any_schedule_gives_the_bits_of_decoding_alone(
    dtype: str, weights: str, captured: bool
) -> None:
    model = random_model(CONFIG)
    runner = cpu_runner(
        CONFIG,
        model=nest(model) if weights == "nested" else model,
        kv_cache_dtype=dtype,
        blocks=BLOCKS,
        rows=96,
        deterministic=True,
    )
    found = compare_schedules(
        runner,
        (75, 21, 50),
        blocks=BLOCKS,
        chance=random.Random(dtype),
        cuts=(0, 1, 1, 2, 9, 30),
        between=runner.capture if captured else lambda: None,
    )
    assert (found.different, found.kv_is_the_same) == (0, True)
    assert found.rows > 15


def test_an_ordinary_runner_fails_the_same_test() -> None:
    """Or the test above would show nothing."""
    runner = cpu_runner(CONFIG, blocks=BLOCKS, rows=96)
    chance = random.Random(1)
    found = compare_schedules(runner, (40, 30), blocks=BLOCKS, chance=chance, cuts=(1, 20))
    assert found.different > 0
    assert not found.kv_is_the_same


def test_scores_of_a_prompt_are_those_of_decoding() -> None:
    runner = cpu_runner(CONFIG, blocks=BLOCKS, rows=96, deterministic=True)
    tokens, table = [(5 * at) % 96 for at in range(30)], (3, 1)
    alone = torch.cat(
        [
            runner.forward([SequenceSlice([t], at, table, True)]).clone()
            for at, t in enumerate(tokens)
        ]
    )
    shown: list[Tensor] = []
    runner.forward_and_score(
        [SequenceSlice(tokens, 0, table, True)],
        [range(3, 27)],
        lambda index, first, logits: shown.append(logits.clone()),
    )
    assert torch.equal(torch.cat(shown), alone[3:27])


def weight_of(kind: str, rows: int, columns: int) -> Weight:
    generator = torch.Generator().manual_seed(columns)
    values = (torch.randn(rows, columns, generator=generator) * columns**-0.5).half()
    if kind == "f16":
        return F16Weight(values)
    if kind.startswith("nested"):
        return encode(values)
    codes = torch.randint(0, 16, (rows, columns), generator=generator, dtype=torch.uint8)
    group = int(kind.removeprefix("w4 g"))
    return pack_w4(codes, torch.rand(rows, columns // group, generator=generator).half())


KINDS = ("f16", "nested", "nested fp8", "w4 g64", "w4 g128")
QUICK = {("f16", 2176, True), ("nested", 1152, False), ("w4 g128", 512, False)}


@pytest.mark.parametrize(
    ("kind", "columns", "hopper"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(KINDS, (512, 1152, 2176), (False, True))
    ],
)
def test_plans_for_any_number_of_rows_sum_in_one_order(
    kind: str, columns: int, hopper: bool
) -> None:
    """Also with plans that a Hopper card would take: they differ in shared memory alone."""
    n, fp8 = 48, kind == "nested fp8"
    weight = weight_of(kind, n, columns)
    x = torch.randn(40, columns, generator=torch.Generator().manual_seed(1)).half()
    gamma = torch.ones(n, dtype=torch.float16)
    workspace = Workspace.allocate(CPU)

    def multiply(part: Tensor) -> Tensor:
        m = part.shape[0]
        out, sums = torch.empty(m, n).half(), torch.empty(m, partials(n))
        residual = torch.zeros(m, n)
        plan = plan_for(weight, min(m, 16), 1, fp8=fp8, hopper=hopper)
        assert isinstance(plan, Plan)
        linear_residual(
            out, residual, sums, part, weight, gamma, fp8=fp8, workspace=workspace, plan=plan
        )
        return torch.cat((residual, out.float(), sums), dim=1)

    alone = torch.cat([multiply(row) for row in torch.split(x, 1)])
    for m in (2, 8, 9, 16, 17, 40):
        assert torch.equal(multiply(x[:m].contiguous()), alone[:m]), f"{m} rows"


def test_a_partition_depends_on_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deterministic, "PARTITION_MIN", 256)
    assert [fixed_partition(n) for n in (512, 32_768, 40_960, 131_072)] == [256, 256, 320, 1024]


def test_what_depends_on_the_load_is_refused() -> None:
    config = replace(CONFIG, layers=1)
    runner = cpu_runner(config, blocks=BLOCKS, deterministic=True)
    with pytest.raises(ValueError, match="precision level 1"):
        runner.forward([SequenceSlice([1], 0, (0,), True)], 1)
