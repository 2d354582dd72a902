"""Which layers of a nested model compute in FP8, by the level of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from deepinfer.kvstore.core.precision import LEVELS_MAX

WEIGHTS: Final = ("auto", "nested")
"""What a checkpoint's weights may be made into: nothing else than they are, or nested ones."""
FP8_PRODUCTS: Final = ("w8a16", "w8a8")
"""What FP8 weights are multiplied by: 16-bit activations always, or FP8 ones in large steps."""
W8A8_ROWS: Final = 129
"""Rows from which a step is faster in W8A8: it is padded to 192 then, not to 128.

On an H200 one layer of Qwen2.5-3B takes, with 64, 128 and 256 rows, 53, 74 and 116 us in FP8, and
78, 79 and 86 in W8A8 (docs/results/kernels_nested.json)."""


@dataclass(frozen=True, slots=True)
class PrecisionLevels:
    """``count`` levels of a model of ``layers``: 0 is FP16, the last one FP8 with the LM head.

    Between them the first layers of ``order`` are in FP8, the least sensitive first; the last but
    one has all of them, but not the head, which may cost as much quality as they do. Every layer
    is named in the order once; empty: from the middle of the model outwards. A model that is not
    nested has one level.

    ``w8a8_rows``: there is a level more, ``count``, for steps of so many rows: the last one with
    activations in FP8 as well, but for the LM head; 0: there is not.

    Raises:
        ValueError: names the field, its value and what is allowed.
    """

    layers: int
    count: int = 1
    order: tuple[int, ...] = ()
    w8a8_rows: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.count <= LEVELS_MAX:
            raise ValueError(f"precision levels: {self.count}, must be 1 to {LEVELS_MAX}")
        if self.w8a8_rows < 0 or (self.w8a8_rows and self.count == 1):
            raise ValueError(f"w8a8_rows = {self.w8a8_rows}: must be 0 or more, 0 with one level")
        if not self.order:
            object.__setattr__(self, "order", _outwards(self.layers))
        elif sorted(self.order) != list(range(self.layers)):
            raise ValueError(
                f"the order of layers names {_shown(self.order)}: must name each of "
                f"0..{self.layers - 1} once"
            )

    @property
    def last(self) -> int:
        """The level with the most in FP8."""
        return self.count - 1

    def in_fp8(self, level: int) -> int:
        """How many layers compute in FP8."""
        self.check(level)
        level = min(level, self.last)
        if level == 0:
            return 0
        steps = max(1, self.last - 1)
        return min(self.layers, (2 * level * self.layers + steps) // (2 * steps))

    def fp8_layers(self, level: int) -> tuple[bool, ...]:
        """For each layer whether it computes in FP8. Raises ValueError for an unknown level."""
        chosen = set(self.order[: self.in_fp8(level)])
        return tuple(layer in chosen for layer in range(self.layers))

    def fp8_head(self, level: int) -> bool:
        """Whether the LM head computes in FP8."""
        self.check(level)
        return self.count > 1 and level >= self.last

    def w8a8(self, level: int) -> bool:
        """Whether activations are in FP8 too."""
        self.check(level)
        return level == self.count

    def check(self, level: int) -> None:
        """Raise ValueError for a level that there is not."""
        most = self.count if self.w8a8_rows else self.last
        if not 0 <= level <= most:
            raise ValueError(f"precision level {level}: this model has 0..{most}")


def _outwards(layers: int) -> tuple[int, ...]:
    """All layers, those in the middle first: the first and the last are the most sensitive."""
    return tuple(sorted(range(layers), key=lambda layer: abs(2 * layer - layers + 1)))


def _shown(order: Sequence[int]) -> str:
    return ", ".join(map(str, order[:8])) + (", ..." if len(order) > 8 else "")
