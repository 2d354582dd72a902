"""Telling the controller the worker's levels, each change at once and all of them in time."""

from __future__ import annotations

from deepinfer.kvstore.core.ids import NodeId, Run, Seq, WorkerRef
from deepinfer.kvstore.core.messages import Departed, ReportReply, ResidentLevel, WorkerReport
from deepinfer.workers.core.orders import Orders
from deepinfer.workers.core.roster import Roster
from deepinfer.workers.core.shedding import Shedding
from deepinfer.workers.core.steps import Steps
from deepinfer.workers.core.swaps import Swaps
from deepinfer.workers.core.valve import Levels


class Reporter:
    """Numbers reports, states differences, and repeats the departed until they are acknowledged."""

    def __init__(
        self,
        ref: WorkerRef,
        node: NodeId,
        roster: Roster,
        orders: Orders,
        steps: Steps,
        swaps: Swaps,
        shedding: Shedding,
        levels: Levels,
    ) -> None:
        self._ref = ref
        self._node = node
        self._roster = roster
        self._orders = orders
        self._steps = steps
        self._swaps = swaps
        self._shedding = shedding
        self._precision = levels
        self._number = 0
        self._complete_due = True
        self._due_ms: int | None = None
        self._levels: dict[Seq, ResidentLevel] = {}
        self._first_said: dict[tuple[Seq, Run], int] = {}

    def restart(self) -> None:
        """The receiver may know nothing of what was said: the next report is complete."""
        self._complete_due = True

    def answered(self, reply: ReportReply, now_ms: int) -> None:
        epoch_before = self._orders.epoch_seen
        if not self._orders.raise_epoch(reply.epoch) or reply.number > self._number:
            return
        if reply.precision is not None:
            self._roster.rule, self._roster.ruled_ms = reply.precision, now_ms
        if reply.drain is not None and not self._orders.draining:
            self._orders.drain()
        if reply.resync:
            self._complete_due = True
            return
        if reply.epoch > epoch_before:
            self._complete_due = True
        departed = self._roster.departed
        kept = [d for d in departed if self._unheard(d, reply.number)]
        departed.clear()
        departed.extend(kept)

    def _unheard(self, departed: Departed, number: int) -> bool:
        key = (departed.seq, departed.run)
        first = self._first_said.get(key)
        if first is None or first > number:
            return True
        del self._first_said[key]
        return False

    def due(self, now_ms: int) -> WorkerReport | None:
        """The next report, if a level changed or the interval has passed."""
        timely = self._due_ms is not None and now_ms < self._due_ms
        if timely and not self._roster.changed and not self._complete_due:
            return None
        return self._next(now_ms)

    def _next(self, now_ms: int) -> WorkerReport:
        roster, config, complete = self._roster, self._roster.config, self._complete_due
        self._number += 1
        self._due_ms = now_ms + config.report_interval_ms
        roster.changed = self._complete_due = False
        residents = list(roster.residents.values())
        levels = {resident.seq: resident.level() for resident in residents}
        said = self._levels
        changed = [v for k, v in levels.items() if complete or said.get(k) != v]
        self._levels = levels
        for departed in roster.departed:
            self._first_said.setdefault((departed.seq, departed.run), self._number)
        return WorkerReport(
            worker=self._ref.worker,
            incarnation=self._ref.incarnation,
            node=self._node,
            number=self._number,
            complete=complete,
            epoch_seen=self._orders.epoch_seen,
            orders_seen=roster.counters.orders_seen,
            block_bytes=config.block_bytes,
            block_size=config.block_size,
            blocks_total=roster.blocks.blocks_total,
            blocks_free=max(0, roster.spare),
            blocks_short=self._steps.blocks_short,
            stalled=self._steps.starved and not self._swaps.under_way,
            draining=self._orders.draining,
            precision=self._precision.report(),
            shed=self._shedding.level(),
            residents=tuple(changed),
            departed=tuple(roster.departed),
            usage=tuple(r.usage(roster.blocks.private(r.blocks)) for r in residents),
        )
