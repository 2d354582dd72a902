"""Checkpoint files: GGUF against safetensors, and what damaged or foreign files say."""

from __future__ import annotations

import dataclasses
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from deepinfer.workers.model.config import ModelConfig, UnsupportedModelError
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.weights import (
    CheckpointError,
    MemoryWeights,
    expected_shapes,
    open_model,
    random_model,
)

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
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def config(family: str = "llama") -> ModelConfig:
    return ModelConfig(
        family=family, vocab_size=40, hidden_size=32, intermediate_size=64, layers=2, heads=4,
        kv_heads=2, head_dim=8, max_positions=128, rms_eps=1e-5, rope_theta=10_000.0,
        qkv_bias=family == "qwen2",
    )  # fmt: skip


def tensors(family: str = "llama") -> dict[str, torch.Tensor]:
    weights = random_model(config(family), seed=2).weights
    return {name: weights.read(name) for name in weights.shapes()}


def write_folder(folder: Path, changes: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HF_CONFIG | (changes or {})))
    save_file(tensors(), folder / "model.safetensors")
    return folder


def permute_like_llama_cpp(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """The converter's row order for Llama's q and k: the halves of each head interleaved."""
    rows = weight.shape[0]
    halves = weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    family: str = "llama",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: Callable[[gguf.GGUFWriter], None] = lambda _: None,
) -> Path:
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"token{at}" for at in range(40)])
    metadata(writer)
    for name, tensor in tensors(family).items():
        stem, _, suffix = name.rpartition(".")
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        values = tensor.numpy()
        if family == "llama" and stem.endswith(("q_proj", "k_proj")):
            values = permute_like_llama_cpp(values, 4 if stem.endswith("q_proj") else 2)
        stored = f"{prefix}{GGUF_NAMES[stem]}.{suffix}"
        if values.ndim == 2:
            writer.add_tensor(stored, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gguf_gives_the_weights_it_was_made_from(family: str, tmp_path: Path) -> None:
    model = load_model(write_gguf(tmp_path / "m.gguf", family))
    # GGUF keeps the epsilon as float32.
    assert model.config == dataclasses.replace(config(family), rms_eps=float(np.float32(1e-5)))
    expected = tensors(family)
    for name in expected_shapes(model.config):
        assert torch.equal(model.weights.read(name), expected[name]), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantised_gguf_is_dequantised(kind: str, tmp_path: Path) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    model = load_model(write_gguf(tmp_path / "m.gguf", "qwen2", quantisation))
    original = tensors("qwen2")
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
        values = original[name].numpy()
        expected = torch.from_numpy(dequantize(quantize(values, quantisation), quantisation))
        assert torch.equal(model.weights.read(name).float(), expected)
        step = {"Q8_0": 2**-7, "Q4_1": 2**-4, "F16": 2**-11, "BF16": 2**-8}[kind]
        assert float((expected - original[name]).abs().max()) < step * values.max() * 2


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_progress_counts_bytes_to_the_end(kind: str, tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m") if kind == "folder" else write_gguf(tmp_path / "m.gguf")
    seen: list[tuple[int, int]] = []
    model = load_model(path, progress=lambda done, total: seen.append((done, total)))
    assert seen == []
    for name in model.weights.shapes():
        model.weights.read(name)
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM.*LlamaForCausalLM.*Qwen2"),
        ({"architectures": None}, "architectures must name one of"),
        ({"num_local_experts": 8}, "mixture of experts"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE scaling 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "RoPE scaling 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "'llama3' lacks 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 64},
            "sliding_window 64 is shorter",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64,
             "use_sliding_window": True},
            "sliding_window 64 is shorter",
        ),
        ({"hidden_size": "32"}, "hidden_size must be an integer, got '32'"),
        ({"num_key_value_heads": 3}, r"heads \(4\) must be a multiple of kv_heads \(3\)"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({"rms_norm_eps": 0.0}, "rms_eps must be a positive number"),
    ],
)  # fmt: skip
def test_unsupported_configs_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(write_folder(tmp_path / "m", changes))


def test_a_window_that_never_applies_is_no_obstacle(tmp_path: Path) -> None:
    harmless: list[dict[str, Any]] = [
        {"sliding_window": 128, "architectures": ["MistralForCausalLM"]},
        {"sliding_window": 64, "use_sliding_window": False},
        {"sliding_window": 64},
    ]
    for at, changes in enumerate(harmless):
        assert load_model(write_folder(tmp_path / str(at), changes)).config.layers == 2


def test_missing_and_misshapen_tensors_are_named() -> None:
    broken = tensors()
    del broken["model.norm.weight"], broken["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"missing tensors: model\.norm\.weight, lm_head"):
        open_model(config(), MemoryWeights(broken))
    broken = tensors()
    broken["lm_head.weight"] = torch.zeros(40, 31)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape \[40, 31\].*\[40, 32\]"):
        open_model(config(), MemoryWeights(broken))
    with pytest.raises(CheckpointError, match="tensor nothing is missing"):
        MemoryWeights(tensors()).read("nothing")


def header(entries: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes are too few"),
        (struct.pack("<Q", 1 << 30) + b"{}", "header claims 1073741824 bytes, the limit is"),
        (struct.pack("<Q", 500) + b"{}", "truncated: header claims 500 bytes"),
        (struct.pack("<Q", 2) + b"[]", "must be an object, got list"),
        (struct.pack("<Q", 2) + b"{]", "header is not JSON"),
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
    ],
)
def test_damaged_safetensors_say_where(content: bytes, message: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{message}"):
        load_model(folder)


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
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"names gone\.safetensors, which is missing"):
        load_model(folder)
    index.write_text(json.dumps({"weight_map": {"a": "../m/model.safetensors"}}))
    with pytest.raises(CheckpointError, match="is not a file name"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match=r"config\.json is not JSON"):
        load_model(folder)
    (tmp_path / "m.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"neither a folder nor a \.gguf file"):
        load_model(tmp_path / "m.bin")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"GGML" + data[4:], "begins with b'GGML'"),
        (lambda data: data[:4] + struct.pack("<I", 7) + data[8:], "version 7"),
        (lambda data: data[:8] + struct.pack("<Q", 1 << 40) + data[16:], "are too many"),
        (lambda data: data[:10], "too short"),
        (lambda data: data[:200], "truncated|exceeds the file"),
        (lambda data: data[:-100], "truncated: tensor"),
    ],
)
def test_damaged_gguf_says_where(
    change: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match=message):
        load_model(path)


def test_foreign_gguf_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"architecture 'gemma3' .* known: llama"):
        load_model(write_gguf(tmp_path / "a.gguf", "gemma3"))
    path = write_gguf(
        tmp_path / "b.gguf",
        metadata=lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN),
    )
    with pytest.raises(UnsupportedModelError, match="RoPE scaling 'yarn'"):
        load_model(path)
    path = write_gguf(
        tmp_path / "c.gguf", metadata=lambda writer: writer.add_rope_dimension_count(4)
    )
    with pytest.raises(UnsupportedModelError, match=r"rope\.dimension_count 4 of head_dim 8"):
        load_model(path)


@pytest.mark.parametrize("name", ["m.gguf", "m"])
def test_flipped_header_bytes_never_escape_as_other_errors(name: str, tmp_path: Path) -> None:
    if name == "m":
        path = write_folder(tmp_path / "m")
        file = path / "model.safetensors"
    else:
        file = path = write_gguf(tmp_path / "m.gguf")
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
