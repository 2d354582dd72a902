"""One sequence as the controller knows it: who claims it, where it runs, what is stored of it."""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import Final, NamedTuple

from deepinfer.kvstore.core.ids import GatewayId, Run, Seq, StoreId, Ticket, WorkerId, WorkerRef
from deepinfer.kvstore.core.messages import (
    Admit,
    Cancel,
    Preempt,
    Reject,
    RequestLevel,
    ResidentLevel,
    SwapIn,
    SwapOut,
    TicketLevel,
    TicketState,
)
from deepinfer.kvstore.core.states import NEXT, State, move

COLD: Final = frozenset({State.SWAPPING_OUT, State.SWAPPED, State.SWAPPING_IN})
RUNNING: Final = frozenset({State.PREFILL, State.DECODE})
ENDED: Final = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})


class Rank(IntEnum):
    """Which line a sequence stands in; a lower rank goes first."""

    RECOVERING = 0
    SWAPPED = 1
    WAITING = 2


class Place(NamedTuple):
    """A place in line: smaller goes first. Of one rank: the earlier arrival or the older swap."""

    rank: Rank
    first: int
    second: int
    seq: Seq


class Placement:
    """A run on a worker, from the order that asked for it until the worker says it has left."""

    __slots__ = ("confirmed", "gateway", "order", "protected", "run", "sent_ms", "since_ms",
                 "withdrawn", "worker")  # fmt: skip

    def __init__(
        self, worker: WorkerRef, run: Run, gateway: GatewayId, order: Admit | SwapIn | None
    ) -> None:
        self.worker = worker
        self.run = run
        self.gateway = gateway
        self.order = order
        """None: adopted from a report; another controller placed it."""
        self.confirmed = order is None
        """The worker's report has listed the run."""
        self.withdrawn = False
        """A Cancel is under way; the sequence is placed anew when the run has left."""
        self.protected = True
        """It was resumed or recovered: ``min_residency_tokens`` holds for it."""
        self.sent_ms = 0
        self.since_ms = 0


class SwapJob:
    """A swap-out from its Reserve until the worker's report tells how it went."""

    __slots__ = ("bytes_max", "failures_before", "gain_blocks", "order", "sent_ms", "since_ms",
                 "started", "store", "ticket", "worker")  # fmt: skip

    def __init__(
        self, ticket: Ticket, store: StoreId, worker: WorkerRef, bytes_max: int, gain_blocks: int
    ) -> None:
        self.ticket = ticket
        self.store = store
        self.worker = worker
        self.bytes_max = bytes_max
        self.gain_blocks = gain_blocks
        """Private blocks that its worker gets back."""
        self.order: SwapOut | None = None
        """None until the store has agreed."""
        self.started = False
        """The worker's report has shown the copy."""
        self.failures_before = 0
        self.sent_ms = 0
        self.since_ms = 0


class StoredTicket:
    """A ticket as its store last reported it."""

    __slots__ = ("level", "released_ms", "store")

    def __init__(self, store: StoreId, level: TicketLevel) -> None:
        self.store = store
        self.level = level
        self.released_ms: int | None = None
        """When the store was last asked to release it; then it is never read again."""

    @property
    def usable(self) -> bool:
        return self.level.state is TicketState.COMMITTED and self.released_ms is None


class Resend:
    """An order without a placement of its own, sent until the levels confirm it."""

    __slots__ = ("order", "sent_ms")

    def __init__(self, order: Cancel | Preempt, sent_ms: int) -> None:
        self.order = order
        self.sent_ms = sent_ms


class Sequence:
    """Facts reported about one sequence, and what the controller wants of it."""

    __slots__ = ("bereaved", "cancels", "capacity_min_tokens", "claims", "closed_ms", "earmark",
                 "expected", "expected_store", "expected_until_ms", "hinted", "home", "level",
                 "not_before_ms", "orphan_since_ms", "owner", "place", "planes_since_ms", "preempt",
                 "queue_capacity", "queued", "recovering", "rejected", "residents", "run", "seq",
                 "since_ms", "state", "swap", "swaps", "tickets", "tokens_min", "unfit_since_ms",
                 "wake_ms")  # fmt: skip

    def __init__(self, seq: Seq, now_ms: int) -> None:
        self.seq = seq
        self.since_ms = now_ms
        """When this controller first heard of it."""
        self.state = State.WAITING
        # Facts.
        self.claims: dict[GatewayId, RequestLevel] = {}
        self.owner: GatewayId | None = None
        """The gateway with the highest claim."""
        self.level: RequestLevel | None = None
        """What the owner says."""
        self.residents: dict[WorkerId, ResidentLevel] = {}
        self.tickets: dict[Ticket, StoredTicket] = {}
        self.tokens_min = 0
        """Tokens known to exist although no gateway has reported so many."""
        self.capacity_min_tokens = 0
        """Pools below this have said that they can never hold it."""
        self.orphan_since_ms: int | None = None
        """Since when nobody claims it, while a claim may still come."""
        self.swaps = 0
        """How often this controller has seen it leave a worker for a store."""
        self.bereaved = False
        """Its gateway died while it was listed there."""
        self.closed_ms: int | None = None
        """When its gateway, alive, stopped listing it."""
        # Intent.
        self.run: Run | None = None
        """The highest run known of it."""
        self.place: Placement | None = None
        self.swap: SwapJob | None = None
        self.preempt: Resend | None = None
        self.cancels: dict[WorkerId, Resend] = {}
        self.expected: Ticket | None = None
        """A payload that should turn up as committed in its store's report."""
        self.expected_store: StoreId | None = None
        """Where it should turn up, if that is known."""
        self.expected_until_ms = 0
        self.recovering = False
        """It has lost its KV, and goes before everyone else."""
        self.home: WorkerId | None = None
        """Swapped or preempted: where it was; no room is made there until it is resident again."""
        self.hinted: WorkerId | None = None
        """The worker that was told to fetch its payload ahead."""
        self.not_before_ms = 0
        self.rejected: Reject | None = None
        self.unfit_since_ms: int | None = None
        self.planes_since_ms: int | None = None
        """Exact: since when it waits for lower planes to return to a card."""
        # Index entries.
        self.queued: Place | None = None
        self.queue_capacity: int | None = None
        self.earmark: WorkerId | None = None
        """The worker where room is being made for it."""
        self.wake_ms: int | None = None

    @property
    def live(self) -> bool:
        """Whether someone wants its tokens."""
        return self.level is not None and not self.level.cancelled and self.rejected is None

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens, as far as anyone has said; a lower bound."""
        level = self.level
        held = 0 if level is None else level.prompt_tokens + level.held_tokens
        return max(held, self.tokens_min)

    @property
    def tokens_max(self) -> int:
        """Prompt tokens + max_tokens: what its worker's pool must be able to hold."""
        level = self.level
        return 0 if level is None else level.prompt_tokens + level.max_tokens

    @property
    def capacity_needed(self) -> int:
        """Smallest pool, in tokens, that it may be placed on."""
        return max(self.tokens_max, self.capacity_min_tokens)

    def payload(self) -> StoredTicket | None:
        """The newest payload that can be resumed from."""
        best: StoredTicket | None = None
        for held in self.tickets.values():
            if held.usable and (best is None or held.level.ticket.order > best.level.ticket.order):
                best = held
        return best

    def need_tokens(self, reserve_full: bool) -> int:
        """Tokens to find room for when it is placed."""
        if reserve_full:
            return self.tokens_max
        payload = self.payload()
        if payload is None:
            return self.tokens
        # The next token's KV has to fit too: or it would come back only to starve.
        return max(self.tokens, min(payload.level.tokens + 1, self.tokens_max))

    @property
    def forgettable(self) -> bool:
        return not (self.claims or self.residents or self.tickets) and self.place is None

    def check(self, config_full: bool) -> None:
        """Raise AssertionError if what is wanted contradicts itself."""
        where = (self.place is not None) + (self.queued is not None) + (self.earmark is not None)
        assert where <= 1, f"{self.seq}: in more than one place"
        assert self.swap is None or self.place is not None or not self.live, f"{self.seq}: swap"
        assert self.run is None or self.place is None or self.place.run <= self.run, self.seq
        if self.queued is not None:
            assert self.live, f"{self.seq}: in line though nobody wants it"
            assert self.need_tokens(config_full) >= 1, self.seq
        if self.state in ENDED:
            assert where == 0, f"{self.seq}: has ended and is still somewhere"
            assert (self.swap, self.preempt) == (None, None), self.seq
        assert self.owner is None or self.claims.get(self.owner) is self.level, self.seq
        assert (self.owner is None) == (self.level is None) == (not self.claims), self.seq


def _reachable() -> dict[State, frozenset[State]]:
    found: dict[State, frozenset[State]] = {}
    for start in State:
        seen = {start}
        line = deque([start])
        while line:
            here = line.popleft()
            for step in State:
                if step in NEXT[here] and step not in seen:
                    seen.add(step)
                    line.append(step)
        found[start] = frozenset(seen)
    return found


_REACHABLE: Final = _reachable()


def walk(name: object, old: State, new: State) -> State:
    """Move to ``new`` in legal steps.

    Levels show where a sequence is, not each step it took: those between two reports were not
    seen. Raises ``IllegalMoveError`` when there is no legal way, as from an end.
    """
    return new if new in _REACHABLE[old] else move(name, old, new)
