"""What the controller has counted since it started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals of this controller's life."""

    swaps_seen_total: int = 0
    """Swap-outs that a worker told of; the workers' own counts survive a restart here."""
    resumes_seen_total: int = 0
    """Swap-ins after which the request ran, from its payload or computed again."""
    swaps_abandoned_total: int = 0
    """Swap-outs that came to nothing for another reason than a bound; the request went on."""
    kv_cpu_offload_rejected_total: int = 0
    """Swap-outs that a store's budget or a bound on tickets or requests refused."""
    requests_admitted_total: int = 0
    requests_refused_late_total: int = 0
    """Placements that the worker had no room for after all."""
    requests_rejected_total: int = 0
    """Requests that no pool can hold, and exact ones for which no planes returned."""
    sheds_wanted_total: int = 0
    """How often a worker was told to give up its lower planes for KV blocks."""
    planes_returns_wanted_total: int = 0
    """How often a worker was told to fetch them back; exact requests count."""
    exact_expired_total: int = 0
    """Exact requests that ended because no planes had returned in time."""
    requests_preempted_total: int = 0
    requests_recovered_total: int = 0
    """Requests whose worker or payload was lost."""
    requests_taken_over_total: int = 0
    """Running requests handed to another gateway in place."""
    orders_sent_total: int = 0
    orders_resent_total: int = 0
