"""Every activation of a step, allocated once: graphs need addresses that never change."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.kernels.attention import DecodeWorkspace
from deepinfer.kernels.linear import Workspace, partials
from deepinfer.workers.gpu.weights import padded_width
from deepinfer.workers.model.config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """A step's activations; ``rows`` is the most rows of any step, ``sequences`` of logits.

    The residual stream is float32, everything between kernels float16.
    """

    residual: Tensor
    """float32 ``[rows, hidden]``"""
    hidden: Tensor
    """half ``[rows, hidden]``: the input of the next linear layer."""
    sumsq: Tensor
    """float32 ``[fused rows, partials(hidden)]``: of the residual's squares."""
    qkv: Tensor
    """half ``[rows, qkv_rows]``"""
    mixed: Tensor
    """half ``[rows, heads, head_dim]``: what attention returns."""
    gate_up: Tensor
    """half ``[rows, 2 * mlp width]``"""
    gated: Tensor
    """half ``[rows, mlp width]``"""
    branch: Tensor
    """half ``[rows, hidden]``: what a branch adds to the residual."""
    picked: Tensor
    """half ``[sequences, hidden]``: the rows whose logits are wanted, normed."""
    logits: Tensor
    """float32 ``[sequences, vocab]``"""
    saturations: Tensor
    """int64 ``[1]``: K and V elements that were clamped, since start."""
    decode: DecodeWorkspace
    linear: Workspace

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        rows: int,
        fused_rows: int,
        sequences: int,
        workspace: DecodeWorkspace,
        device: torch.device,
    ) -> Buffers:
        """Room for steps of up to ``rows`` rows, of which ``sequences`` want logits.

        ``fused_rows`` go through the six-kernel layer.
        """
        hidden, width = config.hidden_size, padded_width(config)

        def half(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float16, device=device)

        def single(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        return cls(
            residual=single(rows, hidden),
            hidden=half(rows, hidden),
            sumsq=single(fused_rows, partials(hidden)),
            qkv=half(rows, config.qkv_rows),
            mixed=half(rows, config.heads, config.head_dim),
            gate_up=half(rows, 2 * width),
            gated=half(rows, width),
            branch=half(rows, hidden),
            picked=half(sequences, hidden),
            logits=single(sequences, config.vocab_size),
            saturations=torch.zeros(1, dtype=torch.int64, device=device),
            decode=workspace,
            linear=Workspace.allocate(device),
        )
