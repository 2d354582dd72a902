"""Quantised checkpoints, packed bit by bit by the tests, give the weights that went in."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.kernels.linear import F16Weight, W4Weight, interleave_gate_up, unpack_w4
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.workers.backends.cpu import CpuBackend
from deepinfer.workers.gpu.weights import load_weights
from deepinfer.workers.model.config import ModelConfig, UnsupportedModelError
from deepinfer.workers.model.decoder import Decoder
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.runner import ModelRunner, SequenceSlice
from deepinfer.workers.model.weights import CheckpointError, LoadedModel, open_model
from deepinfer.workers.pool import PagedPool
from support.memory_weights import MemoryWeights
from support.packed_models import (
    PackedModel,
    Packer,
    awq,
    awq_config,
    compressed,
    compressed_config,
    gptq,
    gptq_config,
    gptq_v2,
    packed_model,
    words,
)

LLAMA = ModelConfig(
    family="llama", vocab_size=48, hidden_size=64, intermediate_size=96, layers=2, heads=4,
    kv_heads=2, head_dim=16, max_positions=64, rms_eps=1e-5, rope_theta=10_000.0,
)  # fmt: skip
QWEN2 = replace(LLAMA, family="qwen2", qkv_bias=True, tied_embeddings=True)
PHI3 = replace(LLAMA, family="phi3", fused_projections=True)

FORMATS: dict[str, tuple[ModelConfig, Packer, bool, dict[str, Any]]] = {
    "gptq": (LLAMA, gptq, True, gptq_config()),
    "gptq asymmetric": (QWEN2, gptq, False, gptq_config(sym=False)),
    "gptq v2": (LLAMA, gptq_v2, True, gptq_config(checkpoint_format="gptq_v2")),
    "gptq v2 asymmetric": (
        PHI3, gptq_v2, False, gptq_config(checkpoint_format="gptq_v2", sym=False),
    ),
    "gptq v2 called v1": (LLAMA, gptq_v2, True, gptq_config()),
    "awq": (QWEN2, awq, False, awq_config()),
    "awq fused": (PHI3, awq, False, awq_config()),
    "compressed-tensors": (QWEN2, compressed, True, compressed_config()),
    "compressed-tensors asymmetric": (
        LLAMA, compressed, False, compressed_config({"symmetric": False}),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def logits(model: LoadedModel) -> torch.Tensor:
    """Of a prompt and of a token behind it."""
    backend = CpuBackend(threads=1)
    decoder = Decoder(model, backend)
    pool = PagedPool(decoder.kv_layout(resolve_kv_dtype("fp16"), 16), 2)
    runner = ModelRunner(decoder, pool, backend)
    first = runner.forward([SequenceSlice([5, 3, 40, 7, 1], 0, [0], True)])
    return torch.cat((first, runner.forward([SequenceSlice([9], 5, [0], True)])))


def test_the_tests_packer_by_hand() -> None:
    eight = np.array([[1, 2, 3, 4, 5, 6, 7, 8]])
    assert words(eight, axis=1).tolist() == [[0x87654321 - (1 << 32)]]
    assert words(eight.T, axis=0).tolist() == [[0x87654321 - (1 << 32)]]
    # Outputs 0, 2, 4, 6, 1, 3, 5, 7 from the lowest nibble on.
    assert words(eight, axis=1, order=(0, 2, 4, 6, 1, 3, 5, 7)).tolist() == [
        [0x86427531 - (1 << 32)]
    ]


@functools.cache
def packed(case: str) -> PackedModel:
    """Made once; never changed."""
    config, pack, symmetric, _ = FORMATS[case]
    return packed_model(config, pack, symmetric=symmetric)


@pytest.mark.parametrize("case", FORMATS)
def test_weights_and_logits_are_those_of_the_dequantised_model(case: str, tmp_path: Path) -> None:
    config, made = FORMATS[case][0], packed(case)
    model = load_model(made.write(tmp_path / "m", FORMATS[case][3]))
    assert model.config == config
    for name, expected in made.plain.items():
        assert torch.equal(model.weights.read(name), expected), name
    assert torch.equal(logits(model), logits(open_model(config, MemoryWeights(made.plain))))


@pytest.mark.parametrize("case", FORMATS)
def test_a_card_gets_the_codes(case: str, tmp_path: Path) -> None:
    config, _, symmetric, quantization = FORMATS[case]
    made = packed(case)
    model = load_model(made.write(tmp_path / "m", quantization))
    layer = load_weights(model, torch.device("cpu"), 8).layers[1]
    codes = {
        name.removeprefix("model.layers.1.").removesuffix("_proj.weight"): torch.from_numpy(
            each.codes.astype(np.uint8)
        )
        for name, each in made.layers.items()
        if ".1." in name
    }
    if config.fused_projections:
        qkv, (gate, up) = codes["self_attn.qkv"], codes["mlp.gate_up"].chunk(2)
    else:
        qkv = torch.cat([codes[f"self_attn.{part}"] for part in "qkv"])
        gate, up = codes["mlp.gate"], codes["mlp.up"]
    expected = (qkv, codes["self_attn.o"], interleave_gate_up(gate, up), codes["mlp.down"])
    got = (layer.qkv, layer.out, layer.gate_up, layer.down)
    for weight, wanted in zip(got, expected, strict=True):
        assert isinstance(weight, W4Weight)
        assert torch.equal(unpack_w4(weight), wanted)
        assert (weight.zeros is None) == symmetric
    down = made.layers["model.layers.1.mlp.down_proj.weight"]
    assert isinstance(layer.down, W4Weight)
    assert torch.equal(layer.down.scales, torch.from_numpy(down.scales))
    if layer.down.zeros is not None:
        assert torch.equal(layer.down.zeros.long(), torch.from_numpy(down.zeros))
    assert (layer.qkv.bias is not None) == config.qkv_bias


def test_layers_may_differ(tmp_path: Path) -> None:
    """Groups of two sizes in one fused layer, a whole row for a scale, layers left in float16."""
    groups: dict[str, int | None] = {
        "model.layers.0.self_attn.k_proj": 64,
        "model.layers.0.mlp.down_proj": 96,
        "model.layers.1.self_attn.v_proj": None,
        "model.layers.1.mlp.gate_proj": None,
    }
    rules = {
        r"model\.layers\.0\.self_attn\.k_proj": {"group_size": 64},
        r"+:model\.layers\.0\.mlp\.down_proj": {"group_size": -1},
        r"-:model\.layers\.1\.(self_attn\.v|mlp\.gate)_proj": {},
    }
    made = packed_model(LLAMA, gptq, symmetric=False, group=lambda module: groups.get(module, 32))
    folder = made.write(tmp_path / "m", gptq_config(sym=False, dynamic=rules))
    model = load_model(folder)
    for name, expected in made.plain.items():
        assert torch.equal(model.weights.read(name), expected), name
    first, second = load_weights(model, torch.device("cpu"), 8).layers
    groups_of = [w.group for w in (first.qkv, first.down) if isinstance(w, W4Weight)]
    assert groups_of == [32, 32]
    for weight, names in (
        (second.qkv, [f"self_attn.{part}" for part in "qkv"]),
        (second.gate_up, ["mlp.gate", "mlp.up"]),
    ):
        assert isinstance(weight, F16Weight)
        parts = [made.plain[f"model.layers.1.{name}_proj.weight"].half() for name in names]
        whole = interleave_gate_up(*parts) if len(parts) == 2 else torch.cat(parts)
        assert torch.equal(weight.weight, whole)


def test_compressed_tensors_leaves_out_what_it_ignores(tmp_path: Path) -> None:
    made = packed_model(
        LLAMA,
        compressed,
        symmetric=True,
        group=lambda module: None if "layers.1" in module else 32,
    )
    made.tensors["model.layers.0.mlp.up_proj.weight_scale"] = made.tensors[
        "model.layers.0.mlp.up_proj.weight_scale"
    ].bfloat16()
    config = compressed_config(ignore=["lm_head", r"re:.*layers\.1\..*"])
    model = load_model(made.write(tmp_path / "m", config))
    up = "model.layers.0.mlp.up_proj.weight"
    read = model.weights.read_quantized(up)
    assert read is not None
    assert torch.equal(read.scales, torch.from_numpy(made.layers[up].scales).bfloat16().half())
    assert model.weights.read_quantized("model.layers.1.mlp.up_proj.weight") is None
    assert model.weights.read_quantized("model.norm.weight") is None


def test_a_packed_head_is_read(tmp_path: Path) -> None:
    made = packed_model(LLAMA, gptq, symmetric=True)
    head = packed_model(replace(LLAMA, intermediate_size=48), gptq, symmetric=True)
    layer = head.layers["model.layers.0.mlp.up_proj.weight"]
    del made.tensors["lm_head.weight"]
    made.tensors.update({f"lm_head.{k}": torch.from_numpy(v) for k, v in gptq(layer).items()})
    model = load_model(made.write(tmp_path / "m", gptq_config(lm_head=True)))
    assert torch.equal(model.weights.read("lm_head.weight"), layer.weight())


def test_biases_of_zeros_are_left_out(tmp_path: Path) -> None:
    made = packed_model(QWEN2, gptq, symmetric=True)
    name = "model.layers.0.self_attn.o_proj.bias"
    made.tensors[name] = torch.zeros(64, dtype=torch.float16)
    model = load_model(made.write(tmp_path / "m", gptq_config()))
    assert name not in model.weights.shapes()
    made.tensors[name][3] = 0.5
    folder = made.write(tmp_path / "n", gptq_config())
    with pytest.raises(CheckpointError, match=r"no use for: .*o_proj\.bias"):
        load_model(folder)


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True}),
    ],
)
def test_a_packers_own_file_will_do(file: str, values: dict[str, Any], tmp_path: Path) -> None:
    pack = gptq if file == "quantize_config.json" else awq
    made = packed_model(LLAMA, pack, symmetric=pack is gptq)
    folder = made.write(tmp_path / "m", None)
    with pytest.raises(CheckpointError, match=r"dtype 'I32' .*has a quantization_config"):
        load_model(folder)
    (folder / file).write_text(json.dumps(values))
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(load_model(folder).weights.read(name), made.plain[name])
    (folder / file).write_text(json.dumps({**values, "bits": 8, "w_bit": 8}))
    with pytest.raises(UnsupportedModelError, match=f"{file}: .*bits? must be 4, got 8"):
        load_model(folder)


def test_fingerprints_tell_scales_and_meanings_apart(tmp_path: Path) -> None:
    made = packed_model(LLAMA, gptq, symmetric=False)
    seen = set()
    for number, form in enumerate(("gptq", "gptq_v2")):
        config = gptq_config(sym=False, checkpoint_format=form)
        seen.add(load_model(made.write(tmp_path / f"a{number}", config)).fingerprint)
    made.tensors["model.layers.1.mlp.up_proj.scales"] *= 2
    seen.add(load_model(made.write(tmp_path / "b", gptq_config(sym=False))).fingerprint)
    assert len(seen) == 3


def test_progress_counts_what_is_packed(tmp_path: Path) -> None:
    made = packed_model(LLAMA, awq, symmetric=False)
    seen: list[tuple[int, int]] = []
    folder = made.write(tmp_path / "m", awq_config())
    model = load_model(folder, progress=lambda done, total: seen.append((done, total)))
    stored = sum(tensor.nbytes for tensor in made.tensors.values())
    assert seen[0][0] == 0
    assert stored <= seen[0][1] < 1.1 * stored
    Decoder(model, CpuBackend(threads=1))
    assert seen[-1] == (seen[0][1], seen[0][1])
    del seen[:]
    model = load_model(folder, progress=lambda done, total: seen.append((done, total)))
    load_weights(model, torch.device("cpu"), 8)
    assert seen[-1] == (seen[0][1], seen[0][1])


K = "model.layers.0.self_attn.k_proj"
Damage = Callable[[dict[str, torch.Tensor]], object]


def put(suffix: str, tensor: torch.Tensor | None) -> Damage:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(f"{K}.{suffix}", None)
        if tensor is not None:
            tensors[f"{K}.{suffix}"] = tensor

    return change


DAMAGES: dict[str, tuple[str, Damage, str]] = {
    "order": (
        "gptq asymmetric", put("g_idx", torch.arange(64, dtype=torch.int32) % 2),
        r"k_proj\.g_idx is not in order: grouped desc_act is not supported",
    ),
    "not symmetric": (
        "gptq", put("qzeros", torch.full((2, 4), 0x77777776, dtype=torch.int32)),
        r"sym is true, but tensor .*k_proj\.qzeros holds zero points other than 8",
    ),
    "no zero points": ("awq", put("qzeros", None), r"missing tensors: .*k_proj\.qzeros"),
    "no scales": ("gptq", put("scales", None), r"missing tensors: .*k_proj\.scales"),
    "scales' shape": (
        "gptq", put("scales", torch.ones(1, 32).half()),
        r"scales has shape \[1, 32\]; with 32 outputs and 64 inputs in groups of 32 .* \[2, 32\]",
    ),
    "scales' dtype": (
        "awq", put("scales", torch.ones(2, 32, dtype=torch.int32)),
        r"k_proj\.scales is torch\.int32, it must be torch\.float16",
    ),
    "codes' dtype": (
        "awq", put("qweight", torch.ones(64, 4)),
        r"k_proj\.qweight is torch\.float32, it must be torch\.int32",
    ),
    "codes' shape": (
        "gptq", put("qweight", torch.ones(8, 33, dtype=torch.int32)),
        r"k_proj\.qzeros has shape \[2, 4\]; with 33 outputs",
    ),
    "no matrix": (
        "gptq", put("qweight", torch.ones(8, dtype=torch.int32)),
        r"k_proj\.qweight is no matrix",
    ),
    "scales of NaN": (
        "compressed-tensors", put("weight_scale", torch.full((32, 2), torch.nan)),
        r"k_proj\.weight_scale holds scales that float16 cannot",
    ),
    "scales too large": (
        "compressed-tensors", put("weight_scale", torch.full((32, 2), 1e5)),
        r"k_proj\.weight_scale holds scales that float16 cannot",
    ),
    "another shape": (
        "compressed-tensors", put("weight_shape", torch.tensor([32, 63])),
        r"k_proj\.weight_shape says \[32, 63\], the codes are \[32, 64\]",
    ),
    "actorder": (
        "compressed-tensors", put("weight_g_idx", torch.zeros(64, dtype=torch.int32)),
        r"actorder 'group' \(tensor .*k_proj\.weight_g_idx\) is not supported: only null",
    ),
    "zero points too many": (
        "compressed-tensors", put("weight_zero_point", torch.zeros(3, 2, dtype=torch.int32)),
        r"k_proj\.weight_zero_point has shape \[3, 2\]; .* \[4, 2\]",
    ),
    "both": ("awq", put("weight", torch.ones(32, 64)), "has both a weight and a qweight"),
    "integers for a norm": (
        "gptq", lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}),
        r"tensor model\.norm\.weight is torch\.int32, which is no weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(damage: str, tmp_path: Path) -> None:
    case, change, message = DAMAGES[damage]
    made = replace(packed(case), tensors=dict(packed(case).tensors))
    change(made.tensors)
    folder = made.write(tmp_path / "m", FORMATS[case][3])
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        Decoder(load_model(folder), CpuBackend(threads=1))


def test_config_and_tensors_must_agree(tmp_path: Path) -> None:
    made = packed_model(LLAMA, awq, symmetric=False)
    with pytest.raises(CheckpointError, match=r"k_proj\.qweight is packed, but .*'self_attn\.k"):
        load_model(made.write(tmp_path / "a", awq_config(modules_to_not_convert=["self_attn.k"])))
    with pytest.raises(UnsupportedModelError, match="group_size 64 does not fit the 96 inputs"):
        load_model(made.write(tmp_path / "b", awq_config(group_size=64)))
    with pytest.raises(CheckpointError, match=r"says compressed-tensors, but no tensor is .*_pack"):
        load_model(made.write(tmp_path / "c", compressed_config()))
