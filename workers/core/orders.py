"""What a controller's orders do here."""

from __future__ import annotations

from deepinfer.kvstore.core.messages import (
    Admit,
    Cancel,
    Departure,
    Order,
    Preempt,
    Prefetch,
    SwapIn,
    SwapOut,
)
from deepinfer.kvstore.core.states import State
from deepinfer.workers.core.attach import Attachment
from deepinfer.workers.core.prefetch import Prefetches
from deepinfer.workers.core.roster import Roster
from deepinfer.workers.core.sequence import Resident
from deepinfer.workers.core.swap import Entering
from deepinfer.workers.core.swaps import Swaps
from deepinfer.workers.core.talk import Talk


class Orders:
    """Carries out each order once, and none from a controller that has been replaced.

    An order may be late, doubled or overtaken by a later one. For a sequence that is here, orders
    at or below the highest one handled are ignored; a run that has left never comes back.
    """

    def __init__(self, roster: Roster, talk: Talk, swaps: Swaps, prefetches: Prefetches) -> None:
        self._roster = roster
        self._talk = talk
        self._swaps = swaps
        self._prefetches = prefetches
        self._config = roster.config
        self._arrivals = 0
        self.epoch_seen = 0
        self.draining = False

    def handle(self, order: Order, now_ms: int) -> None:
        counters = self._roster.counters
        counters.orders_seen += 1
        if order.order.epoch < self.epoch_seen:
            counters.orders_refused += 1
            return
        self.epoch_seen = order.order.epoch
        if isinstance(order, Prefetch):
            if not self.draining:
                self._prefetches.obey(order, now_ms)
            return
        resident = self._roster.residents.get(order.seq)
        if resident is not None and order.order <= resident.order:
            counters.orders_ignored += 1
        elif isinstance(order, Admit | SwapIn):
            self._place(order, resident, now_ms)
        elif isinstance(order, Cancel):
            self._cancel(order, resident)
        elif resident is None or resident.run != order.run:
            counters.orders_ignored += 1
        else:
            resident.order = order.order
            if isinstance(order, SwapOut):
                self._swaps.begin(resident, order, now_ms)
            else:
                self._preempt(order, resident)

    def _place(self, order: Admit | SwapIn, resident: Resident | None, now_ms: int) -> None:
        if self._roster.has_ended(order.seq, order.run) or (
            resident is not None and order.run <= resident.run
        ):
            self._roster.counters.orders_ignored += 1
            return
        if resident is not None and self._stays(order, resident):
            self._take_over(order, resident, now_ms)
            return
        if resident is not None:
            self._roster.depart(resident, Departure.DROPPED)
        self._enter(order, now_ms)

    def drain(self) -> None:
        """Take nobody new from here on, nor anything for somebody new."""
        self.draining = self._roster.changed = True
        self._prefetches.drop()

    @staticmethod
    def _stays(order: Admit | SwapIn, resident: Resident) -> bool:
        """What is here is worth keeping: KV, or the tokens of a finished run.

        A fetch under the old run may go on writing for a while, so its blocks are not taken over.
        """
        if resident.state is State.SWAPPING_IN:
            return False
        return isinstance(order, Admit) or resident.computed > 0

    def _take_over(self, order: Admit | SwapIn, resident: Resident, now_ms: int) -> None:
        """The new run takes the old one's KV and tokens; its gateway decides how many stand."""
        roster = self._roster
        roster.stop_swap(resident)
        roster.end(resident.seq, resident.run)
        resident.run, resident.order, resident.gateway = order.run, order.order, order.gateway
        resident.max_total_tokens = order.max_total_tokens
        resident.notices = resident.advanced = resident.swap_failures = resident.cached = 0
        if resident.state is not State.FINISHED:
            if resident.state is not State.WAITING:
                resident.go(State.RECOVERING)
                resident.go(State.WAITING)
            wanted = self._config.blocks_for(order.tokens)
            missing = wanted - len(resident.blocks) - resident.promised
            roster.promise(resident, max(0, min(missing, roster.spare)))
        roster.changed = True
        self._talk.attach(resident, now_ms)

    def _enter(self, order: Admit | SwapIn, now_ms: int) -> None:
        roster, config = self._roster, self._config
        wanted = config.blocks_for(order.tokens)
        if isinstance(order, SwapIn):
            wanted = max(wanted, order.blocks)
        largest = max(wanted, config.blocks_for(order.max_total_tokens))
        if largest > config.capacity_blocks:
            roster.refuse(order.seq, order.run, Departure.TOO_LARGE, blocks=largest)
            return
        if self.draining or wanted > roster.spare:
            roster.counters.late_refusals += 1
            roster.refuse(order.seq, order.run, Departure.REFUSED, blocks=wanted)
            return
        self._arrivals += 1
        entering = None
        if isinstance(order, SwapIn):
            ahead = self._prefetches.claim(order.ticket)
            entering = Entering(order, phase_ms=now_ms, ahead=ahead)
        self._prefetches.drop_of(order.seq)
        resident = Resident(
            seq=order.seq,
            run=order.run,
            gateway=order.gateway,
            arrival=self._arrivals,
            order=order.order,
            max_total_tokens=order.max_total_tokens,
            since_ms=now_ms,
            attachment=Attachment(now_ms, now_ms),
            state=State.WAITING if entering is None else State.SWAPPING_IN,
            entering=entering,
        )
        roster.promise(resident, wanted)
        roster.add(resident)
        self._talk.attach(resident, now_ms)

    def _cancel(self, order: Cancel, resident: Resident | None) -> None:
        if resident is not None and resident.run <= order.run:
            self._roster.depart(resident, Departure.DROPPED)
        self._roster.end(order.seq, order.run)
        self._prefetches.drop_of(order.seq)

    def _preempt(self, order: Preempt, resident: Resident) -> None:
        # A finished run holds no KV, and its last tokens may not have arrived yet.
        if resident.state is not State.FINISHED:
            self._roster.depart(resident, Departure.PREEMPTED)

    def raise_epoch(self, epoch: int) -> bool:
        """A controller's answer tells its epoch; False if that controller has been replaced."""
        current = epoch >= self.epoch_seen
        self.epoch_seen = max(self.epoch_seen, epoch)
        return current
