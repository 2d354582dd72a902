"""GGUF files: the weights they were made from, and what damaged or foreign files say.

The writer here follows llama.cpp's converter: its names, its row order of Llama's q and k, its
keys for RoPE scalings.
"""

from __future__ import annotations

import dataclasses
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf.quants import dequantize, quantize

from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.model.config import ModelConfig, UnsupportedModelError
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.weights import (
    CheckpointError,
    LoadedModel,
    expected_shapes,
)
from support.memory_weights import random_model

Kind: TypeAlias = gguf.GGMLQuantizationType
Metadata = Callable[[gguf.GGUFWriter], None]

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
PLAIN = ModelConfig(
    family="llama", vocab_size=40, hidden_size=32, intermediate_size=64, layers=2, heads=4,
    kv_heads=2, head_dim=8, max_positions=128, rms_eps=2.0**-17, rope_theta=10_000.0,
)  # fmt: skip
LIMIT = "longrope's original context is 32"
CASES: dict[str, ModelConfig] = {
    "llama": PLAIN,
    "llama-biases": dataclasses.replace(PLAIN, qkv_bias=True, o_bias=True, mlp_bias=True),
    "llama-tied": dataclasses.replace(PLAIN, tied_embeddings=True, rope_theta=500_000.0),
    "llama-wide-heads": dataclasses.replace(PLAIN, head_dim=32, kv_heads=1),
    "llama3": dataclasses.replace(PLAIN, rope_divisors=(1.0, 1.5, 4.0, 8.0)),
    "llama-linear": dataclasses.replace(PLAIN, rope_divisors=(4.0, 4.0, 4.0, 4.0)),
    "qwen2": dataclasses.replace(PLAIN, family="qwen2", qkv_bias=True),
    "qwen3": dataclasses.replace(PLAIN, family="qwen3", qk_norm=True, head_dim=16),
    "phi3": dataclasses.replace(PLAIN, family="phi3", fused_projections=True),
    "phi3-window": dataclasses.replace(
        PLAIN, family="phi3", fused_projections=True, max_positions=48,
        positions_limit="sliding_window is 48",
    ),
    "phi3-longrope": dataclasses.replace(
        PLAIN, family="phi3", fused_projections=True, rotary_dim=4, rope_divisors=(1.0, 2.5),
        rope_magnitude=1.25, max_positions=32, positions_limit=LIMIT,
    ),
}  # fmt: skip


def kind_of(name: str) -> Kind:
    kind: Kind = getattr(Kind, name)
    return kind


def tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    weights = random_model(config, seed=2).weights
    return {name: weights.read(name) for name in weights.shapes()}


def permute_like_llama_cpp(weight: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """The converter's row order for Llama's q and k: the halves of each head interleaved."""
    rows = weight.shape[0]
    halves = weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def add_rope(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    divisors = config.rope_divisors
    if divisors is None:
        return
    values = np.array(divisors, dtype=np.float32)
    if config.family == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.max_positions)
        writer.add_rope_scaling_attn_factors(config.rope_magnitude)
        writer.add_tensor("rope_factors_long.weight", values + 1)
        writer.add_tensor("rope_factors_short.weight", values)
    elif len(set(divisors)) == 1:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(divisors[0])
    else:
        writer.add_tensor("rope_freqs.weight", values)


def write_gguf(
    path: Path,
    config: ModelConfig = PLAIN,
    kind: Kind = Kind.F32,
    metadata: Metadata = lambda _: None,
    *,
    architecture: str | None = None,
    without: str | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture or config.family)
    writer.add_block_count(config.layers)
    writer.add_context_length(128)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.rope_dim)
    if config.head_dim * config.heads != config.hidden_size:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if (config.positions_limit or "").startswith("sliding"):
        writer.add_sliding_window(config.max_positions)
    writer.add_token_list([f"token{at}" for at in range(config.vocab_size)])
    add_rope(writer, config)
    metadata(writer)
    for name, tensor in tensors(config).items():
        stem, _, suffix = name.rpartition(".")
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        values = tensor.numpy()
        if config.family == "llama" and stem.endswith(("q_proj", "k_proj")):
            heads = config.heads if stem.endswith("q_proj") else config.kv_heads
            values = permute_like_llama_cpp(values, heads)
        stored = f"{prefix}{NAMES[stem]}.{suffix}"
        if stored == without:
            continue
        if values.ndim == 2:
            writer.add_tensor(stored, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("case", CASES)
def test_gguf_gives_the_model_it_was_made_from(case: str, tmp_path: Path) -> None:
    model = load_model(write_gguf(tmp_path / "m.gguf", CASES[case]))
    assert model.config == CASES[case]
    expected = tensors(CASES[case])
    for name in expected_shapes(model.config):
        assert torch.equal(model.weights.read(name), expected[name]), name


def test_the_name_of_the_file_does_not_matter(tmp_path: Path) -> None:
    # A hub's cache keeps files under their hashes.
    assert load_model(write_gguf(tmp_path / "b1946ac92492d234")).config == PLAIN


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
def test_quantised_gguf_is_dequantised(kind: str, tmp_path: Path) -> None:
    config = CASES["qwen2"]
    model = load_model(write_gguf(tmp_path / "m.gguf", config, kind_of(kind)))
    original = tensors(config)
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
        values = original[name].numpy()
        expected = torch.from_numpy(dequantize(quantize(values, kind_of(kind)), kind_of(kind)))
        assert torch.equal(model.weights.read(name).float(), expected)
        rows = torch.tensor([3, 0, 31, 3])
        looked_up = model.weights.rows(name)(rows)
        assert looked_up.dtype == torch.float32
        assert torch.equal(looked_up, expected[rows])
        bits = {"Q8_0": 7, "Q4_0": 3, "Q4_1": 4, "Q5_0": 4, "Q5_1": 5, "F16": 11, "BF16": 8}[kind]
        assert float((expected - original[name]).abs().max()) < 2.0**-bits * values.max() * 2


@pytest.mark.parametrize("kind", [kind.name for kind in gguf.GGML_QUANT_SIZES])
def test_every_type_is_dequantised_or_refused_by_name(kind: str, tmp_path: Path) -> None:
    """The types that this package cannot write: any bits are some weights."""
    block, size = gguf.GGML_QUANT_SIZES[kind_of(kind)]
    config = dataclasses.replace(PLAIN, hidden_size=256, head_dim=64)
    chance = np.random.default_rng(3)

    def any_bits(writer: gguf.GGUFWriter) -> None:
        bits = chance.integers(0, 60, (64, 256 // block * size), dtype=np.uint8)
        writer.add_tensor("blk.0.ffn_up.weight", bits, raw_dtype=kind_of(kind))

    path = write_gguf(tmp_path / "m.gguf", config, metadata=any_bits, without="blk.0.ffn_up.weight")
    if kind in ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "Q1_0"):
        words = rf"m.gguf: tensor blk.0.ffn_up.weight is stored as {kind}, which is not supported; "
        with pytest.raises(UnsupportedModelError, match=words + "known: F32, F16, Q4_0"):
            load_model(path)
        return
    model = load_model(path)
    weights = model.weights.read("model.layers.0.mlp.up_proj.weight")
    assert weights.shape == (64, 256)
    rows = torch.tensor([63, 1])
    assert torch.equal(
        model.weights.rows("model.layers.0.mlp.up_proj.weight")(rows), weights[rows].float()
    )


def test_progress_counts_the_bytes_that_a_decoder_reads(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = write_gguf(tmp_path / "m.gguf", CASES["llama3"], Kind.Q8_0)
    model = load_model(path, progress=lambda done, total: seen.append((done, total)))
    before = torch.get_num_threads()
    Decoder(model, CpuBackend(threads=1))
    torch.set_num_threads(before)
    total = sum(model.weights.stored(name)[0].nbytes for name in expected_shapes(model.config))
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == ((0, total), (total, total))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "too short"),
        (lambda data: data[:10], "too short"),
        (lambda data: b"PK\3\4" + data[4:], r"begins with b'PK\\x03\\x04', not b'GGUF'"),
        (lambda data: data[:4] + struct.pack("<I", 7) + data[8:], "version 7"),
        (lambda data: data[:8] + struct.pack("<Q", 1 << 40) + data[16:], "are too many"),
        (lambda data: data[:200], "truncated|exceeds the file"),
        (lambda data: data[: len(data) // 2], "truncated: tensor"),
        (lambda data: data[:-100], "truncated: tensor"),
        (lambda data: data.replace(b"output_norm.weight", b"output_n\xffrm.weight"), "utf-8"),
        (
            lambda data: data.replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"),
            r"tensor blk\.0\.ffn_up\.weight appears twice",
        ),
    ],
)
def test_damaged_gguf_says_where(
    change: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match=rf"m\.gguf: .*({message})"):
        load_model(path)


def test_overlapping_tensors_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    # Behind the name: dimensions, two lengths, the type, then the offset.
    at = data.index(name) + len(name) + 4 + 16 + 4
    data[at : at + 8] = struct.pack("<Q", 64)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"m\.gguf: .*tensor .* overlaps tensor"):
        load_model(path)
    data[at - 4 : at] = struct.pack("<I", 99)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"ffn_up\.weight is of type 99, which is unknown"):
        load_model(path)


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), UnsupportedModelError,
         "RoPE scaling 'yarn' is not supported in GGUF files; known: none, linear, longrope"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR), CheckpointError,
         r"llama\.rope\.scaling\.factor must be a number; it is missing"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), CheckpointError,
         r"rope_factors_short\.weight is missing"),
        (lambda w: w.add_float32("llama.rope.scale_linear", 2.0), UnsupportedModelError,
         "RoPE scaling 'scale_linear'"),
        (lambda w: w.add_expert_count(8), UnsupportedModelError,
         r"mixture of experts \(expert_count = 8\)"),
        (lambda w: w.add_value_length(4), UnsupportedModelError,
         "value heads of 4 beside key heads of 8"),
        (lambda w: w.add_uint16("split.count", 3), UnsupportedModelError,
         "one of 3 parts: split GGUF is not supported"),
        (lambda w: w.add_uint32("llama.vocab_size", 41), CheckpointError,
         r"embed_tokens\.weight has shape \[40, 32\], config asks for \[41, 32\]"),
        (lambda w: w.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32)),
         CheckpointError, r"llama model of this config has no use for: blk\.0\.attn_sinks"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.zeros(3, np.float32)),
         CheckpointError, r"rope_freqs\.weight must be F32 \[4\], got F32 \[3\]"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.zeros(4, np.float32)),
         UnsupportedModelError, "rope_divisors must be a positive number, got 0.0"),
    ],
)  # fmt: skip
def test_unsupported_gguf_is_refused_by_name(
    metadata: Metadata, error: type[ValueError], message: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(error, match=rf"m\.gguf: .*{message}"):
        load_model(path)


def test_foreign_gguf_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", architecture="gemma3")
    with pytest.raises(UnsupportedModelError, match=r"architecture 'gemma3' .* known: llama"):
        load_model(path)
    partial = dataclasses.replace(PLAIN, rotary_dim=4)
    with pytest.raises(UnsupportedModelError, match=r"rope\.dimension_count 4 of head_dim 8"):
        load_model(write_gguf(tmp_path / "m.gguf", partial))
    path = write_gguf(tmp_path / "m.gguf", without="blk.1.ffn_norm.weight")
    with pytest.raises(CheckpointError, match=r"m\.gguf: missing tensors: .*layers\.1\.post_att"):
        load_model(path)


def test_head_counts_by_layer_are_named(tmp_path: Path) -> None:
    class Writer(gguf.GGUFWriter):
        """Gives each layer its own number of KV heads, as OpenELM has."""

        def add_head_count_kv(self, count: Any) -> None:
            super().add_head_count_kv([count, count])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", Writer)
        path = write_gguf(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match="head_count_kv must be one value, got a list of 2"):
        load_model(path)


def test_flipped_bytes_never_escape_as_other_errors(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    original = path.read_bytes()
    chance = random.Random(11)
    refused = 0
    for _ in range(300):
        damaged = bytearray(original)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(2000)] = chance.randrange(256)
        path.write_bytes(damaged[: chance.choice([None, None, chance.randrange(len(original))])])
        try:
            model = load_model(path)
        except (CheckpointError, UnsupportedModelError):
            refused += 1
        else:
            assert isinstance(model, LoadedModel)
    assert refused > 100
