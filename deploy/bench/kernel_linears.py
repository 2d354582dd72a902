"""Times of a layer's linears at a model's shape, beside cuBLAS and torch's int4 product."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from deepinfer.deploy.bench.kernel_timing import graph_us, rotations
from deepinfer.deploy.validate.linear_cases import f16_weight, w4_weight
from deepinfer.deploy.validate.scope import linear_shapes
from deepinfer.kernels import linear
from deepinfer.kernels.linear import F16Weight, Weight, Workspace
from deepinfer.workers.gpu.products import Products, multiply_into_float32
from deepinfer.workers.model.config import ModelConfig

ROWS: Final = (1, 4, 8, 16, 32, 64)
MANY_ROWS: Final = (512, 2048)
"""Of prompts: cuBLAS, after the expansion of 4-bit weights."""

_EPS: Final = 1e-6
_WEIGHTS_MAX: Final = 128
_INT4_GROUP: Final = 128


def time_linears(
    config: ModelConfig,
    device: torch.device,
    *,
    peers: bool,
    rows: Sequence[int] = (*ROWS, *MANY_ROWS),
) -> Iterator[dict[str, Any]]:
    """A record for each weight and number of rows: microseconds of everyone who computes it.

    ``f16`` and ``w4`` are what a worker launches, with what it finishes the product with.
    """
    for name, n, k in linear_shapes(config):
        if device.type == "cuda":
            torch.cuda.empty_cache()
        f16 = [
            f16_weight(n, k, bias=name == "qkv", device=str(device))
            for _ in range(rotations(2 * n * k, most=_WEIGHTS_MAX))
        ]
        groups = [each for each in (128, 64, 32) if k % each == 0]
        w4: list[Weight] = []
        if name != "head" and groups:
            w4 = [
                w4_weight(n, k, groups[0], zeros=False, bias=name == "qkv", device=str(device))
                for _ in range(rotations(n * k // 2, most=_WEIGHTS_MAX))
            ]
        packed = _int4_weights(n, k, len(w4), device) if peers and name != "head" else []
        for m in rows:
            if name == "head" and m > max(ROWS):
                continue  # of a prompt, one row has logits
            found: dict[str, Any] = {"weight": name, "n": n, "k": k, "rows": m}
            x = torch.randn(m, k, device=device).half()
            found["f16_us"] = _own(name, f16, x)
            found["w4_us"] = _own(name, w4, x) if w4 else None
            if peers:
                found["cublas_us"] = graph_us(
                    [functools.partial(torch.nn.functional.linear, x, w.weight) for w in f16]
                )
                found["int4pack_us"] = _int4_us(packed, x) if packed and m <= max(ROWS) else None
            yield found


def _own(name: str, weights: Sequence[Weight], x: Tensor) -> float:
    """What a worker launches for so many rows: its own kernel, or cuBLAS and what that needs."""
    rows = x.shape[0]
    workspace = Workspace.allocate(x.device)
    if rows <= linear.max_rows(weights[0]):
        launch = fused(name, weights[0], x, workspace)
        return graph_us([functools.partial(launch, each) for each in weights])
    if name == "head":
        out = torch.empty(rows, weights[0].rows, device=x.device)
        plain = [each for each in weights if isinstance(each, F16Weight)]
        return graph_us(
            [functools.partial(multiply_into_float32, out, x, each.weight) for each in plain]
        )
    products = Products(list(weights), workspace)
    half = torch.empty(rows, weights[0].rows, device=x.device, dtype=torch.float16)
    return graph_us([functools.partial(products, half, x, each) for each in weights])


def fused(
    name: str, weight: Weight, x: Tensor, workspace: Workspace, *, fp8: bool = False
) -> Callable[[Weight], None]:
    """The product as a fused layer launches it, with the epilogue that its weight has."""
    rows, n, k = x.shape[0], weight.rows, weight.columns

    def half(columns: int) -> Tensor:
        return torch.empty(rows, columns, device=x.device, dtype=torch.float16)

    if name in ("o", "down"):
        residual = torch.zeros(rows, n, device=x.device)
        sums = torch.empty(rows, linear.partials(n), device=x.device)
        hidden, gamma = half(n), torch.ones(n, device=x.device, dtype=torch.float16)
        return lambda w: linear.linear_residual(
            hidden, residual, sums, x, w, gamma, fp8=fp8, workspace=workspace
        )
    sumsq = torch.full((rows, linear.partials(k)), 16.0, device=x.device)
    if name == "head":
        logits = torch.empty(rows, n, device=x.device)
        return lambda w: linear.linear_logits(
            logits, x, w, sumsq=sumsq, eps=_EPS, fp8=fp8, workspace=workspace
        )
    out = half(n // 2 if name == "gate_up" else n)
    finish = linear.linear_swiglu if name == "gate_up" else linear.linear_norm
    return lambda w: finish(out, x, w, sumsq=sumsq, eps=_EPS, fp8=fp8, workspace=workspace)


def _int4_weights(n: int, k: int, count: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Weights of torch's int4 product, which computes in bfloat16; none where it cannot."""
    if k % _INT4_GROUP or not hasattr(torch, "_weight_int4pack_mm"):
        return []
    scales = torch.ones(k // _INT4_GROUP, n, 2, device=device, dtype=torch.bfloat16)
    found = []
    for _ in range(count):
        codes = torch.randint(0, 255, (n, k // 2), device=device, dtype=torch.uint8)
        try:
            found.append((torch._convert_weight_to_int4pack(codes, 8), scales))
        except RuntimeError:  # not for these sizes
            return []
    return found


def _int4_us(packed: Sequence[tuple[Tensor, Tensor]], x: Tensor) -> float:
    wide = x.bfloat16()
    return graph_us(
        [
            functools.partial(torch._weight_int4pack_mm, wide, weight, _INT4_GROUP, scales)
            for weight, scales in packed
        ]
    )
