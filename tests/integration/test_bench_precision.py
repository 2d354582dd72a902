"""`bench precision` on a tiny model: what is compared with what, and what must come out."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from deepinfer.deploy.bench.precision import WEIGHTS, MixedLevels, run_precision
from deepinfer.deploy.bench.quality import Plan
from deepinfer.deploy.bench.rounded_weights import channel_fp8, four_bits, rounded_model
from deepinfer.deploy.models import ModelUnavailableError
from deepinfer.workers.model.levels import PrecisionLevels
from deepinfer.workers.model.nested import nestable_names
from support.nested_models import LLAMA, half_model
from support.packed_models import gptq, gptq_config, packed_model
from support.tiny_model import write_tiny_llama

PLAN = Plan(
    dtypes=("fp16", "fp8"), windows=3, window_tokens=80, answers=2, prompt_tokens=16,
    answer_tokens=8,
)  # fmt: skip


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("matplotlib")
    folder = write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", layers=3)
    tensors = load_file(folder / "model.safetensors")
    # FP8 has all values of layer 1: it alone suffers nothing.
    for name, tensor in tensors.items():
        if "layers.1." in name and name.endswith("_proj.weight"):
            tensor.copy_((tensor * 256).to(torch.float8_e4m3fn).float() / 256)
    save_file(tensors, folder / "model.safetensors")
    output = tmp_path_factory.mktemp("precision")
    figures = run_precision(
        model=str(folder),
        plan=PLAN,
        seed=4,
        text=None,
        output=output,
        console=Console(quiet=True),
    )
    written: dict[str, Any] = json.loads((output / "precision.json").read_text())
    assert written.items() >= figures.items()
    assert (output / "precision.png").stat().st_size > 10_000
    return written


def test_every_pair_is_measured_beside_fp16(found: dict[str, Any]) -> None:
    results = found["results"]
    assert tuple(results) == WEIGHTS
    assert all(list(by_dtype) == ["fp16", "fp8"] for by_dtype in results.values())
    same = results["fp16"]["fp16"]
    assert same["kl_nats"]["mean"] == 0
    assert same["top_token_agreement"]["mean"] == 1
    assert same["perplexity_over_reference"]["mean"] == 1
    assert same["greedy_tokens_alike"]["mean"] == 8
    for weights, by_dtype in results.items():
        for one in by_dtype.values():
            ratio = one["perplexity"]["mean"] / same["perplexity"]["mean"]
            assert one["perplexity_over_reference"]["mean"] == pytest.approx(ratio, rel=1e-4)
        assert by_dtype["fp8"]["kl_nats"]["mean"] > by_dtype["fp16"]["kl_nats"]["mean"], weights
    kl = {weights: results[weights]["fp16"]["kl_nats"]["mean"] for weights in results}
    assert 0 < kl["nested mixed"] < kl["nested fp8"] < kl["nested w8a8"] < kl["w4a16"]
    assert found["mixed_levels"] == 2
    assert found["w4a16_group"] == 64
    assert "--seed 4" in found["command"]


def test_layers_are_ordered_by_what_they_suffer_alone(found: dict[str, Any]) -> None:
    layers = found["layers"]
    assert layers["kl_nats"][1] == 0
    assert all(layers["kl_nats"][layer] > 0 for layer in (0, 2))
    assert layers["order"] == sorted(range(3), key=layers["kl_nats"].__getitem__)
    assert layers["positions"] == 2 * 79
    prefixes = layers["prefixes"]
    assert prefixes["layers"] == [1, 1, 2, 2, 3]
    assert layers["head_kl_nats"] > 0
    best, middle, worst = prefixes["kl_nats"].values()
    assert best[0] == middle[0] == 0
    assert best[2] <= worst[2]
    assert best[4] == middle[4] == worst[4]


def test_a_mixed_run_draws_every_step_anew_and_keeps_its_head_with_it() -> None:
    levels = PrecisionLevels(4, 3)
    mixed = MixedLevels(levels, seed=1)
    seen = Counter((mixed.fp8_layers(0), mixed.fp8_head(0)) for _ in range(300))
    expected = {(levels.fp8_layers(level), levels.fp8_head(level)) for level in range(3)}
    assert set(seen) == expected
    assert min(seen.values()) > 60
    again = MixedLevels(levels, seed=1)
    once_more = Counter((again.fp8_layers(0), again.fp8_head(0)) for _ in range(300))
    assert seen == once_more


def test_plain_formats_round_as_they_should() -> None:
    weight = torch.tensor([[448.0, 17.0, -0.001953125, 0.0], [0.5, -0.25, 0.0, 0.3]])
    rounded = channel_fp8(weight)
    assert rounded[0].tolist() == [448.0, 16.0, -0.001953125, 0.0]  # ties to even; a subnormal
    assert rounded[1, :3].tolist() == pytest.approx([0.5, -0.25, 0.0], rel=1e-6)
    assert float(rounded[1, 3]) == pytest.approx(0.3, rel=1 / 16)
    assert channel_fp8(torch.zeros(1, 4)).tolist() == [[0.0] * 4]
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(8, 64, generator=generator)
    steps = four_bits(32)(random).view(8, 2, 32)
    assert all(len(group.unique()) <= 16 for group in steps.flatten(0, 1))
    model = half_model(LLAMA)
    names = nestable_names(LLAMA)
    changed = rounded_model(model, names, channel_fp8)
    assert not changed.nested
    for name in model.weights.shapes():
        plain = model.weights.read(name)
        wanted = channel_fp8(plain.float()) if name in names else plain
        assert torch.equal(changed.weights.read(name), wanted)
    assert math.isclose(
        float(changed.weights.rows("model.embed_tokens.weight")(torch.tensor([3]))[0, 0]),
        float(model.weights.read("model.embed_tokens.weight")[3, 0]),
    )


def test_four_bits_have_no_fp16_to_compare_with(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    config = replace(LLAMA, hidden_size=64, intermediate_size=96, heads=4)
    folder = packed_model(config, gptq, symmetric=True).write(tmp_path / "m", gptq_config())
    with pytest.raises(ModelUnavailableError, match="has 4 bits, which do not nest"):
        run_precision(
            model=str(folder),
            plan=PLAN,
            seed=0,
            text=None,
            output=tmp_path,
            console=Console(quiet=True),
        )


def test_a_weight_that_is_no_number_is_named(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = write_tiny_llama(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = math.nan
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelUnavailableError, match=r"tensor model.norm.weight: \[3\] = nan"):
        run_precision(
            model=str(folder),
            plan=PLAN,
            seed=0,
            text=None,
            output=tmp_path,
            console=Console(quiet=True),
        )
