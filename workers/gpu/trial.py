"""What the KV quality gate measures with on a card: runners over the weights and buffers there."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepinfer.kernels.compiler import precompile
from deepinfer.kvstore.core.layout import KvDtype
from deepinfer.workers.gpu.runner import GpuRunner
from deepinfer.workers.gpu.shapes import model_specs
from deepinfer.workers.gpu.weights import GpuWeights, with_projections
from deepinfer.workers.model.decoder import kv_layout
from deepinfer.workers.model.weights import LoadedModel
from deepinfer.workers.pool import PagedPool


class GpuTrial:
    """See ``workers.quality.Trial``. Its pools live as long as its runners; no graph is captured.

    ``bind`` makes a runner of weights and a pool; ``saturations`` int64 ``[1]`` is counted in by
    all of them.
    """

    def __init__(
        self,
        weights: GpuWeights,
        block_size: int,
        chunk_tokens: int,
        saturations: torch.Tensor,
        bind: Callable[[GpuWeights, PagedPool], GpuRunner],
    ) -> None:
        self.weights = weights
        self.chunk_tokens = chunk_tokens
        self._block_size = block_size
        self._saturations = saturations
        self._bind = bind

    def runner(self, dtype: KvDtype, tokens: int) -> GpuRunner:
        """See ``Trial.runner``."""
        layout = kv_layout(self.weights.config, dtype, self._block_size)
        device = self.weights.cos.device
        if device.type == "cuda":
            precompile(model_specs(self.weights, layout))
        return self._bind(self.weights, PagedPool(layout, layout.blocks_for(tokens), device))

    def saturations(self) -> int:
        """See ``Trial.saturations``; waits for the card."""
        return int(self._saturations.item())

    def take_projections(self, model: LoadedModel) -> None:
        """See ``Trial.take_projections``."""
        with torch.inference_mode():
            self.weights = with_projections(self.weights, model)
