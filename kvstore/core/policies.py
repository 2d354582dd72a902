"""Who decides the level of a step: policies, as functions of what is asked and what is to be done.

The controller sends each worker a ``PrecisionRule``; the worker applies its policy to every step
that it plans (``choose``). A policy looks at what a step costs at each level, what the step holds
and what waits behind it, with a little memory (``Valve``) so that it does not flap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from deepinfer.kvstore.core.precision import Policy, PrecisionSettings, StepCost

FASTER: Final = 0.97
"""A level is worth its loss where it takes less than this share of the time."""
PROMPTS_FASTER: Final = 0.9
"""The same for prompts that are late: a dwell in FP8 must shorten more than the last of them."""
LEND: Final = 0.5
"""The share of the TTFT target from which on a step with prompts runs at a level where it is
predicted faster, whatever the level stands at: such a step changes at no cost."""
RAISE: Final = 0.9
"""The share of a target above which the level goes up."""
LOWER: Final = 0.7
"""The share of a target below which a lower level must stay for the level to go down."""
FULL: Final = 0.7
"""The share of what full batches can decode above which the level goes up.

Bursts fill the rest. A batch that is full costs both targets: sequences take turns, and prompts get
one seat a step.
"""
CROWDED: Final = 0.5
"""The share of seats whose sequences decode already above which the level goes up: what flows is
known only when it has flowed, and a batch that fills fast is half full before."""
SEATS_MIN: Final = 16
"""Fewer seats are often full where nothing else is amiss: they say nothing."""
FLOW_MS: Final = 400.0
"""What has flowed is weighed by its age, in e-folds of this: about a second of it counts."""
FLOW_KNOWN_MS: Final = 100.0
"""Before so much has been seen, nothing is concluded from it."""
DECODE_ROWS: Final = (1, 8, 16)
"""Rows of a step at which it is judged whether a card gains anything by FP8."""
SMOOTHING: Final = 1 / 64
"""Weight of the newest step in the mean that is held against the TPOT target.

A request's tokens are spread over about so many steps. In a model of a card under Poisson arrivals
1/8 let single prompts open the valve, and closed it too soon under overload: of what FP8 gains in
attainment a third was lost.
"""


def decode_ratio(costs: Sequence[StepCost]) -> float:
    """What a decode step takes at the highest level, of its time at level 0; 0: not measured."""
    if not costs:
        return 0.0
    rows = DECODE_ROWS[1]
    return costs[-1].predict(rows, 0) / costs[0].predict(rows, 0)


def not_worth(costs: Sequence[StepCost], levels: int) -> str:
    """Why predictions speak against every level but 0; "" if they do not."""
    if levels < 2:
        return "the model's weights are not nested"
    if len(costs) != levels:
        return "the times of steps were not measured at every level"
    ratios = {
        rows: min(cost.predict(rows, 0) for cost in costs[1:]) / costs[0].predict(rows, 0)
        for rows in DECODE_ROWS
    }
    if min(ratios.values()) < FASTER:
        return ""
    shown = ", ".join(f"{ratio:.2f} at {rows} rows" for rows, ratio in ratios.items())
    return f"FP8 steps are no faster here: of an FP16 step's time they take {shown}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What a step that is being planned holds, and what waits behind it."""

    rows: int
    """Tokens that the step computes."""
    decodes: int
    """Sequences among them that have sent tokens already: the TPOT target is theirs."""
    context_tokens: int
    """Tokens of KV that its rows attend to, summed over sequences."""
    backlog_tokens: int = 0
    """Prompt tokens to be computed before the last of those that wait gets its first token: here,
    this step's included, and at the controller for this worker."""
    backlog_ms: int = 0
    """How long the one among them has waited that has waited longest."""
    step_tokens_max: int = 2048
    """Tokens that a step may compute."""
    seats: int = 64
    """Sequences that a step may hold."""
    decoding: int = 0
    """Sequences that have sent tokens already, in this step or not: more than seats take turns."""
    pace: float = 1.0
    """How long steps have taken of late, of what was predicted: there is more to a step than what
    was measured at the start."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What steps have done of late, weighed by age; see ``FLOW_MS``."""

    seen_ms: int | None = None
    """When the latest step was planned; None: there was none."""
    ms: float = 0.0
    """Time that was looked at."""
    ran_us: float = 0.0
    """What the steps were predicted to take, each at the level before it."""
    decodes: float = 0.0
    """Tokens behind first ones that were computed."""
    context: float = 0.0
    """KV that a sequence attended to, on average, in the latest step without prompts."""
    prompt_us: tuple[float, ...] = ()
    """What prompts added to steps, as predicted at each level."""

    def and_now(self, load: StepLoad, costs: Sequence[StepCost], level: int, now_ms: int) -> Flow:
        """With the step that is being planned; ``level`` is that of the one before."""
        past_ms = 0 if self.seen_ms is None else max(0, now_ms - self.seen_ms)
        keep = math.exp(-past_ms / FLOW_MS)
        context, prompt_us = self.context, self.prompt_us or (0.0,) * len(costs)
        if load.rows > load.decodes:
            added = tuple(_prompt_us(cost, load) for cost in costs)
        else:
            added = (0.0,) * len(costs)
            context = load.context_tokens / load.decodes
        return Flow(
            now_ms,
            keep * self.ms + past_ms,
            keep * self.ran_us + costs[level].predict(load.rows, load.context_tokens),
            keep * self.decodes + load.decodes,
            context,
            tuple(keep * old + new for old, new in zip(prompt_us, added, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class Valve:
    """What a policy remembers between steps."""

    level: int = 0
    since_ms: int | None = None
    """When the level last changed; None: it never has."""
    step_us: tuple[float, ...] = ()
    """The mean predicted time of the latest steps that held decodes, at each level."""
    pays: bool | None = None
    """Whether any level is predicted faster than level 0; None: not looked at yet."""
    flow: Flow = Flow()
    lent_from: int | None = None
    """The level that comes back after this step; None: this one's stands."""


class _Policy(Protocol):
    def __call__(
        self,
        settings: PrecisionSettings,
        costs: Sequence[StepCost],
        level_max: int,
        load: StepLoad,
        valve: Valve,
        now_ms: int,
    ) -> Valve: ...


def choose(
    settings: PrecisionSettings,
    costs: Sequence[StepCost],
    levels: int,
    load: StepLoad,
    valve: Valve,
    now_ms: int,
) -> Valve:
    """The valve for the step that is being planned, by the settings' policy.

    ``costs``: one a level, or () if they were not measured. An ``exact`` request is not the
    policy's business: its step runs at level 0 and the valve stays as it is.
    """
    level_max = min(settings.level_max, levels - 1)
    return _POLICIES[settings.policy](settings, costs, level_max, load, valve, now_ms)


def _to(valve: Valve, level: int, now_ms: int) -> Valve:
    return valve if level == valve.level else replace(valve, level=level, since_ms=now_ms)


def _fp16(
    settings: PrecisionSettings,
    costs: Sequence[StepCost],
    level_max: int,
    load: StepLoad,
    valve: Valve,
    now_ms: int,
) -> Valve:
    return _to(valve, 0, now_ms)


def _fp8(
    settings: PrecisionSettings,
    costs: Sequence[StepCost],
    level_max: int,
    load: StepLoad,
    valve: Valve,
    now_ms: int,
) -> Valve:
    return _to(valve, level_max, now_ms)


def _threshold(
    settings: PrecisionSettings,
    costs: Sequence[StepCost],
    level_max: int,
    load: StepLoad,
    valve: Valve,
    now_ms: int,
) -> Valve:
    return _to(valve, level_max if load.rows > settings.threshold_tokens else 0, now_ms)


def _slo(
    settings: PrecisionSettings,
    costs: Sequence[StepCost],
    level_max: int,
    load: StepLoad,
    valve: Valve,
    now_ms: int,
) -> Valve:
    """The smallest level whose predicted times hold both targets, with hysteresis.

    Up, at once, when the present level is predicted to use more than ``RAISE`` of a target, or more
    than ``FULL`` of the batch, and a higher one is predicted to help: to the smallest that
    suffices, else to the fastest. Down, after ``dwell_ms``, when a lower one is predicted to stay
    below ``LOWER / RAISE`` of all that. So it flaps no faster than the dwell, and is never late.

    Beside that, a step with prompts is lent a higher level once they use ``LEND`` of their target.
    """
    if valve.lent_from is not None:
        valve = replace(valve, level=valve.lent_from, lent_from=None)
    pays = not not_worth(costs, len(costs)) if valve.pays is None else valve.pays
    if not pays or level_max == 0:
        return _to(Valve(valve.level, valve.since_ms, pays=pays), 0, now_ms)
    step_us = _smooth(valve.step_us, load, costs)
    flow = valve.flow.and_now(load, costs, valve.level, now_ms)
    valve = Valve(valve.level, valve.since_ms, step_us, pays, flow)
    if valve.level > level_max:
        return _to(valve, level_max, now_ms)

    def times(level: int) -> _Times:
        return _Times(settings, costs[level], level, load, valve)

    now = times(valve.level)
    if now.pressure > RAISE:
        higher = {level: times(level) for level in range(valve.level + 1, level_max + 1)}
        faster = [level for level, then in higher.items() if then.helps(now)]
        enough = (level for level in faster if higher[level].pressure <= RAISE)
        fastest = min(
            faster, key=lambda level: (higher[level].pressure, level), default=valve.level
        )
        valve = _to(valve, next(enough, fastest), now_ms)
    elif valve.since_ms is None or now_ms - valve.since_ms >= settings.dwell_ms:
        lower = (level for level in range(valve.level) if times(level).pressure < LOWER)
        valve = _to(valve, next(lower, valve.level), now_ms)
    if valve.level < level_max and load.rows > load.decodes:
        now, most = times(valve.level), times(level_max)
        if max(now.clear, now.waited) > LEND and most.step < FASTER * now.step:
            return replace(valve, level=level_max, lent_from=valve.level)
    return valve


class _Times:
    """What is predicted of one level, as shares of the targets."""

    __slots__ = ("clear", "full", "step", "token", "waited")

    def __init__(
        self,
        settings: PrecisionSettings,
        cost: StepCost,
        level: int,
        load: StepLoad,
        valve: Valve,
    ) -> None:
        ttft_us = 1000 * settings.ttft_target_ms / load.pace
        tpot_us = 1000 * settings.tpot_target_ms / load.pace
        full, token_us = _steady(cost, level, load, valve.flow)
        crowd = load.decoding / load.seats
        if load.decodes and level != valve.level:  # it grows and shrinks with a step's time
            crowd *= valve.step_us[level] / valve.step_us[valve.level]
        self.full = 0.0
        if load.seats >= SEATS_MIN:
            self.full = RAISE * max(full / FULL, crowd / CROWDED)
        """How full its batches would be if what comes went on coming, or about are by now."""
        self.token = token_us / tpot_us
        """A token behind the first: what it will come to, or the mean step of late if that is
        longer, once for each turn that sequences take."""
        if load.decodes:
            turns = max(1.0, load.decoding / load.seats)
            self.token = max(self.token, turns * valve.step_us[level] / tpot_us)
        self.step = cost.predict(load.rows, load.context_tokens) / ttft_us
        """This step."""
        self.clear = self.waited = 0.0
        """The first token of who came last: when the backlog is done, decodes going on beside it;
        and of who has waited longest, and is served next. Everybody else lies between."""
        if load.backlog_tokens:
            self.clear = _clear_us(cost, load) / ttft_us
            self.waited = load.backlog_ms / settings.ttft_target_ms + self.step

    @property
    def pressure(self) -> float:
        """The share of the target of which most is used."""
        return max(self.token, self.full, self.clear, self.waited)

    def helps(self, now: _Times) -> bool:
        """Whether it is predicted to shorten something that is too long at the present level."""
        return (
            (now.token > RAISE and self.token < FASTER * now.token)
            or (now.full > RAISE and self.full < FASTER * now.full)
            or (now.clear > RAISE and self.clear < PROMPTS_FASTER * now.clear)
            or (now.waited > RAISE >= now.clear and self.step < PROMPTS_FASTER * now.step)
        )


def _steady(cost: StepCost, level: int, load: StepLoad, flow: Flow) -> tuple[float, float]:
    """What a level would come to under what has flowed of late, whatever level that ran at.

    Returns the share of its full batches' speed that is needed, and the time of a token in the
    batch that makes as many, in predicted microseconds.

    A batch that FP8 keeps small would grow in FP16: to judge FP16 by today's batch would close
    the valve too soon.
    """
    if flow.ms < FLOW_KNOWN_MS or not flow.decodes:
        return 0.0, 0.0
    # Steps that take less than predicted, which ``pace`` is slow to learn, fill no more than all.
    us = max(1000 * flow.ms / load.pace, flow.ran_us)
    left = 1 - flow.prompt_us[level] / us
    if left <= 0.0:
        return 1.0 / FULL, 0.0
    needed = flow.decodes / us / left

    def step_us(batch: float) -> float:
        return cost.predict(round(batch), round(batch * flow.context))

    batch = float(max(1, load.decodes))
    for _ in range(3):  # from below, or from above: it comes near
        batch = min(float(load.seats), max(1.0, needed * step_us(batch)))
    return needed * step_us(load.seats) / load.seats, step_us(batch) / left


def _prompt_us(cost: StepCost, load: StepLoad) -> float:
    """What prompts add to a step."""
    alone = cost.predict(load.decodes, load.context_tokens) if load.decodes else 0.0
    return max(0.0, cost.predict(load.rows, load.context_tokens) - alone)


def _clear_us(cost: StepCost, load: StepLoad) -> float:
    """The time of all steps until the backlog is computed."""
    beside = max(1, load.step_tokens_max - load.decodes)
    full, rest = divmod(load.backlog_tokens, beside)
    time_us = full * cost.predict(load.decodes + beside, load.context_tokens)
    if rest:
        time_us += cost.predict(load.decodes + rest, load.context_tokens)
    return time_us


def _smooth(
    mean: tuple[float, ...], load: StepLoad, costs: Sequence[StepCost]
) -> tuple[float, ...]:
    """A token's time is a mean over steps: one long step among short ones breaks no target."""
    if not load.decodes:
        return mean
    new = tuple(cost.predict(load.rows, load.context_tokens) for cost in costs)
    if len(mean) != len(new):
        return new
    return tuple(old + SMOOTHING * (latest - old) for old, latest in zip(mean, new, strict=True))


_POLICIES: Final[Mapping[Policy, _Policy]] = {
    Policy.FP16: _fp16,
    Policy.FP8: _fp8,
    Policy.THRESHOLD: _threshold,
    Policy.SLO: _slo,
}
