"""The swaps under way on one worker: what their events do to its residents."""

from __future__ import annotations

from deepinfer.kvstore.core.ids import Run, StoreId, Ticket
from deepinfer.kvstore.core.messages import Departure, NoticeKind, StoreStatus, SwapOut
from deepinfer.kvstore.core.precision import Precision
from deepinfer.kvstore.core.states import State
from deepinfer.workers.core.events import (
    CancelFetch,
    CommitReply,
    FetchDone,
    PutDone,
    PutPayload,
    ResolveReply,
)
from deepinfer.workers.core.roster import Roster
from deepinfer.workers.core.sequence import RUNNABLE, Resident, common_prefix
from deepinfer.workers.core.swap import CopyKey, InPhase, Leaving, Outcome, OutPhase
from deepinfer.workers.core.talk import Talk


def put_key(ticket: Ticket) -> CopyKey:
    """A put is named by its ticket; a fetch of the same ticket has a higher run."""
    return ticket, ticket.run


class Swaps:
    """Drives every Leaving and Entering; frees blocks only after the store's commit."""

    def __init__(self, roster: Roster, talk: Talk) -> None:
        self._roster = roster
        self._talk = talk
        self._config = roster.config

    @property
    def under_way(self) -> bool:
        """A swap will free blocks, or let somebody run, without anyone's further word."""
        return any(
            r.leaving is not None or (r.entering is not None and r.entering.phase is InPhase.FETCH)
            for r in self._roster.residents.values()
        )

    # ---- out -------------------------------------------------------------------------------

    def begin(self, resident: Resident, order: SwapOut, now_ms: int) -> None:
        """Leave the batch; the copy starts when no step touches the blocks."""
        roster = self._roster
        nothing_to_put = resident.computed == 0 and not resident.in_step
        if resident.state not in RUNNABLE or nothing_to_put:
            resident.swap_failures += 1
            roster.counters.swap_failures += 1
            roster.changed = True
            return
        resident.go(State.SWAPPING_OUT)
        resident.leaving = Leaving(order, phase_ms=now_ms)
        roster.changed = True
        if not resident.in_step:
            self.boundary(resident, now_ms)

    def boundary(self, resident: Resident, now_ms: int) -> None:
        """No step touches the resident's blocks now: a swap-out that waited for that may copy."""
        leaving = resident.leaving
        if leaving is None or leaving.phase is not OutPhase.BOUNDARY:
            return
        roster, order = self._roster, leaving.order
        key = put_key(order.ticket)
        leaving.blocks = self._config.blocks_for(resident.computed)
        if leaving.blocks == 0 or key in roster.copies:
            self._apply(resident, Outcome.FAILED)
            return
        table = resident.blocks[: leaving.blocks]
        roster.copies.begin(key, table)
        leaving.enter(OutPhase.PUT, now_ms)
        roster.out.append(
            PutPayload(
                order.ticket,
                order.store,
                resident.seq,
                resident.run,
                tuple(table),
                tuple(resident.tokens[: resident.computed]),
                resident.stage,
                resident.purity.at(resident.computed),
            )
        )

    def put_done(self, event: PutDone, now_ms: int) -> None:
        self._roster.copies.end(put_key(event.ticket))
        for resident, leaving in self._leaving(event.ticket):
            self._apply(resident, leaving.put_done(event, now_ms, self._roster.out))

    def commit_reply(self, event: CommitReply, now_ms: int) -> None:
        for resident, leaving in self._leaving(event.ticket):
            outcome = leaving.commit_reply(event.status, now_ms, self._roster.out)
            self._apply(resident, outcome)

    def resolve_reply(self, event: ResolveReply, now_ms: int) -> None:
        for resident, leaving in self._leaving(event.ticket):
            self._apply(resident, leaving.resolve_reply(event.status, now_ms))

    def _leaving(self, ticket: Ticket) -> list[tuple[Resident, Leaving]]:
        """The resident that leaves under this ticket, as a list of one or none."""
        resident = self._roster.residents.get(ticket.seq)
        if resident is None or resident.leaving is None:
            return []
        leaving = resident.leaving
        return [(resident, leaving)] if leaving.order.ticket == ticket else []

    def _apply(self, resident: Resident, outcome: Outcome) -> None:
        leaving, roster = resident.leaving, self._roster
        assert leaving is not None, f"{resident.seq} is not being swapped out"
        order = leaving.order
        if outcome is Outcome.GONE:
            roster.counters.swaps_out += 1
            roster.counters.offload_us += leaving.copy_us
            roster.counters.offload_blocks += leaving.blocks
            roster.counters.offload_bytes += leaving.payload_bytes
            self._talk.notice(
                resident,
                NoticeKind.SWAPPED_OUT,
                store=order.store,
                blocks=leaving.blocks,
                payload_bytes=leaving.payload_bytes,
                copy_us=leaving.copy_us,
            )
            resident.leaving = None
            roster.depart(
                resident,
                Departure.SWAPPED,
                ticket=order.ticket,
                blocks=leaving.blocks,
                payload_bytes=leaving.payload_bytes,
            )
        elif outcome is Outcome.FAILED:
            resident.leaving = None
            resident.settle()
            resident.swap_failures += 1
            roster.counters.swap_failures += 1
            roster.changed = True
            self._talk.notice(resident, NoticeKind.SWAP_FAILED, store=order.store)

    # ---- in --------------------------------------------------------------------------------

    def fetch_done(self, event: FetchDone, now_ms: int) -> None:
        roster = self._roster
        roster.copies.end((event.ticket, event.run))
        if event.refused:
            roster.counters.add_refusal(event.refused)
        resident = self._fetching(event.ticket, event.run)
        if event.ahead is not None:
            used = event.ahead and event.status is StoreStatus.OK and resident is not None
            roster.counters.prefetches_used += used
            roster.counters.prefetches_wasted += not used
        if resident is None:
            return
        capacity = len(resident.blocks) * self._config.block_size
        good = event.status is StoreStatus.OK and 0 < len(event.token_ids) <= capacity
        if resident.exact and event.precision is not Precision.FP16:
            good = False  # No payload of an exact request is: its KV is computed anew.
        assert resident.entering is not None
        store = resident.entering.order.store
        resident.entering = None
        if good:
            standing = common_prefix(list(event.token_ids), resident.tokens)
            resident.computed = min(standing, resident.computed_max)
            resident.purity.extend(0, resident.computed, event.precision)
        resident.cacheable = not good
        resident.settle()
        roster.changed = True
        if good:
            roster.counters.swaps_in += 1
            roster.counters.reload_us += event.copy_us
            roster.counters.reload_blocks += event.blocks
            self._talk.notice(
                resident,
                NoticeKind.RESUMED,
                store=store,
                blocks=event.blocks,
                payload_bytes=event.payload_bytes,
                copy_us=event.copy_us,
            )
        else:
            self._recompute(resident, store)

    def _fetching(self, ticket: Ticket, run: Run) -> Resident | None:
        resident = self._roster.find(ticket.seq, run)
        entering = resident.entering if resident is not None else None
        if entering is None or entering.phase is not InPhase.FETCH:
            return None
        return resident if entering.order.ticket == ticket else None

    def _abandon(self, resident: Resident) -> None:
        """Compute instead, in other blocks: the copy may still write into these."""
        entering, roster = resident.entering, self._roster
        assert entering is not None
        roster.out.append(CancelFetch(entering.order.ticket, resident.run))
        resident.entering = None
        roster.release(resident)
        resident.settle()
        roster.changed = True
        self._recompute(resident, entering.order.store)

    def _recompute(self, resident: Resident, store: StoreId) -> None:
        self._roster.counters.recomputed += 1
        self._talk.notice(resident, NoticeKind.RECOMPUTED, store=store)

    # ---- both ------------------------------------------------------------------------------

    def store_gone(self, store: StoreId) -> None:
        for resident in list(self._roster.residents.values()):
            leaving, entering = resident.leaving, resident.entering
            if leaving is not None and leaving.order.store == store:
                self._apply(resident, leaving.store_gone(self._roster.out))
            elif (
                entering is not None
                and entering.order.store == store
                and entering.phase is InPhase.FETCH
            ):
                self._abandon(resident)

    def tick(self, resident: Resident, now_ms: int) -> None:
        if resident.leaving is not None:
            outcome = resident.leaving.tick(now_ms, self._config, self._roster.out)
            self._apply(resident, outcome)
        elif resident.entering is not None and resident.entering.expired(now_ms, self._config):
            self._abandon(resident)
