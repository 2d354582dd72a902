"""Every metric that ``/metrics`` serves: its name, type, labels, unit and meaning.

Names, samples and the table in docs/metrics.md come from here. What is in no family is not served.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram", "unknown"]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. ``labels`` leaves out a histogram's ``le``."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    unit: str
    help: str


def _of(label: str, kind: Kind, rows: tuple[tuple[str, str, str], ...]) -> tuple[Family, ...]:
    labels = (label,) if label else ()
    return tuple(Family(name, kind, labels, unit, text) for name, unit, text in rows)


_SWAPS = (
    *_of(
        "worker",
        "counter",
        (
            ("requests_swapped_total", "requests", "Swapped out: copied, committed, then freed."),
            ("requests_resumed_total", "requests", "Swapped in from a verified payload."),
            ("kv_cpu_offload_blocks_total", "blocks", "KV blocks copied out and committed."),
            ("kv_cpu_offload_bytes_total", "bytes", "Payload bytes copied out and committed."),
            (
                "kv_cpu_offload_failed_total",
                "swap-outs",
                "Begun and failed; the request went on where it was.",
            ),
            ("kv_cpu_reload_blocks_total", "blocks", "KV blocks copied back in and verified."),
        ),
    ),
    *_of(
        "worker",
        "unknown",
        (
            (
                "cpu_offload_seconds",
                "seconds",
                "Copies, hashing and the store's calls of committed swap-outs. A counter, but for "
                "its name.",
            ),
            ("cpu_reload_seconds", "seconds", "The same of verified swap-ins."),
        ),
    ),
    *_of(
        "",
        "counter",
        (
            (
                "kv_cpu_offload_rejected_total",
                "swap-outs",
                "Refused by a store's budget or a bound on tickets or requests.",
            ),
        ),
    ),
    *_of(
        "",
        "gauge",
        (
            ("swapped_requests", "requests", "Whose KV is in a store now."),
            ("cpu_offload_bytes", "bytes", "Committed payloads in all stores."),
            ("cpu_offload_budget_bytes", "bytes", "What all stores may hold."),
            ("cpu_offload_enabled", "0 or 1", "Whether requests may be swapped out."),
            ("max_swapped_requests", "requests", "Bound on requests swapped out at a time."),
        ),
    ),
)
_LATENCIES = (
    *_of(
        "gateway",
        "histogram",
        (
            (
                "deepinfer_request_queue_seconds",
                "seconds",
                "Arrival to the moment a worker takes the request.",
            ),
            (
                "deepinfer_time_to_first_token_seconds",
                "seconds",
                "TTFT: arrival to the first token's arrival at the gateway.",
            ),
            (
                "deepinfer_inter_token_seconds",
                "seconds",
                "One token's arrival to the next one's, stalls included.",
            ),
            (
                "deepinfer_time_per_output_token_seconds",
                "seconds",
                "TPOT: first token to last over the tokens but one, of ended requests.",
            ),
            ("deepinfer_request_seconds", "seconds", "Arrival to the end."),
            (
                "deepinfer_swap_stall_seconds",
                "seconds",
                "What a client waits for a swap: from the last token before a swap-out to the "
                "first one after it.",
            ),
        ),
    ),
    Family(
        "deepinfer_swap_copy_seconds",
        "histogram",
        ("gateway", "direction"),
        "seconds",
        "What of it is copying: copies, hashing and the store's calls of one swap, out or in.",
    ),
    *_of(
        "gateway",
        "histogram",
        (
            ("deepinfer_request_prompt_tokens", "tokens", "Prompts of accepted requests."),
            ("deepinfer_request_generation_tokens", "tokens", "Answers of ended requests."),
        ),
    ),
)
_REQUESTS = (
    *_of(
        "gateway",
        "counter",
        (
            ("deepinfer_requests_accepted_total", "requests", "From then on they must finish."),
            ("deepinfer_prompt_tokens_total", "tokens", "Prompt tokens of accepted requests."),
            ("deepinfer_generation_tokens_total", "tokens", "Generated, each counted once."),
        ),
    ),
    Family(
        "deepinfer_requests_finished_total",
        "counter",
        ("gateway", "reason"),
        "choices",
        "Ended, one for each of a request's n choices: stop, length, abort, deadline, error, or "
        "orphan (its client stayed away).",
    ),
    Family(
        "deepinfer_requests_refused_total",
        "counter",
        ("gateway", "reason"),
        "requests",
        "invalid, unknown_model, max_live_requests, max_streams, request_bytes (too long), "
        "long_inputs (too many of those are being tokenized), draining (the gateway is to be "
        "stopped), or no_pool (none could ever hold it; such a request was accepted first).",
    ),
    *_of(
        "gateway",
        "counter",
        (
            ("deepinfer_aborts_total", "requests", "Aborted by their clients."),
            ("deepinfer_deadlines_total", "requests", "Ended by their deadline."),
            ("deepinfer_orphans_total", "requests", "Ended because no client came back."),
            ("deepinfer_client_resumes_total", "streams", "Clients that came back here."),
            ("deepinfer_client_resumes_refused_total", "streams", "Clients that may not resume."),
            (
                "deepinfer_streams_sent_away_total",
                "streams",
                "Ended before their request, for the gateway to be stopped: they go on at another.",
            ),
            (
                "deepinfer_streams_unread_total",
                "streams",
                "Ended because their clients read nothing for too long.",
            ),
            ("deepinfer_takeovers_total", "requests", "Taken over from another gateway."),
            ("deepinfer_disowned_total", "requests", "Taken over by another gateway."),
        ),
    ),
    Family(
        "deepinfer_requests",
        "gauge",
        ("state",),
        "choices",
        "Each state of docs/architecture.md: waiting, prefill, decode, swapping_out, swapped and "
        "so on.",
    ),
    *_of(
        "",
        "gauge",
        (("deepinfer_requests_in_line", "choices", "Those that wait for room on a worker."),),
    ),
    *_of(
        "gateway",
        "gauge",
        (
            ("deepinfer_gateway_live_requests", "requests", "Those that have not ended."),
            ("deepinfer_gateway_kept_requests", "requests", "Live ones and ended ones still kept."),
            ("deepinfer_gateway_streams", "streams", "Clients' streams that are open."),
            ("deepinfer_gateway_worker_links", "links", "Workers' links that are open."),
            ("deepinfer_gateway_up", "0 or 1", "Whether it reports."),
        ),
    ),
)
_WORKERS = (
    Family(
        "deepinfer_model_info",
        "gauge",
        ("model", "kv_cache_dtype"),
        "1",
        "What is served, and how its KV is kept.",
    ),
    Family(
        "deepinfer_workers",
        "gauge",
        ("state",),
        "workers",
        "serving, suspected (silent or deaf), draining or gone.",
    ),
    *_of(
        "worker",
        "gauge",
        (
            ("deepinfer_kv_blocks", "blocks", "In the pool."),
            ("deepinfer_kv_blocks_free", "blocks", "That an allocation could take now."),
            ("deepinfer_kv_blocks_short", "blocks", "Wanted for the next step and not there."),
            ("deepinfer_kv_block_bytes", "bytes", "Of one block over all layers."),
            ("deepinfer_kv_block_tokens", "tokens", "In one block."),
            ("deepinfer_kv_cache_usage_ratio", "0 to 1", "Share of the pool that is in use."),
            ("deepinfer_worker_requests", "requests", "On the worker."),
            ("deepinfer_worker_requests_coming", "requests", "Placed and not there yet."),
            ("deepinfer_worker_requests_swapped", "requests", "Swapped out from it."),
            (
                "deepinfer_worker_precision_level",
                "level",
                "Of nested weights, in its latest step: 0 is FP16 in every layer.",
            ),
            (
                "deepinfer_worker_precision_levels",
                "levels",
                "How many there are: at the last one every layer is FP8.",
            ),
            (
                "deepinfer_worker_precision_pays",
                "0 or 1",
                "Whether its steps are faster above level 0; if not, the policy slo stays there.",
            ),
            (
                "deepinfer_worker_planes_away",
                "0 or 1",
                "Whether the lower planes of nested weights are, or may be, off the card.",
            ),
            (
                "deepinfer_worker_kv_blocks_gained",
                "blocks",
                "Of the pool's, those in the place of lower planes.",
            ),
            (
                "deepinfer_worker_kv_quality_kl_nats",
                "nats",
                "KL divergence of logits from those with FP16 KV, measured at a start with 8-bit "
                "KV.",
            ),
            (
                "deepinfer_worker_kv_quality_agreement_ratio",
                "0 to 1",
                "Share of positions with the same top token, in the same measurement.",
            ),
            (
                "deepinfer_worker_kv_key_scales",
                "0 or 1",
                "Whether the channels of INT8 K are scaled by powers of two, in the same.",
            ),
        ),
    ),
    *_of(
        "worker",
        "counter",
        (
            ("deepinfer_worker_steps_total", "steps", "Model steps."),
            (
                "deepinfer_worker_tokens_computed_total",
                "tokens",
                "Whose KV was computed: prompts, answers and recomputed ones.",
            ),
            (
                "deepinfer_worker_tokens_generated_total",
                "tokens",
                "Sampled; those that are computed again after a loss count again.",
            ),
            (
                "deepinfer_worker_prefix_query_tokens_total",
                "tokens",
                "Looked up in the prefix cache.",
            ),
            ("deepinfer_worker_prefix_hit_tokens_total", "tokens", "Found in the prefix cache."),
            (
                "deepinfer_worker_kv_saturations_total",
                "values",
                "K and V clamped to an 8-bit dtype's range; not counted for fp16 and int8.",
            ),
            (
                "deepinfer_worker_recomputed_total",
                "requests",
                "Computed again because their payload was lost or refused.",
            ),
            (
                "deepinfer_worker_prefetches_total",
                "payloads",
                "Begun to be fetched from another node's store ahead of their swap-in.",
            ),
            ("deepinfer_worker_prefetches_used_total", "payloads", "Of these, swapped in here."),
            (
                "deepinfer_worker_prefetches_wasted_total",
                "payloads",
                "Of these, called off, failed, or swapped in elsewhere.",
            ),
            ("deepinfer_worker_late_refusals_total", "requests", "Sent back for want of room."),
            ("deepinfer_worker_orders_seen_total", "orders", "From controllers."),
            ("deepinfer_worker_orders_refused_total", "orders", "Of replaced controllers."),
            ("deepinfer_worker_orders_ignored_total", "orders", "Late, doubled or without object."),
            ("deepinfer_worker_attaches_repeated_total", "messages", "Asked a gateway again."),
            ("deepinfer_worker_resends_total", "messages", "Tokens sent to a gateway again."),
            (
                "deepinfer_worker_precision_switches_total",
                "steps",
                "At another level of nested weights than the step before.",
            ),
            (
                "deepinfer_worker_sheds_total",
                "times",
                "The lower planes of nested weights left for KV blocks.",
            ),
            ("deepinfer_worker_planes_returns_total", "times", "They came back."),
            (
                "deepinfer_worker_planes_return_failures_total",
                "times",
                "Their copy back failed; it is tried again.",
            ),
            (
                "deepinfer_worker_blocks_moved_total",
                "blocks",
                "Copied to other blocks to make way for returning planes.",
            ),
        ),
    ),
    Family(
        "deepinfer_worker_payloads_refused_total",
        "counter",
        ("worker", "reason"),
        "payloads",
        "Fetched, and not used but computed anew: bytes (not those that were hashed), manifest "
        "(none), or what it names and does not belong here: dtype, encoding, layout, block_bytes, "
        "model, run, blocks, precision.",
    ),
    *(
        Family(name, "counter", ("worker", "precision"), unit, text)
        for name, unit, text in (
            (
                "deepinfer_worker_precision_tokens_total",
                "tokens",
                "Sampled in steps of nested weights: fp16, mixed (some layers in FP8), fp8 or w8a8 "
                "(activations too).",
            ),
            (
                "deepinfer_worker_precision_seconds_total",
                "seconds",
                "From the plan to the end of these steps.",
            ),
        )
    ),
)
_STORES = (
    *_of(
        "store",
        "gauge",
        (
            ("deepinfer_store_up", "0 or 1", "Whether it reports."),
            ("deepinfer_store_budget_bytes", "bytes", "What it may hold."),
            ("deepinfer_store_used_bytes", "bytes", "Reserved, committed and quarantined."),
            ("deepinfer_store_payload_bytes", "bytes", "Committed payloads."),
            ("deepinfer_store_tickets", "payloads", "Committed payloads."),
        ),
    ),
    *_of(
        "store",
        "counter",
        (
            ("deepinfer_store_reserved_total", "tickets", "Reservations made."),
            ("deepinfer_store_rejected_total", "tickets", "Refused: budget or bound reached."),
            ("deepinfer_store_committed_total", "tickets", "Payloads committed."),
            ("deepinfer_store_released_total", "tickets", "Given back by the controller."),
            ("deepinfer_store_sealed_total", "tickets", "Resolved as never to be committed."),
            ("deepinfer_store_expired_total", "tickets", "Reservations that ran out."),
            ("deepinfer_store_bad_payloads_total", "puts", "Wrong length, hash or manifest."),
        ),
    ),
)
_CONTROL = (
    *_of(
        "",
        "gauge",
        (
            ("deepinfer_controller_ready", "0 or 1", "Whether it decides: all have reported."),
            ("deepinfer_controller_start_time_seconds", "seconds", "Since 1970."),
        ),
    ),
    *_of(
        "",
        "counter",
        (
            ("deepinfer_controller_requests_admitted_total", "requests", "Placed on a worker."),
            ("deepinfer_controller_requests_rejected_total", "requests", "No pool can hold them."),
            (
                "deepinfer_controller_exact_expired_total",
                "requests",
                "Exact ones, rejected because no lower planes had returned in time.",
            ),
            (
                "deepinfer_controller_sheds_wanted_total",
                "times",
                "A worker was told to give up its lower planes.",
            ),
            (
                "deepinfer_controller_planes_returns_wanted_total",
                "times",
                "A worker was told to fetch them back.",
            ),
            (
                "deepinfer_controller_requests_refused_late_total",
                "requests",
                "Placed where there was no room after all.",
            ),
            (
                "deepinfer_controller_requests_preempted_total",
                "requests",
                "Dropped to be computed again, for want of any other room.",
            ),
            (
                "deepinfer_controller_requests_recovered_total",
                "requests",
                "Whose worker or payload was lost.",
            ),
            (
                "deepinfer_controller_requests_taken_over_total",
                "requests",
                "Handed to another gateway while they ran.",
            ),
            ("deepinfer_controller_swaps_seen_total", "swap-outs", "Told of by workers."),
            ("deepinfer_controller_resumes_seen_total", "swap-ins", "After which they ran."),
            (
                "deepinfer_controller_swaps_abandoned_total",
                "swap-outs",
                "Come to nothing, but for a bound; the request went on.",
            ),
            ("deepinfer_controller_orders_sent_total", "orders", "To workers."),
            ("deepinfer_controller_orders_resent_total", "orders", "Sent again."),
        ),
    ),
    *_of(
        "gateway",
        "counter",
        (
            ("deepinfer_attaches_total", "runs", "Runs that may speak for a request."),
            ("deepinfer_attaches_refused_total", "runs", "Runs that may not."),
            ("deepinfer_worker_links_lost_total", "links", "Workers' links that broke."),
            ("deepinfer_tokens_repeated_total", "tokens", "Sent again, and held already."),
            ("deepinfer_tokens_outdated_total", "tokens", "Of a run that was replaced."),
            ("deepinfer_tokens_unattached_total", "tokens", "Of a run that has not attached."),
            ("deepinfer_tokens_after_gap_dropped_total", "tokens", "Ahead of what is held."),
            (
                "deepinfer_tokens_contradicting_dropped_total",
                "tokens",
                "Other ones than those that were sent; the run ends.",
            ),
            ("deepinfer_tokens_ended_dropped_total", "tokens", "After the end."),
        ),
    ),
)

SECTIONS: dict[str, tuple[Family, ...]] = {
    "Swaps": _SWAPS,
    "Latencies and sizes": _LATENCIES,
    "Requests": _REQUESTS,
    "Workers and pools": _WORKERS,
    "Stores": _STORES,
    "What goes on inside": _CONTROL,
}
FAMILIES: dict[str, Family] = {f.name: f for part in SECTIONS.values() for f in part}
_PARTS = ("_bucket", "_count", "_sum")


def family_of(sample: str) -> Family | None:
    """The family that a sample's name, without labels, belongs to."""
    found = FAMILIES.get(sample)
    if found is not None:
        return None if found.kind == "histogram" else found
    for part in _PARTS:
        if sample.endswith(part):
            found = FAMILIES.get(sample.removesuffix(part))
            return found if found is not None and found.kind == "histogram" else None
    return None


def reference() -> str:
    """Every metric as Markdown tables; docs/metrics.md holds them word for word."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    for title, families in SECTIONS.items():
        yield f"### {title}\n"
        yield "| name | type | labels | unit | meaning |"
        yield "| --- | --- | --- | --- | --- |"
        for family in families:
            labels = ", ".join(f"`{label}`" for label in family.labels) or "none"
            kind = "untyped" if family.kind == "unknown" else family.kind
            yield f"| `{family.name}` | {kind} | {labels} | {family.unit} | {family.help} |"
        yield ""
