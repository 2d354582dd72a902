"""The CUDA runner's steps against the model written with torch's operators, kernels emulated."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.deploy.bench.random_weights import random_model
from deepinfer.deploy.bench.sdpa_model import SdpaModel
from deepinfer.kvstore.core.requests import SamplingParams, Token
from deepinfer.workers import sampler
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.engine import Engine
from deepinfer.workers.gpu.ahead import PAUSE_STEPS, POOR_MAX
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
LONG = SamplingParams(max_tokens=64, temperature=0.0)
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
    ("name", "dtype", "captured"),
    [
        ("qwen2", "fp16", False),
        ("qwen2", "fp16", True),
        ("qwen2", "int8", True),
        ("qwen3", "fp16", False),
        ("phi3", "fp8", True),
    ],
)
def test_steps_of_every_kind_give_the_models_logits(name: str, dtype: str, captured: bool) -> None:
    config = MODELS[name]
    runner = cpu_runner(config, kv_cache_dtype=dtype)
    if captured:  # decode steps of 1, 2, 4 and 8 rows, and all but prompts' attention of 64
        assert runner.capture() == 4 + (config.layers + 1) + config.layers
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
    assert (runner.counters.replays > 0) == captured
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


def generate(runner: GpuRunner, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    config = WorkerConfig(
        blocks_total=32,
        block_size=BLOCK_SIZE,
        block_bytes=1,
        max_batch_tokens=32,
        max_batch_seqs=8,
        prefill_chunk_tokens=16,
    )
    params = [SamplingParams(max_tokens=length, temperature=0.0) for length in lengths]
    done = LocalEngine(Engine(runner), config).generate(prompts, params)
    return [completion.token_ids for completion in done]


def test_an_engine_generates_what_the_model_says() -> None:
    """Answers of different lengths, across blocks: rows end, and most were computed ahead."""
    runner = cpu_runner(QWEN2)
    prompts = [ids(20, 3), ids(9, 4), ids(33, 5)]
    lengths = [18, 12, 5]
    answers = generate(runner, prompts, lengths)
    model = SdpaModel(random_model(QWEN2), torch.float32, CPU)
    for prompt, answer, length in zip(prompts, answers, lengths, strict=True):
        assert len(answer) == length
        rows = model.logits(prompt + answer)[len(prompt) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert float((rows.max(dim=1).values - chosen).max()) < TOLERANCE["fp16"]
    counters = runner.counters
    assert counters.ahead_used > 0.8 * (sum(lengths) - len(lengths))
    assert runner.backend.kv_saturations == 0
    # And the same without a step ahead.
    assert generate(cpu_runner(QWEN2, ahead=False), prompts, lengths) == answers


def test_a_warm_up_leaves_nothing_behind() -> None:
    runner = cpu_runner(QWEN2)
    runner.warm_up()
    gc.unfreeze()
    assert not runner.pool.storage[:32].any()
    a = ids(9, 1)
    found = runner.forward([step(a, 0, 9, (3,))])
    wanted = SdpaModel(random_model(QWEN2), torch.float32, CPU).logits(a)[[8]]
    assert error(found, wanted) < TOLERANCE["fp16"]


def follow(runner: GpuRunner, slices: list[SequenceSlice]) -> list[int]:
    """A step, and its tokens."""
    rows = [SampleRow(params=LONG, seed=0, index=0)] * len(slices)
    return [token.id for token in runner.backend.sample(runner.forward(slices), rows)]


def test_a_plan_that_was_half_foreseen_is_answered_whole() -> None:
    """Others come and go, another token or block is asked for: each row is its sequence's."""
    runner, plain = cpu_runner(QWEN2), cpu_runner(QWEN2, ahead=False)
    a, b, c = ids(30, 1), ids(31, 2), ids(20, 3)
    at_a, at_c = (3, 9), (5, 6)
    at_b: tuple[int, ...] = (7, 1)
    start = [step(a, 0, 30, at_a), step(b, 0, 31, at_b)]
    next_a, next_b = follow(runner, start)
    assert follow(plain, start) == [next_a, next_b]
    # b was foreseen; a is gone, and c was not known.
    plan = [SequenceSlice([next_b], 31, at_b, True), step(c, 0, 20, at_c)]
    next_b, next_c = follow(runner, plan)
    assert follow(plain, plan) == [next_b, next_c]
    assert runner.counters.ahead_used == 1
    # Both were foreseen, in another order; b begins a block that it was not given before.
    at_b = (*at_b, 2)
    plan = [SequenceSlice([next_c], 20, at_c, True), SequenceSlice([next_b], 32, at_b, True)]
    next_c, next_b = follow(runner, plan)
    assert follow(plain, plan) == [next_c, next_b]
    assert runner.counters.ahead_used == 3
    # Another token than was foreseen for c.
    other_c = (next_c + 1) % QWEN2.vocab_size
    plan = [SequenceSlice([other_c], 21, at_c, True), SequenceSlice([next_b], 33, at_b, True)]
    assert follow(runner, plan) == follow(plain, plan)
    assert runner.counters.ahead_used == 4


def test_what_was_copied_into_the_pool_is_not_overlooked() -> None:
    runner = cpu_runner(QWEN2)
    a = ids(20, 1)
    [token] = follow(runner, [step(a, 0, 20, (3, 9))])
    payload = bytearray(runner.pool.layout.payload_bytes(2))
    runner.pool.copy_out((3, 9), payload)
    runner.pool.copy_in((3, 9), payload)
    runner.forward([SequenceSlice([token], 20, (3, 9), True)])
    assert (runner.counters.ahead_rows, runner.counters.ahead_used) == (1, 0)


def test_plans_that_never_come_are_not_computed_for_long() -> None:
    runner = cpu_runner(replace(QWEN2, layers=1))
    for _ in range(2 * PAUSE_STEPS):
        follow(runner, [SequenceSlice([5], 0, (2,), True)])
    assert runner.counters.ahead_rows <= 2 * (POOR_MAX + 1)


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
        ([SequenceSlice([1], 0, (40,), logits=True)], r"block ids must be in 0\.\.39, got 40"),
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
    chosen = [int(row.argmax()) for row in logits]
    raw = logits.clone()
    drawn = [
        SampleRow(params=SamplingParams(max_tokens=4, temperature=0.9), seed=seed, index=3)
        for seed in (5, 6)
    ]
    assert runner.backend.sample(logits, drawn) == sampler.sample(raw, drawn)
    logits = runner.forward([step(ids(9, 6), 0, 9, (0,)), step(ids(5, 7), 0, 5, (1,))])
    assert runner.backend.sample(logits, greedy) == [Token(token) for token in chosen]
    logits = runner.forward([step(ids(9, 6), 0, 9, (0,)), step(ids(5, 7), 0, 5, (1,))])
    # Some other row goes on as if nothing had been.
    logits[1, 3] = float("nan")
    runner.backend.choose_greedily(2)
    logits = runner.backend.first(2)
    with pytest.raises(LogitsError) as caught:
        runner.backend.sample(logits, greedy)
    assert caught.value.rows == (1,)
    [token] = runner.backend.sample(logits[:1], greedy[:1])
    assert token.id == chosen[0]
    with pytest.raises(LogitsError):
        runner.backend.sample(logits[1:2], greedy[:1])


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.8, "top_k": 5},
        {"temperature": 1.2, "top_p": 0.7, "min_p": 0.02},
        {"temperature": 0.0, "repetition_penalty": 1.4},
        {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "top_k": 30},
        {"temperature": 0.7, "logprobs": 2},
        {"temperature": 0.0, "logit_bias": ((17, 8.0),)},
        {"temperature": 0.0, "min_tokens": 3},
    ],
)
def test_parameters_mean_what_they_mean_on_the_host(
    runner: GpuRunner, changes: dict[str, Any]
) -> None:
    """In one batch with greedy rows, and of the rows that are chosen on the host as well."""
    tables = [(0,), (1,), (2,), (3,)]
    slices = [step(ids(9, 6 + i), 0, 9, table) for i, table in enumerate(tables)]
    params = [SamplingParams(max_tokens=4, **changes), GREEDY] * 2
    logits = runner.forward(slices)
    rows = [
        SampleRow(
            params=each,
            seed=2**63 + i,
            index=2,
            choice=i,
            prompt_ids=ids(9, 6 + i),
            output_ids=[int(logits[i].argmax()), 40],
            stop_token_ids=(int(logits[i].argmax()),),
        )
        for i, each in enumerate(params)
    ]
    wanted = sampler.sample(logits.clone(), rows)
    assert runner.backend.sample(logits, rows) == wanted


@pytest.mark.parametrize(
    ("name", "value", "dtype"),
    [
        ("mlp.down_proj.weight", 7e4, torch.float32),
        ("mlp.down_proj.weight", math.nan, torch.float16),
        ("self_attn.q_proj.bias", math.inf, torch.float16),
        ("input_layernorm.weight", math.nan, torch.float32),
    ],
)
def test_numbers_that_half_precision_cannot_hold_are_refused(
    name: str, value: float, dtype: torch.dtype
) -> None:
    config = replace(QWEN2, layers=1)
    source = stored_model(config, 0).weights
    tensors = {each: source.read(each) for each in source.shapes()}
    name = f"model.layers.0.{name}"
    tensors[name] = tensors[name].to(dtype, copy=True)
    tensors[name].view(-1)[5] = value
    with pytest.raises(
        CheckpointError, match=rf"tensor {name}: \[.*5\] = .*: float16 holds finite"
    ):
        load_weights(open_model(config, MemoryWeights(tensors)), CPU, 16)
