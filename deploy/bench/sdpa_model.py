"""The decoder written with torch's own operators: what the native one is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer.workers.model.decoder import EMBEDDING, RopeTable
from deepinfer.workers.model.weights import LoadedModel

HEAD_ROWS: Final = 256
"""Rows that go through the LM head at once."""


class SdpaModel:
    """One sequence at a time, no cache, in ``dtype`` throughout as transformers computes.

    Weights are rounded to float16 first whatever the dtype, as the native model holds them: in
    float32 it is what both are measured against. Norms are computed in float32.

    ``kept`` is what becomes of K (after RoPE) and V ``[tokens, kv_heads, head_dim]`` in a cache,
    ``rounded`` what becomes of the float32 rows that layers, but not the head, multiply.
    """

    def __init__(
        self,
        model: LoadedModel,
        dtype: torch.dtype,
        device: torch.device,
        kept: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        rounded: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.config = model.config
        self._dtype = dtype
        self._device = device
        self._kept = kept
        self._activation = rounded
        names = model.weights.shapes()
        self._tensors = {name: self._rounded(model.weights.read(name)) for name in names}
        self._rope = RopeTable(model.config, torch.device("cpu"))

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        """float32 ``[tokens, vocab]``, on the model's device."""
        config = self.config
        ids = torch.tensor(token_ids, device=self._device)
        cos, sin = self._rope.at(torch.arange(len(token_ids)))
        turn = cos.to(self._device)[:, None], sin.to(self._device)[:, None]
        x = self._tensors[EMBEDDING][ids]
        for index in range(config.layers):
            x = x + self._attention(index, self._norm(x, f"{_layer(index)}.input_layernorm"), turn)
            x = x + self._mlp(index, self._norm(x, f"{_layer(index)}.post_attention_layernorm"))
        head = self._tensors[EMBEDDING if config.tied_embeddings else "lm_head.weight"]
        normed = self._norm(x, "model.norm")
        return torch.cat([F.linear(part, head).float() for part in torch.split(normed, HEAD_ROWS)])

    def _attention(self, index: int, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        config, prefix = self.config, f"{_layer(index)}.self_attn"
        sizes = (config.heads, config.kv_heads, config.kv_heads)
        if config.fused_projections:
            qkv = self._linear(x, f"{prefix}.qkv_proj")
            q, k, v = torch.split(qkv, [size * config.head_dim for size in sizes], dim=-1)
        else:
            q, k, v = (self._linear(x, f"{prefix}.{part}_proj") for part in "qkv")
        q, k, v = (part.view(len(x), -1, config.head_dim) for part in (q, k, v))
        if config.qk_norm:
            q = self._norm(q, f"{prefix}.q_norm")
            k = self._norm(k, f"{prefix}.k_norm")
        q, k = self._rotate(q, turn), self._rotate(k, turn)
        if self._kept is not None:
            k, v = self._kept(k, v)
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self._linear(mixed[0].transpose(0, 1).flatten(1), f"{prefix}.o_proj")

    def _mlp(self, index: int, x: Tensor) -> Tensor:
        prefix = f"{_layer(index)}.mlp"
        if self.config.fused_projections:
            gate, up = self._linear(x, f"{prefix}.gate_up_proj").chunk(2, dim=-1)
        else:
            gate, up = (self._linear(x, f"{prefix}.{part}_proj") for part in ("gate", "up"))
        return self._linear(F.silu(gate) * up, f"{prefix}.down_proj")

    def _rotate(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = turn
        width = self.config.rope_dim
        low, high = x[..., :width].float().chunk(2, dim=-1)
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
        return torch.cat((turned.to(x.dtype), x[..., width:]), dim=-1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add(self.config.rms_eps).rsqrt()
        return (wide * scale).to(self._dtype) * self._tensors[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        if self._activation is not None:
            x = self._activation(x.float()).to(self._dtype)
        return F.linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def _rounded(self, weight: Tensor) -> Tensor:
        return weight.to(self._device).to(torch.float16).to(self._dtype)


def _layer(index: int) -> str:
    return f"model.layers.{index}"
