"""The order of a swap: copy, check, commit, and only then free; fetch, verify, go on.

Out::

    BOUNDARY --step done--> PUT --copied--> COMMIT --committed--> gone: blocks may be freed
                             |                | no answer
                             |                v
                             |             RESOLVE --committed--> gone
                             v                v
                           failed: the blocks stay and the request goes on

In::

    ATTACH --attached--> FETCH --verified--> go on from the payload
                           |
                           v
                         failed: compute again from the first token

Every phase that waits for another process has a deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from deepinfer.kvstore.core.ids import Run, Ticket
from deepinfer.kvstore.core.messages import StoreStatus, SwapIn, SwapOut
from deepinfer.workers.core.blocks import BlockManager
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.core.events import AbortPut, Commit, PutDone, Resolve, WorkerEffect


class OutPhase(Enum):
    BOUNDARY = "boundary"
    PUT = "put"
    COMMIT = "commit"
    RESOLVE = "resolve"


class InPhase(Enum):
    ATTACH = "attach"
    FETCH = "fetch"


class Outcome(Enum):
    """What a swap-out has come to."""

    UNDER_WAY = "under_way"
    GONE = "gone"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Leaving:
    """One swap-out. Its methods return the outcome so far and add what to do to ``out``."""

    order: SwapOut
    phase: OutPhase = OutPhase.BOUNDARY
    phase_ms: int = 0
    """When the phase began."""
    blocks: int = 0
    payload_bytes: int = 0
    copy_us: int = 0

    def enter(self, phase: OutPhase, now_ms: int) -> None:
        self.phase = phase
        self.phase_ms = now_ms

    def put_done(self, event: PutDone, now_ms: int, out: list[WorkerEffect]) -> Outcome:
        if self.phase is not OutPhase.PUT:
            return Outcome.UNDER_WAY
        if not event.ok:
            out.append(AbortPut(self.order.ticket, self.order.store))
            return Outcome.FAILED
        self.payload_bytes = event.payload_bytes
        self.copy_us = event.copy_us
        self.enter(OutPhase.COMMIT, now_ms)
        out.append(Commit(self.order.ticket, self.order.store))
        return Outcome.UNDER_WAY

    def commit_reply(self, status: StoreStatus, now_ms: int, out: list[WorkerEffect]) -> Outcome:
        if self.phase not in (OutPhase.COMMIT, OutPhase.RESOLVE):
            return Outcome.UNDER_WAY
        if status in (StoreStatus.OK, StoreStatus.COMMITTED):
            return self._gone(now_ms)
        if self.phase is OutPhase.RESOLVE:
            return Outcome.UNDER_WAY  # The question that was asked later decides.
        if status is StoreStatus.UNREACHABLE:
            return self._resolve(now_ms, out)
        out.append(AbortPut(self.order.ticket, self.order.store))
        return Outcome.FAILED

    def resolve_reply(self, status: StoreStatus, now_ms: int) -> Outcome:
        if self.phase is not OutPhase.RESOLVE or status is StoreStatus.UNREACHABLE:
            return Outcome.UNDER_WAY
        return self._gone(now_ms) if status is StoreStatus.COMMITTED else Outcome.FAILED

    def store_gone(self, out: list[WorkerEffect]) -> Outcome:
        """A payload that may have been committed there is of no use to us: the blocks stay."""
        self.abort(out)
        return Outcome.UNDER_WAY if self.phase is OutPhase.BOUNDARY else Outcome.FAILED

    def tick(self, now_ms: int, config: WorkerConfig, out: list[WorkerEffect]) -> Outcome:
        waited_ms = now_ms - self.phase_ms
        if self.phase is OutPhase.PUT and waited_ms >= config.put_timeout_ms:
            self.abort(out)
            return Outcome.FAILED
        if self.phase is OutPhase.COMMIT and waited_ms >= config.commit_timeout_ms:
            return self._resolve(now_ms, out)
        if self.phase is OutPhase.RESOLVE and waited_ms >= config.resolve_timeout_ms:
            return Outcome.FAILED
        return Outcome.UNDER_WAY

    def abort(self, out: list[WorkerEffect]) -> None:
        """Stop a copy under way. A commit under way is the controller's to see and release."""
        if self.phase is OutPhase.PUT:
            out.append(AbortPut(self.order.ticket, self.order.store))

    def _resolve(self, now_ms: int, out: list[WorkerEffect]) -> Outcome:
        self.enter(OutPhase.RESOLVE, now_ms)
        out.append(Resolve(self.order.ticket, self.order.store))
        return Outcome.UNDER_WAY

    def _gone(self, now_ms: int) -> Outcome:
        self.copy_us += (now_ms - self.phase_ms) * 1000
        return Outcome.GONE


@dataclass(slots=True, eq=False)
class Entering:
    """One swap-in."""

    order: SwapIn
    phase: InPhase = InPhase.ATTACH
    phase_ms: int = 0
    ahead: bool = False
    """The payload was asked for ahead of the order; the fetch will end that."""

    def enter(self, phase: InPhase, now_ms: int) -> None:
        self.phase = phase
        self.phase_ms = now_ms

    def expired(self, now_ms: int, config: WorkerConfig) -> bool:
        waited_ms = now_ms - self.phase_ms
        return self.phase is InPhase.FETCH and waited_ms >= config.fetch_timeout_ms


CopyKey = tuple[Ticket, Run]


class Copies:
    """The copies in flight, each with a pin on its blocks: freed blocks wait for their copy."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._pinned: dict[CopyKey, list[int]] = {}

    def __len__(self) -> int:
        return len(self._pinned)

    def __contains__(self, key: CopyKey) -> bool:
        return key in self._pinned

    def begin(self, key: CopyKey, blocks: Sequence[int]) -> None:
        assert key not in self._pinned, f"a second copy of {key}"
        self._pinned[key] = list(blocks)
        self._blocks.pin(blocks)

    def end(self, key: CopyKey) -> bool:
        """The copy has ended; False if there was none (a doubled answer)."""
        pinned = self._pinned.pop(key, None)
        if pinned is not None:
            self._blocks.unpin(pinned)
        return pinned is not None

    def tables(self) -> list[list[int]]:
        return list(self._pinned.values())
