"""config.json: what it means, and what is refused by name."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from deepinfer.workers.model.config import ModelConfig, UnsupportedModelError
from deepinfer.workers.model.hf_config import config_from_hf, config_json
from deepinfer.workers.model.rope import llama3_divisors, longrope_magnitude

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
MISTRAL = {"architectures": ["MistralForCausalLM"]}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 8}
PHI3 = {"architectures": ["Phi3ForCausalLM"]}
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2, 3, 4, 5]}


def read(*changes: dict[str, Any], without: str = "") -> ModelConfig:
    fields = dict(LLAMA)
    for change in changes:
        fields |= change
    return config_from_hf({name: value for name, value in fields.items() if name != without})


def test_a_plain_llama() -> None:
    assert read() == ModelConfig(
        family="llama", vocab_size=40, hidden_size=32, intermediate_size=64, layers=2, heads=4,
        kv_heads=2, head_dim=8, max_positions=128, rms_eps=1e-5, rope_theta=10_000.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([{"attention_bias": True}], {"qkv_bias": True, "o_bias": True}),
        ([{"mlp_bias": True}], {"mlp_bias": True}),
        ([{"tie_word_embeddings": True}], {"tied_embeddings": True}),
        ([{"head_dim": 16}], {"head_dim": 16}),
        ([{"head_dim": None}], {"head_dim": 8}),
        ([{"num_key_value_heads": None}], {"kv_heads": 4}),
        ([{"rope_theta": 500_000}], {"rope_theta": 500_000.0}),
        ([{"rope_theta": None}], {"rope_theta": 10_000.0}),
        ([QWEN2], {"family": "qwen2", "qkv_bias": True, "o_bias": False}),
        ([QWEN3, {"attention_bias": True}], {"qk_norm": True, "qkv_bias": True, "o_bias": True}),
        # Fields that these families carry and do not use.
        ([MISTRAL, {"sliding_window": None, "attention_bias": True}], {"qkv_bias": False}),
        ([PHI3, {"attention_bias": True}], {"qkv_bias": False, "fused_projections": True}),
        ([PHI3, {"partial_rotary_factor": 0.75}], {"rotary_dim": 6}),
        ([{"rope_scaling": {"type": "linear", "factor": 4}}], {"rope_divisors": (4.0,) * 4}),
        ([{"rope_scaling": None, "pretraining_tp": 1, "torch_dtype": "int3"}], {}),
    ],
)
def test_switches(changes: list[dict[str, Any]], expected: dict[str, object]) -> None:
    config = read(*changes)
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ([{"sliding_window": 64}], 128),  # Llama's attention knows no window
        ([MISTRAL, {"sliding_window": None}], 128),
        ([MISTRAL, {"sliding_window": 128}], 128),
        ([MISTRAL, {"sliding_window": 64}], 64),
        ([MISTRAL, {"max_position_embeddings": 32768}], 4096),  # what transformers assumes
        ([PHI3, {"max_position_embeddings": 32768}], 32768),
        ([PHI3, {"sliding_window": 127}], 127),
        ([QWEN2, {"sliding_window": 64}], 128),
        ([QWEN2, {"sliding_window": 64, "use_sliding_window": False}], 128),
        ([QWEN2, {"sliding_window": 64, "use_sliding_window": True}], 128),  # from layer 28 on
        ([QWEN2, {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}], 64),
        ([QWEN2, {"use_sliding_window": True, "max_window_layers": 0,
                  "max_position_embeddings": 8192}], 4096),
        ([QWEN3, {"sliding_window": 64, "use_sliding_window": True,
                  "layer_types": ["full_attention", "full_attention"]}], 128),
        ([QWEN3, {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 28,
                  "layer_types": ["full_attention", "sliding_attention"]}], 64),
        ([PHI3, {"rope_scaling": LONGROPE, "original_max_position_embeddings": 32}], 32),
        ([PHI3, {"rope_scaling": LONGROPE, "original_max_position_embeddings": 32,
                 "sliding_window": 16}], 16),
        ([PHI3, {"rope_scaling": LONGROPE}], 128),  # the original's are 4096
    ],
)  # fmt: skip
def test_contexts_end_where_a_window_or_scaling_would_begin(
    changes: list[dict[str, Any]], positions: int
) -> None:
    config = read(*changes)
    assert config.max_positions == positions
    declared: int = (LLAMA | changes[-1]).get("max_position_embeddings", 128)
    assert (config.positions_limit is None) == (positions == declared)


def test_longrope_of_phi3() -> None:
    spellings: list[dict[str, Any]] = [
        {"rope_scaling": LONGROPE, "original_max_position_embeddings": 32},
        {"rope_scaling": LONGROPE | {"type": "su"}, "original_max_position_embeddings": 32},
        {"rope_scaling": LONGROPE | {"type": "yarn"}, "original_max_position_embeddings": 32},
        {"rope_parameters": LONGROPE | {"original_max_position_embeddings": 32}},
    ]
    for spelling in spellings:
        config = read(PHI3, spelling)
        assert config.rope_divisors == (1.0, 1.1, 1.2, 1.3)
        assert config.rope_magnitude == math.sqrt(1 + math.log(4) / math.log(32))
    told = read(PHI3, {"rope_scaling": LONGROPE | {"attention_factor": 1.5}})
    assert told.rope_magnitude == 1.5
    assert longrope_magnitude(factor=0.5, original_positions=32) == 1.0


def test_llama3_divisors_keep_blend_and_slow() -> None:
    divisors = llama3_divisors(
        theta=500_000.0, head_dim=128, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_positions=8192,
    )  # fmt: skip
    assert divisors[0] == 1.0
    assert divisors[-1] == 8.0
    assert list(divisors) == sorted(divisors)
    assert any(1.0 < divisor < 8.0 for divisor in divisors)
    inside = read({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}})
    top = read({"rope_scaling": LLAMA3, "original_max_position_embeddings": 64})
    assert inside.rope_divisors == top.rope_divisors != read({"rope_scaling": LLAMA3}).rope_divisors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([{"architectures": ["GemmaForCausalLM"]}],
         "'GemmaForCausalLM' is not supported; known: LlamaForCausalLM, Mistral.*Qwen3.*Phi3"),
        ([{"architectures": None}], "architectures must name one of Llama.*got None"),
        ([{"architectures": ["LlamaForCausalLM", "x"]}], "architectures must name one of"),
        ([{"architectures": [5]}], r"architectures must name one of .*; got \[5\]"),
        ([{"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}],
         r"mixture of experts \(num_local_experts = 8\) is not supported"),
        ([{"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128}], "num_experts = 128"),
        ([{"hidden_act": "gelu"}], "hidden_act 'gelu' is not supported: only silu"),
        ([{"quantization_config": {"quant_method": "fp8"}}], "quant_method must be 'gptq' or"),
        ([{"quantization_config": "x"}], "quantization_config must be an object, got 'x'"),
        ([QWEN2, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}],
         "RoPE scaling 'yarn' is not supported; known: linear, llama3, longrope"),
        ([{"rope_scaling": {"type": "dynamic", "factor": 4.0}}], "RoPE scaling 'dynamic'"),
        ([{"rope_scaling": {"type": ["x"]}}], r"RoPE scaling \['x'\]"),
        ([{"rope_scaling": {"type": "linear"}}], "rope_scaling: factor is missing"),
        ([{"rope_parameters": {"rope_type": "linear", "factor": 0}}],
         "rope_parameters: factor must be a positive number, got 0"),
        ([{"rope_scaling": {"rope_type": "llama3"}}], "low_freq_factor is missing"),
        ([{"rope_scaling": LLAMA3 | {"high_freq_factor": 1}}], r"high_freq_factor \(1.0\) must be"),
        ([{"rope_scaling": LLAMA3 | {"factor": "8"}}], "factor must be a finite number, got '8'"),
        ([{"rope_scaling": 7}], "rope_scaling must be an object, got 7"),
        ([{"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}],
         r"rope_parameters by layer type \(full_attention\) is not supported"),
        ([PHI3, {"rope_scaling": LONGROPE | {"short_factor": [1.0]}}],
         "short_factor must be a list of 4 numbers, got 1 values"),
        ([PHI3, {"rope_scaling": LONGROPE | {"short_factor": [1, 2, 3, -1]}}],
         r"short_factor\[3\] must be a positive number, got -1"),
        ([PHI3, {"rope_scaling": LONGROPE, "original_max_position_embeddings": 1}],
         "original_max_position_embeddings must be 2 or more"),
        ([{"partial_rotary_factor": 0.5}],
         "partial_rotary_factor 0.5 is not supported in llama models"),
        ([PHI3, {"partial_rotary_factor": 1.5}], r"must be in \(0, 1\], got 1.5"),
        ([PHI3, {"partial_rotary_factor": 0.4}], "rotary_dim must be even .* got 3"),
        ([{"layer_types": ["full_attention"]}], "layer_types must list 2 layers"),
        ([QWEN3, {"layer_types": ["full_attention", "linear_attention"]}],
         "layer_types: 'linear_attention' is not supported; known: full_attention"),
        ([MISTRAL, {"sliding_window": 0}], "sliding_window must be 1 or more, got 0"),
        ([MISTRAL, {"sliding_window": "4k"}], "sliding_window must be a whole number, got '4k'"),
        ([{"hidden_size": "32"}], "hidden_size must be a whole number, got '32'"),
        ([{"hidden_size": 33}], "hidden_size 33 is not a multiple of num_attention_heads 4"),
        ([{"num_attention_heads": 0}], "hidden_size 32 is not a multiple of num_attention_heads 0"),
        ([{"num_key_value_heads": 3}], r"heads \(4\) must be a multiple of kv_heads \(3\)"),
        ([{"num_key_value_heads": 0}], "kv_heads must be a whole number from 1 to"),
        ([{"head_dim": 7}], "head_dim must be even, got 7"),
        ([{"vocab_size": 0}], "vocab_size must be a whole number from 1 to 16777216, got 0"),
        ([{"vocab_size": -5}], "vocab_size must be .* got -5"),
        ([{"vocab_size": 2**40}], "vocab_size must be .* got 1099511627776"),
        ([{"num_hidden_layers": 10**9}], "layers must be a whole number from 1 to 4096, got 10000"),
        ([{"intermediate_size": True}], "intermediate_size must be a whole number, got True"),
        ([{"intermediate_size": 64.0}], "intermediate_size must be a whole number, got 64.0"),
        ([{"max_position_embeddings": 10**30}], "max_positions must be a whole number from 1"),
        ([{"rms_norm_eps": 0.0}], "rms_eps must be a positive number, got 0.0"),
        ([{"rms_norm_eps": math.nan}], "rms_norm_eps must be a finite number, got nan"),
        ([{"rms_norm_eps": 10**400}], "rms_norm_eps must be a finite number, got 1000"),
        ([{"rms_norm_eps": [1]}], r"rms_norm_eps must be a finite number, got \[1\]"),
        ([{"rope_theta": -1}], "rope_theta must be a positive number, got -1"),
        ([{"tie_word_embeddings": "false"}], "tie_word_embeddings must be true or false, got 'fal"),
        ([{"attention_bias": 1}], "attention_bias must be true or false, got 1"),
        ([{"hidden_size": "x" * 10**6}], r"hidden_size must be a whole number, got 'xxx.{40,60}$"),
    ],
)  # fmt: skip
def test_refusals_name_the_field_and_its_value(changes: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(*changes)


@pytest.mark.parametrize("name", sorted(LLAMA.keys() - {"architectures", "num_key_value_heads"}))
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^{name} is missing$"):
        read(without=name)


def test_fields_that_only_some_families_may_leave_out() -> None:
    assert read(without="num_key_value_heads").kv_heads == 4
    assert read(PHI3, without="num_key_value_heads").kv_heads == 4
    for family in (MISTRAL, QWEN2, QWEN3):
        with pytest.raises(UnsupportedModelError, match="num_key_value_heads is missing"):
            read(family, without="num_key_value_heads")
    with pytest.raises(UnsupportedModelError, match="head_dim is missing"):
        read(QWEN3, without="head_dim")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is not JSON: Expecting value"),
        ("{", "it is not JSON"),
        ("[]", "it must hold an object, got list"),
        ("[" * 100_000, "it is not JSON: maximum recursion depth"),
        (f'{{"vocab_size": {"9" * 5000}}}', "it is not JSON: Exceeds the limit"),
        ('{"architectures": ["LlamaForCausalLM"], "hidden_size": NaN}', "num_attention_heads is"),
    ],
)
def test_text_that_is_no_config(text: str, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        config_json(text)


def test_text_that_is_one() -> None:
    assert config_json(json.dumps(LLAMA)) == read()
