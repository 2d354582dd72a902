"""The status document as tables for a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table

SWAP_COUNTERS = (
    "requests_swapped_total",
    "requests_resumed_total",
    "kv_cpu_offload_blocks_total",
    "kv_cpu_offload_bytes_total",
    "kv_cpu_offload_failed_total",
    "kv_cpu_offload_rejected_total",
    "kv_cpu_reload_blocks_total",
    "deepinfer_worker_prefetches_total",
    "deepinfer_worker_prefetches_used_total",
    "deepinfer_worker_prefetches_wasted_total",
    "cpu_offload_seconds",
    "cpu_reload_seconds",
)
"""What the table shows of the counters; ``--json`` has them all."""


def mib(size: float) -> str:
    """Bytes as MiB with one decimal."""
    return f"{size / 2**20:.1f} MiB"


def mode(precision: dict[str, Any]) -> str:
    """The precision of a worker's nested weights, in a few letters."""
    level, top = precision["level"], precision["levels"] - 1
    if level == 0:
        return "fp16"
    return "fp8" if level == top else f"mixed {level}/{top}"


def render_status(document: dict[str, Any]) -> Group:
    """Workers and their pools, stores, request states, the swap budget (S9), precision, quality."""
    workers = Table("worker", "node", "blocks used", "free", "short", "residents", "state")
    for name, worker in sorted(document["workers"].items()):
        used = worker["blocks_total"] - worker["blocks_free"]
        workers.add_row(
            name,
            worker["node"],
            f"{used} / {worker['blocks_total']}",
            str(worker["blocks_free"]),
            str(worker["blocks_short"]),
            str(worker["residents"]),
            worker["state"],
        )
    stores = Table("store", "node", "used", "budget", "tickets")
    for name, store in sorted(document["stores"].items()):
        stores.add_row(
            name,
            store["node"],
            mib(store["used_bytes"]),
            mib(store["budget_bytes"]),
            str(store["tickets"]),
        )
    requests = Table("state", "requests")
    for state, count in document["requests"].items():
        if count:
            requests.add_row(state, str(count))
    if not requests.rows:
        requests.add_row("none", "0")
    offload = document["cpu_offload"]
    swap = Table("swap", "")
    swap.add_row("deterministic", "yes" if document["deterministic"] else "no")
    swap.add_row("enabled", "yes" if offload["enabled"] else "no")
    swap.add_row("swapped now", str(document["swapped"]))
    swap.add_row("payload", mib(offload["payload_bytes"]))
    swap.add_row("budget", mib(offload["budget_bytes"]))
    swap.add_row("most swapped requests", str(offload["max_swapped_requests"]))
    for name in SWAP_COUNTERS:
        swap.add_row(name, f"{document['counters'][name]:g}")
    shown = [workers, stores, requests, swap]
    nested = {n: w["precision"] for n, w in document["workers"].items() if w.get("precision")}
    if nested:
        modes = Table(
            "weights", "mode", "tokens fp16", "mixed", "fp8", "w8a8", "switches", "remark"
        )
        for name, precision in sorted(nested.items()):
            tokens = (f"{count:,}" for count in precision["tokens"])
            remark = precision["remark"]
            modes.add_row(name, mode(precision), *tokens, f"{precision['switches']:,}", remark)
        shown.append(modes)
    away = {n: w["planes"] for n, w in document["workers"].items() if w.get("planes")}
    if away:
        shedding = Table("lower planes", "state", "blocks gained", "to gain", "return")
        for name, planes in sorted(away.items()):
            shedding.add_row(
                name,
                planes["state"],
                f"{planes['blocks_gained']:,}",
                f"{planes['blocks_to_gain']:,}",
                f"{planes['return_ms']:,} ms",
            )
        shown.append(shedding)
    if quality := document.get("kv_quality"):
        measured = Table("KV beside fp16", "KL nats", "same top token", "K channel scales")
        for name, found in sorted(quality.items()):
            measured.add_row(
                name,
                f"{found['kl_nats']:.2g}",
                f"{found['agreement']:.1%}",
                "yes" if found["key_scales"] else "no",
            )
        shown.append(measured)
    return Group(*shown)
