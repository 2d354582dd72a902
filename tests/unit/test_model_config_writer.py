"""A ModelConfig written as config.json and read again."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from deepinfer.workers.model.config import ModelConfig, UnsupportedModelError
from deepinfer.workers.model.hf_config import config_json
from deepinfer.workers.model.hf_config_writer import hf_config

LLAMA = ModelConfig(
    family="llama", vocab_size=40, hidden_size=32, intermediate_size=64, layers=2, heads=4,
    kv_heads=2, head_dim=8, max_positions=128, rms_eps=1e-5, rope_theta=10_000.0,
)  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        replace(LLAMA, tied_embeddings=True, mlp_bias=True, qkv_bias=True, o_bias=True),
        replace(LLAMA, rope_divisors=(1.0, 1.5, 2.25, 8.1), rope_magnitude=1.19),
        replace(LLAMA, max_positions=64, positions_limit="sliding_window is 64"),
        replace(LLAMA, family="mistral", head_dim=16),
        replace(LLAMA, family="qwen2", qkv_bias=True),
        replace(LLAMA, family="qwen3", qk_norm=True, head_dim=24),
        replace(LLAMA, family="phi3", fused_projections=True, rotary_dim=6),
        replace(
            LLAMA, family="phi3", fused_projections=True, head_dim=96, rotary_dim=72,
            rope_divisors=tuple(1.0 + at / 7 for at in range(36)),
        ),
    ],
)  # fmt: skip
def test_it_is_read_as_it_was(config: ModelConfig) -> None:
    text = json.dumps(hf_config(config))
    assert config_json(text) == replace(config, positions_limit=None)


def test_what_no_config_json_says_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"switches that no config\.json expresses"):
        hf_config(replace(LLAMA, qkv_bias=True))
