"""The weather of a seed, and the one who strikes.

After ``fault_phase_ms`` the weather is fair and nothing breaks any more: what is still unfinished
then has to finish.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from deepinfer.deploy.sim.engine import Engine
from deepinfer.deploy.sim.plan import Strike, WeatherPlan

if TYPE_CHECKING:
    from deepinfer.deploy.sim.world import World


class Mishap(NamedTuple):
    """What befell the message ``number`` (from 1 on) of those from ``source`` to ``target``."""

    source: str
    target: str
    number: int
    kind: str
    """lost, doubled or late."""


MISHAPS = ("lost", "doubled", "late")


class _Channel:
    __slots__ = ("number", "random")

    def __init__(self, random: Callable[[], float]) -> None:
        self.random = random
        self.number = 0


class SeededWeather:
    """Random delays, and losses of calls, until ``fair`` is set.

    Each channel has its own chance and draws as much for a message that something befalls as for
    any other. Args: ``only``: of the mishaps that the seed has, those that happen; None: all.
    """

    __slots__ = (
        "_channels",
        "_double",
        "_engine",
        "_jitter",
        "_late",
        "_late_ms",
        "_leak",
        "_loss",
        "_only",
        "befallen",
        "fair",
        "mishaps",
    )

    def __init__(
        self, engine: Engine, plan: WeatherPlan, only: frozenset[Mishap] | None = None
    ) -> None:
        self._engine = engine
        self._leak = engine.chance("leaks").random
        self._jitter = plan.jitter_ms
        self._late = plan.late_share
        self._late_ms = plan.late_ms
        self._loss = plan.loss_share
        self._double = plan.double_share
        self._channels: dict[tuple[str, str], _Channel] = {}
        self._only = only
        self.mishaps: list[Mishap] = []
        """What befell messages so far."""
        self.befallen: Counter[str] = Counter()
        """How often each kind of mishap befell each kind of message."""
        self.fair = False

    def _channel(self, source: str, target: str) -> _Channel:
        channel = self._channels.get((source, target))
        if channel is None:
            channel = _Channel(self._engine.chance(f"{source}>{target}").random)
            self._channels[source, target] = channel
        channel.number += 1
        return channel

    def _befalls(self, source: str, target: str, number: int, kind: str, message: object) -> bool:
        mishap = Mishap(source, target, number, kind)
        if self._only is not None and mishap not in self._only:
            return False
        self.mishaps.append(mishap)
        inner = getattr(message, "body", message)
        self.befallen[f"{kind} {type(inner).__name__}"] += 1
        return True

    def _delay_ms(self, source: str, target: str, channel: _Channel, message: object) -> int:
        chance = channel.random()
        if self.fair:
            return 1 + int(chance * 3)
        if chance < self._late and self._befalls(source, target, channel.number, "late", message):
            return 1 + int(chance / self._late * self._late_ms)
        return 1 + int(chance * self._jitter)

    def hop_ms(self, source: str, target: str, message: object) -> int | None:
        """A live stream loses nothing."""
        return self._delay_ms(source, target, self._channel(source, target), message)

    def calls_ms(self, source: str, target: str, message: object) -> tuple[int | None, ...]:
        """A call or a reply is lost, carried once, or carried twice."""
        channel = self._channel(source, target)
        fate = channel.random()
        number = channel.number
        delay_ms = self._delay_ms(source, target, channel, message)
        if not self.fair:
            if fate < self._loss and self._befalls(source, target, number, "lost", message):
                return ()
            doubled = fate > 1.0 - self._double
            if doubled and self._befalls(source, target, number, "doubled", message):
                most_ms = self._late_ms if fate * 64 % 1.0 < self._late else self._jitter
                return (delay_ms, 1 + int(fate * 4096 % 1.0 * most_ms))
        return (delay_ms,)

    def leaks(self) -> bool:
        """Whether what is under way on a stream that breaks may still arrive."""
        return self._leak() < 0.5


class Saboteur:
    """Breaks one thing after another, as planned."""

    __slots__ = ("_world", "over", "struck")

    def __init__(self, world: World) -> None:
        self._world = world
        self.struck: Counter[str] = Counter()
        """How often each fault was done; one that finds nothing to break does not count."""
        self.over = False

    def start(self) -> None:
        """Begin."""
        for strike in self._world.plan.strikes:
            self._world.engine.after(strike.at_ms, self._strike, strike)

    def _strike(self, strike: Strike) -> None:
        if not self.over and self._world.havoc.strike(strike):
            self.struck[strike.name] += 1
