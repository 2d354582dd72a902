"""Who cannot reach whom, for a while.

Only what goes over a network is parted: processes of one node still see each other die, and Ray's
word of a death still reaches the controller.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.deploy.sim.world import World

Ways = tuple[tuple[str, str], ...]


class Partitions:
    """Parts processes or nodes, and heals that after a while."""

    __slots__ = ("_now", "_world")

    def __init__(self, world: World) -> None:
        self._world = world
        self._now: dict[Ways, None] = {}
        """What is parted now, oldest first."""

    def pair(self, rng: Random, *, one_way: bool) -> bool:
        """Part two processes that talk to each other."""
        world = self._world
        kind = rng.choice(("report", "link", "payload", "order", "client"))
        workers, stores = list(world.workers), list(world.stores)
        gateways, controller = list(world.gateways), world.controller.name
        match kind:
            case "report":
                a, b = rng.choice([*workers, *stores, *gateways]), controller
            case "link":
                a, b = rng.choice(workers), rng.choice(gateways)
            case "payload" if stores:
                a, b = rng.choice(workers), rng.choice(stores)
            case "client":
                a, b = rng.choice(list(world.clients)), rng.choice(gateways)
            case _:
                a, b = rng.choice(workers), controller
        if rng.random() < 0.5:
            a, b = b, a
        return self._part(rng, ((a, b),) if one_way else ((a, b), (b, a)))

    def nodes(self, rng: Random, *, one_way: bool) -> bool:
        """Part the two nodes. Clients are on neither."""
        world = self._world
        hosts = [world.controller, *world.servers()]
        here = [host.name for host in hosts if world.node_of(host) == "n0"]
        there = [host.name for host in hosts if world.node_of(host) == "n1"]
        if rng.random() < 0.5:
            here, there = there, here
        ways = [(a, b) for a in here for b in there]
        if not one_way:
            ways += [(b, a) for a, b in ways]
        return self._part(rng, tuple(ways))

    def _part(self, rng: Random, ways: Ways) -> bool:
        if not ways or ways in self._now:
            return False
        self._now[ways] = None
        self._world.note(f"parted: {ways}")
        for way in ways:
            self._world.network.silence(*way)
        self._world.engine.after(1 + rng.randrange(rng.choice((100, 1000, 4000))), self._heal, ways)
        return True

    def _heal(self, ways: Ways) -> None:
        if ways in self._now:
            del self._now[ways]
            for way in ways:
                self._world.network.heal(*way)

    def heal(self) -> None:
        """End every partition."""
        for ways in list(self._now):
            self._heal(ways)
