"""`deepinfer convert --weights nested`: the folder it writes, what it says, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from deepinfer.deploy.bench.sensitivity import FixedLevel, Sensitivity, divergences
from deepinfer.deploy.cli import app
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.nested import nestable_names
from support.tiny_model import write_tiny_llama


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny model in FP16 in which one matrix has large values, in rows 0 and 1."""
    folder = write_tiny_llama(tmp_path / "m")
    weights = {name: t.half() for name, t in load_file(folder / "model.safetensors").items()}
    for name in nestable_names(load_model(folder).config):
        weights[name].clamp_(-1.75, 1.75)
    up = weights["model.layers.1.mlp.up_proj.weight"]
    up[0] = (up[0] * 64).round() / 64
    up[0, 3], up[1, 4], up[1, 5] = -6.5, 2.0, 2.0**-24
    save_file(weights, folder / "model.safetensors")
    return folder


def convert(source: Path, target: Path, *options: str) -> Result:
    command = ["convert", str(source), str(target), "--weights", "nested", *options]
    return CliRunner().invoke(app, command)


def refused(result: Result, words: str) -> None:
    assert result.exit_code == 1, result.output
    error = " ".join(result.stderr.split())
    assert words in error, error
    assert "Traceback" not in error


def test_a_nested_folder_is_the_model_it_was_made_from(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "nested"
    result = convert(source, target)
    assert result.exit_code == 0, result.output
    said = result.stdout.splitlines()
    assert said[0].startswith(f"{target}: 15 of 15 weights nested, each bit of FP16 kept; ")
    assert said[1] == (
        "1 of 1,283 rows shifted, 1 outliers listed; without either, 1 of 15 weights (6.7%) would "
        "stay as they were"
    )
    plain, nested = load_model(source), load_model(target)
    names = [n for n in nestable_names(plain.config) if "layers.0." in n]
    largest = max(float(plain.weights.read(name).abs().max()) for name in names)
    assert said[2:] == [
        f"  layer 0: 0 of 512 rows shifted, 0 outliers, max |w| {largest:.4g}",
        "  layer 1: 1 of 512 rows shifted, 1 outliers, max |w| 6.5",
        "  lm_head: 0 of 259 rows shifted, 0 outliers, max |w| 1.75",
    ]
    assert nested.nested
    for name in plain.weights.shapes():
        assert torch.equal(nested.weights.read(name), plain.weights.read(name)), name
    config = json.loads((target / "config.json").read_text())
    assert config.pop("quantization_config") == {
        "quant_method": "deepinfer_nested",
        "version": 1,
        "row_scaling": True,
        "modules_to_not_convert": [],
        "layer_order": [],
    }
    assert config == json.loads((source / "config.json").read_text())
    assert {file.name for file in target.iterdir()} == {file.name for file in source.iterdir()}
    sizes = [
        sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
        for folder in (source, target)
    ]
    # Of the one matrix: shifts, where each row's outliers start, and one outlier.
    assert sizes[1] == sizes[0] + 128 + 4 * 129 + 6
    checked = CliRunner().invoke(app, ["model", "get", str(target)])
    assert checked.exit_code == 0, checked.output


def test_the_published_rule_says_what_it_leaves_out(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "nested"
    result = convert(source, target, "--no-row-scaling")
    assert result.exit_code == 0, result.output
    said = result.stdout.splitlines()
    assert "14 of 15 weights nested" in said[0]
    assert said[1] == "1 of 15 weights (6.7%) have values above 1.75 and stay as they were"
    assert said[3].endswith("max |w| 6.5; up_proj stay as they were")
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"] == ["model.layers.1.mlp.up_proj"]
    assert config["row_scaling"] is False
    plain, nested = load_model(source).weights, load_model(target).weights
    for name in plain.shapes():
        assert torch.equal(nested.read(name), plain.read(name)), name


def test_rounding_to_half_is_told(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "m")  # float32
    result = convert(folder, tmp_path / "nested")
    assert result.exit_code == 0, result.output
    weights = load_file(folder / "model.safetensors")
    nestable = nestable_names(load_model(folder).config)
    rounded = sum(int((weights[n].half().float() != weights[n]).sum()) for n in nestable)
    total = sum(weights[name].numel() for name in nestable)
    assert rounded > 0.9 * total
    assert (
        f"{rounded:,} of {total:,} values are no FP16 numbers in the source and were rounded to "
        "the nearest first"
    ) in result.stdout
    made = load_model(tmp_path / "nested").weights
    assert all(torch.equal(made.read(name), weights[name].half()) for name in nestable)


def test_the_measured_order_is_that_of_the_divergences(source: Path, tmp_path: Path) -> None:
    weights = load_file(source / "model.safetensors")
    for name, tensor in weights.items():  # FP8 has all of these values, and changes nothing
        if "layers.1." in name and name.endswith("_proj.weight"):
            tensor.copy_((tensor * 256).to(torch.float8_e4m3fn).half() / 256)
    save_file(weights, source / "model.safetensors")
    target = tmp_path / "nested"
    result = convert(source, target, "--measure-order")
    assert result.exit_code == 0, result.output
    assert "least to the most sensitive to FP8: 1, 0; alone in FP8 they cost 0 to " in result.stdout
    model = load_model(target)
    assert model.layer_order == (1, 0)
    backend = CpuBackend()
    levels = [FixedLevel(2, frozenset(fp8)) for fp8 in ((), (1,), (0,), (0, 1))]
    found = divergences(Decoder(model, backend), backend, [list(range(40))], levels, lambda: None)
    assert found[:2] == [0, 0]
    assert found[2] == found[3] > 0
    assert Sensitivity((0.2, 0.1, 0.2, 0.0), 4).order == (3, 1, 0, 2)


def test_what_is_refused(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "nested"
    refused(convert(source, target, "--group-size", "64"), "nested weights have no groups")
    for option in ("--no-row-scaling", "--measure-order"):
        result = CliRunner().invoke(app, ["convert", str(source), str(target), option])
        refused(result, "only nested weights have")
    four_bits = tmp_path / "w4"
    made = CliRunner().invoke(app, ["convert", str(source), str(four_bits)])
    assert made.exit_code == 0, made.output
    refused(convert(four_bits, target), "q_proj.weight has 4 bits already: convert the model that")
    assert not target.exists()
    assert convert(source, target).exit_code == 0
    refused(convert(target, tmp_path / "again"), "its weights are nested already")
    back = CliRunner().invoke(app, ["convert", str(target), str(tmp_path / "w4 again")])
    assert back.exit_code == 0, back.output
    one, two = (load_file(f / "model.safetensors") for f in (four_bits, tmp_path / "w4 again"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("model.layers.1.mlp.down_proj.weight", (5, 9), float("nan")),
        ("model.layers.1.mlp.down_proj.weight", (127, 63), float("-inf")),
        ("model.embed_tokens.weight", (5, 9), float("inf")),
        ("model.norm.weight", (3,), float("nan")),
    ],
)
def test_a_weight_that_is_no_number_is_named(
    source: Path, tmp_path: Path, name: str, place: tuple[int, ...], value: float
) -> None:
    weights = load_file(source / "model.safetensors")
    place = tuple(at % size for at, size in zip(place, weights[name].shape, strict=True))
    weights[name][place] = value
    save_file(weights, source / "model.safetensors")
    result = convert(source, tmp_path / "nested")
    refused(result, f"tensor {name}: {list(place)} = {value}: ")
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


@pytest.mark.slow
def test_every_layer_of_the_demo_model_nests(demo_model: Path, tmp_path: Path) -> None:
    target = tmp_path / "nested"
    result = convert(demo_model, target)
    assert result.exit_code == 0, result.output
    said = result.stdout.splitlines()
    assert "211 of 211 weights nested" in said[0]
    assert said[1].startswith(
        "682 of 204,672 rows shifted, 0 outliers listed; without either, 153 of 211 weights (72.5%)"
    )
    plain, nested = load_model(demo_model), load_model(target)
    for name in nestable_names(plain.config):
        weight = plain.weights.read(name)
        assert torch.equal(nested.weights.read(name), weight.half()), name
