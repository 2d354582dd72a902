"""Which run may speak for a choice: the highest that has attached, on the worker that said so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.gateway.core.events import Effect, SendToWorker
from deepinfer.gateway.core.levels import Levels
from deepinfer.gateway.core.record import Choice, Entry
from deepinfer.gateway.core.table import RequestTable
from deepinfer.kvstore.core.ids import Run, Seq, WorkerRef
from deepinfer.kvstore.core.messages import (
    Ack,
    Attach,
    Attached,
    AttachRefused,
    Drop,
    Scores,
    Tokens,
    ToWorker,
)


class Runs:
    """Lets one run at a time speak for each choice; works on the core's own parts."""

    def __init__(
        self,
        config: GatewayConfig,
        table: RequestTable,
        levels: Levels,
        counters: Counter[str],
        emit: Callable[[Effect], None],
        *,
        now_ms: int,
    ) -> None:
        self._config = config
        self._table = table
        self._levels = levels
        self._counters = counters
        self._emit = emit
        self._started_ms = now_ms

    def attach(self, worker: WorkerRef, attach: Attach, now_ms: int) -> None:
        """A run asks for the record: it gets it unless a higher one has."""
        found = self._table.choice(attach.seq)
        if found is None:
            if not self._quiet(attach.seq, now_ms):
                self._refuse(worker, attach, None)
            return
        entry, choice = found
        highest = choice.attached
        if choice.finish is not None:
            self._refuse(worker, attach, None)
            return
        if highest is None or attach.run > highest:
            if choice.worker != worker:  # in place, the newer run has the older one's KV
                self.drop(choice)
            if highest is None:
                choice.meter.attached(now_ms)
            choice.attached, choice.worker = attach.run, worker
            self._levels.touch(choice.seq)
        elif attach.run < highest or choice.worker != worker:
            self._refuse(worker, attach, highest)
            return
        self._counters["attaches_total"] += 1
        scored = len(choice.scores.tokens)
        self._send(
            worker, Attached(choice.seq, attach.run, entry.record, choice.token_ids(), scored)
        )

    def speaks(
        self, worker: WorkerRef, said: Scores | Tokens, now_ms: int
    ) -> tuple[Entry, Choice] | None:
        """The record that is meant, if it is the attached run that speaks; others are told so."""
        found = self._table.choice(said.seq)
        if found is None:
            if not self._quiet(said.seq, now_ms):
                self._send(worker, Drop(said.seq, said.run))
            return None
        choice = found[1]
        if choice.attached is None or said.run > choice.attached:
            # It has not attached here (or this gateway has restarted since): it will.
            self._counters["tokens_unattached_total"] += len(said.tokens)
            return None
        if said.run < choice.attached or worker != choice.worker:
            self._counters["tokens_outdated_total"] += len(said.tokens)
            self._send(worker, Drop(said.seq, said.run))
            return None
        return found

    def acknowledge(self, worker: WorkerRef, choice: Choice, run: Run) -> None:
        """Say how much is held."""
        held, scored = len(choice.tokens), len(choice.scores.tokens)
        self._send(worker, Ack(choice.seq, run, held, choice.finish is not None, scored))

    def contradicted(self, choice: Choice) -> None:
        """What the run computes does not follow what is here. Another starts from the truth."""
        self.drop(choice)
        choice.worker = None
        self._levels.touch(choice.seq)

    def drop(self, choice: Choice) -> None:
        """Tell the attached run, if there is one, that nobody wants it any more."""
        if choice.worker is not None and choice.attached is not None:
            self._send(choice.worker, Drop(choice.seq, choice.attached))

    def _quiet(self, seq: Seq, now_ms: int) -> bool:
        """Whether to leave a run of an unknown sequence unanswered: it may be wanted elsewhere."""
        young = now_ms - self._started_ms < self._config.startup_grace_ms
        wanted = young or self._table.disowned(seq.request)
        return wanted and not self._levels.is_cancelled(seq)

    def _refuse(self, worker: WorkerRef, attach: Attach, highest: Run | None) -> None:
        self._counters["attaches_refused_total"] += 1
        self._send(worker, AttachRefused(attach.seq, attach.run, highest))

    def _send(self, worker: WorkerRef, message: ToWorker) -> None:
        self._emit(SendToWorker(worker, message))
