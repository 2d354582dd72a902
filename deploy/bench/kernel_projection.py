"""What cards of compute capability 8.6 would do: a projection from bytes, nothing measured there.

A decode step reads every weight once and every cached token once; a card that did nothing else
would take bytes / bandwidth for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rich.table import Table

from deepinfer.deploy.validate.scope import KV_DTYPES, linear_shapes
from deepinfer.kvstore.core.layout import resolve_kv_dtype
from deepinfer.workers.model.config import ModelConfig
from deepinfer.workers.model.decoder import kv_layout

BANDWIDTHS: Final = (192e9, 600e9, 936e9)
"""Bytes a second of memory, by data sheets of cards of that generation."""

CELLS: Final = ((1, 2048), (4, 2048), (16, 2048), (64, 2048), (16, 8192))
_BITS: Final = {"fp16": 16.0, "w4a16": 4.0 + 16.0 / 128}


def projection(config: ModelConfig, measured: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Tokens a second by the roofline, and at the share of it that was measured elsewhere.

    ``measured`` are results of ``kernel_steps.time_model`` with ``roofline_share`` in them.
    """
    shares = {
        (each["weights"], each["kv_cache_dtype"], cell["batch"], cell["context"]): cell[
            "roofline_share"
        ]
        for each in measured
        for cell in each["decode"]
        if cell.get("roofline_share") is not None
    }
    rows = []
    for weights in _BITS:
        for dtype in KV_DTYPES:
            layout = kv_layout(config, resolve_kv_dtype(dtype), 16)
            for batch, context in CELLS:
                step = step_bytes(config, weights, layout.block_bytes / 16, batch, context)
                share = shares.get((weights, dtype, batch, context))
                rows.append(
                    {
                        "weights": weights,
                        "kv_cache_dtype": dtype,
                        "batch": batch,
                        "context": context,
                        "step_bytes": step,
                        "share_measured_elsewhere": share,
                        "tokens_per_s": {
                            f"{bandwidth / 1e9:.0f} GB/s": {
                                "roofline": batch * bandwidth / step,
                                "projected": share and batch * bandwidth / step * share,
                            }
                            for bandwidth in BANDWIDTHS
                        },
                    }
                )
    return {"projection": True, "rows": rows}


def step_bytes(
    config: ModelConfig, weights: str, kv_bytes_a_token: float, batch: int, context: int
) -> float:
    """Bytes that a decode step must read: weights once, and the cache of every sequence."""
    *layer, (_, vocab, hidden) = linear_shapes(config)
    bits = config.layers * sum(n * k for _, n, k in layer) * _BITS[weights] + 16 * vocab * hidden
    return bits / 8 + batch * context * kv_bytes_a_token


def table(found: dict[str, Any]) -> Table:
    """For a terminal."""
    shown = Table(title="projection, not measured: tokens/s of SM86 cards by memory bandwidth")
    for heading in ("weights", "KV"):
        shown.add_column(heading)
    for heading in ("batch", "context", "GB a step"):
        shown.add_column(heading, justify="right")
    for bandwidth in BANDWIDTHS:
        shown.add_column(f"{bandwidth / 1e9:.0f} GB/s", justify="right")
    for row in found["rows"]:
        cells = []
        for rate in row["tokens_per_s"].values():
            projected = rate["projected"]
            cells.append(
                f"{rate['roofline']:,.0f}"
                + (f" ({projected:,.0f})" if projected is not None else "")
            )
        shown.add_row(
            row["weights"],
            row["kv_cache_dtype"],
            str(row["batch"]),
            f"{row['context']:,}",
            f"{row['step_bytes'] / 1e9:.2f}",
            *cells,
        )
    shown.caption = "by the roofline; in brackets at the share of it measured on another card"
    return shown
