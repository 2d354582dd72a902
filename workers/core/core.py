"""The worker's protocol: one object that hears everything and says what to do."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from deepinfer.kvstore.core.ids import NodeId, Seq, WorkerRef
from deepinfer.kvstore.core.messages import Admit, Cancel, Preempt, Prefetch, SwapIn, SwapOut
from deepinfer.kvstore.core.precision import Precision
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.core.events import (
    REFUSALS,
    CommitReply,
    FetchDone,
    FromGateway,
    GatewayDown,
    GatewayUp,
    PlanesRestored,
    PlanesShed,
    PutDone,
    Report,
    ReportAnswered,
    ReportsUp,
    ResolveReply,
    StartDrain,
    StepDone,
    StoreGone,
    WorkerEffect,
    WorkerEvent,
)
from deepinfer.workers.core.orders import Orders
from deepinfer.workers.core.prefetch import Prefetches
from deepinfer.workers.core.reports import Reporter
from deepinfer.workers.core.roster import Counters, Roster
from deepinfer.workers.core.sequence import Resident
from deepinfer.workers.core.shedding import Shedding
from deepinfer.workers.core.steps import Steps
from deepinfer.workers.core.swaps import Swaps
from deepinfer.workers.core.talk import Talk
from deepinfer.workers.core.valve import Levels

SWAP_COUNTERS = frozenset(
    {
        "requests_swapped_total",
        "requests_resumed_total",
        "kv_cpu_offload_blocks_total",
        "kv_cpu_offload_bytes_total",
        "kv_cpu_offload_failed_total",
        "kv_cpu_reload_blocks_total",
        "cpu_offload_seconds",
        "cpu_reload_seconds",
    }
)
"""Exported without a prefix."""


class WorkerCore:
    """One life of one worker.

    It owns block ids and token ids, asks no one before it grows, and frees KV only when the store
    has committed it, the gateway has acknowledged the end, or somebody entitled said to drop it.
    """

    def __init__(self, ref: WorkerRef, node: NodeId, config: WorkerConfig) -> None:
        self.ref = ref
        self.node = node
        self.config = config
        self._roster = Roster(config)
        self._talk = Talk(ref, self._roster)
        self._swaps = Swaps(self._roster, self._talk)
        self._shedding = Shedding(self._roster)
        self._levels = Levels(self._roster)
        self._steps = Steps(self._roster, self._talk, self._shedding, self._levels)
        self._prefetches = Prefetches(self._roster)
        self._orders = Orders(self._roster, self._talk, self._swaps, self._prefetches)
        self._reporter = Reporter(
            ref,
            node,
            self._roster,
            self._orders,
            self._steps,
            self._swaps,
            self._shedding,
            self._levels,
        )

    @property
    def residents(self) -> dict[Seq, Resident]:
        """Read-only for callers."""
        return self._roster.residents

    @property
    def counters(self) -> Counters:
        return self._roster.counters

    def metrics(self) -> dict[str, float]:
        """Counts since this life began; times in seconds.

        Those of swaps have the names that they are exported under; the shell prefixes the others.
        Labels follow a name as they are exported.
        """
        counters = self._roster.counters
        counts: dict[str, Any] = {f.name: getattr(counters, f.name) for f in fields(counters)}
        for reason, count in zip(REFUSALS, counts.pop("payloads_refused"), strict=True):
            counts[f'payloads_refused{{reason="{reason}"}}'] = count
        in_precisions = zip(Precision, counts.pop("tokens_in"), counts.pop("ms_in"), strict=True)
        if self.config.levels == 1:
            del counts["precision_switches"]
        else:
            for precision, tokens, ms in in_precisions:
                label = f'{{precision="{precision.value}"}}'
                counts[f"precision_tokens{label}"] = tokens
                counts[f"precision_seconds{label}"] = ms / 1000
        return {
            "requests_swapped_total": counts.pop("swaps_out"),
            "requests_resumed_total": counts.pop("swaps_in"),
            "kv_cpu_offload_blocks_total": counts.pop("offload_blocks"),
            "kv_cpu_offload_bytes_total": counts.pop("offload_bytes"),
            "kv_cpu_offload_failed_total": counts.pop("swap_failures"),
            "kv_cpu_reload_blocks_total": counts.pop("reload_blocks"),
            "cpu_offload_seconds": counts.pop("offload_us") / 1e6,
            "cpu_reload_seconds": counts.pop("reload_us") / 1e6,
            "prefix_hit_tokens": self._roster.blocks.hit_tokens,
            "prefix_query_tokens": self._roster.blocks.query_tokens,
            **counts,
        }

    def handle(self, event: WorkerEvent, now_ms: int) -> list[WorkerEffect]:
        """Return what the shell must do about one event, in this order."""
        match event:
            case Admit() | SwapOut() | SwapIn() | Preempt() | Cancel() | Prefetch():
                self._orders.handle(event, now_ms)
            case FromGateway():
                self._talk.hear(event, now_ms)
            case StepDone():
                for resident in self._steps.done(event, now_ms):
                    self._swaps.boundary(resident, now_ms)
            case PutDone():
                self._swaps.put_done(event, now_ms)
            case CommitReply():
                self._swaps.commit_reply(event, now_ms)
            case ResolveReply():
                self._swaps.resolve_reply(event, now_ms)
            case FetchDone():
                self._swaps.fetch_done(event, now_ms)
            case StoreGone():
                self._swaps.store_gone(event.store)
                self._prefetches.store_gone(event.store)
            case GatewayUp():
                self._talk.gateway_up(event.gateway, now_ms)
            case GatewayDown():
                self._talk.gateway_down(event.gateway, now_ms)
            case ReportAnswered():
                self._reporter.answered(event.reply, now_ms)
            case ReportsUp():
                self._reporter.restart()
            case StartDrain():
                self._orders.drain()
            case PlanesShed():
                self._shedding.planes_shed(now_ms)
            case PlanesRestored():
                self._shedding.planes_restored(event, now_ms)
            case _:
                self._tick(now_ms)
        self._shedding.settle(self._steps.in_flight, now_ms)
        self._steps.pump(now_ms)
        report = self._reporter.due(now_ms)
        out = self._roster.out
        self._roster.out = []
        if report is not None:
            out.append(Report(report))
        return out

    def _tick(self, now_ms: int) -> None:
        self._prefetches.tick(now_ms)
        self._steps.tick(now_ms)
        for resident in list(self._roster.residents.values()):
            self._swaps.tick(resident, now_ms)
            if self._roster.residents.get(resident.seq) is resident:
                self._talk.tick(resident, now_ms)

    def snapshot(self) -> dict[str, object]:
        """Levels and counts for status pages; plain values only."""
        roster, blocks = self._roster, self._roster.blocks
        precision = self._levels.report()
        states = [resident.state.value for resident in roster.residents.values()]
        return {
            "worker": self.ref.worker,
            "incarnation": self.ref.incarnation,
            "node": self.node,
            "epoch_seen": self._orders.epoch_seen,
            "draining": self._orders.draining,
            "blocks_total": blocks.blocks_total,
            "blocks_free": max(0, roster.spare),
            "blocks_cached": blocks.cached,
            "blocks_held": blocks.held,
            "blocks_quarantined": blocks.quarantined,
            "blocks_promised": roster.promised,
            "blocks_short": self._steps.blocks_short,
            "blocks_gained": blocks.blocks_total - blocks.ordinary,
            "blocks_in_tail": blocks.tail_held,
            "blocks_capacity": self.config.capacity_blocks,
            "planes": self._shedding.state.value,
            "residents": {state: states.count(state) for state in sorted(set(states))},
            "precision": None if precision is None else precision._asdict(),
            **self.metrics(),
        }

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        self._roster.check()
        self._prefetches.check()
        self._shedding.check()
        self._levels.check()
        running = self._steps.in_flight
        members = {chunk.seq for chunk in running.chunks} if running is not None else set()
        members |= {resident.seq for resident in self._steps.moving}
        for seq, resident in self._roster.residents.items():
            assert not resident.in_step or seq in members, f"{seq} is in a step that has ended"
