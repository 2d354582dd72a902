"""The step loop: one plan in flight, and what its end changes."""

from __future__ import annotations

from deepinfer.kvstore.core.requests import FinishReason
from deepinfer.kvstore.core.states import State
from deepinfer.workers.core.batch import plan
from deepinfer.workers.core.events import GiveUp, RunStep, StepDone, StepPlan
from deepinfer.workers.core.roster import Roster
from deepinfer.workers.core.sequence import Resident
from deepinfer.workers.core.shedding import Shedding
from deepinfer.workers.core.talk import Talk
from deepinfer.workers.core.valve import Levels


class Steps:
    """Starts a step whenever none is in flight and somebody can run."""

    def __init__(self, roster: Roster, talk: Talk, shedding: Shedding, levels: Levels) -> None:
        self._roster = roster
        self._levels = levels
        self._talk = talk
        self._shedding = shedding
        self._number = 0
        self._running: StepPlan | None = None
        self._since_ms = 0
        """When the step in flight began."""
        self._given_up = False
        self._members: tuple[Resident, ...] = ()
        self._moved: tuple[Resident, ...] = ()
        self.blocks_short = 0
        self.starved = False
        """Somebody is ready and nobody could be given the blocks for a step."""

    @property
    def moving(self) -> tuple[Resident, ...]:
        """Residents whose blocks the step in flight moves."""
        return self._moved

    @property
    def in_flight(self) -> StepPlan | None:
        return self._running

    def pump(self, now_ms: int) -> None:
        """Start the next step if there is one."""
        if self._running is not None:
            return
        roster = self._roster
        moves, self._moved = self._shedding.moves()
        residents = roster.residents.values()
        able = [resident for resident in residents if self._shedding.may_step(resident)]
        spare = roster.spare
        batch = plan(able, roster.blocks, max(0, spare), roster.config, self._number + 1)
        short = batch.blocks_short + max(0, -spare)
        starved = not batch.chunks and any(resident.ready for resident in residents)
        if starved != self.starved or (short > 0) != (self.blocks_short > 0):
            roster.changed = True
        self.blocks_short, self.starved = short, starved
        if not (batch.chunks or moves):
            return
        self._number += 1
        level = self._levels.plan(batch.chunks, self._shedding.level_min, now_ms)
        self._running = StepPlan(self._number, batch.chunks, level, moves, self._levels.next_level)
        self._since_ms = now_ms
        self._members = batch.residents
        for resident in (*self._moved, *batch.residents):
            resident.in_step, resident.step_stale = True, False
        roster.out.append(RunStep(self._running))

    def tick(self, now_ms: int) -> None:
        """A device that never answers is given up, once, and with it this life of the worker."""
        waited_ms, limit_ms = now_ms - self._since_ms, self._roster.config.step_timeout_ms
        if self._running is None or self._given_up or waited_ms < limit_ms:
            return
        self._given_up = True
        step = self._running.step
        why = f"step {step} has not ended after {waited_ms} ms (step_timeout_ms = {limit_ms})"
        self._roster.out.append(GiveUp(why))

    def done(self, event: StepDone, now_ms: int) -> tuple[Resident, ...]:
        """Apply the step in flight; return the residents that took part and are still here.

        KV and tokens count for a resident under whatever run it has by now: they are this
        worker's, and its gateway's word decides what is sent.
        """
        running, roster = self._running, self._roster
        if running is None or event.step != running.step:
            return ()
        self._running = None
        roster.step_ended()
        roster.counters.steps += 1
        self._levels.ended(running, now_ms)
        tag = self._levels.tag(running)
        outputs = {output.seq: output.token for output in event.outputs}
        scores = {scored.seq: scored.tokens for scored in event.scores}
        present: list[Resident] = []
        for chunk, resident in zip(running.chunks, self._members, strict=True):
            resident.in_step = False
            if roster.residents.get(chunk.seq) is not resident:
                continue
            present.append(resident)
            end = chunk.start + len(chunk.token_ids)
            computed = tuple(resident.tokens[chunk.start : end])
            if resident.step_stale or not resident.blocks or chunk.token_ids != computed:
                continue  # The gateway's tokens parted from ours while the step ran.
            if chunk.seq in event.failed:
                resident.finish = FinishReason.ERROR
                self._settle(resident, now_ms)
                continue
            if chunk.seq in scores:
                resident.score(chunk.score_from, scores[chunk.seq])
            if len(resident.scores) < min(end, resident.scores_due):
                continue  # A new gateway lacks log-probabilities that nobody asked this step for.
            resident.computed = end
            resident.purity.extend(chunk.start, end, tag)
            resident.last_step = running.step
            roster.counters.tokens_computed += len(chunk.token_ids)
            self._announce(resident)
            if chunk.seq in scores:
                self._talk.flush(resident, now_ms)
            token = outputs.get(chunk.seq)
            if not chunk.sample or end != len(resident.tokens):
                continue
            if token is not None:
                roster.counters.add_token(tag)
                resident.accept(token._replace(precision=tag))
            self._settle(resident, now_ms)
        for resident in self._moved:
            resident.in_step = False
            if roster.residents.get(resident.seq) is resident and resident not in present:
                present.append(resident)
        self._members = self._moved = ()
        return tuple(present)

    def _settle(self, resident: Resident, now_ms: int) -> None:
        roster = self._roster
        if resident.finish is not None:
            roster.finish(resident)
        elif resident.state is State.PREFILL:
            resident.settle()
            roster.changed = True
        self._talk.flush(resident, now_ms)

    def _announce(self, resident: Resident) -> None:
        """Put blocks that became full into the prefix cache."""
        blocks, size = self._roster.blocks, self._roster.config.block_size
        if not (resident.cacheable and blocks.prefix_cache):
            return
        while (len(resident.chain) + 1) * size <= resident.computed:
            index = len(resident.chain)
            parent = resident.chain[-1] if resident.chain else blocks.root
            digest = blocks.digest(parent, resident.tokens[index * size : (index + 1) * size])
            resident.chain.append(digest)
            tag = resident.purity.at((index + 1) * size)
            blocks.register(resident.blocks[index], digest, tag)
