"""Decoders of model files: safetensors, GGUF, ``config.json``, what it says of packed weights."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from deepinfer.deploy.fuzz.messages import decoding
from deepinfer.deploy.fuzz.shapes import Bytes, Json, Led
from deepinfer.deploy.fuzz.target import Case, Target
from deepinfer.text.errors import TokenizerError
from deepinfer.text.gguf_metadata import read_gguf_metadata
from deepinfer.workers.model.config import UnsupportedModelError
from deepinfer.workers.model.gguf_loader import load_gguf
from deepinfer.workers.model.hf_config import config_json
from deepinfer.workers.model.load import load_model
from deepinfer.workers.model.quantization import NestedFormat, parse_quantization
from deepinfer.workers.model.safetensors_loader import (
    FLOATS,
    INTEGERS,
    PLANES,
    SafetensorsFile,
    SafetensorsWeights,
    parse_object,
)
from deepinfer.workers.model.weights import CheckpointError, expected_shapes

LLAMA: Final[Mapping[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 12,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
"""The smallest model that there is."""


def file_of(read: Callable[[Path], object], name: str) -> Callable[[Path], Any]:
    """A target that reads a file of this name; each input is a new file."""

    @contextmanager
    def opened(folder: Path) -> Iterator[Case]:
        path = folder / name

        def case(data: bytes) -> object:
            path.unlink(missing_ok=True)  # whoever maps the one before keeps it
            path.write_bytes(data)
            return read(path)

        yield case

    return opened


# ---- safetensors ---------------------------------------------------------------------------

WIDTHS: Final = {"F32": 4, "F16": 2, "BF16": 2, "I32": 4, "I64": 8, "U8": 1, "I8": 1}


def safetensors_of(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> bytes:
    """A file of zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + WIDTHS[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(at)


def _safetensors(path: Path) -> None:
    for dtypes in (FLOATS, FLOATS | INTEGERS, FLOATS | PLANES):
        try:
            file = SafetensorsFile(path, dtypes)
        except CheckpointError:
            if dtypes is FLOATS:
                continue  # it may hold integers
            raise
        weights = SafetensorsWeights([file])
        for name, shape in weights.shapes().items():
            assert tuple(weights.read(name).shape) == shape
            assert (
                sum(map(len, weights.stored(name)))
                == file.entries[name].end - file.entries[name].begin
            )


def _safetensors_seeds() -> list[bytes]:
    floats = {"a": ("F32", (2, 3)), "b": ("F16", (4,)), "c": ("BF16", ()), "d": ("F32", (0, 5))}
    integers = {"x.qweight": ("I32", (2, 2)), "x.scales": ("F16", (1, 2)), "g": ("I64", (2,))}
    planes = {"x.upper": ("U8", (4, 2)), "x.lower": ("U8", (4, 2)), "x.e": ("I8", (2,))}
    return [safetensors_of(each) for each in (floats, integers, planes, {})]


def _index(data: bytes) -> object:
    return parse_object(data, "index")


# ---- config.json ---------------------------------------------------------------------------

GPTQ: Final = {
    "quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False,
}  # fmt: skip
AWQ: Final = {
    "quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm",
    "modules_to_not_convert": ["lm_head"],
}  # fmt: skip
COMPRESSED: Final = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*gate.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                "group_size": 128, "actorder": None,
            },
        }
    },
}  # fmt: skip
NESTED: Final = NestedFormat(layer_order=(0,)).to_hf()
PACKINGS: Final = (GPTQ, AWQ, COMPRESSED, NESTED)


def configs() -> list[bytes]:
    """A ``config.json`` of every family, with every kind of RoPE and of packing, Llama's first."""
    llama3 = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    long = {"type": "longrope", "long_factor": [2.0] * 4, "short_factor": [1.0] * 4}
    changes: list[dict[str, Any]] = [
        {},
        {"rope_scaling": llama3},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "attention_bias": True},
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 32},
        {"architectures": ["Qwen3ForCausalLM"], "rope_parameters": {"rope_theta": 1e6}},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 4},
        {"architectures": ["Phi3ForCausalLM"], "rope_scaling": long, "partial_rotary_factor": 1.0},
        *({"quantization_config": packing} for packing in PACKINGS),
    ]
    return [json.dumps(dict(LLAMA) | change).encode() for change in changes]


def _config(data: bytes) -> object:
    return config_json(data.decode(errors="replace"))


def _quantization(data: bytes) -> None:
    values = parse_object(data, "quantization_config")
    found = parse_quantization(values, where="quantization_config")
    if not isinstance(found, NestedFormat):
        for module in ("lm_head", "model.layers.0.mlp.gate_proj", "x" * 50 + "!"):
            found.rule(module)


@contextmanager
def _checkpoint(folder: Path) -> Iterator[Case]:
    """A folder with the weights of ``LLAMA`` and whatever ``config.json``."""
    config = config_json(json.dumps(LLAMA))
    shapes = {name: ("F16", shape) for name, shape in expected_shapes(config).items()}
    (folder / "model.safetensors").write_bytes(safetensors_of(shapes))

    def case(data: bytes) -> object:
        (folder / "config.json").write_bytes(data)
        return load_model(folder)

    yield case


# ---- GGUF ----------------------------------------------------------------------------------

_GGUF_NUMBERS: Final = {int: (4, "<I"), float: (6, "<f"), bool: (7, "<?")}


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _gguf_value(value: object) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, list):
        if isinstance(value[0], str):
            packed = b"".join(map(_string, value))
            return struct.pack("<IIQ", 9, 8, len(value)) + packed
        kind, code = _GGUF_NUMBERS[type(value[0])]
        packed = b"".join(struct.pack(code, item) for item in value)
        return struct.pack("<IIQ", 9, kind, len(value)) + packed
    kind, code = _GGUF_NUMBERS[type(value)]
    return struct.pack("<I", kind) + struct.pack(code, value)


def gguf_of(
    metadata: Mapping[str, object], tensors: Mapping[str, tuple[int, Sequence[int]]] | None = None
) -> bytes:
    """A file of zeros; a tensor is its type, 0 or 1 for F32 and F16, and its shape."""
    tensors = tensors or {}
    made = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    made += b"".join(_string(key) + _gguf_value(value) for key, value in metadata.items())
    at = 0
    for name, (kind, shape) in tensors.items():
        made += _string(name) + struct.pack("<I", len(shape))
        made += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", kind, at)
        at += -(-math.prod(shape) * (2 if kind else 4) // 32) * 32
    return made + bytes(-len(made) % 32 + at)


def gguf_model() -> bytes:
    """A Llama of one layer."""
    metadata = {
        "general.architecture": "llama", "general.alignment": 32, "llama.block_count": 1,
        "llama.context_length": 64, "llama.embedding_length": 16, "llama.feed_forward_length": 24,
        "llama.attention.head_count": 2, "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": 8, "llama.vocab_size": 12,
        "tokenizer.ggml.tokens": ["a", "b", "c"] * 4, "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0,
    }  # fmt: skip
    shapes: dict[str, tuple[int, Sequence[int]]] = {
        "token_embd.weight": (1, (12, 16)), "output_norm.weight": (0, (16,)),
        "blk.0.attn_norm.weight": (0, (16,)), "blk.0.attn_q.weight": (1, (16, 16)),
        "blk.0.attn_k.weight": (1, (8, 16)), "blk.0.attn_v.weight": (1, (8, 16)),
        "blk.0.attn_output.weight": (1, (16, 16)), "blk.0.ffn_norm.weight": (0, (16,)),
        "blk.0.ffn_gate.weight": (1, (24, 16)), "blk.0.ffn_up.weight": (1, (24, 16)),
        "blk.0.ffn_down.weight": (1, (16, 24)), "rope_freqs.weight": (0, (4,)),
    }  # fmt: skip
    return gguf_of(metadata, shapes)


def _gguf_model(path: Path) -> None:
    _, weights = load_gguf(path)
    for name in weights.shapes():
        weights.stored(name)
    load_model(path)


def _gguf_metadata(path: Path) -> None:
    read_gguf_metadata(path)
    read_gguf_metadata(path, prefixes=("tokenizer.",))


GGUF_WORDS: Final = (
    b"\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x08\0\0\0", b"\x09\0\0\0", b"\0\0\0\x40\0\0\0\0",
    b"llama.block_count", b"general.alignment",
)  # fmt: skip

TARGETS: Final = (
    Target(
        name="safetensors",
        about="a safetensors file and every tensor in it",
        seeds=_safetensors_seeds,
        shape=Led(Json((b'"dtype"', b"I64", b"data_offsets"))),
        open=file_of(_safetensors, "model.safetensors"),
        errors=(CheckpointError,),
    ),
    Target(
        name="index",
        about="JSON objects of a checkpoint, no key twice",
        seeds=lambda: [b'{"weight_map": {"a": "model-1.safetensors", "b": "x"}}', b"{}"],
        shape=Json(),
        open=decoding(_index),
        errors=(CheckpointError,),
    ),
    Target(
        name="config",
        about="config.json of every family",
        seeds=configs,
        shape=Json((b"rope_scaling", b"quantization_config")),
        open=decoding(_config),
        errors=(UnsupportedModelError,),
    ),
    Target(
        name="quantization",
        about="quantization_config of every packer",
        seeds=lambda: [json.dumps(packing).encode() for packing in PACKINGS],
        shape=Json((b"re:(a+)+$", b"re:[", b"re:.*")),
        open=decoding(_quantization),
        errors=(UnsupportedModelError, CheckpointError),
    ),
    Target(
        name="checkpoint",
        about="a model folder whose config.json lies about its weights",
        seeds=lambda: configs()[:3],
        shape=Json(),
        open=_checkpoint,
        errors=(UnsupportedModelError, CheckpointError),
    ),
    Target(
        name="gguf",
        about="a GGUF file: header, metadata, directory of tensors, the model that they make",
        seeds=lambda: [gguf_model()],
        shape=Bytes(GGUF_WORDS),
        open=file_of(_gguf_model, "model.gguf"),
        errors=(UnsupportedModelError, CheckpointError),
    ),
    Target(
        name="gguf_metadata",
        about="a GGUF file's metadata with its arrays, as the tokenizer reads them",
        seeds=lambda: [gguf_model(), gguf_of({"tokenizer.x": [1.5, 2.5], "a": True})],
        shape=Bytes(GGUF_WORDS),
        open=file_of(_gguf_metadata, "model.gguf"),
        errors=(TokenizerError,),
    ),
)
"""Those of this module."""
