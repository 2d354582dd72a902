"""What ``paged_decode`` must compute: float64, row by row, from the stored bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Tensor | None,
    block_tables: Tensor,
    lens: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Attention of one query row a sequence over its paged KV, float64 ``[rows, heads, head_dim]``.

    ``q`` ``[rows, heads, head_dim]``; ``k`` and ``v`` ``[blocks, kv_heads, block_size, head_dim]``
    in their storage dtype; ``scales`` float16 ``[blocks, 2 (K, V), kv_heads, block_size]`` (int8
    only); ``block_tables`` ``[rows, columns]``; ``lens`` ``[rows]``: tokens in the cache. Query
    head ``h`` reads KV head ``h // (heads // kv_heads)``; scores are multiplied by ``scale``. A
    row of length 0 gives zeros. Nothing beyond a row's length has any influence.
    """
    rows, heads, head_dim = q.shape
    kv_heads, block_size = k.shape[1], k.shape[2]
    result = torch.zeros((rows, heads, head_dim), dtype=torch.float64, device=q.device)
    for row, tokens in enumerate(lens.tolist()):
        if not tokens:
            continue
        blocks = block_tables[row, : -(-tokens // block_size)].tolist()
        keys = _gather(k, None if scales is None else scales[:, 0], blocks, tokens)
        values = _gather(v, None if scales is None else scales[:, 1], blocks, tokens)
        queries = q[row].double().view(kv_heads, heads // kv_heads, head_dim)
        weights = torch.softmax(queries @ keys.transpose(1, 2) * scale, dim=-1)
        result[row] = (weights @ values).reshape(heads, head_dim)
    return result


def _gather(pages: Tensor, scales: Tensor | None, blocks: list[int], tokens: int) -> Tensor:
    """The first ``tokens`` tokens of one sequence, float64 ``[kv_heads, tokens, head_dim]``."""
    # One by one to float64: torch cannot stack or index every 8-bit float on every device.
    chosen = torch.stack([pages[block].double() for block in blocks])
    if scales is not None:
        chosen = chosen * torch.stack([scales[block] for block in blocks]).double()[..., None]
    _, kv_heads, _, head_dim = chosen.shape
    return chosen.transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :tokens]
