"""quantization_config: what is read, and what is refused by field, value and what is allowed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepinfer.workers.model.config import UnsupportedModelError
from deepinfer.workers.model.quantization import (
    Packing,
    Quantization,
    Scheme,
    parse_quantization,
    quantization_from_hf,
)
from support.packed_models import awq_config, compressed_config, gptq_config

UP = "model.layers.3.mlp.up_proj"
Q = "model.layers.3.self_attn.q_proj"


def read(values: dict[str, Any]) -> Quantization:
    found = quantization_from_hf({"quantization_config": values})
    assert isinstance(found, Quantization)
    return found


def test_a_config_without_one() -> None:
    assert quantization_from_hf({}) is None
    assert quantization_from_hf({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("changes", "offset"),
    [
        ({}, 1),
        ({"checkpoint_format": "gptq"}, 1),
        ({"checkpoint_format": "gptq_v2"}, 0),
        ({"format": "gptq_v2"}, 0),
    ],
)
def test_the_two_formats_of_gptq(changes: dict[str, Any], offset: int) -> None:
    found = read(gptq_config(**changes))
    assert (found.packing, found.zero_offset) == (Packing.GPTQ, offset)
    assert found.rule(UP).scheme == Scheme(group=32, symmetric=True)


def test_one_scale_a_row_may_come_in_any_order() -> None:
    values = gptq_config(group_size=-1, desc_act=True, sym=False)
    assert read(values).rule(UP).scheme == Scheme(group=None, symmetric=False)


def test_the_first_rule_of_dynamic_that_matches_holds() -> None:
    rules = {
        r"-:.*\.3\.self_attn": {},
        r"+:model\.layers\.3\.": {"group_size": 64},
        r".*up_proj": {"group_size": 128, "sym": False},
    }
    found = read(gptq_config(dynamic=rules))
    assert found.rule(Q).scheme is None
    assert "dynamic" in found.rule(Q).because
    assert found.rule(UP).scheme == Scheme(group=64, symmetric=True)
    assert found.rule(UP.replace("3", "4")).scheme == Scheme(group=128, symmetric=False)
    assert found.rule(Q.replace("3", "4")).scheme == Scheme(group=32, symmetric=True)


def test_awq_and_its_older_names() -> None:
    old = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    found = parse_quantization(old, where="quant_config.json", method_default="awq")
    assert isinstance(found, Quantization)
    assert found.packing is Packing.AWQ
    assert found.rule(UP).scheme == Scheme(group=64, symmetric=False)
    partly = read(awq_config(modules_to_not_convert=["self_attn"]))
    assert partly.rule(Q).scheme is None
    assert partly.rule(UP).scheme == Scheme(group=32, symmetric=False)


def test_compressed_tensors_and_its_older_key() -> None:
    found = quantization_from_hf({"compression_config": compressed_config()})
    assert isinstance(found, Quantization)
    assert found.packing is Packing.COMPRESSED_TENSORS
    assert found.rule("lm_head").scheme is None
    assert found.rule(UP).scheme == Scheme(group=32, symmetric=True)


def test_a_name_counts_for_more_than_a_class() -> None:
    values = compressed_config()
    first = values["config_groups"]["group_0"]
    named = first | {
        "targets": [Q, r"re:.*down_proj$"],
        "weights": first["weights"] | {"strategy": "channel", "group_size": None},
    }
    values["config_groups"]["group_1"] = named
    values["ignore"] = ["lm_head", "re:.*gate_proj"]
    found = read(values)
    assert found.rule(UP).scheme == Scheme(group=32, symmetric=True)
    assert found.rule(UP.replace("up", "down")).scheme == Scheme(group=None, symmetric=True)
    assert found.rule(Q).scheme == Scheme(group=None, symmetric=True)
    assert found.rule(UP.replace("up", "gate")).scheme is None
    del values["config_groups"]["group_0"]
    assert "no config_groups" in read(values).rule(UP).because


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "fp8"}, "quant_method must be 'gptq' or 'awq' or .*, got 'fp8'"),
    ({"bits": 4}, "quant_method must be .* it is missing"),
    (gptq_config(bits=8), "bits must be 4, got 8"),
    (gptq_config(bits=3), "bits must be 4, got 3"),
    (gptq_config(bits=True), "bits must be 4, got True"),
    (gptq_config(group_size=16), "group_size must be -1 or 32 or 64 or .*, got 16"),
    (gptq_config(desc_act=True), "desc_act must be False, got True"),
    (gptq_config(sym=None), "sym must be True or False, got None"),
    (gptq_config(checkpoint_format="marlin"), "checkpoint_format must be .*, got 'marlin'"),
    (gptq_config(is_marlin_format=True), "is_marlin_format must be False, got True"),
    (gptq_config(pack_dtype="int16"), "pack_dtype must be 'int32', got 'int16'"),
    (gptq_config(dynamic=[]), r"dynamic must be an object, got \[\]"),
    (gptq_config(dynamic={"(": {}}), r"dynamic '\(' is no regular expression"),
    (gptq_config(dynamic={"x": 1}), "dynamic 'x' must be an object, got 1"),
    (gptq_config(dynamic={"x": {"bits": 8}}), "dynamic 'x': bits must be 4, got 8"),
    (awq_config(version="gemv"), "version must be 'gemm', got 'gemv'"),
    (awq_config(version="GEMV_fast"), "version must be 'gemm', got 'gemv_fast'"),
    (awq_config(version="exllama"), "version must be 'gemm', got 'exllama'"),
    (awq_config(bits=8), "bits must be 4, got 8"),
    (awq_config(zero_point=False), "zero_point must be True, got False"),
    (awq_config(backend="llm-awq"), "backend must be 'autoawq', got 'llm-awq'"),
    (awq_config(modules_to_not_convert="mlp"), "modules_to_not_convert must be a list of str"),
    (compressed_config({"num_bits": 8}), r"group_0\.weights: num_bits must be 4, got 8"),
    (compressed_config({"type": "float"}), "type must be 'int', got 'float'"),
    (compressed_config({"actorder": "group"}), "actorder must be .*'static', got 'group'"),
    (compressed_config({"strategy": "tensor"}), "strategy must be 'group' or 'channel', got 'ten"),
    (compressed_config({"group_size": 48}), "group_size must be .*, got 48"),
    (compressed_config({"dynamic": True}), "dynamic must be False, got True"),
    (
        compressed_config(group={"input_activations": {"num_bits": 8}}),
        "group_0: input_activations must be null, got {'num_bits': 8}",
    ),
    (compressed_config(format="int-quantized"), "format must be 'pack-quantized', got 'int-quan"),
    (compressed_config(quantization_status="frozen"), "status must be 'compressed', got 'frozen'"),
    (compressed_config(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme must be null, got {'num"),
    (compressed_config(transform_config={"R1": {}}), "transform_config must be null, got"),
    (
        compressed_config(sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config: format must be 'dense', got 'sparse-24",
    ),
    (compressed_config(config_groups={}), "config_groups is missing"),
]


@pytest.mark.parametrize(("values", "message"), REFUSALS)
def test_what_is_refused_says_the_field_the_value_and_what_is_allowed(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^quantization_config.*{message}"):
        read(values)
    json.dumps(values)  # all of it could come from a file


def test_what_no_file_should_hold() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"^quant_config\.json must be an object, got 7"
    ):
        parse_quantization(7, where="quant_config.json")
