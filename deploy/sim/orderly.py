"""Orderly ends: processes that are drained first, one by one or each in its turn."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from deepinfer.controller.core.events import Drain
from deepinfer.deploy.sim.checker import ViolationError
from deepinfer.deploy.sim.gateway_host import GatewayHost
from deepinfer.deploy.sim.worker_host import WorkerHost
from deepinfer.kvstore.core.ids import GatewayId, Incarnation, WorkerId
from deepinfer.workers.core.events import StartDrain

if TYPE_CHECKING:
    from deepinfer.deploy.sim.havoc import Havoc
    from deepinfer.deploy.sim.world import World

Drained = WorkerHost | GatewayHost
PATIENCE_MS = 2000
"""How long whoever drains waits before the process is ended nevertheless."""
_LOOK_MS = 50


class Orderly:
    """Drains processes, waits until they are empty, and replaces them."""

    __slots__ = ("_havoc", "_rolling", "_world")

    def __init__(self, world: World, havoc: Havoc) -> None:
        self._world = world
        self._havoc = havoc
        self._rolling = False

    def drain(self, host: Drained, grace_ms: int | None = None) -> None:
        """Ask the controller to drain a process."""
        controller = self._world.controller
        name = WorkerId(host.name) if isinstance(host, WorkerHost) else GatewayId(host.name)
        wanted = Drain(name, grace_ms, Incarnation(host.life))
        controller.take(controller.life, controller.drive, (wanted,))

    def drain_and_replace(self, rng: Random, host: Drained) -> bool:
        """Drain a process; replace it once it is empty, or after a while."""
        if not host.up:
            return False
        if isinstance(host, WorkerHost) and rng.random() < 0.3:
            host.take(host.life, host.drive, (StartDrain(),))
        else:
            self.drain(host, rng.choice((None, 0, 300)))
        patience_ms = rng.choice((100, PATIENCE_MS))
        self._look(host, host.life, self._world.engine.now_ms + patience_ms, None)
        return True

    def roll(self, rng: Random) -> bool:
        """Drain and replace every worker and gateway, one after the other."""
        if self._rolling:
            return False
        self._rolling = True
        line: list[Drained] = [*self._world.workers.values(), *self._world.gateways.values()]
        rng.shuffle(line)
        self._next(line)
        return True

    def _next(self, line: list[Drained]) -> None:
        if self._world.fair or not line:
            self._rolling = False
            return
        host, *rest = line
        if host.up:
            self.drain(host)
            self._look(host, host.life, self._world.engine.now_ms + PATIENCE_MS, rest)
        else:
            self._next(rest)

    def _look(self, host: Drained, life: int, until_ms: int, rest: list[Drained] | None) -> None:
        """Wait for the process to be empty; then, or when time is up, replace it."""
        engine = self._world.engine
        over = not host.up or host.life != life
        empty = not over and self._empty(host)
        if not over and engine.now_ms < until_ms and not empty:
            engine.after(_LOOK_MS, self._look, host, life, until_ms, rest)
            return
        if empty and (held := host.held()):
            raise ViolationError(f"{host} is called drained, and holds {held} requests")
        if not over:
            self._havoc.kill(host)
            engine.after(1 + host.within(200), self._havoc.restart, host)
        if rest is not None:
            engine.after(400, self._next, rest)

    def _empty(self, host: Drained) -> bool:
        controller = self._world.controller
        if not controller.up:
            return False
        level = controller.core.drain_level(host.name)
        return level is not None and level.life == host.life and level.drained
