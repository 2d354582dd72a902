"""Hugging Face folders: what is read, and what damaged or foreign files say."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.model.config import ModelConfig, UnsupportedModelError
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.weights import (
    CheckpointError,
    open_model,
)
from support.memory_weights import MemoryWeights, random_model

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def config() -> ModelConfig:
    return ModelConfig(
        family="llama", vocab_size=40, hidden_size=32, intermediate_size=64, layers=2, heads=4,
        kv_heads=2, head_dim=8, max_positions=128, rms_eps=1e-5, rope_theta=10_000.0,
    )  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    weights = random_model(config(), seed=2).weights
    return {name: weights.read(name) for name in weights.shapes()}


def write_folder(folder: Path, changes: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG | (changes or {})))
    save_file(tensors(), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("tied", [False, True])
def test_progress_counts_the_bytes_that_a_decoder_reads(tied: bool, tmp_path: Path) -> None:
    # A tied model's file may hold its head a second time, which nobody reads.
    path = write_folder(tmp_path / "m", {"tie_word_embeddings": tied})
    seen: list[tuple[int, int]] = []
    model = load_model(path, progress=lambda done, total: seen.append((done, total)))
    wanted = sum(tensor.nbytes for tensor in tensors().values()) - (40 * 32 * 4 if tied else 0)
    assert seen == [(0, wanted)]
    before = torch.get_num_threads()
    Decoder(model, CpuBackend(threads=1))
    torch.set_num_threads(before)
    assert seen == sorted(seen)
    assert seen[-1] == (wanted, wanted)
    assert len(seen) > 20


def test_what_was_read_outlives_its_release(tmp_path: Path) -> None:
    model = load_model(write_folder(tmp_path / "m"))
    name = "model.layers.1.mlp.up_proj.weight"
    weight, rows = model.weights.read(name), model.weights.rows(name)
    model.weights.release()
    assert torch.equal(weight, tensors()[name])
    assert torch.equal(rows(torch.tensor([5, 0])), tensors()[name][[5, 0]])


def test_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    first = load_model(folder).fingerprint
    assert load_model(folder).fingerprint == first
    changed = tensors()
    changed["model.layers.1.mlp.up_proj.weight"] += 0.01
    save_file(changed, folder / "model.safetensors")
    assert load_model(folder).fingerprint != first
    save_file(tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(HF_CONFIG | {"rope_theta": 9_999.0}))
    assert load_model(folder).fingerprint != first


def test_missing_and_misshapen_tensors_are_named() -> None:
    broken = tensors()
    del broken["model.norm.weight"], broken["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"missing tensors: model\.norm\.weight, lm_head"):
        open_model(config(), MemoryWeights(broken))
    broken = tensors()
    broken["lm_head.weight"] = torch.zeros(40, 31)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape \[40, 31\].*\[40, 32\]"):
        open_model(config(), MemoryWeights(broken))
    # Ignored, a bias would only show in the answers.
    extra = tensors() | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}
    with pytest.raises(CheckpointError, match=r"llama model .* no use for: .*q_proj\.bias"):
        open_model(config(), MemoryWeights(extra))
    harmless = tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    assert open_model(config(), MemoryWeights(harmless)).config == config()
    with pytest.raises(CheckpointError, match="tensor nothing is missing"):
        MemoryWeights(tensors()).read("nothing")


def two_tensors(*at: int) -> dict[str, Any]:
    return {
        name: {"dtype": "F32", "shape": [2], "data_offsets": at[2 * place : 2 * place + 2]}
        for place, name in enumerate("tu")
    }


def text_header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(entries: dict[str, Any], data: bytes = b"") -> bytes:
    return text_header(json.dumps(entries).encode()) + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes are too few"),
        (struct.pack("<Q", 1 << 30) + b"{}", "header claims 1073741824 bytes, the limit is"),
        (struct.pack("<Q", 500) + b"{}", "truncated: header claims 500 bytes"),
        (text_header(b"[]"), "must be an object, got list"),
        (text_header(b"{]"), "header is not JSON"),
        (header({"t": 5}), "tensor t: entry is not an object"),
        (
            header({"t": {"dtype": "I4", "shape": [1], "data_offsets": [0, 1]}}, b"x"),
            "tensor t: dtype 'I4' is not supported, only F32, F16, BF16",
        ),
        (
            header({"t": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"x" * 15),
            "tensor t: truncated",
        ),
        (
            header({"t": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}, b"x" * 12),
            "12 bytes do not hold",
        ),
        (
            header({"t": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}, b"x" * 16),
            "must be lists of naturals",
        ),
        (
            text_header(b'{"t": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}'),
            "must be lists of naturals",
        ),
        (
            header({"t": {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]}}, b"x" * 16),
            "must be lists of naturals",
        ),
        (
            header({"t": {"dtype": "F32", "shape": [2**62], "data_offsets": [0, 16]}}, b"x" * 16),
            "16 bytes do not hold",
        ),
        (
            header({"t": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}, b"x" * 8),
            "-4 bytes do not hold",
        ),
        (header(two_tensors(0, 8, 4, 12), b"x" * 12), "tensor u overlaps tensor t"),
        (header(two_tensors(0, 8, 12, 20), b"x" * 20), "tensor u begins 4 bytes after tensor t"),
        (header(two_tensors(4, 12, 12, 20), b"x" * 20), "tensor t begins 4 bytes after the header"),
        (header(two_tensors(0, 8, 8, 16), b"x" * 17), "1 bytes after tensor u belong to no tensor"),
        (
            text_header(b'{"t": {"dtype": "F32"}, "t": {"dtype": "F16"}}'),
            "key 't' appears twice",
        ),
        (text_header(b'{"\xff"'), "header is not JSON: 'utf-8' codec"),
        (text_header(b"[" * 90_000), "header is not JSON: maximum recursion"),
    ],
)
def test_damaged_safetensors_say_where(content: bytes, message: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{message}"):
        load_model(folder)


def test_a_huge_header_is_neither_read_nor_given_memory(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 1 << 30))
        file.truncate(2 << 30)  # sparse: the header would fit
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="header claims 1073741824 bytes, the limit is"):
            load_model(folder)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_folders_that_lack_files_say_which(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "m").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_model(tmp_path / "m")
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load_model(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not read: it is pickled"):
        load_model(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"names gone\.safetensors, which is missing"):
        load_model(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../m/model.safetensors"}}))
    with pytest.raises(CheckpointError, match="is not a file name"):
        load_model(folder)
    index.write_text(json.dumps({"weight_map": {"a": 5}}))
    with pytest.raises(CheckpointError, match=r"index\.json: 5 is not a file name"):
        load_model(folder)
    index.write_text(json.dumps({"weight_map": []}))
    with pytest.raises(CheckpointError, match="weight_map must be an object"):
        load_model(folder)
    index.write_bytes(b'{"weight_map": "\xff"}')
    with pytest.raises(CheckpointError, match=r"index\.json is not UTF-8"):
        load_model(folder)
    (folder / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(CheckpointError, match=r"config\.json is not UTF-8"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match=r"config\.json: it is not JSON"):
        load_model(folder)
    (folder / "config.json").write_bytes(b" " * 1_000_001)
    with pytest.raises(CheckpointError, match=r"config\.json is larger than 1000000 bytes"):
        load_model(folder)


def test_a_tensor_in_two_shards_is_ambiguous(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    save_file({"lm_head.weight": torch.zeros(40, 32)}, folder / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "lm_head.weight": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is in one\.s.* and in two\.safet"):
        load_model(folder)


def test_flipped_header_bytes_never_escape_as_other_errors(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m")
    file = path / "model.safetensors"
    original = file.read_bytes()
    chance = random.Random(11)
    refused = 0
    for _ in range(300):
        damaged = bytearray(original)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(2000)] = chance.randrange(256)
        file.write_bytes(damaged[: chance.choice([None, None, chance.randrange(len(original))])])
        try:
            load_model(path)
        except (CheckpointError, UnsupportedModelError):
            refused += 1
    assert refused > 100


def test_random_models_are_reproducible() -> None:
    one, other = random_model(config(), seed=2), random_model(config(), seed=2)
    assert one.fingerprint == other.fingerprint
    assert one.fingerprint != random_model(config(), seed=3).fingerprint
    norm = one.weights.read("model.norm.weight")
    assert abs(float(np.mean(norm.numpy())) - 1) < 0.1
