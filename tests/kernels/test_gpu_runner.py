"""The CUDA runner's steps against the model written with torch's operators, kernels emulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from deepinfer.deploy.bench.random_weights import random_model
from deepinfer.deploy.bench.sdpa_model import SdpaModel
from deepinfer.kvstore.core.requests import SamplingParams, Token
from deepinfer.workers import sampler
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.engine import Engine
from deepinfer.workers.gpu.runner import GpuRunner
from deepinfer.workers.gpu.weights import load_weights
from deepinfer.workers.local import LocalEngine
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.runner import SequenceSlice
from deepinfer.workers.model.weights import CheckpointError, open_model
from deepinfer.workers.sampler import LogitsError, SampleRow
from kernels.simt.build import COMPILER
from support.gpu_runner import BLOCK_SIZE, CPU, FUSED_ROWS, cpu_runner, emulated_gpu
from support.memory_weights import MemoryWeights
from support.memory_weights import random_model as stored_model

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

QWEN2 = ModelConfig(
    family="qwen2",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=48,  # padded to 64
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
QWEN3 = replace(
    QWEN2,
    family="qwen3",
    layers=1,
    kv_heads=2,
    heads=6,
    tied_embeddings=False,
    qkv_bias=False,
    qk_norm=True,
    o_bias=True,
    mlp_bias=True,
)
PHI3 = replace(
    QWEN2,
    family="phi3",
    layers=1,
    head_dim=96,
    rotary_dim=64,
    qkv_bias=False,
    fused_projections=True,
)
MODELS = {"qwen2": QWEN2, "qwen3": QWEN3, "phi3": PHI3}
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
TOLERANCE = {"fp16": 0.02, "int8": 0.12, "fp8": 0.5}
"""Of logits that reach 3 to 5. FP16 rounds about ten times a layer, by 2^-11 each; a key of INT8
is off by 1 in 254 of its largest element, of E4M3 by 1 in 16 of each."""


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with emulated_gpu():
        yield


def ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, QWEN2.vocab_size, (count,), generator=generator).tolist()


def step(tokens: list[int], start: int, end: int, table: tuple[int, ...]) -> SequenceSlice:
    return SequenceSlice(tokens[start:end], start, table, logits=True)


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max())


@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen2", "fp16"), ("qwen2", "int8"), ("qwen3", "fp16"), ("phi3", "fp8")]
)
def test_steps_of_every_kind_give_the_models_logits(name: str, dtype: str) -> None:
    config = MODELS[name]
    runner = cpu_runner(config, kv_cache_dtype=dtype)
    model = SdpaModel(random_model(config), torch.float32, CPU)
    a, b = ids(36, 1), ids(25, 2)
    of_a, of_b = model.logits(a), model.logits(b)
    at_a, at_b = (3, 9, 4), (7, 1)  # blocks, in no order
    limit = TOLERANCE[dtype]
    assert runner.forward([SequenceSlice(a[:13], 0, at_a, logits=False)]).shape == (0, 96)
    # The rest of a prompt, then one prompt beside the other's first token.
    assert error(runner.forward([step(a, 13, 30, at_a)]), of_a[[29]]) < limit
    found = runner.forward([step(b, 0, 19, at_b), step(a, 30, 31, at_a)])
    assert error(found, torch.stack((of_b[18], of_a[30]))) < limit
    # Decode steps: fused, one row and two of them.
    assert error(runner.forward([step(a, 31, 32, at_a)]), of_a[[31]]) < limit
    found = runner.forward([step(a, 32, 33, at_a), step(b, 19, 20, at_b)])
    assert error(found, torch.stack((of_a[32], of_b[19]))) < limit
    # And more rows than are fused: the same token in every one of them.
    found = runner.forward([step(b, 20, 21, at_b)] * (FUSED_ROWS + 2))
    assert error(found, of_b[[20]].expand_as(found)) < limit
    assert float(of_a.abs().max()) > 20 * TOLERANCE["fp16"], "or errors would not show"


def test_rows_of_prompts_can_be_scored() -> None:
    runner = cpu_runner(QWEN2)
    model = SdpaModel(random_model(QWEN2), torch.float32, CPU)
    a, b = ids(21, 1), ids(12, 2)
    seen: dict[int, list[Tensor]] = {0: [], 1: []}

    def visit(index: int, first: int, logits: Tensor) -> None:
        assert first == (3 if index == 0 else 0) + sum(map(len, seen[index]))
        seen[index].append(logits.clone())

    last = runner.forward_and_score(
        [step(a, 0, 21, (0, 1)), step(b, 0, 12, (2,))], [range(3, 20), range(0)], visit
    )
    assert error(torch.cat(seen[0]), model.logits(a)[3:20]) < TOLERANCE["fp16"]
    assert seen[1] == []
    wanted = torch.stack((model.logits(a)[20], model.logits(b)[11]))
    assert error(last, wanted) < TOLERANCE["fp16"]


def test_an_engine_generates_what_the_model_says() -> None:
    runner = cpu_runner(QWEN2)
    config = WorkerConfig(
        blocks_total=32,
        block_size=BLOCK_SIZE,
        block_bytes=1,
        max_batch_tokens=32,
        max_batch_seqs=8,
        prefill_chunk_tokens=16,
    )
    prompts = [ids(20, 3), ids(9, 4), ids(33, 5)]
    done = LocalEngine(Engine(runner), config).generate(prompts, GREEDY)
    model = SdpaModel(random_model(QWEN2), torch.float32, CPU)
    for prompt, completion in zip(prompts, done, strict=True):
        answer = completion.token_ids
        assert len(answer) == GREEDY.max_tokens
        rows = model.logits(prompt + answer)[len(prompt) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert float((rows.max(dim=1).values - chosen).max()) < TOLERANCE["fp16"]
    assert runner.counters.steps > 0
    assert runner.backend.kv_saturations == 0


@pytest.fixture
def runner() -> GpuRunner:
    return cpu_runner(replace(QWEN2, layers=1))


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([], "at least one slice"),
        ([SequenceSlice([], 0, (0,), logits=True)], "slice 0: 0 tokens from position 0"),
        ([SequenceSlice([96], 0, (0,), logits=True)], r"slice 0: token ids must be in 0\.\.95"),
        ([SequenceSlice([1], 512, tuple(range(33)), logits=True)], "position 512 is beyond"),
        ([SequenceSlice([1] * 17, 0, (0,), logits=True)], "17 tokens need 2 blocks, the table"),
        ([SequenceSlice([1], 0, (32,), logits=True)], r"block ids must be in 0\.\.31, got 32"),
        ([SequenceSlice([1] * 65, 0, tuple(range(5)), logits=True)], "a step of 65 rows in 1"),
        ([SequenceSlice([1], 0, (0,), logits=True)] * 9, "9 slices: at most 64 and 8"),
    ],
)
def test_a_slice_that_cannot_be_computed_is_named(
    runner: GpuRunner, slices: list[SequenceSlice], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        runner.forward(slices)


def test_tokens_are_those_of_the_workers_sampler(runner: GpuRunner) -> None:
    logits = runner.forward([step(ids(9, 6), 0, 9, (0,)), step(ids(5, 7), 0, 5, (1,))])
    greedy = [SampleRow(params=GREEDY, seed=1, index=0)] * 2
    assert runner.backend.sample(logits, greedy) == [Token(int(row.argmax())) for row in logits]
    drawn = [
        SampleRow(params=SamplingParams(max_tokens=4, temperature=0.9), seed=seed, index=3)
        for seed in (5, 6)
    ]
    assert runner.backend.sample(logits, drawn) == sampler.sample(logits, drawn)
    logits[1, 3] = float("nan")
    runner.backend.choose_greedily(2)
    with pytest.raises(LogitsError) as caught:
        runner.backend.sample(logits, greedy)
    assert caught.value.rows == (1,)


def test_a_weight_beyond_half_precision_is_refused() -> None:
    config = replace(QWEN2, layers=1)
    source = stored_model(config, 0).weights
    tensors = {name: source.read(name) for name in source.shapes()}
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].clone()
    tensors[name][3, 5] = 7e4
    with pytest.raises(CheckpointError, match=rf"{name} holds values that float16 cannot"):
        load_weights(open_model(config, MemoryWeights(tensors)), CPU, 16)
