"""The weather of a seed, and the one who kills, stops and cuts.

After ``fault_phase_ms`` the weather is fair and nothing breaks any more: what is still unfinished
then has to finish.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from deepinfer.deploy.sim.plan import Plan, WeatherPlan

if TYPE_CHECKING:
    from deepinfer.deploy.sim.world import World


class SeededWeather:
    """Random delays, and losses of calls, until ``fair`` is set."""

    __slots__ = ("_double", "_jitter", "_late", "_late_ms", "_loss", "_random", "fair")

    def __init__(self, rng: Random, plan: WeatherPlan) -> None:
        self._random = rng.random
        self._jitter = plan.jitter_ms
        self._late = plan.late_share
        self._late_ms = plan.late_ms
        self._loss = plan.loss_share
        self._double = plan.double_share
        self.fair = False

    def _delay_ms(self) -> int:
        chance = self._random()
        if self.fair:
            return 1 + int(chance * 3)
        if chance < self._late:
            return 1 + int(self._random() * self._late_ms)
        return 1 + int(chance * self._jitter)

    def hop_ms(self, source: str, target: str, message: object) -> int | None:
        """A live stream loses nothing."""
        return self._delay_ms()

    def calls_ms(self, source: str, target: str, message: object) -> tuple[int | None, ...]:
        """A call or a reply is lost, carried once, or carried twice."""
        if not self.fair:
            chance = self._random()
            if chance < self._loss:
                return ()
            if chance > 1.0 - self._double:
                return (self._delay_ms(), self._delay_ms())
        return (self._delay_ms(),)

    def leaks(self) -> bool:
        """Whether what is under way on a stream that breaks may still arrive."""
        return self._random() < 0.5


class Saboteur:
    """Breaks one thing after another, as the plan weighs them."""

    __slots__ = ("_names", "_plan", "_rng", "_weights", "_world", "over")

    def __init__(self, world: World, plan: Plan) -> None:
        self._world = world
        self._plan = plan
        self._rng = world.engine.rng
        self._names = [name for name, _ in plan.faults]
        self._weights = [weight for _, weight in plan.faults]
        self.over = False

    def start(self) -> None:
        """Begin, if the plan has faults at all."""
        if self._names:
            self._world.engine.after(self._wait_ms(), self._strike)

    def _wait_ms(self) -> int:
        return 1 + int(self._rng.expovariate(1.0 / self._plan.fault_every_ms))

    def _strike(self) -> None:
        if self.over:
            return
        name = self._rng.choices(self._names, self._weights)[0]
        self._world.note(name)
        getattr(self._world.havoc, name)()
        self._world.engine.after(self._wait_ms(), self._strike)
