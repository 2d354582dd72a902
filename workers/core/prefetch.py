"""The one payload that is fetched ahead of its swap-in, because the controller expects that here.

::

    Prefetch --> held --SwapIn of its ticket--> claimed (``Entering.ahead``) --fetch--> used
                  | another Prefetch, an order about its sequence,                |
                  | no word of it for too long, its store gone                    | of no use
                  v                                                               v
                wasted                                                          wasted

Nothing waits for it: whatever becomes of it, a swap-in can fetch its payload from the store.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.kvstore.core.ids import Run, Seq, StoreId, Ticket
from deepinfer.kvstore.core.messages import Prefetch
from deepinfer.workers.core.events import PrefetchPayload
from deepinfer.workers.core.roster import Roster


@dataclass(slots=True, eq=False)
class Held:
    """A payload in host memory, or on its way there."""

    ticket: Ticket
    store: StoreId
    named_ms: int
    """When an order last named it."""


class Prefetches:
    """Holds at most one payload that no resident has claimed. Counts go to the roster's."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._config = roster.config
        self._order = Run(0, 0)
        self.held: Held | None = None

    def obey(self, order: Prefetch, now_ms: int) -> None:
        """Hold what the order names, and nothing else; a late or doubled order changes nothing."""
        roster, held = self._roster, self.held
        resident = roster.residents.get(order.seq)
        late = order.order <= self._order or roster.has_ended(order.seq, order.order)
        if late or (resident is not None and order.order <= resident.order):
            roster.counters.orders_ignored += 1
            return
        self._order = order.order
        if held is not None and held.ticket == order.ticket:
            held.named_ms = now_ms
            return
        self.drop()
        entering = None if resident is None else resident.entering
        if entering is not None and entering.order.ticket == order.ticket:
            return  # it is on its way in already
        size_bytes = order.blocks * self._config.block_bytes
        if order.ticket is None or order.store is None:
            return
        if not 0 < size_bytes <= self._config.prefetch_bytes_max:
            return
        self.held = Held(order.ticket, order.store, now_ms)
        roster.counters.prefetches += 1
        roster.out.append(PrefetchPayload(order.ticket, order.store, order.blocks))

    def claim(self, ticket: Ticket) -> bool:
        """A swap-in of this very ticket takes over what is held, if that is it."""
        if self.held is None or self.held.ticket != ticket:
            return False
        self.held = None
        return True

    def drop(self) -> None:
        """Hold nothing."""
        if self.held is not None:
            self._roster.waste(self.held.ticket)
            self.held = None

    def drop_of(self, seq: Seq) -> None:
        """The sequence goes on from something else, or not at all."""
        if self.held is not None and self.held.ticket.seq == seq:
            self.drop()

    def store_gone(self, store: StoreId) -> None:
        if self.held is not None and self.held.store == store:
            self.drop()

    def tick(self, now_ms: int) -> None:
        held = self.held
        if held is not None and now_ms - held.named_ms >= self._config.prefetch_keep_ms:
            self.drop()

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        counters, held = self._roster.counters, self.held
        ended = counters.prefetches_used + counters.prefetches_wasted
        assert ended + (held is not None) <= counters.prefetches, "prefetches are miscounted"
        for resident in self._roster.residents.values():
            entering = resident.entering
            if held is not None and entering is not None:
                assert not entering.ahead or entering.order.ticket != held.ticket, (
                    f"{held.ticket} is held for nobody and for {resident.seq}"
                )
