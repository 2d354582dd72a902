"""Random 4-bit weights of a known model's shape."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.deploy.bench.random_weights import RandomWeights
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.convert import group_size_for, linear_names
from deepinfer.workers.model.quantized import QuantizedTensor
from deepinfer.workers.model.weights import LoadedModel


@dataclass(frozen=True, slots=True)
class RandomW4Weights(RandomWeights):
    """As ``RandomWeights``, with the decoder's linear layers in 4 bits.

    Scales have seven bits, so that every weight is a float16 exactly: ``read`` and
    ``read_quantized`` give the same numbers.
    """

    group: int

    def read(self, name: str) -> Tensor:
        """One tensor in float16. Raises CheckpointError when there is none of that name."""
        packed = self.read_quantized(name)
        if packed is None:
            return RandomWeights.read(self, name)
        return packed.dequantised().half()

    def read_quantized(
        self, name: str, device: torch.device | None = None
    ) -> QuantizedTensor | None:
        """One linear layer; None for everything else."""
        if name not in linear_names(self.config):
            return None
        rows, columns = self.shapes()[name]
        random = torch.Generator(self.device).manual_seed(
            (self.seed << 32) + zlib.crc32(name.encode())
        )
        codes = torch.randint(
            0, 16, (rows, columns), generator=random, device=self.device, dtype=torch.uint8
        )
        steps = torch.randint(
            64, 128, (rows, columns // self.group), generator=random, device=self.device
        )
        # Codes spread by 4.6 about 8, steps are 96 on average: activations stay near 1.
        unit = 2.0 ** round(math.log2(columns**-0.5 / (4.6 * 96)))
        packed = QuantizedTensor(codes, (steps * unit).half())
        if device is None or device == self.device:
            return packed
        return QuantizedTensor(packed.codes.to(device), packed.scales.to(device))


def random_w4_model(
    config: ModelConfig, *, seed: int = 0, device: torch.device | str = "cpu"
) -> LoadedModel:
    """A model of ``config`` with random weights that are drawn on ``device``.

    Raises GroupSizeError: no group size divides all of its layers' inputs.
    """
    weights = RandomW4Weights(config, seed, torch.device(device), group_size_for(config, None))
    return LoadedModel(config, weights, f"random-w4-{seed}")
