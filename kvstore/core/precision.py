"""The mode of a nested model's weights: its levels, their names, costs, and who chooses them.

A nested model computes each step at a *level*: 0 reads every layer in FP16, the last one reads
every layer in FP8, those between read some in each. What a step computed carries the *precision* of
its level as a tag; KV that attended tagged KV is no purer than that.

Where a device multiplies FP8 by FP8 (W8A8), steps of many rows at the last level may round their
activations as well. That is a mode of its own, with a tag of its own, and in plans a level of its
own, ``levels``: no policy chooses it (``with_w8a8``).

The controller sends each worker a ``PrecisionRule``; a policy (``policies``) makes the level of
each step of it, and the plan says the level.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

LEVELS_MAX: Final = 6
"""FP16, FP8 and four between: each is a graph set of its own on a card, and more would cost more
memory than they tell apart."""


class Precision(Enum):
    """The mode that computed tokens or KV; of two, the greater one is the worse."""

    FP16 = "fp16"
    MIXED = "mixed"
    FP8 = "fp8"
    W8A8 = "w8a8"
    """Weights as FP8 has them, and activations in 8 bits too."""

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
    """The tag of what a step at ``level`` computes of a model with ``levels``; that is W8A8's."""
    if level == 0:
        return Precision.FP16
    if level == levels:
        return Precision.W8A8
    return Precision.FP8 if level == levels - 1 else Precision.MIXED


def with_w8a8(level: int, levels: int, rows: int, w8a8_rows: int) -> int:
    """What a step of ``rows`` that a policy has put at ``level`` is planned at.

    ``w8a8_rows``: from so many rows on, steps at the last level multiply FP8 by FP8; 0: never.
    """
    return levels if w8a8_rows and rows >= w8a8_rows and level == levels - 1 else level


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
    tokens: tuple[int, ...]
    """Tokens generated by steps of each ``Precision``, since the worker started."""
    ms: tuple[int, ...]
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
