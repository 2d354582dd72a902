"""The one description of a decoder that every checkpoint format is turned into."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

SUPPORTED_ARCHITECTURES: Final[dict[str, str]] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
}
"""Hugging Face architecture names and the families they are."""


class UnsupportedModelError(ValueError):
    """A checkpoint asks for something this decoder does not compute; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and switches of a decoder-only transformer.

    Every layer is RMSNorm, attention with RoPE over halves, RMSNorm, SwiGLU. ``qkv_bias``,
    ``o_bias`` and ``mlp_bias`` say which linear layers have biases, ``qk_norm`` that q and k are
    RMS-normalised per head, ``fused_projections`` that the checkpoint stores qkv and gate/up
    fused. ``rope_divisors`` divide RoPE's inverse frequencies one by one (Llama 3's scaling).

    Raises UnsupportedModelError for sizes that do not fit together.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    rms_eps: float
    rope_theta: float
    rope_divisors: tuple[float, ...] | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fused_projections: bool = False

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size hidden_size intermediate_size layers heads kv_heads head_dim max_positions"
        )
        for field in sizes.split():
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UnsupportedModelError(f"{field} must be a positive integer, got {value!r}")
        if self.heads % self.kv_heads:
            raise UnsupportedModelError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim must be even, got {self.head_dim}")
        for name, number in (("rms_eps", self.rms_eps), ("rope_theta", self.rope_theta)):
            if not (math.isfinite(number) and number > 0):
                raise UnsupportedModelError(f"{name} must be a positive number, got {number}")
        if self.rope_divisors is not None and len(self.rope_divisors) != self.head_dim // 2:
            raise UnsupportedModelError(
                f"rope_divisors must have head_dim / 2 = {self.head_dim // 2} values, "
                f"got {len(self.rope_divisors)}"
            )

    @property
    def qkv_rows(self) -> int:
        """Output rows of the fused q, k, v projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


def config_from_hf(fields: Mapping[str, Any]) -> ModelConfig:
    """Read a Hugging Face ``config.json``.

    Raises UnsupportedModelError for an unknown architecture (listing the known ones), mixture of
    experts, quantised weights, an activation other than SiLU, sliding windows shorter than the
    context, partial rotary embeddings and RoPE scalings other than Llama 3's; each by name.
    """
    family = _family(fields)
    if quantised := fields.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise UnsupportedModelError(f"quantization_config {method!r} is not supported")
    if (activation := fields.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported, only 'silu'")
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if fields.get(name):
            raise UnsupportedModelError(
                f"mixture of experts ({name}={fields[name]}) is unsupported"
            )
    heads = _integer(fields, "num_attention_heads")
    hidden = _integer(fields, "hidden_size")
    head_dim = _optional(fields, "head_dim") or hidden // max(heads, 1)
    positions = _optional(fields, "max_position_embeddings") or 2048
    rope = _rope_fields(fields)
    if (rotary := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModelError(f"partial_rotary_factor {rotary} is not supported, only 1.0")
    theta = float(rope.get("rope_theta", 10_000.0))
    _refuse_sliding_window(fields, family, positions)
    return ModelConfig(
        family=family,
        vocab_size=_integer(fields, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(fields, "intermediate_size"),
        layers=_integer(fields, "num_hidden_layers"),
        heads=heads,
        kv_heads=_optional(fields, "num_key_value_heads") or heads,
        head_dim=head_dim,
        max_positions=positions,
        rms_eps=float(fields.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_divisors=_rope_divisors(rope, theta, head_dim),
        tied_embeddings=bool(fields.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or bool(fields.get("attention_bias", False)),
        o_bias=family in ("llama", "qwen3") and bool(fields.get("attention_bias", False)),
        mlp_bias=family == "llama" and bool(fields.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        fused_projections=family == "phi3",
    )


def config_json(text: str) -> ModelConfig:
    """Parse the text of a ``config.json``; errors as ``config_from_hf``."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise UnsupportedModelError(f"config.json is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise UnsupportedModelError(f"config.json must hold an object, got {type(fields).__name__}")
    return config_from_hf(fields)


def llama3_divisors(
    *,
    theta: float,
    head_dim: int,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_positions: int,
) -> tuple[float, ...]:
    """What Llama 3's RoPE scaling divides each inverse frequency by.

    Wavelengths shorter than ``original_positions / high_freq_factor`` keep their frequency,
    those longer than ``original_positions / low_freq_factor`` are slowed by ``factor``, and those
    between are blended linearly in the number of turns (Llama 3.1's reference code).
    """
    divisors = []
    for pair in range(head_dim // 2):
        turns = original_positions / (2 * math.pi * theta ** (2 * pair / head_dim))
        blend = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        blend = min(max(blend, 0.0), 1.0)
        divisors.append(1.0 / ((1.0 - blend) / factor + blend))
    return tuple(divisors)


def _family(fields: Mapping[str, Any]) -> str:
    names = fields.get("architectures")
    known = ", ".join(SUPPORTED_ARCHITECTURES)
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UnsupportedModelError(f"architectures must name one of {known}; got {names!r}")
    family = SUPPORTED_ARCHITECTURES.get(names[0])
    if family is None:
        raise UnsupportedModelError(f"architecture {names[0]!r} is not supported; known: {known}")
    return family


def _integer(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnsupportedModelError(f"config field {name} must be an integer, got {value!r}")
    return value


def _optional(fields: Mapping[str, Any], name: str) -> int | None:
    return None if fields.get(name) is None else _integer(fields, name)


def _rope_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the old (top level and ``rope_scaling``) and new (``rope_parameters``) spellings."""
    rope: dict[str, Any] = {
        name: fields[name]
        for name in ("rope_theta", "partial_rotary_factor")
        if fields.get(name) is not None
    }
    for name in ("rope_scaling", "rope_parameters"):
        nested = fields.get(name)
        if nested is not None and not isinstance(nested, Mapping):
            raise UnsupportedModelError(f"config field {name} must be an object, got {nested!r}")
        rope |= nested or {}
    rope.setdefault("original_max_position_embeddings", fields.get("max_position_embeddings"))
    return rope


def _rope_divisors(
    rope: Mapping[str, Any], theta: float, head_dim: int
) -> tuple[float, ...] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UnsupportedModelError(f"RoPE scaling {kind!r} is not supported; known: llama3")
    try:
        return llama3_divisors(
            theta=theta,
            head_dim=head_dim,
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_positions=int(rope["original_max_position_embeddings"]),
        )
    except KeyError as missing:
        raise UnsupportedModelError(f"RoPE scaling 'llama3' lacks {missing}") from missing
    except (ArithmeticError, TypeError, ValueError) as error:
        raise UnsupportedModelError(f"RoPE scaling 'llama3' is malformed: {error}") from error


def _refuse_sliding_window(fields: Mapping[str, Any], family: str, positions: int) -> None:
    window = _optional(fields, "sliding_window")
    if window is None or window >= positions:
        return
    # Qwen's configs name a window that applies only with use_sliding_window; Llama's never does.
    used = fields.get("use_sliding_window", family in ("mistral", "phi3"))
    if family != "llama" and used:
        raise UnsupportedModelError(
            f"sliding_window {window} is shorter than max_position_embeddings {positions}: "
            "sliding-window attention is not supported"
        )
