"""A step's kernels in order: the fused layer of small batches, and the wide one of all others.

*Fused* (six kernels a layer): the residual, ``hidden = residual * gamma`` and sums of squares go
from kernel to kernel, so that norms, bias, SwiGLU and residual cost no launch of their own.

*Wide*: cuBLAS between pointwise kernels; rows with one token read their KV by ``paged_decode``,
chunks of prompts by ``paged_prefill``, in one step.

Nothing here waits for the card or reads from it, so that all of it can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
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
    columns: int
    """Of the block tables that the longest sequence needs."""
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
            self.decode(index, inputs, rows, inputs.block_tables.shape[1], partition)
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

    def wide(
        self,
        inputs: InputViews,
        step: WideStep,
        *,
        piece: Callable[[int], None] | None = None,
        decode: Callable[[int], None] | None = None,
    ) -> None:
        """Write the step's KV; leave the final residual, and its norm in ``hidden``.

        ``piece(index)`` and ``decode(index)`` stand in for the methods of those names where what
        they launch is captured.
        """
        layers = len(self.weights.layers)
        for index in range(layers + 1):
            if piece is None:
                self.piece(index, inputs, step.rows)
            else:
                piece(index)
            if index == layers:
                break
            if step.decodes and decode is None:
                self.decode(index, inputs, step.decodes, step.columns, step.partition)
            elif step.decodes and decode is not None:
                decode(index)
            if step.spans is not None:
                paged_prefill(
                    self.buffers.mixed[: step.rows],
                    self._queries(self.buffers.qkv[: step.rows]),
                    self._views[index],
                    step.spans,
                    inputs.block_tables[:, : step.columns],
                    scale=self._scale,
                )

    def piece(self, index: int, inputs: InputViews, rows: int) -> None:
        """What a wide step does between the attention of layers ``index - 1`` and ``index``.

        There is one piece more than there are layers: the first begins with the embedding, the
        last ends with the final norm. They depend on nothing but the inputs and ``rows``.
        """
        layers, eps, b = self.weights.layers, self.weights.config.rms_eps, self.buffers
        residual, hidden = b.residual[:rows], b.hidden[:rows]
        last = index == len(layers)
        gamma = self.weights.norm if last else layers[index].input_norm
        if index == 0:
            embed(residual, None, None, inputs.token_ids, self.weights.embedding, None)
            rms_norm(hidden, residual, gamma, eps)
        else:
            before, branch = layers[index - 1], b.branch[:rows]
            self._products(branch, b.mixed[:rows].view(rows, -1), before.out)
            residual_add_norm(hidden, residual, branch, before.mlp_norm, eps)
            self._products(b.gate_up[:rows], hidden, before.gate_up)
            swiglu(b.gated[:rows], b.gate_up[:rows])
            self._products(branch, b.gated[:rows], before.down)
            residual_add_norm(hidden, residual, branch, gamma, eps)
        if not last:
            self._products(b.qkv[:rows], hidden, layers[index].qkv)
            self._write_kv(index, layers[index], b.qkv[:rows], inputs)

    def decode(
        self, index: int, inputs: InputViews, rows: int, columns: int, partition: int
    ) -> None:
        """Attention of the first ``rows`` of a step, which have one token each."""
        paged_decode(
            self.buffers.mixed[:rows],
            self._queries(self.buffers.qkv[:rows]),
            self._views[index],
            inputs.block_tables[:rows, :columns],
            inputs.lens[:rows],
            scale=self._scale,
            partition=partition,
            workspace=self.buffers.decode,
        )

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

    def _queries(self, qkv: Tensor) -> Tensor:
        config = self.weights.config
        width = config.heads * config.head_dim
        return qkv[:, :width].view(-1, config.heads, config.head_dim)
