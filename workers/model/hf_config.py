"""What a Hugging Face ``config.json`` says, old spellings and new, as a ``ModelConfig``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from deepinfer.workers.model.config import (
    SUPPORTED_ARCHITECTURES,
    ModelConfig,
    UnsupportedModelError,
    check_size,
)
from deepinfer.workers.model.fields import Fields, shown
from deepinfer.workers.model.quantization import quantization_from_hf
from deepinfer.workers.model.rope import llama3_divisors, longrope_magnitude

_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_LAYER_TYPES: Final = ("full_attention", "sliding_attention")

# What transformers takes for a field that a config leaves out.
_SLIDING_WINDOW_DEFAULT: Final = 4096
_WINDOW_LAYERS_DEFAULT: Final = 28
_PHI3_ORIGINAL_POSITIONS_DEFAULT: Final = 4096


def config_json(text: str) -> ModelConfig:
    """Parse the text of a ``config.json``; errors as ``config_from_hf``."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"it is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise UnsupportedModelError(f"it must hold an object, got {type(values).__name__}")
    return config_from_hf(values)


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """Read the fields of a ``config.json``.

    A context that only a sliding window or LongRoPE's second set of factors could serve is cut
    off (``max_positions`` with ``positions_limit``). Raises UnsupportedModelError, naming the
    field, for an unknown architecture (listing the known ones), mixture of experts, weights that
    are quantised in a way that ``quantization`` does not read, an activation other than SiLU, RoPE
    scalings other than linear, llama3 and longrope, partial rotary embeddings outside Phi-3, and
    fields that are missing or malformed.
    """
    fields = Fields(values)
    for name in _EXPERTS:
        if values.get(name):
            raise UnsupportedModelError(
                f"mixture of experts ({name} = {shown(values[name])}) is not supported"
            )
    family = _family(values)
    quantization_from_hf(values)  # refuses here, before any tensor, what cannot be read
    if (activation := values.get("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"hidden_act {shown(activation)} is not supported: only silu")
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    layers = fields.integer("num_hidden_layers")
    positions = fields.integer("max_position_embeddings")
    head_dim = _head_dim(fields, family, hidden, heads)
    check_size("head_dim", head_dim)  # RoPE's divisors are as many as half of it
    check_size("max_positions", positions)
    rope = _rope(fields, family, head_dim, positions)
    limit = _limit(positions, _window(fields, family, layers), rope.positions)
    attention_bias = fields.flag("attention_bias")
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=_kv_heads(fields, family, heads),
        head_dim=head_dim,
        max_positions=positions if limit is None else limit[0],
        positions_limit=None if limit is None else limit[1],
        rms_eps=fields.number("rms_norm_eps"),
        rope_theta=rope.theta,
        rotary_dim=rope.rotary_dim,
        rope_divisors=rope.divisors,
        rope_magnitude=rope.magnitude,
        tied_embeddings=fields.flag("tie_word_embeddings"),
        # Phi-3's and Mistral's configs may carry attention_bias; their attention has none.
        qkv_bias=family == "qwen2" or (family in ("llama", "qwen3") and attention_bias),
        o_bias=family in ("llama", "qwen3") and attention_bias,
        mlp_bias=family == "llama" and fields.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        fused_projections=family == "phi3",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rope:
    theta: float
    rotary_dim: int | None = None
    divisors: tuple[float, ...] | None = None
    magnitude: float = 1.0
    positions: int | None = None
    """How many positions this RoPE is right for; None: all."""


def _family(values: Mapping[str, Any]) -> str:
    names = values.get("architectures")
    known = ", ".join(SUPPORTED_ARCHITECTURES)
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise UnsupportedModelError(f"architectures must name one of {known}; got {shown(names)}")
    family = SUPPORTED_ARCHITECTURES.get(names[0])
    if family is None:
        raise UnsupportedModelError(
            f"architecture {shown(names[0])} is not supported; known: {known}"
        )
    return family


def _head_dim(fields: Fields, family: str, hidden: int, heads: int) -> int:
    # Qwen3's heads do not follow from the hidden size.
    if family == "qwen3" or fields.values.get("head_dim") is not None:
        return fields.integer("head_dim")
    if heads < 1 or hidden % heads:
        raise UnsupportedModelError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and there is "
            "no head_dim"
        )
    return hidden // heads


def _kv_heads(fields: Fields, family: str, heads: int) -> int:
    # Left out it means "as many as heads" here, and a number of its own in the other families.
    if family in ("llama", "phi3") and "num_key_value_heads" not in fields.values:
        return heads
    if "num_key_value_heads" in fields.values and fields.values["num_key_value_heads"] is None:
        return heads
    return fields.integer("num_key_value_heads")


def _rope(fields: Fields, family: str, head_dim: int, positions: int) -> _Rope:
    """Read RoPE in its old spelling (top level and ``rope_scaling``) or new (one object)."""
    old = {
        name: fields.values[name]
        for name in ("rope_theta", "partial_rotary_factor")
        if fields.values.get(name) is not None
    }
    spelling = "rope_scaling"
    for name in ("rope_scaling", "rope_parameters"):
        nested = fields.values.get(name)
        if nested is None:
            continue
        if not isinstance(nested, Mapping):
            raise UnsupportedModelError(f"{name} must be an object, got {shown(nested)}")
        if layered := [key for key, value in nested.items() if isinstance(value, Mapping)]:
            raise UnsupportedModelError(f"{name} by layer type ({layered[0]}) is not supported")
        old |= nested
        spelling = name
    rope = Fields({"rope_theta": 10_000.0, **old}, f"{spelling}: ")
    theta = rope.positive("rope_theta")
    rotary_dim = _rotary_dim(rope, family, head_dim)
    turned = head_dim if rotary_dim is None else rotary_dim
    kind = old.get("rope_type", old.get("type", "default"))
    if family == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # by these names Phi-3's first configs called it
    original = fields.optional_integer("original_max_position_embeddings")
    if original is None:
        original = rope.optional_integer("original_max_position_embeddings")
    match kind:
        case "default":
            return _Rope(theta=theta, rotary_dim=rotary_dim)
        case "linear":
            divisors = (rope.positive("factor"),) * (turned // 2)
            return _Rope(theta=theta, rotary_dim=rotary_dim, divisors=divisors)
        case "llama3":
            return _Rope(
                theta=theta,
                rotary_dim=rotary_dim,
                divisors=_llama3(rope, theta, turned, original or positions),
            )
        case "longrope":
            if original is None:
                original = _PHI3_ORIGINAL_POSITIONS_DEFAULT if family == "phi3" else positions
            if original < 2:
                raise UnsupportedModelError(
                    f"original_max_position_embeddings must be 2 or more, got {original}"
                )
            rope.positives("long_factor", turned // 2)
            factor = rope.optional_number("factor")
            magnitude = rope.optional_number("attention_factor")
            if magnitude is None:
                magnitude = longrope_magnitude(
                    factor=positions / original if factor is None else factor,
                    original_positions=original,
                )
            return _Rope(
                theta=theta,
                rotary_dim=rotary_dim,
                divisors=rope.positives("short_factor", turned // 2),
                magnitude=magnitude,
                positions=original,
            )
        case _:
            raise UnsupportedModelError(
                f"RoPE scaling {shown(kind)} is not supported; known: linear, llama3, longrope"
            )


def _rotary_dim(rope: Fields, family: str, head_dim: int) -> int | None:
    factor = rope.optional_number("partial_rotary_factor")
    if factor is None or factor == 1.0:
        return None
    if family != "phi3":
        raise UnsupportedModelError(
            f"partial_rotary_factor {factor} is not supported in {family} models: only 1.0"
        )
    if not 0 < factor < 1:
        raise UnsupportedModelError(f"partial_rotary_factor must be in (0, 1], got {factor}")
    return int(head_dim * factor)


def _llama3(
    rope: Fields, theta: float, rotary_dim: int, original_positions: int
) -> tuple[float, ...]:
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if high <= low:
        raise UnsupportedModelError(
            f"high_freq_factor ({high}) must be greater than low_freq_factor ({low})"
        )
    try:
        return llama3_divisors(
            theta=theta,
            head_dim=rotary_dim,
            factor=rope.positive("factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_positions=original_positions,
        )
    except ArithmeticError as error:
        raise UnsupportedModelError(f"RoPE scaling 'llama3' is out of range: {error}") from error


def _window(fields: Fields, family: str, layers: int) -> int | None:
    """The shortest attention window that any layer has; None: every layer sees everything."""
    kinds = fields.values.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise UnsupportedModelError(f"layer_types must list {layers} layers")
        for kind in kinds:
            if kind not in _LAYER_TYPES:
                raise UnsupportedModelError(
                    f"layer_types: {shown(kind)} is not supported; known: {', '.join(_LAYER_TYPES)}"
                )
    if family == "llama":
        return None  # its attention knows no window, whatever the config says
    if family in ("qwen2", "qwen3"):
        if not fields.flag("use_sliding_window"):
            return None
        if kinds is None:
            first = fields.optional_integer("max_window_layers")
            some_slide = (_WINDOW_LAYERS_DEFAULT if first is None else first) < layers
        else:
            some_slide = "sliding_attention" in kinds
        if not some_slide:
            return None
    if family != "phi3" and "sliding_window" not in fields.values:
        return _SLIDING_WINDOW_DEFAULT
    window = fields.optional_integer("sliding_window")
    if window is not None and window < 1:
        raise UnsupportedModelError(f"sliding_window must be 1 or more, got {window}")
    return window


def _limit(
    positions: int, window: int | None, rope_positions: int | None
) -> tuple[int, str] | None:
    """The lower of the limits below ``positions``, and what sets it."""
    limits = []
    if window is not None and window < positions:
        limits.append((window, f"sliding_window is {window}"))
    if rope_positions is not None and rope_positions < positions:
        limits.append((rope_positions, f"longrope's original context is {rope_positions}"))
    return min(limits, default=None)
