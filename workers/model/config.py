"""The one description of a decoder that every checkpoint format is turned into."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

SUPPORTED_ARCHITECTURES: Final[dict[str, str]] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
}
"""Hugging Face architecture names and the families they are."""


_SIZES_MAX: Final = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "layers": 1 << 12,
    "heads": 1 << 12,
    "kv_heads": 1 << 12,
    "head_dim": 1 << 12,
    "max_positions": 1 << 30,
}
"""Far beyond any model: what is larger is damage, and must not become a list of that length."""

_POSITIVE: Final = ("rms_eps", "rope_theta", "rope_magnitude")


class UnsupportedModelError(ValueError):
    """A checkpoint asks for something this decoder does not compute; the message names it."""


def check_size(field: str, value: object) -> None:
    """Raise UnsupportedModelError for a size that is absurd; readers ask before they use one."""
    largest = _SIZES_MAX[field]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
        shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:37]}..."
        raise UnsupportedModelError(
            f"{field} must be a whole number from 1 to {largest}, got {shown}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and switches of a decoder-only transformer.

    Every layer is RMSNorm, attention with RoPE over halves, RMSNorm, SwiGLU. ``qkv_bias``,
    ``o_bias`` and ``mlp_bias`` say which linear layers have biases, ``qk_norm`` that q and k are
    RMS-normalised per head, ``fused_projections`` that the checkpoint stores qkv and gate/up
    fused.

    RoPE turns the first ``rotary_dim`` dimensions of a head (None: all), ``rope_divisors`` divide
    its inverse frequencies one by one, and ``rope_magnitude`` multiplies its cos and sin.

    Raises UnsupportedModelError for sizes that are absurd or do not fit together.
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
    positions_limit: str | None = None
    """Why ``max_positions`` is lower than what the checkpoint was made for; None if it is not."""
    rms_eps: float
    rope_theta: float
    rotary_dim: int | None = None
    rope_divisors: tuple[float, ...] | None = None
    rope_magnitude: float = 1.0
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    fused_projections: bool = False

    def __post_init__(self) -> None:
        for field in _SIZES_MAX:
            check_size(field, getattr(self, field))
        if self.heads % self.kv_heads:
            raise UnsupportedModelError(
                f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"head_dim must be even, got {self.head_dim}")
        if self.rope_dim % 2 or not 2 <= self.rope_dim <= self.head_dim:
            raise UnsupportedModelError(
                f"rotary_dim must be even and at most head_dim = {self.head_dim}, "
                f"got {self.rope_dim}"
            )
        divisors = self.rope_divisors or ()
        if self.rope_divisors is not None and len(divisors) != self.rope_dim // 2:
            raise UnsupportedModelError(
                f"rope_divisors must have rotary_dim / 2 = {self.rope_dim // 2} values, "
                f"got {len(divisors)}"
            )
        numbers = [(name, getattr(self, name)) for name in _POSITIVE]
        for name, number in (*numbers, *(("rope_divisors", number) for number in divisors)):
            if not (math.isfinite(number) and number > 0):
                raise UnsupportedModelError(f"{name} must be a positive number, got {number}")

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that RoPE turns."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def qkv_rows(self) -> int:
        """Output rows of the fused q, k, v projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim
