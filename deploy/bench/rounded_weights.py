"""Models whose linear layers were rounded to another format and back, to see what that costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from deepinfer.workers.model.rounding import round_to_nearest
from deepinfer.workers.model.weights import LoadedModel, RowLookup, WeightSource

E4M3_MAX: Final = 448.0


@dataclass(frozen=True, slots=True)
class RoundedWeights:
    """A ``WeightSource`` whose tensors called ``names`` are those of ``source``, rounded."""

    source: WeightSource
    names: frozenset[str]
    rounded: Callable[[Tensor], Tensor]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return self.source.shapes()

    def read(self, name: str) -> Tensor:
        """One tensor; float32 if it is rounded."""
        tensor = self.source.read(name)
        return self.rounded(tensor.to(torch.float32)) if name in self.names else tensor

    def read_quantized(self, name: str, device: torch.device | None = None) -> None:
        """None: what is rounded is read as numbers."""

    def read_nested(self, name: str, device: torch.device | None = None) -> None:
        """None: nothing is nested."""

    def stored(self, name: str) -> tuple[memoryview, ...]:
        """The stored bytes of one tensor, as they are."""
        return self.source.stored(name)

    def rows(self, name: str) -> RowLookup:
        """Rows of one matrix, never rounded: an embedding that is the head too is looked up."""
        return self.source.rows(name)

    def release(self) -> None:
        """Give back what the source can."""
        self.source.release()


def rounded_model(
    model: LoadedModel, names: Iterable[str], rounded: Callable[[Tensor], Tensor]
) -> LoadedModel:
    """A plain model whose weights ``names`` are ``rounded``, float32 to float32."""
    weights = RoundedWeights(model.weights, frozenset(names), rounded)
    return replace(model, weights=weights, nested=False, layer_order=())


def channel_fp8(weight: Tensor) -> Tensor:
    """E4M3 with one scale for each output row, the largest value of which becomes 448."""
    scale = weight.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / E4M3_MAX
    codes = (weight / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.to(torch.float32) * scale


def four_bits(group: int) -> Callable[[Tensor], Tensor]:
    """W4A16 as ``deepinfer convert`` makes it: rounded to nearest, ``group`` inputs a scale."""
    return lambda weight: round_to_nearest(weight, group).dequantised()
