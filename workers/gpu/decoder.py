"""A step's kernels in order: the fused layer of small batches, and the wide one of all others.

*Fused* (six kernels a layer): the residual, ``hidden = residual * gamma`` and sums of squares go
from kernel to kernel, so that norms, bias, SwiGLU and residual cost no launch of their own.

*Wide*: cuBLAS between pointwise kernels; rows with one token read their KV by ``paged_decode``,
chunks of prompts by ``paged_prefill``, in one step.

Nothing here waits for the card or reads from it, so that all of it can be captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from deepinfer.kernels.attention import KvView, paged_decode
from deepinfer.kernels.linear import (
    linear_logits,
    linear_norm,
    linear_residual,
    linear_swiglu,
    max_rows,
)
from deepinfer.kernels.pointwise import embed, residual_add_norm, rms_norm, rope_kv_write, swiglu
from deepinfer.kernels.prefill import PrefillSpans, paged_prefill
from deepinfer.workers.gpu.buffers import Buffers
from deepinfer.workers.gpu.inputs import InputViews
from deepinfer.workers.gpu.products import Products, multiply_into_float32
from deepinfer.workers.gpu.weights import GpuLayer, GpuWeights, layer_weights


@dataclass(frozen=True, slots=True, eq=False)
class WideStep:
    """How the rows of a wide step divide: ``decodes`` first, then the chunks of ``spans``."""

    rows: int
    decodes: int
    partition: int
    """Tokens of a partition of ``paged_decode``."""
    spans: PrefillSpans | None


class GpuDecoder:
    """A model, its pool's layers and its buffers: everything a step reads and writes."""

    def __init__(self, weights: GpuWeights, views: tuple[KvView, ...], buffers: Buffers) -> None:
        self.weights = weights
        self.buffers = buffers
        self._views = views
        self._scale = weights.config.head_dim**-0.5
        self._products = Products(
            [w for layer in weights.layers for w in layer_weights(layer)], buffers.linear
        )

    def fused(self, inputs: InputViews, rows: int, partition: int) -> None:
        """Write the step's KV; leave the final residual, ``hidden`` and sums of squares."""
        config, layers = self.weights.config, self.weights.layers
        b, eps = self.buffers, config.rms_eps
        residual, hidden, sumsq = b.residual[:rows], b.hidden[:rows], b.sumsq[:rows]
        qkv, mixed, gated = b.qkv[:rows], b.mixed[:rows], b.gated[:rows]
        embed(
            residual,
            hidden,
            sumsq,
            inputs.token_ids,
            self.weights.embedding,
            layers[0].input_norm,
        )
        for index, layer in enumerate(layers):
            linear_norm(qkv, hidden, layer.qkv, sumsq=sumsq, eps=eps, workspace=b.linear)
            self._write_kv(index, layer, qkv, inputs)
            self._decode(index, mixed, qkv, inputs, partition)
            linear_residual(
                hidden,
                residual,
                sumsq,
                mixed.view(rows, -1),
                layer.out,
                layer.mlp_norm,
                workspace=b.linear,
            )
            linear_swiglu(gated, hidden, layer.gate_up, sumsq=sumsq, eps=eps, workspace=b.linear)
            last = index + 1 == len(layers)
            gamma = self.weights.norm if last else layers[index + 1].input_norm
            linear_residual(hidden, residual, sumsq, gated, layer.down, gamma, workspace=b.linear)

    def fused_logits(self, rows: int) -> None:
        """After ``fused``: logits of every row."""
        b = self.buffers
        linear_logits(
            b.logits[:rows],
            b.hidden[:rows],
            self.weights.head,
            sumsq=b.sumsq[:rows],
            eps=self.weights.config.rms_eps,
            workspace=b.linear,
        )

    def wide(self, inputs: InputViews, step: WideStep) -> None:
        """Write the step's KV; leave the final residual."""
        config, layers = self.weights.config, self.weights.layers
        b, rows, eps = self.buffers, step.rows, config.rms_eps
        residual, hidden, qkv = b.residual[:rows], b.hidden[:rows], b.qkv[:rows]
        mixed, branch = b.mixed[:rows], b.branch[:rows]
        gate_up, gated = b.gate_up[:rows], b.gated[:rows]
        embed(residual, None, None, inputs.token_ids, self.weights.embedding, None)
        rms_norm(hidden, residual, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            self._products(qkv, hidden, layer.qkv)
            self._write_kv(index, layer, qkv, inputs)
            if step.decodes:
                count = step.decodes
                self._decode(index, mixed[:count], qkv[:count], inputs, step.partition)
            if step.spans is not None:
                paged_prefill(
                    mixed,
                    self._queries(qkv),
                    self._views[index],
                    step.spans,
                    inputs.block_tables,
                    scale=self._scale,
                )
            self._products(branch, mixed.view(rows, -1), layer.out)
            residual_add_norm(hidden, residual, branch, layer.mlp_norm, eps)
            self._products(gate_up, hidden, layer.gate_up)
            swiglu(gated, gate_up)
            self._products(branch, gated, layer.down)
            last = index + 1 == len(layers)
            gamma = self.weights.norm if last else layers[index + 1].input_norm
            residual_add_norm(hidden, residual, branch, gamma, eps)

    def logits(self, normed: Tensor) -> Tensor:
        """Logits of rows that went through the final norm: a part of ``buffers.logits``."""
        rows = normed.shape[0]
        out, head = self.buffers.logits[:rows], self.weights.head
        if rows <= max_rows(head):
            linear_logits(out, normed, head, workspace=self.buffers.linear)
        else:
            multiply_into_float32(out, normed, head.weight)
        return out

    def _write_kv(self, index: int, layer: GpuLayer, qkv: Tensor, inputs: InputViews) -> None:
        weights = self.weights
        rope_kv_write(
            qkv,
            self._views[index],
            inputs.positions,
            inputs.sequences,
            inputs.block_tables,
            weights.cos,
            weights.sin,
            heads=weights.config.heads,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=weights.config.rms_eps,
            saturations=self.buffers.saturations,
        )

    def _decode(
        self, index: int, out: Tensor, qkv: Tensor, inputs: InputViews, partition: int
    ) -> None:
        rows = qkv.shape[0]
        paged_decode(
            out,
            self._queries(qkv),
            self._views[index],
            inputs.block_tables[:rows],
            inputs.lens[:rows],
            scale=self._scale,
            partition=partition,
            workspace=self.buffers.decode,
        )

    def _queries(self, qkv: Tensor) -> Tensor:
        config = self.weights.config
        width = config.heads * config.head_dim
        return qkv[:, :width].view(-1, config.heads, config.head_dim)
