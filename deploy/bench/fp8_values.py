"""A nested model with the values that FP8 mode computes with, as a plain one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.decoder import EMBEDDING
from deepinfer.workers.model.weights import (
    LoadedModel,
    RowLookup,
    WeightSource,
    expected_shapes,
    row_lookup,
)

HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Fp8Values:
    """A ``WeightSource``: what ``source`` has nested is decoded from its upper planes.

    A tied embedding is looked up in FP16 and multiplied in FP8, so ``config`` has a head.
    """

    source: WeightSource
    config: ModelConfig
    tied: bool
    device: torch.device

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return expected_shapes(self.config)

    def read(self, name: str) -> Tensor:
        """One tensor, on ``device`` if it is nested."""
        if self.tied and name == EMBEDDING:
            return self.source.read(name)
        nested = self.source.read_nested(
            EMBEDDING if self.tied and name == HEAD else name, self.device
        )
        return self.source.read(name) if nested is None else nested.decode_fp8()

    def read_quantized(self, name: str, device: torch.device | None = None) -> None:
        """None: nothing has 4 bits."""

    def read_nested(self, name: str, device: torch.device | None = None) -> None:
        """None: nothing is nested."""

    def stored(self, name: str) -> tuple[memoryview, ...]:
        """The bytes of one tensor."""
        return (self.read(name).cpu().contiguous().flatten().view(torch.uint8).numpy().data,)

    def rows(self, name: str) -> RowLookup:
        """Rows of one matrix by their number, as float32."""
        return row_lookup(self.read(name))

    def release(self) -> None:
        """Give back what the source can."""
        self.source.release()


def fp8_model(model: LoadedModel, device: torch.device | str) -> LoadedModel:
    """The plain model that the last level of a nested one computes."""
    config = replace(model.config, tied_embeddings=False)
    weights = Fp8Values(model.weights, config, model.config.tied_embeddings, torch.device(device))
    return replace(model, config=config, weights=weights, nested=False, layer_order=())
