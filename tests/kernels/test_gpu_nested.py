"""A nested model through the CUDA runner, kernels emulated: its levels, and steps ahead of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.deploy.bench.random_weights import random_model
from deepinfer.deploy.bench.sdpa_model import SdpaModel
from deepinfer.kernels.nested import NestedWeight, encode
from deepinfer.kvstore.core.requests import SamplingParams
from deepinfer.workers.gpu.runner import GpuRunner
from deepinfer.workers.gpu.weights import (
    GpuWeights,
    linears,
    load_weights,
    with_projections,
)
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.key_scales import KeyScales, with_key_scales
from deepinfer.workers.model.levels import PrecisionLevels
from deepinfer.workers.model.nested import nest
from deepinfer.workers.model.runner import SequenceSlice
from deepinfer.workers.model.weights import LoadedModel
from deepinfer.workers.sampler import SampleRow
from kernels.simt.build import COMPILER
from support.gpu_runner import CPU, FUSED_ROWS, cpu_runner, emulated_gpu
from support.memory_weights import MemoryWeights

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

QWEN2 = ModelConfig(
    family="qwen2", vocab_size=96, hidden_size=64, intermediate_size=48, layers=2, heads=2,
    kv_heads=1, head_dim=64, max_positions=512, rms_eps=1e-6, rope_theta=1e4,
    tied_embeddings=True, qkv_bias=True,
)  # fmt: skip
TOLERANCE = 0.02
"""Of logits that reach 5: FP16 rounds about ten times a layer, by 2^-11 each."""
LONG = SamplingParams(max_tokens=64, temperature=0.0)


@pytest.fixture(autouse=True)
def emulated() -> Iterator[None]:
    with emulated_gpu():
        yield


def ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, QWEN2.vocab_size, (count,), generator=generator).tolist()


def step(tokens: list[int], start: int, end: int, table: tuple[int, ...]) -> SequenceSlice:
    return SequenceSlice(tokens[start:end], start, table, logits=True)


def tensors(config: ModelConfig) -> dict[str, Tensor]:
    source = random_model(config).weights
    return {name: source.read(name) for name in source.shapes()}


def in_memory(config: ModelConfig, found: Mapping[str, Tensor]) -> LoadedModel:
    return LoadedModel(config, MemoryWeights(found), "in memory")


def rounded(
    config: ModelConfig, levels: PrecisionLevels, level: int, kind: type[SdpaModel] = SdpaModel
) -> SdpaModel:
    """The model whose weights are those of ``level``, in float32."""
    fp8, found = levels.fp8_layers(level), tensors(config)
    for name, tensor in found.items():
        parts = name.split(".")
        if parts[1] == "layers" and "proj.weight" in name and fp8[int(parts[2])]:
            found[name] = encode(tensor).decode_fp8()
    if levels.fp8_head(level) and not config.tied_embeddings:
        found["lm_head.weight"] = encode(found["lm_head.weight"]).decode_fp8()
    return kind(in_memory(config, found), torch.float32, CPU)


def nested_runner(config: ModelConfig, levels: int = 2, **options: Any) -> GpuRunner:
    return cpu_runner(config, model=nest(random_model(config)), levels=levels, **options)


def planes(weights: GpuWeights) -> list[NestedWeight]:
    found = [each for each in linears(weights) if isinstance(each, NestedWeight)]
    assert len(found) == 4 * len(weights.layers)
    return found


def steps(runner: GpuRunner, level: int = 0, *, prompts: bool) -> list[Tensor]:
    """Logits of steps of up to 16 rows: alone and together, ``prompts`` in short chunks."""
    a, b, at_a, at_b = ids(30, 1), ids(20, 2), (3, 9), (7, 1)
    plans = []
    if prompts:
        plans += [[step(a, start, start + 8, at_a)] for start in range(0, 24, 8)]
        plans += [[step(b, 0, 12, at_b), step(a, 24, 25, at_a)]]
    plans += [[step(a, 25, 26, at_a)], [step(a, 26, 27, at_a), step(b, 12, 13, at_b)]]
    plans += [[step(b, 13, 14, at_b)] * (FUSED_ROWS + 2)]
    return [runner.forward(plan, level).clone() for plan in plans]


@pytest.mark.parametrize(("tied", "captured"), [(True, True), (False, False)])
def test_fp16_mode_gives_the_bits_of_the_plain_model(tied: bool, captured: bool) -> None:
    config = replace(QWEN2, tied_embeddings=tied)
    nested, plain = nested_runner(config, rows=16), cpu_runner(config, rows=16)
    if captured:
        nested.capture()
    pairs = zip(*(steps(each, prompts=not captured) for each in (nested, plain)), strict=True)
    for found, wanted in pairs:
        assert torch.equal(found, wanted)
    assert torch.equal(nested.pool.storage, plain.pool.storage)


def test_every_level_computes_its_layers_in_fp8() -> None:
    config = replace(QWEN2, tied_embeddings=False)
    levels = PrecisionLevels(2, 4)
    runner = nested_runner(config, levels=4, rows=32, sequences=2)
    assert runner.levels == 4
    runner.capture()
    a = ids(30, 1)
    found = []
    for level in range(4):
        wanted = rounded(config, levels, level).logits(a)
        logits = [runner.forward([step(a, 0, 28, (3, 9))], level).clone()]
        logits += [runner.forward([step(a, at, at + 1, (3, 9))], level).clone() for at in (28, 29)]
        found.append(torch.cat(logits))
        assert float((found[-1] - wanted[27:]).abs().max()) < TOLERANCE, level
    for one, other in itertools.pairwise(found):
        assert float((one - other).abs().max()) > 2 * TOLERANCE, "or a wrong level would not show"


def test_levels_share_what_is_alike() -> None:
    """Decode graphs are a level's own; of wide steps only pieces whose layers' modes differ are."""
    config = replace(QWEN2, layers=3)
    runner = nested_runner(config, levels=4, rows=16, sequences=1)
    plain = cpu_runner(config, rows=16, sequences=1)
    decode, pieces, attention = 1, 4, 3
    assert plain.capture() == decode + pieces + attention
    modes = [PrecisionLevels(3, 4).fp8_layers(level) for level in range(4)]
    different = sum(
        len({(at > 0 and mode[at - 1], at < 3 and mode[at]) for mode in modes}) for at in range(4)
    )
    assert pieces < different < 4 * pieces
    assert runner.capture() == 4 * decode + different + attention


def test_attention_is_shared_and_a_sequence_may_change_levels_in_its_course() -> None:
    """Its KV is what the levels of its steps made it; what follows is computed at the new one."""
    runner = nested_runner(QWEN2, rows=16, sequences=1)
    plain = cpu_runner(QWEN2, rows=16, sequences=1)
    runner.capture()
    a, at_a = ids(40, 1), (3, 9, 4)
    for each in (runner, plain):
        for at in range(16):
            each.forward([step(a, at, at + 1, at_a)])
    before = runner.pool.storage.clone()
    fp8 = runner.forward([step(a, 16, 17, at_a)], 1).clone()
    assert not torch.equal(runner.pool.storage, before)
    fp16 = plain.forward([step(a, 16, 17, at_a)]).clone()
    assert not torch.equal(fp8, fp16)
    # The same positions again at level 0: nothing of the FP8 steps is left.
    for at in (16, 17):
        found = runner.forward([step(a, at, at + 1, at_a)]).clone()
        assert torch.equal(found, plain.forward([step(a, at, at + 1, at_a)]))
    assert torch.equal(runner.pool.storage, plain.pool.storage)


def follow(
    runner: GpuRunner, slices: list[SequenceSlice], level: int, next_level: int | None = None
) -> list[int]:
    """A step, and its tokens; the step after it is launched ahead."""
    rows = [SampleRow(params=LONG, seed=0, index=0)] * len(slices)
    logits = runner.forward(slices, level, next_level)
    return [token.id for token in runner.backend.sample(logits, rows)]


@pytest.mark.parametrize("announced", [True, False])
def test_a_step_ahead_is_claimed_at_its_own_level_only(announced: bool) -> None:
    runner = nested_runner(QWEN2)
    alone = nested_runner(QWEN2, ahead=False)
    a, at_a = ids(20, 1), (3, 9, 4)
    slices, levels = [step(a, 0, 20, at_a)], [0, 0, 1, 1, 1, 0, 0]
    for at, level in enumerate(levels):
        coming = levels[at + 1] if announced and at + 1 < len(levels) else None
        (token,) = follow(runner, slices, level, coming)
        assert [token] == follow(alone, slices, level)
        slices = [SequenceSlice([token], 20 + at, at_a, logits=True)]
    changes = 0 if announced else 2
    assert runner.counters.ahead_used == len(levels) - 1 - changes


def test_prompt_tokens_are_scored_at_the_steps_level() -> None:
    config = replace(QWEN2, layers=1, tied_embeddings=False)
    runner, a = nested_runner(config), ids(20, 1)
    for level in (0, 1):
        seen: list[Tensor] = []
        runner.forward_and_score(
            [step(a, 0, 20, (0, 1))],
            [range(20)],
            lambda _index, _first, logits, seen=seen: seen.append(logits.clone()),  # type: ignore[misc]
            level,
        )
        wanted = rounded(config, PrecisionLevels(1, 2), level).logits(a)
        assert float((torch.cat(seen) - wanted).abs().max()) < TOLERANCE


class InW8A8(SdpaModel):
    """Multiplies by activations that were rounded to FP8, each row by itself."""

    def _linear(self, x: Tensor, name: str) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 448
        return super()._linear((x / scale).to(torch.float8_e4m3fn).float() * scale, name)


def scored(runner: GpuRunner, part: SequenceSlice, level: int) -> Tensor:
    """Logits of all rows."""
    seen: list[Tensor] = []
    rows = [range(len(part.token_ids))]
    runner.forward_and_score([part], rows, lambda _i, _f, found: seen.append(found.clone()), level)
    return torch.cat(seen)


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def test_large_steps_at_the_highest_level_may_be_w8a8() -> None:
    config = replace(QWEN2, tied_embeddings=False, layers=1)
    runner = nested_runner(config, rows=96, sequences=4, blocks=16, w8a8_rows=20)
    a, at = ids(30, 1), (3, 9, 4)
    captured = runner.capture()
    without = nested_runner(config, rows=96, sequences=4, blocks=16).capture()
    assert captured - without == 2 * (config.layers + 1), "pieces of 64 and 96 rows"
    levels = PrecisionLevels(1, 2)
    exact = rounded(config, levels, 1).logits(a[:28])
    wanted = rounded(config, levels, 1, InW8A8).logits(a[:28])
    found = scored(runner, step(a, 0, 28, at), 2)
    effect = rms(wanted - exact)
    # Of the two roundings some values, which half precision has moved, go to different codes.
    assert rms(found - wanted) < 0.6 * effect < rms(found - exact)
    assert rms(scored(runner, step(a, 0, 28, at), 1) - exact) < 0.1 * effect
    # With fewer rows than gain by it, and for rows that are decoded, it is the level below.
    for start, end in ((0, 19), (28, 29)):
        low, high = (runner.forward([step(a, start, end, at)], k)[0].clone() for k in (1, 2))
        assert torch.equal(low, high)
    with pytest.raises(ValueError, match=r"precision level 3: this model has 0\.\.2"):
        runner.forward([step(a, 0, 28, at)], 3)


def test_rows_computed_ahead_in_fp8_are_taken_by_a_w8a8_step() -> None:
    """Such a step is no better for them, and its tag already says the worst."""
    runner = nested_runner(QWEN2, rows=96, sequences=4, blocks=16, w8a8_rows=20)
    a, b, at_a, at_b = ids(10, 1), ids(24, 2), (3, 9, 4), (7, 1)
    (token,) = follow(runner, [step(a, 0, 10, at_a)], 1)
    mine = SequenceSlice([token], 10, at_a, logits=True)
    found = runner.forward([mine, step(b, 0, 24, at_b)], 2, 1).clone()
    assert runner.counters.ahead_used == 1
    assert torch.equal(found[0], runner.forward([mine], 1)[0])
    alone = nested_runner(QWEN2, rows=96, sequences=4, blocks=16, w8a8_rows=20)
    assert torch.equal(found[1], alone.forward([step(b, 0, 24, at_b)], 2)[0])


@pytest.mark.parametrize("level", [-1, 2])
def test_a_level_that_there_is_not_is_named(level: int) -> None:
    runner = nested_runner(replace(QWEN2, layers=1))
    for levels in ((level,), (0, level)):
        with pytest.raises(ValueError, match=rf"precision level {level}: this model has 0\.\.1"):
            runner.forward([step(ids(4, 1), 0, 4, (0,))], *levels)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_key_scales_are_shifts_of_rows_in_the_planes_that_are_there(qk_norm: bool) -> None:
    """Nested again with other scales: the same memory, and the same logits as plain weights."""
    config = replace(QWEN2, qk_norm=qk_norm, family="qwen3" if qk_norm else "qwen2")
    model, plain = nest(random_model(config)), random_model(config)
    exponents = torch.tensor([[[3, -2] * 32]] * 2, dtype=torch.int8)
    exponents[..., 32:] = exponents[..., :32]
    scaled = with_key_scales(model, KeyScales(exponents))
    weights = load_weights(model, CPU, 32)
    before = [layer.qkv for layer in weights.layers]
    after = [layer.qkv for layer in with_projections(weights, scaled).layers]
    fresh = [layer.qkv for layer in load_weights(scaled, CPU, 32).layers]
    for old, new, wanted in zip(before, after, fresh, strict=True):
        assert isinstance(old, NestedWeight)
        assert isinstance(new, NestedWeight)
        assert isinstance(wanted, NestedWeight)
        assert new.upper.data_ptr() == old.upper.data_ptr()
        assert new.lower is old.lower
        assert torch.equal(new.decode(), wanted.decode())
    runner = cpu_runner(config, model=scaled, levels=2)
    logits = SdpaModel(plain, torch.float32, CPU).logits(ids(20, 1))[[19]]
    found = runner.forward([step(ids(20, 1), 0, 20, (0, 1))])
    assert float((found - logits).abs().max()) < TOLERANCE
