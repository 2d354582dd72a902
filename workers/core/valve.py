"""How far the weights' precision gives way in the step that is being planned."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.kvstore.core.policies import StepLoad, Valve, choose, decode_ratio, not_worth
from deepinfer.kvstore.core.precision import (
    Policy,
    Precision,
    PrecisionLevel,
    PrecisionRule,
    StepCost,
    precision_of,
    with_w8a8,
)
from deepinfer.kvstore.core.states import State
from deepinfer.workers.core.events import Chunk, StepPlan
from deepinfer.workers.core.roster import Roster
from deepinfer.workers.core.sequence import Resident

PACE = (0.5, 3.0)
"""What is believed of how much faster or slower steps are than predicted."""
PACE_STEPS = 64
"""Over so many steps it is a mean."""
LOAD_KEEP_MS = 2000
"""What a rule says of the load at the controller counts for so long."""


def note(levels: int, costs: Sequence[StepCost]) -> tuple[str, ...]:
    """What a start has to say of nested weights: whether their levels are of use here."""
    if levels == 1:
        return ()
    reason = not_worth(costs, levels)
    if reason:
        return (f"nested weights: {reason}; with precision = 'slo' every step is FP16",)
    ratio = decode_ratio(costs)
    return (f"nested weights: a step of 8 rows takes {ratio:.0%} of its FP16 time in FP8",)


class Levels:
    """Chooses the level of each step by the controller's rule, and counts what came of it.

    Before the first rule, and where a step holds an ``exact`` request, that is level 0.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._config = config = roster.config
        self._ratio = decode_ratio(config.costs)
        self._not_worth = not_worth(config.costs, config.levels)
        self._valve = Valve()
        self._planned_ms = 0
        self._predicted_us = 0.0
        """Of the step in flight; 0: not looked at."""
        self._mean_us = (0.0, 0.0)
        """Of the latest steps: what was predicted, and what they took."""
        self.level = 0
        """Of the latest step."""
        self.next_level = 0
        """What was announced with it for the step after it."""

    @property
    def remark(self) -> str:
        """Why the policy never leaves level 0 here; "" if it may, or has no choice."""
        rule, config = self._roster.rule, self._config
        if config.levels == 1 or config.start_shed:
            return ""
        if rule is None or rule.settings.policy is not Policy.SLO:
            return ""
        return self._not_worth

    def report(self) -> PrecisionLevel | None:
        """What the controller is told; None: the weights are not nested."""
        config, counters = self._config, self._roster.counters
        if config.levels == 1:
            return None
        return PrecisionLevel(
            self.level,
            config.levels,
            self._ratio,
            self.remark,
            counters.precision_switches,
            counters.tokens_in,
            counters.ms_in,
        )

    def plan(self, chunks: Sequence[Chunk], level_min: int, now_ms: int) -> int:
        """The level of a step of these chunks; what levels below ``level_min`` read is away.

        At the highest one that may be ``levels``, which is W8A8, for this step alone.
        A change is announced one step before (``next_level``) where the device may have computed
        this one already, at the level that it was announced for.
        """
        self._planned_ms = now_ms
        if not chunks:  # a step that only moves blocks
            return max(self.level, level_min)
        level, rule, config = 0, self._roster.rule, self._config
        if any(chunk.record.exact for chunk in chunks):
            assert level_min == 0, "an exact request in a step that cannot be exact"
        elif config.levels > 1 and rule is not None:
            load = self._load(chunks, rule, now_ms)
            self._valve = choose(
                rule.settings, config.costs, config.levels, load, self._valve, now_ms
            )
            level = self._valve.level
        level = self._announced(max(level, level_min), chunks, level_min)
        self._predicted_us = 0.0
        rows, context_tokens = _size(chunks)
        if config.costs:
            self._predicted_us = config.costs[level].predict(rows, context_tokens)
        if level != self.level:
            self.level = level
            self._roster.counters.precision_switches += 1
        return with_w8a8(level, config.levels, rows, config.w8a8_rows)

    def _announced(self, wanted: int, chunks: Sequence[Chunk], level_min: int) -> int:
        """What to do now about a level that is ``wanted``: it, or the one before and then it."""
        foreseen = all(len(chunk.token_ids) == 1 and chunk.index > 0 for chunk in chunks)
        forced = self.level < level_min or any(chunk.record.exact for chunk in chunks)
        waits = wanted not in (self.level, self.next_level) and foreseen and not forced
        self.next_level = wanted
        return self.level if waits else wanted

    def tag(self, plan: StepPlan) -> Precision:
        """The precision of what a step computes."""
        return precision_of(plan.level, self._config.levels)

    def ended(self, plan: StepPlan, now_ms: int) -> None:
        """The step has run."""
        if plan.chunks:
            took_ms = now_ms - self._planned_ms
            self._roster.counters.add_time(self.tag(plan), took_ms)
            self._compare(1000.0 * took_ms)

    @property
    def pace(self) -> float:
        """How long steps have taken of late, of what was predicted."""
        predicted_us, took_us = self._mean_us
        low, high = PACE
        return min(max(took_us / predicted_us, low), high) if predicted_us else 1.0

    def _compare(self, took_us: float) -> None:
        new = self._predicted_us
        if not new:
            return
        predicted_us, before_us = self._mean_us if self._mean_us[0] else (new, new)
        took_us = min(took_us, PACE[1] * new)  # a process that was stopped says nothing of steps
        self._mean_us = (
            predicted_us + (new - predicted_us) / PACE_STEPS,
            before_us + (took_us - before_us) / PACE_STEPS,
        )

    def _load(self, chunks: Sequence[Chunk], rule: PrecisionRule, now_ms: int) -> StepLoad:
        tokens, since_ms, decoding = 0, now_ms, 0
        for resident in self._roster.residents.values():
            if resident.state is State.DECODE:
                decoding += 1
            elif resident.state in (State.WAITING, State.PREFILL) and not resident.generated:
                tokens += self._to_compute(resident)
                since_ms = min(since_ms, resident.since_ms)
        said_ms = now_ms - self._roster.ruled_ms
        if rule.waiting_tokens and said_ms < LOAD_KEEP_MS:
            tokens += rule.waiting_tokens
            since_ms = min(since_ms, self._roster.ruled_ms - rule.waiting_ms)
        rows, context_tokens = _size(chunks)
        return StepLoad(
            rows=rows,
            decodes=sum(1 for chunk in chunks if chunk.index > 0),
            context_tokens=context_tokens,
            backlog_tokens=tokens,
            backlog_ms=now_ms - since_ms,
            step_tokens_max=self._config.max_batch_tokens,
            seats=self._config.max_batch_seqs,
            decoding=decoding,
            pace=self.pace,
        )

    def _to_compute(self, resident: Resident) -> int:
        if resident.record is None:  # its gateway has not answered: the promise tells the length
            return resident.promised * self._config.block_size
        return resident.remaining

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        assert 0 <= self.level < self._config.levels, f"{self.level} of {self._config.levels}"


def _size(chunks: Sequence[Chunk]) -> tuple[int, int]:
    """Rows of a step, and the tokens of KV that they attend to."""
    rows = sum(len(chunk.token_ids) for chunk in chunks)
    return rows, rows + sum(chunk.start for chunk in chunks)
