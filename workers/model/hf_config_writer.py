"""A ``ModelConfig`` as a Hugging Face ``config.json``: what GGUF checkpoints do not have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deepinfer.workers.model.config import (
    SUPPORTED_ARCHITECTURES,
    ModelConfig,
    UnsupportedModelError,
)
from deepinfer.workers.model.hf_config import config_from_hf


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The fields that ``config_from_hf`` reads back as ``config``, in transformers' old spelling.

    A context that was cut off is written as the model's own. Divisors of RoPE's frequencies,
    which other files only name the recipe of, are written as the factors of ``longrope``.

    Raises UnsupportedModelError for a combination of switches that no such file can express.
    """
    architecture = next(
        n for n, family in SUPPORTED_ARCHITECTURES.items() if family == config.family
    )
    values: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": "float16",
    }
    if config.family in ("llama", "qwen3"):
        values["attention_bias"] = config.o_bias
    if config.family == "llama":
        values["mlp_bias"] = config.mlp_bias
    if config.family in ("mistral", "phi3"):
        values["sliding_window"] = None
    if config.rotary_dim is not None:
        # They cut the product down: a half lies safely above what is meant.
        values["partial_rotary_factor"] = (config.rotary_dim + 0.5) / config.head_dim
    if config.rope_divisors is not None:
        values["original_max_position_embeddings"] = config.max_positions
        values["rope_scaling"] = {
            "type": "longrope",
            "rope_type": "longrope",
            "short_factor": list(config.rope_divisors),
            "long_factor": list(config.rope_divisors),
            "attention_factor": config.rope_magnitude,
        }
    read = config_from_hf(values)
    if read != replace(config, positions_limit=None):
        raise UnsupportedModelError(
            f"this {config.family} model has switches that no config.json expresses: {config}, "
            f"which would be read as {read}"
        )
    return values
