"""Inputs for paged decode, and the accuracy rule that its outputs are held to.

Every byte of the pool that no token of a case owns is poison (NaN codes, infinite scales), and so
are block table entries beyond a sequence, so whatever reads too far shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from deepinfer.deploy.validate import accuracy
from deepinfer.deploy.validate.accuracy import Accuracy, Miss
from deepinfer.kernels import attention, reference_decode
from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.workers.pool import PagedPool

FORMATS: Final = {
    "fp16": attention.KV_FP16,
    "int8": attention.KV_INT8,
    "fp8": attention.KV_E4M3,
    "fp8_e5m2": attention.KV_E5M2,
    "k16v8": attention.KV_K16V8,
}

Kind = Literal["normal", "large_k", "saturated", "tiny", "scales"]
"""``large_k``: |k| to 200, as some models have; ``saturated``: codes at both ends; ``tiny``:
values in the storage's subnormals; ``scales``: int8 scales over their whole range."""

_LAYERS: Final = 2
_LAYER: Final = 1


@dataclass(frozen=True, slots=True)
class Case:
    """One launch: ``q`` is a slice of wider rows, as a QKV projection leaves it."""

    name: str
    q: Tensor
    kv: attention.KvView
    block_tables: Tensor
    lens: Tensor
    scale: float
    k: Tensor
    v: Tensor
    scales: Tensor | None

    def expected(self) -> Tensor:
        """The specification's result, float64 ``[rows, heads, head_dim]``."""
        return reference_decode.paged_decode(
            self.q, self.k, self.v, self.scales, self.block_tables, self.lens, scale=self.scale
        )

    def run(
        self,
        partition: int,
        workspace: attention.DecodeWorkspace | None = None,
        *,
        bulk: bool | None = None,
    ) -> Tensor:
        """Launch the kernel; the output was NaN before."""
        rows, heads, head_dim = self.q.shape
        device = self.q.device
        context = self.block_tables.shape[1] * self.kv.block_size
        workspace = workspace or attention.DecodeWorkspace.allocate(
            rows, heads, head_dim, attention.partitions(context, partition), device
        )
        out = torch.full((rows, heads, head_dim), math.nan, dtype=torch.float16, device=device)
        attention.paged_decode(
            out,
            self.q,
            self.kv,
            self.block_tables,
            self.lens,
            scale=self.scale,
            partition=partition,
            workspace=workspace,
            bulk=bulk,
        )
        return out


def make(
    dtype: str,
    lens: list[int],
    *,
    head_dim: int = 128,
    kv_heads: int = 2,
    group: int = 8,
    block_size: int = 16,
    columns: int | None = None,
    kind: Kind = "normal",
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """A pool of two layers (the case is the second) with one sequence for each of ``lens``."""
    random = torch.Generator(device).manual_seed(seed)
    layout = KvLayout(
        dtype=resolve_kv_dtype(dtype),
        layers=_LAYERS,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    needed = [layout.blocks_for(tokens) for tokens in lens]
    columns = max(needed) if columns is None else columns
    blocks = sum(needed) + 3
    pool = PagedPool(layout, blocks, device)
    pool.storage.fill_(0xFF)
    scales = pool.scales(_LAYER) if layout.dtype.scaled else None
    if scales is not None:
        scales.fill_(math.inf)

    order = torch.randperm(blocks, generator=random, device=device).int()
    tables = torch.full((len(lens), columns + 1), 1 << 30, dtype=torch.int32, device=device)
    at = 0
    for row, count in enumerate(needed):
        tables[row, :count] = order[at : at + count]
        at += count
    for row, tokens in enumerate(lens):
        if tokens:
            _fill(pool, tables[row, : needed[row]].long(), tokens, kind, random)

    heads = kv_heads * group
    qkv = torch.randn((len(lens), (heads + 2) * head_dim), generator=random, device=device)
    if kind == "large_k":
        qkv *= 0.05
    q = qkv.half()[:, head_dim : (heads + 1) * head_dim].view(len(lens), heads, head_dim)
    view = attention.KvView(
        pool.storage,
        layout.block_bytes,
        layout.k_offset(_LAYER),
        layout.v_offset(_LAYER),
        layout.k_scale_offset(_LAYER) if scales is not None else 0,
        kv_heads,
        head_dim,
        block_size,
        FORMATS[dtype],
    )
    name = f"{dtype} {kind} d{head_dim} {kv_heads}x{group} block {block_size} lens {lens}"
    return Case(
        name,
        q,
        view,
        tables[:, :columns],
        torch.tensor(lens, dtype=torch.int32, device=device),
        head_dim**-0.5,
        pool.k(_LAYER),
        pool.v(_LAYER),
        scales,
    )


def _fill(
    pool: PagedPool, blocks: Tensor, tokens: int, kind: Kind, random: torch.Generator
) -> None:
    """Write ``tokens`` tokens of K and V into ``blocks`` of the case's layer."""
    layout = pool.layout
    for which, (pages, words) in enumerate(
        ((pool.k(_LAYER), pool.k_words(_LAYER)), (pool.v(_LAYER), pool.v_words(_LAYER)))
    ):
        shape = (len(blocks), layout.kv_heads, layout.block_size, layout.head_dim)
        values = torch.randn(shape, generator=random, device=blocks.device)
        stored, scales = store(values, pages.dtype, kind, which == 0, random)
        tail = torch.arange(len(blocks) * layout.block_size, device=blocks.device)
        own = (tail < tokens).view(len(blocks), 1, layout.block_size, 1)
        bits = stored.view(words.dtype)
        words[blocks] = torch.where(own, bits, words[blocks])
        if scales is not None:
            kept = pool.scales(_LAYER)[blocks, which]
            pool.scales(_LAYER)[blocks, which] = torch.where(own[..., 0], scales, kept)


def store(
    values: Tensor, dtype: torch.dtype, kind: Kind, is_k: bool, random: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """``values`` in storage type ``dtype`` (and int8's scales), after what ``kind`` does."""
    if kind == "large_k" and is_k:
        values = values * 4
        values[..., ::16] = values[..., ::16] * 50
        values = values.clamp(-200, 200)
    if kind == "saturated" and not is_k:
        values = torch.where(values.abs() > 1, values.sign() * 1e6, values)
    if kind == "tiny":
        values = values * (1 if is_k else 2.0**-7)
    if dtype == torch.int8:
        scales = (values.abs().amax(-1) / 127).clamp(2.0**-14, 65504 / 127).half()
        codes = (values / scales.float()[..., None]).round().clamp(-127, 127).to(torch.int8)
        if kind == "scales" and not is_k:
            steps = torch.rand(scales.shape, generator=random, device=scales.device)
            scales = (2.0 ** (-14 + 23 * steps)).clamp(2.0**-14, 65504 / 127).half()
        return codes, scales
    limit = min(torch.finfo(dtype).max, 65504)
    return values.clamp(-limit, limit).to(dtype), None


def judge(case: Case, out: Tensor, expected: Tensor) -> Accuracy:
    """``out`` beside float64 on the same stored bytes; raises Miss for a padding row not zero."""
    padding = case.lens == 0
    if bool(out[padding].any()):
        raise Miss(f"{case.name}: a padding row is not zero")
    e5m2 = case.kv.format == attention.KV_E5M2
    return accuracy.attention(case.name, out[~padding], expected[~padding], e5m2=e5m2)


def error(case: Case, out: Tensor, expected: Tensor) -> str | None:
    """Why ``out`` breaks a rule; None if it keeps them."""
    try:
        return judge(case, out, expected).problem
    except Miss as miss:
        return str(miss)
