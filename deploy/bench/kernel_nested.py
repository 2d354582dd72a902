"""Times of nested linears at a model's shape: both modes, beside plain FP16 and cuBLAS."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.deploy.bench.kernel_linears import fused
from deepinfer.deploy.bench.kernel_timing import graph_us, rotations
from deepinfer.deploy.validate.linear_cases import f16_weight
from deepinfer.deploy.validate.scope import linear_shapes
from deepinfer.kernels import linear, linear_w8a8, nested
from deepinfer.kernels.compiler import precompile
from deepinfer.kernels.linear import F16Weight, NestedWeight, Workspace
from deepinfer.kernels.linear_w8a8 import W8A8Weight
from deepinfer.workers.gpu.products import SCRATCH_BYTES
from deepinfer.workers.model.config import ModelConfig

ROWS: Final = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

_WEIGHTS_MAX: Final = 64
_EXPANDED_FROM: Final = 16
"""Expansion and cuBLAS are timed above so many rows: below, nobody would do it."""


def time_nested(
    config: ModelConfig, device: torch.device, *, peers: bool, rows: Sequence[int] = ROWS
) -> Iterator[dict[str, Any]]:
    """A record for each weight and number of rows: microseconds of everyone who computes it.

    ``nested_us`` and ``nested_fp8_us`` are our kernels in the two modes, ``f16_us`` the same ones
    with plain FP16 weights, each with what it finishes the product with; ``expanded_us`` cuBLAS
    after slices of the weight were expanded to FP16 (``expanded_fp8_us``: from the upper plane);
    ``w8a8_us`` FP8 products of torch, quantisation included, where the card has them.
    """
    fp8_products = device.type == "cuda" and (
        torch.cuda.get_device_capability(device) >= linear_w8a8.CAPABILITY_MIN
    )
    if device.type == "cuda":
        mine = (*linear.specs(), *linear_w8a8.specs())
        precompile([spec for spec in mine if "w4" not in spec.name])
    for name, n, k in linear_shapes(config):
        if device.type == "cuda":
            torch.cuda.empty_cache()
        count = rotations(2 * n * k, most=_WEIGHTS_MAX)
        plain = [f16_weight(n, k, bias=False, device=str(device)) for _ in range(count)]
        stored = [nested.encode(each.weight) for each in plain]
        halves = rotations(n * k, most=_WEIGHTS_MAX)
        stored += [nested.encode(each.weight) for each in plain[: max(0, halves - count)]]
        for m in rows:
            x = torch.randn(m, k, device=device).half()
            workspace = Workspace.allocate(device)
            found: dict[str, Any] = {"weight": name, "n": n, "k": k, "rows": m}
            found["f16_us"] = graph_us(_fused(name, plain, x, workspace, fp8=False))
            found["nested_us"] = graph_us(_fused(name, stored[:count], x, workspace, fp8=False))
            found["nested_fp8_us"] = graph_us(_fused(name, stored, x, workspace, fp8=True))
            for fp8, key in ((False, "expanded_us"), (True, "expanded_fp8_us")):
                found[key] = None
                if peers and m > _EXPANDED_FROM:
                    found[key] = graph_us(_expanded(stored[:count], x, fp8=fp8))
            found["w8a8_us"] = None
            if fp8_products:
                found["w8a8_us"] = graph_us(_w8a8(stored[:count], x))
            if peers:
                found["cublas_us"] = graph_us(
                    [functools.partial(torch.nn.functional.linear, x, w.weight) for w in plain]
                )
            yield found


def _fused(
    name: str,
    weights: Sequence[F16Weight] | Sequence[NestedWeight],
    x: Tensor,
    workspace: Workspace,
    *,
    fp8: bool,
) -> list[Callable[[], None]]:
    launch = fused(name, weights[0], x, workspace, fp8=fp8)
    return [functools.partial(launch, each) for each in weights]


def _w8a8(weights: Sequence[NestedWeight], x: Tensor) -> list[Callable[[], None]]:
    n, k = weights[0].rows, weights[0].columns
    scratch = linear_w8a8.Scratch.allocate(x.shape[0], k, x.device)
    out = torch.empty(x.shape[0], n, device=x.device, dtype=torch.float16)
    return [
        functools.partial(linear_w8a8.linear_w8a8, out, x, W8A8Weight.of(each), scratch)
        for each in weights
    ]


def _expanded(weights: Sequence[NestedWeight], x: Tensor, *, fp8: bool) -> list[Callable[[], None]]:
    """Slices of rows expanded one after another into one scratch, each multiplied by cuBLAS."""
    n, k = weights[0].rows, weights[0].columns
    rows = min(n, SCRATCH_BYTES // (2 * k) // 8 * 8)
    scratch = torch.empty(rows, k, device=x.device, dtype=torch.float16)
    out = torch.empty(x.shape[0], n, device=x.device, dtype=torch.float16)

    def multiply(weight: NestedWeight) -> None:
        for first in range(0, n, rows):
            part = scratch[: min(rows, n - first)]
            linear.expand_nested(part, weight, first, fp8=fp8)
            torch.mm(x, part.t(), out=out[:, first : first + part.shape[0]])

    return [functools.partial(multiply, each) for each in weights]
