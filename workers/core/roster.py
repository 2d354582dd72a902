"""Who is on this worker, what each holds, and who has left."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from deepinfer.kvstore.core.ids import Run, Seq, Ticket
from deepinfer.kvstore.core.messages import Departed, Departure
from deepinfer.kvstore.core.precision import PrecisionRule
from deepinfer.kvstore.core.states import State
from deepinfer.workers.core.blocks import BlockManager
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.core.events import CancelFetch, CancelPrefetch, ForgetSeq, WorkerEffect
from deepinfer.workers.core.sequence import Resident
from deepinfer.workers.core.swap import Copies, InPhase


@dataclass(slots=True)
class Counters:
    """Counts since this life began, for metrics."""

    orders_seen: int = 0
    orders_refused: int = 0
    """From a controller that a higher epoch has replaced."""
    orders_ignored: int = 0
    """Late or doubled, or for a run that is not here."""
    late_refusals: int = 0
    attaches_repeated: int = 0
    resends: int = 0
    steps: int = 0
    tokens_computed: int = 0
    tokens_generated: int = 0
    swaps_out: int = 0
    """Swap-outs that were committed."""
    swaps_in: int = 0
    """Swap-ins that went on from a verified payload."""
    offload_blocks: int = 0
    offload_bytes: int = 0
    reload_blocks: int = 0
    offload_us: int = 0
    """Copies, hashing and the store's calls of committed swap-outs."""
    reload_us: int = 0
    """The same of verified swap-ins."""
    swap_failures: int = 0
    recomputed: int = 0
    prefetches: int = 0
    """Payloads that began to be fetched ahead; each is used or wasted in the end."""
    prefetches_used: int = 0
    prefetches_wasted: int = 0
    sheds: int = 0
    """How often the weights' lower planes left for KV blocks."""
    planes_returns: int = 0
    planes_return_failures: int = 0
    blocks_moved: int = 0
    """Blocks copied out of the tail to make way for the planes."""


class Roster:
    """The residents, their blocks and the departed. ``out`` collects the effects of one event."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.blocks = BlockManager(
            config.blocks_total,
            config.block_size,
            tail_blocks=config.tail_blocks,
            salt=config.cache_salt,
            prefix_cache=config.prefix_cache,
        )
        self.copies = Copies(self.blocks)
        self.residents: dict[Seq, Resident] = {}
        self.departed: deque[Departed] = deque()
        self.promised = 0
        """Blocks kept aside for admissions whose gateway has not answered yet."""
        self.counters = Counters()
        self.out: list[WorkerEffect] = []
        self.changed = False
        """A level changed that the controller should hear of at once."""
        self.rule: PrecisionRule | None = None
        """What the controller last said of the weights' precision."""
        self._ended: OrderedDict[Seq, Run] = OrderedDict()
        self._step_pins: list[list[int]] = []

    @property
    def spare(self) -> int:
        """Blocks that nobody holds and nobody was promised.

        Negative while a closing tail holds more than there is room for elsewhere; then nothing is
        promised.
        """
        return self.blocks.available - self.promised - self.blocks.to_move

    def find(self, seq: Seq, run: Run) -> Resident | None:
        """The resident with this very run."""
        resident = self.residents.get(seq)
        return resident if resident is not None and resident.run == run else None

    def has_ended(self, seq: Seq, run: Run) -> bool:
        """Whether this run, or a higher one of the sequence, has left."""
        ended = self._ended.get(seq)
        return ended is not None and run <= ended

    def add(self, resident: Resident) -> None:
        self.residents[resident.seq] = resident
        self.changed = True

    def promise(self, resident: Resident, blocks: int) -> None:
        assert 0 <= blocks <= max(0, self.spare), f"{blocks} blocks promised of {self.spare} spare"
        resident.promised += blocks
        self.promised += blocks

    def redeem(self, resident: Resident) -> None:
        """The promise ends: its blocks are spare again, for its owner to take at once."""
        self.promised -= resident.promised
        resident.promised = 0

    def release(self, resident: Resident, keep: int = 0) -> None:
        """Give up the blocks after the first ``keep``; the step in flight may still use them."""
        freed = resident.blocks[keep:]
        if resident.in_step:
            self.blocks.pin(freed)
            self._step_pins.append(freed)
        self.blocks.release(freed)
        del resident.blocks[keep:]
        del resident.chain[min(keep, resident.computed // self.config.block_size) :]

    def truncate(self, resident: Resident, computed: int) -> None:
        """KV is valid for ``computed`` tokens only.

        A block that was full, and so may be shared, is never written again: what it held for the
        tokens that stand is computed anew in another block.
        """
        size = self.config.block_size
        if computed >= resident.computed:
            return
        keep = computed // size
        if keep < len(resident.chain) or keep * size == computed:
            computed = keep * size
        else:
            keep += 1
        resident.computed = computed
        resident.step_stale = resident.in_step
        self.release(resident, keep)

    def keep_for_step(self, blocks: list[int]) -> None:
        """The next step reads blocks that are pinned already: unpin them when it has ended."""
        self._step_pins.append(blocks)

    def send_back(self, resident: Resident) -> None:
        """There is no room for it after all; it has no KV yet."""
        self.counters.late_refusals += 1
        self.depart(resident, Departure.REFUSED, blocks=resident.promised)

    def step_ended(self) -> None:
        """The step in flight touches nothing any more."""
        for pinned in self._step_pins:
            self.blocks.unpin(pinned)
        self._step_pins.clear()

    def finish(self, resident: Resident) -> None:
        """Its last token is known: no more KV is needed, only the acknowledgement."""
        self.stop_swap(resident)
        resident.go(State.FINISHED)
        resident.computed = 0
        self.redeem(resident)
        self.release(resident)
        self.changed = True

    def depart(
        self,
        resident: Resident,
        why: Departure,
        *,
        ticket: Ticket | None = None,
        blocks: int = 0,
        payload_bytes: int = 0,
    ) -> None:
        """Let a resident go, whatever it is doing; a copy in flight keeps its blocks to its end."""
        self.stop_swap(resident)
        self.redeem(resident)
        self.release(resident)
        del self.residents[resident.seq]
        self.out.append(ForgetSeq(resident.seq, resident.run))
        self.refuse(resident.seq, resident.run, why, ticket, blocks, payload_bytes)

    def refuse(
        self,
        seq: Seq,
        run: Run,
        why: Departure,
        ticket: Ticket | None = None,
        blocks: int = 0,
        payload_bytes: int = 0,
    ) -> None:
        """Report a run as gone, or as never begun."""
        self.end(seq, run)
        self.departed.append(Departed(seq, run, why, ticket, blocks, payload_bytes))
        self.changed = True

    def end(self, seq: Seq, run: Run) -> None:
        """Runs of the sequence up to this one never run here (again)."""
        self._ended[seq] = max(run, self._ended.pop(seq, run))
        if len(self._ended) > self.config.ended_max:
            self._ended.popitem(last=False)

    def stop_swap(self, resident: Resident) -> None:
        """Call off a swap in either direction; copies in flight keep their pins to their end."""
        leaving, entering = resident.leaving, resident.entering
        resident.leaving = resident.entering = None
        if leaving is not None:
            leaving.abort(self.out)
        if entering is None:
            return
        if entering.phase is InPhase.FETCH:
            self.out.append(CancelFetch(entering.order.ticket, resident.run))
        elif entering.ahead:
            self.waste(entering.order.ticket)

    def waste(self, ticket: Ticket) -> None:
        """Nobody will use what was, or is being, fetched ahead under this ticket."""
        self.out.append(CancelPrefetch(ticket))
        self.counters.prefetches_wasted += 1

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        self.blocks.check()
        promised = sum(resident.promised for resident in self.residents.values())
        assert promised == self.promised, "promised blocks are miscounted"
        assert self.spare >= 0 or not self.promised, "more was promised than there is"
        tables = [resident.blocks for resident in self.residents.values()]
        pins = [*self.copies.tables(), *self._step_pins]
        self.blocks.check_tables(tables, pins)
        for seq, resident in self.residents.items():
            assert seq == resident.seq, f"{seq} is filed under another name"
            assert not self.has_ended(seq, resident.run), f"{seq} {resident.run} has ended"
            resident.check(self.config.block_size)
