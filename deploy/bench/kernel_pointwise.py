"""Times of the pointwise kernels at a model's shape, beside torch where it has the like."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.deploy.bench.kernel_attention import BLOCK_SIZE, AttentionShape
from deepinfer.deploy.bench.kernel_timing import graph_us, rotations
from deepinfer.deploy.validate.scope import KV_DTYPES
from deepinfer.kernels import pointwise
from deepinfer.workers.gpu.shapes import kv_views
from deepinfer.workers.gpu.weights import padded_width

ROWS: Final = (1, 16, 64, 512, 2048)
_EPS: Final = 1e-6
_POSITIONS: Final = 4096


def time_pointwise(shape: AttentionShape, *, peers: bool) -> Iterator[dict[str, Any]]:
    """A record for each kernel and number of rows: microseconds, and bytes a second."""
    for rows in ROWS:
        yield from _norms(shape, rows, peers=peers)
        yield _swiglu(shape, rows)
        for dtype in KV_DTYPES:
            yield _rope(shape, rows, dtype)
    for count in (1, 8, 64):
        yield _copy_blocks(shape, count)


def _record(
    kernel: str, rows: int, moved: int, calls: Sequence[Callable[[], object]]
) -> dict[str, Any]:
    us = graph_us(calls)
    return {
        "kernel": kernel,
        "rows": rows,
        "us": us,
        "bytes": moved,
        "bytes_per_s": moved / us * 1e6,
    }


def _norms(shape: AttentionShape, rows: int, *, peers: bool) -> Iterator[dict[str, Any]]:
    hidden = shape.config.hidden_size
    count = rotations(6 * rows * hidden, most=64)
    gamma = torch.randn(hidden, device=shape.card.device).half()
    residuals = [torch.randn(rows, hidden, device=shape.card.device) for _ in range(count)]
    outs = [each.half() for each in residuals]
    branches = [torch.randn(rows, hidden, device=shape.card.device).half() for _ in range(count)]
    norm = _record(
        "rms_norm",
        rows,
        6 * rows * hidden,
        [
            functools.partial(pointwise.rms_norm, out, x, gamma, _EPS)
            for out, x in zip(outs, residuals, strict=True)
        ],
    )
    if peers:
        wide = gamma.float()

        def torch_norm(x: Tensor) -> Tensor:
            return torch.nn.functional.rms_norm(x, (hidden,), wide, _EPS).half()

        norm["torch_us"] = graph_us([functools.partial(torch_norm, x) for x in residuals])
    yield norm
    yield _record(
        "residual_add_norm",
        rows,
        12 * rows * hidden,
        [
            functools.partial(pointwise.residual_add_norm, out, x, branch, gamma, _EPS)
            for out, x, branch in zip(outs, residuals, branches, strict=True)
        ],
    )


def _swiglu(shape: AttentionShape, rows: int) -> dict[str, Any]:
    width, device = padded_width(shape.config), shape.card.device
    count = rotations(6 * rows * width, most=64)
    gate_ups = [torch.randn(rows, 2 * width, device=device).half() for _ in range(count)]
    outs = [torch.empty(rows, width, device=device, dtype=torch.float16) for _ in gate_ups]
    calls = [
        functools.partial(pointwise.swiglu, out, each)
        for out, each in zip(outs, gate_ups, strict=True)
    ]
    return _record("swiglu", rows, 6 * rows * width, calls)


def _rope(shape: AttentionShape, rows: int, dtype: str) -> dict[str, Any]:
    config = shape.config
    pool = shape.pool(dtype, rows)
    views = kv_views(pool)
    width = config.qkv_rows
    moved = 4 * rows * width
    count = rotations(moved, most=36)
    qkvs = [torch.randn(rows, width, device=shape.card.device).half() for _ in range(count)]
    angles = torch.randn(2, _POSITIONS, config.rope_dim // 2, device=shape.card.device)
    positions = torch.randint(0, BLOCK_SIZE, (rows,), dtype=torch.int32, device=shape.card.device)
    sequences = torch.arange(rows, dtype=torch.int32, device=shape.card.device)
    tables = torch.randperm(rows, device=shape.card.device).int().view(rows, 1) % pool.num_blocks
    saturations = torch.zeros(1, dtype=torch.int64, device=shape.card.device)

    def launch(at: int) -> None:
        pointwise.rope_kv_write(
            qkvs[at],
            views[at % len(views)],
            positions,
            sequences,
            tables,
            angles[0],
            angles[1],
            heads=config.heads,
            eps=_EPS,
            saturations=saturations,
        )

    calls = [functools.partial(launch, at) for at in range(count)]
    return _record("rope_kv_write", rows, moved, calls) | {"kv_cache_dtype": dtype}


def _copy_blocks(shape: AttentionShape, count: int) -> dict[str, Any]:
    pool = shape.pool("fp16", 2048)
    order = torch.randperm(pool.num_blocks, device=shape.card.device).int()
    moved = 2 * count * pool.layout.block_bytes
    sets = min(rotations(moved, most=16), pool.num_blocks // (2 * count))
    pairs = order[: 2 * count * sets].view(sets, count, 2).contiguous()
    calls = [functools.partial(pointwise.copy_blocks, pool.storage, each) for each in pairs]
    return _record("copy_blocks", count, moved, calls)
