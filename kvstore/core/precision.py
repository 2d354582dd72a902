"""The mode of a nested model's weights: its levels, their names, costs, and who chooses them.

A nested model computes each step at a *level*: 0 reads every layer in FP16, the last one reads
every layer in FP8, those between read some in each. What a step computed carries the *precision* of
its level as a tag; KV that attended tagged KV is no purer than that.

The controller sends each worker a ``PrecisionRule``; the worker applies it to every step that it
plans (``choose``), and the plan says the level. A policy is a function of what is asked for, what a
step costs and what waits, with a little memory (``Valve``) so that it does not flap.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, NamedTuple, Protocol

LEVELS_MAX: Final = 6
"""FP16, FP8 and four between: each is a graph set of its own on a card."""

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


class Precision(Enum):
    """The mode that computed tokens or KV; of two, the greater one is the worse."""

    FP16 = "fp16"
    MIXED = "mixed"
    FP8 = "fp8"

    @property
    def rank(self) -> int:
        """0 is the best."""
        return _RANKS[self]

    def __lt__(self, other: Precision) -> bool:
        return _RANKS[self] < _RANKS[other]

    def __le__(self, other: Precision) -> bool:
        return _RANKS[self] <= _RANKS[other]

    def __gt__(self, other: Precision) -> bool:
        return _RANKS[self] > _RANKS[other]

    def __ge__(self, other: Precision) -> bool:
        return _RANKS[self] >= _RANKS[other]


_TAGS: Final = tuple(Precision)
_RANKS: Final[Mapping[Precision, int]] = {tag: rank for rank, tag in enumerate(Precision)}


def precision_of(level: int, levels: int) -> Precision:
    """The tag of what a step at ``level`` of a model with ``levels`` computes."""
    if level == 0:
        return Precision.FP16
    return Precision.FP8 if level == levels - 1 else Precision.MIXED


def packed(tags: Iterable[Precision]) -> bytes:
    """The tags of tokens in a row, one byte each (its rank); empty if all of them are FP16."""
    ranks = bytes(tag.rank for tag in tags)
    return ranks if any(ranks) else b""


def unpacked(ranks: bytes, count: int) -> tuple[Precision, ...]:
    """Undo ``packed`` for ``count`` tokens; ValueError for what it does not give."""
    if not ranks:
        return (Precision.FP16,) * count
    if len(ranks) != count or max(ranks) >= len(_TAGS):
        raise ValueError(
            f"{len(ranks)} bytes up to {max(ranks)}: must be empty, or {count} bytes (one a token) "
            f"up to {len(_TAGS) - 1}"
        )
    return tuple(_TAGS[rank] for rank in ranks)


class PrecisionError(ValueError):
    """A setting of the precision policy that cannot work: names it, its value and what is legal."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"{name} = {value!r}: must be {allowed}")
        self.name = name
        self.value = value
        self.allowed = allowed


class Policy(Enum):
    """Who decides the level of a step."""

    FP16 = "fp16"  # always 0
    FP8 = "fp8"  # always the highest
    THRESHOLD = "threshold"  # the highest in steps of many tokens, as published
    SLO = "slo"  # the lowest whose predicted times hold the targets


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSettings:
    """A policy with its parameters. Checked on construction (PrecisionError)."""

    policy: Policy = Policy.SLO
    level_max: int = LEVELS_MAX - 1
    """No step goes above it, nor above what the model has."""
    threshold_tokens: int = 1024
    """``threshold``: steps of more tokens than this run at the highest level."""
    ttft_target_ms: float = 2000.0
    """``slo``: time to the first token."""
    tpot_target_ms: float = 100.0
    """``slo``: mean time of each token after it."""
    dwell_ms: int = 500
    """``slo``: the level stays at least so long."""

    def __post_init__(self) -> None:
        def check(name: str, legal: bool, allowed: str) -> None:
            if not legal:
                raise PrecisionError(name, getattr(self, name), allowed)

        check("level_max", 0 <= self.level_max < LEVELS_MAX, f"between 0 and {LEVELS_MAX - 1}")
        check("threshold_tokens", self.threshold_tokens >= 0, "0 or more")
        for name in ("ttft_target_ms", "tpot_target_ms"):
            target = getattr(self, name)
            check(name, target > 0 and math.isfinite(target), "above 0 and finite")
        check("dwell_ms", self.dwell_ms >= 0, "0 or more")


def resolve_policy(name: str) -> Policy:
    """The policy of that name; PrecisionError lists the legal ones."""
    try:
        return Policy(name)
    except ValueError:
        allowed = "one of " + ", ".join(policy.value for policy in Policy)
        raise PrecisionError("precision", name, allowed) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRule:
    """What the controller tells one worker, in each answer to its reports."""

    settings: PrecisionSettings = field(default_factory=PrecisionSettings)
    waiting_tokens: int = 0
    """Prompt tokens that wait at the controller for this worker: its share of what waits."""
    waiting_ms: int = 0
    """How long the oldest of these requests has waited, when the answer was sent."""
    shed: bool = False
    """The worker should run at the highest level and give up its lower planes for KV blocks."""


class PrecisionLevel(NamedTuple):
    """What a worker with nested weights reports of them."""

    level: int
    """Of its latest step."""
    levels: int
    ratio: float
    """What a decode step takes at the highest level, of its time at level 0; 0: not measured."""
    remark: str
    """Why the policy never leaves level 0 there; "" if it may."""
    switches: int
    """Steps at another level than the one before, since the worker started."""
    tokens: tuple[int, int, int]
    """Tokens generated by FP16, MIXED and FP8 steps, since the worker started."""
    ms: tuple[int, int, int]
    """Time in these steps."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """How long steps take at one level: measured at start-up.

    ``us[i]`` is the time of a step of ``rows[i]`` tokens that attends to nothing; each token of KV
    that a step attends to, summed over its sequences, adds ``us_per_context_token``.
    """

    rows: tuple[int, ...]
    """Rising."""
    us: tuple[float, ...]
    us_per_context_token: float = 0.0

    def __post_init__(self) -> None:
        rising = all(low < high for low, high in zip(self.rows, self.rows[1:], strict=False))
        if not (self.rows and rising and self.rows[0] >= 1):
            raise PrecisionError("rows", self.rows, "one or more rising counts of 1 or more")
        if len(self.us) != len(self.rows) or not all(0 < t < math.inf for t in self.us):
            raise PrecisionError("us", self.us, f"{len(self.rows)} times above 0")
        if not 0 <= self.us_per_context_token < math.inf:
            raise PrecisionError("us_per_context_token", self.us_per_context_token, "0 or more")

    def predict(self, rows: int, context_tokens: int) -> float:
        """Microseconds of a step: linear between what was measured, the last slope beyond."""
        return self._rows_us(rows) + self.us_per_context_token * context_tokens

    def _rows_us(self, rows: int) -> float:
        if rows <= self.rows[0] or len(self.rows) == 1:
            # Below the first, weights are read all the same; above one alone, all is proportional.
            return self.us[0] * max(1.0, rows / self.rows[0])
        high = min(bisect_left(self.rows, rows), len(self.rows) - 1)
        low = high - 1
        slope = (self.us[high] - self.us[low]) / (self.rows[high] - self.rows[low])
        if rows > self.rows[high]:
            slope = max(0.0, slope)  # A noisy last pair must not predict less for more.
        return self.us[high] + slope * (rows - self.rows[high])


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
