"""A step's kernels in order: the fused layer of small batches, and the wide one of all others.

*Fused* (six kernels a layer): the residual, ``hidden = residual * gamma`` and sums of squares go
from kernel to kernel, so that norms, bias, SwiGLU and residual cost no launch of their own.

*Wide*: cuBLAS between pointwise kernels; rows with one token read their KV by ``paged_decode``,
chunks of prompts by ``paged_prefill``, in one step.

Of a nested model each layer is computed in FP16 or in FP8, as a step's *level* says.

Nothing here waits for the card or reads from it, so that all of it can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.kernels.attention import KvView, paged_decode
from deepinfer.kernels.linear import (
    ROWS_MAX,
    AnyPlan,
    F16Weight,
    NestedWeight,
    Weight,
    linear_logits,
    linear_norm,
    linear_residual,
    linear_swiglu,
    max_rows,
)
from deepinfer.kernels.linear_w8a8 import Scratch
from deepinfer.kernels.pointwise import embed, residual_add_norm, rms_norm, rope_kv_write, swiglu
from deepinfer.kernels.prefill import PrefillSpans, paged_prefill
from deepinfer.workers.gpu.buffers import Buffers
from deepinfer.workers.gpu.inputs import InputViews
from deepinfer.workers.gpu.products import Products, multiply_into_float32
from deepinfer.workers.gpu.weights import GpuLayer, GpuWeights, linears
from deepinfer.workers.model.levels import PrecisionLevels


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


class Mode(IntEnum):
    """What a layer's products are: of which weights, and with which activations."""

    FP16 = 0
    FP8 = 1
    W8A8 = 2


class PieceModes(NamedTuple):
    """How a piece of a wide step computes the layer before it, and its own."""

    before: Mode
    own: Mode


def layer_modes(levels: PrecisionLevels, level: int) -> tuple[Mode, ...]:
    """The mode of each layer at a level."""
    fp8 = Mode.W8A8 if levels.w8a8(level) else Mode.FP8
    return tuple(fp8 if chosen else Mode.FP16 for chosen in levels.fp8_layers(level))


def piece_modes(levels: PrecisionLevels, level_min: int = 0) -> set[tuple[int, PieceModes]]:
    """All that pieces are captured for, from some level up but W8A8: their places and modes."""
    found = set()
    for level in range(level_min, levels.count):
        modes = (Mode(levels.fp8_head(level)), *layer_modes(levels, level), Mode.FP16)
        found |= {(at, PieceModes(*modes[at : at + 2])) for at in range(len(modes) - 1)}
    return found


class GpuDecoder:
    """A model, its pool's layers and its buffers: everything a step reads and writes.

    ``levels`` are those of a nested model; one that is not has one. With ``upper_head`` the last
    of them reads nothing of the embedding's lower plane either. ``activations`` has room for those
    of W8A8 steps, where ``levels`` has such.
    """

    def __init__(
        self,
        weights: GpuWeights,
        views: tuple[KvView, ...],
        buffers: Buffers,
        levels: PrecisionLevels | None = None,
        *,
        upper_head: bool = False,
        activations: Scratch | None = None,
    ) -> None:
        self.weights = weights
        self.levels = levels or PrecisionLevels(len(weights.layers))
        self.buffers = buffers
        self._views = views
        self._scale = weights.config.head_dim**-0.5
        self._products = Products(list(linears(weights)), buffers.linear, activations)
        count = self.levels.count + (self.levels.w8a8_rows > 0)
        self._modes = [layer_modes(self.levels, level) for level in range(count)]
        self._upper_embedding: NestedWeight | None = None
        if upper_head and isinstance(weights.embedding, NestedWeight):
            self._upper_embedding = replace(weights.embedding, lower=None)

    def fused(self, inputs: InputViews, rows: int, partition: int, level: int = 0) -> None:
        """Write the step's KV; leave the final residual, ``hidden`` and sums of squares.

        Not for W8A8, which so few rows do not gain by.
        """
        config, layers = self.weights.config, self.weights.layers
        modes = self._modes[level]
        b, eps = self.buffers, config.rms_eps
        residual, hidden, sumsq = b.residual[:rows], b.hidden[:rows], b.sumsq[:rows]
        qkv, mixed, gated = b.qkv[:rows], b.mixed[:rows], b.gated[:rows]
        embed(
            residual,
            hidden,
            sumsq,
            inputs.token_ids,
            self._embedding(self._is_upper_embedding(level)),
            layers[0].input_norm,
        )
        for index, layer in enumerate(layers):
            wanted = modes[index] is Mode.FP8
            linear_norm(
                qkv,
                hidden,
                layer.qkv,
                sumsq=sumsq,
                eps=eps,
                fp8=_mode(layer.qkv, wanted),
                plan=self.plan(layer.qkv, rows, _mode(layer.qkv, wanted)),
                workspace=b.linear,
            )
            self._write_kv(index, layer, qkv, inputs)
            self.decode(index, inputs, rows, inputs.block_tables.shape[1], partition)
            linear_residual(
                hidden,
                residual,
                sumsq,
                mixed.view(rows, -1),
                layer.out,
                layer.mlp_norm,
                fp8=_mode(layer.out, wanted),
                plan=self.plan(layer.out, rows, _mode(layer.out, wanted)),
                workspace=b.linear,
            )
            linear_swiglu(
                gated,
                hidden,
                layer.gate_up,
                sumsq=sumsq,
                eps=eps,
                fp8=_mode(layer.gate_up, wanted),
                plan=self.plan(layer.gate_up, rows, _mode(layer.gate_up, wanted)),
                workspace=b.linear,
            )
            last = index + 1 == len(layers)
            gamma = self.weights.norm if last else layers[index + 1].input_norm
            linear_residual(
                hidden,
                residual,
                sumsq,
                gated,
                layer.down,
                gamma,
                fp8=_mode(layer.down, wanted),
                plan=self.plan(layer.down, rows, _mode(layer.down, wanted)),
                workspace=b.linear,
            )

    def plan(self, weight: Weight, rows: int, fp8: bool) -> AnyPlan | None:
        """How ``fused`` multiplies ``weight``; None: as is fastest for so many rows."""
        return None

    def fused_logits(self, rows: int, level: int = 0) -> None:
        """After ``fused``: logits of every row."""
        b = self.buffers
        linear_logits(
            b.logits[:rows],
            b.hidden[:rows],
            self.weights.head,
            sumsq=b.sumsq[:rows],
            eps=self.weights.config.rms_eps,
            fp8=self.head_fp8(level),
            workspace=b.linear,
        )

    def wide(
        self,
        inputs: InputViews,
        step: WideStep,
        level: int = 0,
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
                self.piece(index, inputs, step.rows, self.modes(index, level))
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

    def modes(self, index: int, level: int) -> PieceModes:
        """Modes of a piece at a level; before the first layer there is the embedding."""
        modes = self._modes[level]
        before = modes[index - 1] if index else Mode(self._is_upper_embedding(level))
        return PieceModes(before, modes[index] if index < len(modes) else Mode.FP16)

    def piece(self, index: int, inputs: InputViews, rows: int, modes: PieceModes) -> None:
        """What a wide step does between the attention of layers ``index - 1`` and ``index``.

        There is one piece more than there are layers: the first begins with the embedding, the
        last ends with the final norm. They depend on nothing but the inputs, ``rows`` and
        ``modes``.
        """
        layers, eps, b = self.weights.layers, self.weights.config.rms_eps, self.buffers
        residual, hidden = b.residual[:rows], b.hidden[:rows]
        last = index == len(layers)
        gamma = self.weights.norm if last else layers[index].input_norm
        if index == 0:
            embedding = self._embedding(modes.before is not Mode.FP16)
            embed(residual, None, None, inputs.token_ids, embedding, None)
            rms_norm(hidden, residual, gamma, eps)
        else:
            before, branch = layers[index - 1], b.branch[:rows]
            self._multiply(branch, b.mixed[:rows].view(rows, -1), before.out, modes.before)
            residual_add_norm(hidden, residual, branch, before.mlp_norm, eps)
            self._multiply(b.gate_up[:rows], hidden, before.gate_up, modes.before)
            swiglu(b.gated[:rows], b.gate_up[:rows])
            self._multiply(branch, b.gated[:rows], before.down, modes.before)
            residual_add_norm(hidden, residual, branch, gamma, eps)
        if not last:
            self._multiply(b.qkv[:rows], hidden, layers[index].qkv, modes.own)
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

    def logits(self, normed: Tensor, level: int = 0) -> Tensor:
        """Logits of rows that went through the final norm: a part of ``buffers.logits``."""
        rows = normed.shape[0]
        out, head = self.buffers.logits[:rows], self.weights.head
        if isinstance(head, F16Weight) and rows > max_rows(head):
            multiply_into_float32(out, normed, head.weight)
            return out
        fp8 = self.head_fp8(level)
        parts = zip(torch.split(normed, ROWS_MAX), torch.split(out, ROWS_MAX), strict=True)
        for part, into in parts:
            linear_logits(into, part, head, fp8=fp8, workspace=self.buffers.linear)
        return out

    def head_fp8(self, level: int) -> bool:
        """Whether the LM head is multiplied in FP8."""
        return _mode(self.weights.head, self.levels.fp8_head(level))

    def _multiply(self, out: Tensor, x: Tensor, weight: Weight, mode: Mode) -> None:
        if mode is Mode.W8A8 and isinstance(weight, NestedWeight):
            self._products.multiply_w8a8(out, x, weight)
        else:
            self._products(out, x, weight, fp8=_mode(weight, mode is not Mode.FP16))

    def _is_upper_embedding(self, level: int) -> bool:
        return self._upper_embedding is not None and self.levels.fp8_head(level)

    def _embedding(self, upper: bool) -> Tensor | NestedWeight:
        if upper and self._upper_embedding is not None:
            return self._upper_embedding
        return self.weights.embedding

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


def _mode(weight: Weight, wanted: bool) -> bool:
    """Whether ``weight`` is multiplied in FP8, where that is ``wanted`` or all that there is."""
    return isinstance(weight, NestedWeight) and (wanted or weight.lower is None)
