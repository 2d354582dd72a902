"""What the gateway has counted and measured, by the names it is exported under.

A flat mapping from a sample's name, labels and all, to its value: ``name{label="value"}``. That is
how it travels in reports to the controller, which adds ``gateway="..."`` and serves it.
"""

from __future__ import annotations

from collections.abc import Mapping

from deepinfer.gateway.core.measures import Histogram, Measures, by_reason
from deepinfer.kvstore.core.requests import FinishReason

PREFIX = "deepinfer_"
REASONS = {
    "requests_finished_total": (*(reason.value for reason in FinishReason), "orphan"),
    "requests_refused_total": (
        "draining",
        "invalid",
        "long_inputs",
        "max_live_requests",
        "max_streams",
        "no_pool",
        "request_bytes",
        "unknown_model",
    ),
}
"""Totals by reason, and every reason there is: a series should begin at 0, not at its first 1."""
TOTALS = (
    "aborts_total",
    "attaches_refused_total",
    "attaches_total",
    "deadlines_total",
    "disowned_total",
    "orphans_total",
    "prompt_tokens_total",
    "requests_total",
    "resumes_refused_total",
    "resumes_total",
    "streams_sent_away_total",
    "streams_unread_total",
    "takeovers_total",
    "tokens_after_gap_dropped_total",
    "tokens_contradicting_dropped_total",
    "tokens_ended_dropped_total",
    "tokens_outdated_total",
    "tokens_repeated_total",
    "tokens_total",
    "tokens_unattached_total",
    "worker_links_lost_total",
)
RENAMED = {
    "requests_total": "requests_accepted_total",
    "tokens_total": "generation_tokens_total",
    "resumes_total": "client_resumes_total",
    "resumes_refused_total": "client_resumes_refused_total",
}
"""Beside others' metrics their names in the core would mislead, or clash."""
GAUGES = {
    "live_requests": "gateway_live_requests",
    "kept_requests": "gateway_kept_requests",
    "streams": "gateway_streams",
    "worker_links": "gateway_worker_links",
}
"""Numbers of the shell's snapshot."""
_MS, _US, _TOKENS = 1_000, 1_000_000, 1
"""Units in a second; in a token."""


def totals(counters: Mapping[str, float]) -> dict[str, float]:
    """What is only counted, zeros too; ``counters`` are the core's and the shell's."""
    found = {f"{PREFIX}{RENAMED.get(name, name)}": counters.get(name, 0) for name in TOTALS}
    for name, reasons in REASONS.items():
        for reason in reasons:
            key = by_reason(name, reason)
            found[f"{PREFIX}{key}"] = counters.get(key, 0)
    return found


def samples(
    counters: Mapping[str, float], measures: Measures, snapshot: Mapping[str, object]
) -> dict[str, float]:
    """Everything, zeros too.

    Args:
        counters: the core's, and what the shell has added to them.
        measures: the core's.
        snapshot: the shell's ``snapshot()``.
    """
    found = totals(counters)
    for name, exported in GAUGES.items():
        value = snapshot[name]
        assert isinstance(value, int), f"{name} is a number"
        found[f"{PREFIX}{exported}"] = value
    for exported, histogram, per_unit, label in (
        ("request_queue_seconds", measures.queue_ms, _MS, ""),
        ("time_to_first_token_seconds", measures.ttft_ms, _MS, ""),
        ("inter_token_seconds", measures.inter_token_ms, _MS, ""),
        ("time_per_output_token_seconds", measures.tpot_us, _US, ""),
        ("request_seconds", measures.choice_ms, _MS, ""),
        ("request_prompt_tokens", measures.prompt_tokens, _TOKENS, ""),
        ("request_generation_tokens", measures.generation_tokens, _TOKENS, ""),
        ("swap_stall_seconds", measures.stall_ms, _MS, ""),
        ("swap_copy_seconds", measures.copy_out_us, _US, 'direction="out"'),
        ("swap_copy_seconds", measures.copy_in_us, _US, 'direction="in"'),
    ):
        found |= _histogram(f"{PREFIX}{exported}", histogram, per_unit, label)
    return found


def _histogram(name: str, histogram: Histogram, per_unit: int, label: str) -> dict[str, float]:
    """A histogram's samples: cumulative buckets, count and sum."""
    before, alone = (f"{label},", f"{{{label}}}") if label else ("", "")
    found: dict[str, float] = {
        f'{name}_bucket{{{before}le="{bound / per_unit}"}}': count
        for bound, count in histogram.cumulative()
    }
    found[f'{name}_bucket{{{before}le="+Inf"}}'] = histogram.count
    found[f"{name}_count{alone}"] = histogram.count
    found[f"{name}_sum{alone}"] = histogram.total / per_unit
    return found
