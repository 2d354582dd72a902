"""Who decides the level of a step: policies, as functions of what is asked and what is to be done.

The controller sends each worker a ``PrecisionRule``; the worker applies its policy to every step
that it plans (``choose``). A policy looks at what a step costs at each level, what the step holds
and what waits behind it, with a little memory (``Valve``) so that it does not flap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from deepinfer.kvstore.core.precision import Policy, PrecisionSettings, StepCost

FASTER: Final = 0.97
"""A level is worth its loss where it takes less than this share of the time."""
RAISE: Final = 0.9
"""The share of a target above which the level goes up."""
LOWER: Final = 0.7
"""The share of a target below which a lower level must stay for the level to go down."""
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
    pace: float = 1.0
    """How long steps have taken of late, of what was predicted: there is more to a step than what
    was measured at the start."""


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

    Up when the present level is predicted to use more than ``RAISE`` of a target and a higher one
    is predicted faster: to the smallest that suffices, else to the fastest. Down when a lower one
    is predicted to stay below ``LOWER`` of both. Neither before the level has stood ``dwell_ms``.
    """
    pays = not not_worth(costs, len(costs)) if valve.pays is None else valve.pays
    step_us = _smooth(valve.step_us, load, costs) if pays else ()
    valve = Valve(valve.level, valve.since_ms, step_us, pays)
    if not pays or level_max == 0:
        return _to(valve, 0, now_ms)
    if valve.level > level_max:
        return _to(valve, level_max, now_ms)
    if valve.since_ms is not None and now_ms - valve.since_ms < settings.dwell_ms:
        return valve
    times = [
        _Times(settings, cost, load, valve.step_us[level] if load.decodes else 0.0)
        for level, cost in enumerate(costs[: level_max + 1])
    ]
    now = times[valve.level]
    if now.pressure > RAISE:
        faster = [
            level for level in range(valve.level + 1, level_max + 1) if times[level].helps(now)
        ]
        enough = (level for level in faster if times[level].pressure <= RAISE)
        fastest = min(faster, key=lambda level: (times[level].pressure, level), default=valve.level)
        return _to(valve, next(enough, fastest), now_ms)
    lower = (level for level in range(valve.level) if times[level].pressure < LOWER)
    return _to(valve, next(lower, valve.level), now_ms)


class _Times:
    """What is predicted of one level, as shares of the targets."""

    __slots__ = ("clear", "step", "token", "waited")

    def __init__(
        self, settings: PrecisionSettings, cost: StepCost, load: StepLoad, token_us: float
    ) -> None:
        ttft_us = 1000 * settings.ttft_target_ms / load.pace
        self.token = load.pace * token_us / (1000 * settings.tpot_target_ms)
        """A token behind the first: the mean step."""
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
        return max(self.token, self.clear, self.waited)

    def helps(self, now: _Times) -> bool:
        """Whether it is predicted to shorten something that is too long at the present level."""
        return (
            (now.token > RAISE and self.token < FASTER * now.token)
            or (now.clear > RAISE and self.clear < FASTER * now.clear)
            or (now.waited > RAISE >= now.clear and self.step < FASTER * now.step)
        )


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
