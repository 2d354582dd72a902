"""What ``paged_prefill`` must compute: float64, span by span, from the stored bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def paged_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Tensor | None,
    block_tables: Tensor,
    spans: Sequence[tuple[int, int, int, int]],
    *,
    scale: float,
) -> Tensor:
    """Causal attention of the spans' rows over their paged KV, float64 ``[rows, heads, head_dim]``.

    ``q`` ``[rows, heads, head_dim]``; ``k`` and ``v`` ``[blocks, kv_heads, block_size, head_dim]``
    in their storage dtype; ``scales`` float16 ``[blocks, 2 (K, V), kv_heads, block_size]`` (int8
    only); ``block_tables`` ``[tables, columns]``. A span is (first row of ``q``, rows, tokens
    cached before it, row of ``block_tables``): its row i attends the first ``start + i + 1``
    tokens. Query head ``h`` reads KV head ``h // (heads // kv_heads)``; scores are multiplied by
    ``scale``. Rows of no span are NaN. Nothing beyond the attended tokens has any influence.
    """
    heads, head_dim = q.shape[1:]
    kv_heads, block_size = k.shape[1], k.shape[2]
    result = torch.full(q.shape, float("nan"), dtype=torch.float64, device=q.device)
    for row, rows, start, table in spans:
        tokens = start + rows
        blocks = block_tables[table, : -(-tokens // block_size)].tolist()
        keys = _gather(k, None if scales is None else scales[:, 0], blocks, tokens)
        values = _gather(v, None if scales is None else scales[:, 1], blocks, tokens)
        # [kv_heads, group, rows, head_dim] against [kv_heads, 1, tokens, head_dim]
        queries = q[row : row + rows].double().view(rows, kv_heads, heads // kv_heads, head_dim)
        scores = queries.permute(1, 2, 0, 3) @ keys[:, None].transpose(2, 3) * scale
        positions = torch.arange(start, tokens, device=q.device)[:, None]
        visible = torch.arange(tokens, device=q.device)[None] <= positions
        weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
        attended = (weights @ values[:, None]).permute(2, 0, 1, 3)
        result[row : row + rows] = attended.reshape(rows, heads, head_dim)
    return result


def _gather(pages: Tensor, scales: Tensor | None, blocks: list[int], tokens: int) -> Tensor:
    """The first ``tokens`` tokens of one span's cache, float64 ``[kv_heads, tokens, head_dim]``."""
    chosen = torch.stack([pages[block] for block in blocks]).double()
    if scales is not None:
        chosen = chosen * torch.stack([scales[block] for block in blocks]).double()[..., None]
    _, kv_heads, _, head_dim = chosen.shape
    return chosen.transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :tokens]
