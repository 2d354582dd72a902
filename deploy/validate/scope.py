"""What a run of the checks covers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from deepinfer.workers.model.config import ModelConfig

KV_DTYPES: Final = ("fp16", "int8", "fp8", "fp8_e5m2", "k16v8")

_EVERY_HEAD: Final = tuple((dim, group) for dim in (64, 96, 128) for group in (1, 3, 7, 8, 16))
_SOME_HEADS: Final = ((64, 3), (96, 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Which inputs are tried; ``heads`` end with those of the model that is asked about."""

    device: str
    hopper: bool
    """The kernels that exist for compute capability 9.0 only are checked as well."""
    kv_dtypes: tuple[str, ...]
    heads: tuple[tuple[int, int], ...]
    """(head_dim, query heads to a KV head) of attention."""
    linears: tuple[tuple[str, int, int], ...]
    """(name, rows, columns) of the model's weights."""
    thorough: bool
    """Long contexts, and every number of rows."""
    length_max: int
    """Longest context of a case that is not about long ones."""
    prompt: int
    """Tokens of the prompt that is cut."""
    weight_max: int
    """Elements of the largest weight of a case that is not the model's."""

    def fits(self, elements: int) -> bool:
        """Whether weights of so many elements are tried."""
        return elements <= self.weight_max

    def shortened(self, lens: Sequence[int]) -> tuple[int, ...]:
        """Lengths of sequences, none longer than allowed."""
        return tuple(min(each, self.length_max - at) for at, each in enumerate(lens))

    def shortened_spans(self, spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Spans, none beyond what is allowed."""
        return tuple(
            (min(start, self.length_max // 2), min(rows, self.length_max // 2))
            for start, rows in spans
        )


def make_scope(config: ModelConfig, *, device: str, hopper: bool, quick: bool) -> Scope:
    """The checks for a model: ``quick`` tries three kinds of heads instead of all of them."""
    own = (config.head_dim, config.heads // config.kv_heads)
    heads = [each for each in (_SOME_HEADS if quick else _EVERY_HEAD) if each != own]
    return Scope(
        device=device,
        hopper=hopper,
        kv_dtypes=KV_DTYPES,
        heads=(*heads, own),
        linears=linear_shapes(config),
        thorough=not quick,
        length_max=5000,
        prompt=1500,
        weight_max=1 << 24,
    )


def linear_shapes(config: ModelConfig) -> tuple[tuple[str, int, int], ...]:
    """(name, rows, columns) of a layer's weights and of the head, as the card holds them."""
    from deepinfer.workers.gpu.weights import padded_width

    width, hidden = padded_width(config), config.hidden_size
    return (
        ("qkv", config.qkv_rows, hidden),
        ("o", hidden, config.heads * config.head_dim),
        ("gate_up", 2 * width, hidden),
        ("down", hidden, width),
        ("head", config.vocab_size, hidden),
    )
