"""`deepinfer convert`: what it writes, what it refuses, and what it leaves behind."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from deepinfer.deploy.bench.prompts import read_text
from deepinfer.deploy.bench.quality import SONNETS, served_logits
from deepinfer.deploy.cli import app
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.text.load import load_tokenizer
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.runner import ModelRunner
from deepinfer.workers.pool import PagedPool
from support.tiny_model import write_tiny_llama


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def convert(source: Path, target: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["convert", str(source), str(target), *options])


def codes_of(words: torch.Tensor) -> torch.Tensor:
    """int32 ``[N, K / 8]`` to ``[N, K]``, by shifts alone."""
    shifts = 4 * torch.arange(8)
    return ((words.long()[..., None] >> shifts) & 15).flatten(1)


@pytest.mark.parametrize("group", [32, 64])
def test_every_weight_is_the_nearest_that_its_group_has(group: int, tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "m")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][:2] = 0.0
    weights["model.layers.1.mlp.down_proj.weight"][3, 7] = 100.0
    save_file(weights, source / "model.safetensors")
    target = tmp_path / "w4"
    result = convert(source, target, "--group-size", str(group))
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "14 linear layers in 4 bits, rounded to nearest, symmetric" in said
    assert f"a scale for every {group} weights; embedding and head in 16 bits" in said
    written = load_file(target / "model.safetensors")
    model = load_model(target)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            assert torch.equal(written.pop(name), weight.half() if weight.ndim == 2 else weight)
            continue
        assert written.pop(f"{module}.weight_shape").tolist() == list(weight.shape)
        scales = written.pop(f"{module}.weight_scale")
        assert scales.dtype == torch.float16
        assert scales.shape == (weight.shape[0], weight.shape[1] // group)
        steps = codes_of(written.pop(f"{module}.weight_packed")).float() - 8
        scale = scales.float().repeat_interleave(group, dim=1)
        assert torch.equal(model.weights.read(name), steps * scale)
        assert torch.equal(steps, (weight / scale).round().clamp(-8, 7)), name
        # At least as good as the plain scale, whose largest weight is the range's end.
        groups = weight.view(-1, group)
        plain = (groups.abs().amax(dim=1, keepdim=True) / 7).half().float().clamp(min=2**-24)
        plainly = (groups / plain).round().clamp(-8, 7) * plain
        error = (steps * scale - weight).view(-1, group).square().sum(dim=1)
        assert bool((error <= (plainly - groups).square().sum(dim=1)).all())
    assert not written


def test_the_folder_is_whole(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "m")
    (source / "LICENSE").write_text("as is")
    (source / "notes.txt").write_text("not a part of the model")
    target = tmp_path / "w4"
    result = convert(source, target)
    assert result.exit_code == 0, result.output
    assert "every 64 weights" in " ".join(result.stdout.split()), "the most that 64 inputs have"
    names = {file.name for file in source.iterdir()} - {"notes.txt"}
    assert {file.name for file in target.iterdir()} == names
    for name in names - {"config.json", "model.safetensors"}:
        assert (target / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((target / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == json.loads((source / "config.json").read_text())
    assert quantization["config_groups"]["group_0"]["weights"]["group_size"] == 64
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []
    checked = CliRunner().invoke(app, ["model", "get", str(target)])
    assert checked.exit_code == 0, checked.output


def refused(result: Result, words: str) -> None:
    assert result.exit_code == 1, result.output
    error = " ".join(result.stderr.split())
    assert words in error, error
    assert "Traceback" not in error


def test_what_is_refused(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "m")
    target = tmp_path / "w4"
    refused(
        convert(source, target, "--group-size", "128"),
        "group_size = 128 does not divide the 64 inputs of model.layers.0.self_attn.q_proj: of "
        "32, 64 and 128 this model takes 32, 64",
    )
    refused(convert(source, target, "--group-size", "16"), "group_size = 16: must be 32, 64 or 128")
    refused(convert(source, target, "--weights", "int8"), "weights = 'int8': must be w4a16")
    refused(convert(source, tmp_path / "no" / "w4"), f"{tmp_path / 'no'} is no folder")
    refused(convert(tmp_path / "nothing", target), "no such file or folder")
    assert not target.exists()
    assert convert(source, target).exit_code == 0
    before = (target / "model.safetensors").read_bytes()
    refused(convert(source, target), f"{target} is there already: nothing is overwritten")
    assert (target / "model.safetensors").read_bytes() == before
    refused(convert(target, tmp_path / "again"), "q_proj.weight has 4 bits already: convert the")
    odd = write_tiny_llama(tmp_path / "odd", hidden=48, heads=4)
    refused(convert(odd, tmp_path / "w4-odd"), "group_size = 32 does not divide the 48 inputs of")


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny_llama(tmp_path / "m")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = math.nan
    save_file(weights, source / "model.safetensors")
    refused(convert(source, tmp_path / "w4"), "down_proj.weight: [0, 0] = nan: float16 holds")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("deepinfer.workers.model.convert.write_w4a16", full)
    refused(convert(source, tmp_path / "w4"), "w4 cannot be written: [Errno 28] No space left on")
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


@pytest.mark.slow
def test_the_demo_model_keeps_most_of_its_sense(demo_model: Path, tmp_path: Path) -> None:
    """Measured: perplexity grows by 30% with groups of 32 (135 million weights are few)."""
    target = tmp_path / "w4"
    result = convert(demo_model, target, "--group-size", "32")
    assert result.exit_code == 0, result.output
    text = "One day, a little girl found a key in the garden. "
    tokenizers = [load_tokenizer(path) for path in (demo_model, target)]
    assert tokenizers[0].encode(text) == tokenizers[1].encode(text)
    tokens = tokenizers[0].encode(read_text(SONNETS))[:512]
    before, after = (perplexity(path, tokens) for path in (demo_model, target))
    assert before < after < 1.5 * before


def perplexity(path: Path, tokens: list[int]) -> float:
    backend = CpuBackend(threads=1)
    decoder = Decoder(load_model(path), backend)
    layout = decoder.kv_layout(resolve_kv_dtype("fp16"), 16)
    runner = ModelRunner(decoder, PagedPool(layout, layout.blocks_for(len(tokens))), backend)
    scores = torch.log_softmax(served_logits(runner, tokens)[:-1].double(), dim=-1)
    return float((-scores.gather(1, torch.tensor(tokens[1:])[:, None])).mean().exp())
