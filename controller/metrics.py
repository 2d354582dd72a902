"""The cluster's metrics in Prometheus' formats.

What a peer counts is served as its own series, with ``worker``, ``store`` or ``gateway`` naming
it, and begins at 0 with each of its lives: that is a reset as Prometheus' ``rate`` knows it. Were
the sums served, a controller that starts would serve them without whoever has not reported yet,
and ``rate`` would take the rest for news.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from deepinfer.controller.catalogue import FAMILIES, Family, family_of
from deepinfer.controller.core.events import Peer

_SAMPLE = re.compile(r'(\w+)(?:\{((?:\w+="[^"\\{}]*",?)+)\})?')
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_STATES = ("serving", "suspected", "draining", "gone")

Labels = dict[str, str]


def render(
    status: Mapping[str, Any],
    peers: Iterable[tuple[Peer, Mapping[str, float]]],
    *,
    model: str = "",
    kv_cache_dtype: str = "",
    accept: str = "",
) -> tuple[bytes, str]:
    """Write every metric.

    Args:
        status: the controller core's snapshot.
        peers: what each peer has counted, as ``Tally.peers`` gives it.
        model: its name as clients use it; with ``kv_cache_dtype``, for ``deepinfer_model_info``.
        accept: the scraper's Accept header: OpenMetrics if it is asked for, else text.

    Returns:
        The text and its content type.
    """
    metrics = {
        family.name: Metric(name.removesuffix("_total"), family.help, family.kind)
        for name, family in FAMILIES.items()
    }
    for name, labels, value in _levels(status):
        metrics[name].add_sample(name, labels, value)
    if model:
        labels = {"model": model, "kv_cache_dtype": kv_cache_dtype}
        metrics["deepinfer_model_info"].add_sample("deepinfer_model_info", labels, 1)
    counted: list[tuple[str, str, Labels, float]] = []
    for peer, samples in peers:
        alive = _alive(status, peer)
        for sample, value in samples.items():
            found = _parse(sample)
            if found is None:
                continue
            family, name, labels = found
            if family.kind == "gauge" and not alive:
                continue
            counted.append((family.name, name, {peer.kind.value: peer.id} | labels, value))
    for family_name, name, labels, value in sorted(counted, key=_order):
        metrics[family_name].add_sample(name, labels, value)
    encode, content_type = choose_encoder(accept)
    return encode(_Collected(metrics.values())), content_type


class _Collected:
    """What ``prometheus_client`` takes for a registry."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


@lru_cache(maxsize=4096)
def _parse(sample: str) -> tuple[Family, str, Labels] | None:
    """A peer's sample: its family, name and labels; None unless it is one of the catalogue."""
    match = _SAMPLE.fullmatch(sample)
    if match is None:
        return None
    family = family_of(match[1])
    if family is None:
        return None
    return family, match[1], dict(_LABEL.findall(match[2] or ""))


def _order(sample: tuple[str, str, Labels, float]) -> tuple[str, list[tuple[str, str]], str, float]:
    """Series by series; a histogram's buckets by their bounds, then count and sum."""
    family, name, labels, _ = sample
    rest = [(key, value) for key, value in labels.items() if key != "le"]
    return family, rest, name, float(labels.get("le", math.inf))


def _alive(status: Mapping[str, Any], peer: Peer) -> bool:
    here = status[f"{peer.kind.value}s"].get(peer.id)
    if here is None or here["incarnation"] != peer.incarnation:
        return False
    return bool(here["state"] != "gone" if "state" in here else here["alive"])


def _levels(status: Mapping[str, Any]) -> Iterator[tuple[str, Labels, float]]:
    """What the controller knows itself."""
    # What is not bounded is without end.
    yield "max_swapped_requests", {}, status["counters"].get("max_swapped_requests", math.inf)
    for name, value in status["counters"].items():
        if name != "max_swapped_requests":
            yield name, {}, value
    yield "deepinfer_controller_ready", {}, float(status["ready"])
    yield "deepinfer_controller_start_time_seconds", {}, status["epoch"] / 1_000
    yield "deepinfer_requests_in_line", {}, status["waiting"]
    for state, count in status["requests"].items():
        yield "deepinfer_requests", {"state": state}, count
    states = [worker["state"] for worker in status["workers"].values()]
    for state in _STATES:
        yield "deepinfer_workers", {"state": state}, states.count(state)
    for worker, levels in status["workers"].items():
        if levels["state"] != "gone":
            for name, value in _pool(levels):
                yield name, {"worker": worker}, value
    for store, levels in status["stores"].items():
        yield "deepinfer_store_up", {"store": store}, float(levels["alive"])
        if levels["alive"]:
            for name in ("budget_bytes", "used_bytes", "payload_bytes", "tickets"):
                yield f"deepinfer_store_{name}", {"store": store}, levels[name]
    for gateway, levels in status["gateways"].items():
        yield "deepinfer_gateway_up", {"gateway": gateway}, float(levels["alive"])


def _pool(levels: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    total, free = levels["blocks_total"], levels["blocks_free"]
    yield "deepinfer_kv_blocks", total
    yield "deepinfer_kv_blocks_free", free
    yield "deepinfer_kv_blocks_short", levels["blocks_short"]
    yield "deepinfer_kv_block_bytes", levels["block_bytes"]
    yield "deepinfer_kv_block_tokens", levels["block_size"]
    if total:
        yield "deepinfer_kv_cache_usage_ratio", (total - free) / total
    if precision := levels["precision"]:
        yield "deepinfer_worker_precision_level", precision["level"]
        yield "deepinfer_worker_precision_levels", precision["levels"]
        yield "deepinfer_worker_precision_pays", float(not precision["remark"])
    if planes := levels.get("planes"):
        yield "deepinfer_worker_planes_away", float(planes["state"] != "held")
        yield "deepinfer_worker_kv_blocks_gained", planes["blocks_gained"]
    yield "deepinfer_worker_requests", levels["residents"]
    yield "deepinfer_worker_requests_coming", levels["pending"]
    yield "deepinfer_worker_requests_swapped", levels["swapped_from_here"]
