"""Everything that can break, and how the survivors hear of it.

A death is seen by those who are connected, a little later and each on its own; Ray confirms it to
the controller and starts the process anew. What processes or links are told to do to orderly end is
in ``orderly.py``, what separates living ones in ``partitions.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from deepinfer.controller.core.events import GatewayGone, StoreGone, WorkerGone
from deepinfer.deploy.sim.ambush import Ambush, Moment
from deepinfer.deploy.sim.controller_host import ControllerHost
from deepinfer.deploy.sim.engine import Act
from deepinfer.deploy.sim.gateway_host import GatewayHost
from deepinfer.deploy.sim.host import Host
from deepinfer.deploy.sim.orderly import Orderly
from deepinfer.deploy.sim.partitions import Partitions
from deepinfer.deploy.sim.plan import Strike
from deepinfer.deploy.sim.store_host import StoreHost
from deepinfer.deploy.sim.worker_host import WorkerHost
from deepinfer.kvstore.core.ids import GatewayId, Incarnation, StoreId
from deepinfer.kvstore.core.messages import ReportReply
from deepinfer.kvstore.core.precision import PrecisionRule
from deepinfer.workers.core.events import ReportAnswered

if TYPE_CHECKING:
    from deepinfer.deploy.sim.world import World

T = TypeVar("T")
LONG_MS = 3500
"""Longer than any patience of the cores."""


class Havoc:
    """Breaks things in a world.

    Methods named by a ``Strike`` choose their victim by chance and say whether they found one.
    """

    __slots__ = ("_own", "_rivals", "_rng", "_world", "orderly", "partitions")

    def __init__(self, world: World) -> None:
        self._world = world
        self._own = world.engine.chance("havoc")
        self._rng = self._own
        self._rivals: list[ControllerHost] = []
        """Controllers that were replaced while they were stopped."""
        self.partitions = Partitions(world)
        self.orderly = Orderly(world, self)

    def strike(self, strike: Strike) -> bool:
        """Break what is planned; False if there is nothing to break."""
        self._world.note(strike.name)
        self._rng = Random(strike.chance)
        try:
            done: bool = getattr(self, strike.name)()
        finally:
            self._rng = self._own
        return done

    # ---- death ----

    def kill_worker(self) -> bool:
        """SIGKILL a worker; it comes back after a while."""
        return self._kill_and_restart(self._pick(self._workers()))

    def kill_store(self) -> bool:
        """SIGKILL a store: its payloads are gone."""
        store = self._store()
        return store is not None and self._kill_and_restart(store)

    def kill_gateway(self) -> bool:
        """SIGKILL a gateway: its records are gone."""
        return self._kill_and_restart(self._pick(list(self._world.gateways.values())))

    def kill_in_put(self) -> bool:
        """SIGKILL the next worker that copies a payload out, soon after it has begun."""
        return self._lie_in_wait("kill_in_put", Moment.PUT, self._kill_and_restart)

    def kill_in_commit(self) -> bool:
        """SIGKILL the next worker that sends a Commit: the call may run after its caller."""
        return self._lie_in_wait("kill_in_commit", Moment.COMMIT, self._kill_and_restart)

    def kill_in_fetch(self) -> bool:
        """SIGKILL the next worker that copies a payload in, soon after it has begun."""
        return self._lie_in_wait("kill_in_fetch", Moment.FETCH, self._kill_and_restart)

    def kill_store_in_put(self) -> bool:
        """SIGKILL a store when the next payload is copied out."""
        return self._lie_in_wait("kill_store_in_put", Moment.PUT, lambda _: self.kill_store())

    def stop_in_put(self) -> bool:
        """SIGSTOP the next worker that copies a payload out, until its pages could be lent anew."""
        return self._lie_in_wait("stop_in_put", Moment.PUT, lambda w: self.stop(w, 3000, 1500))

    def stuck_step(self) -> bool:
        """The next step that begins never ends: the device does not answer."""
        return self._lie_in_wait("stuck_step", Moment.STEP, lambda worker: worker.get_stuck())

    def give_up(self, worker: WorkerHost) -> None:
        """A worker ends itself, and is started anew."""
        self._kill_and_restart(worker)

    def _lie_in_wait(self, name: str, moment: Moment, hit: Callable[[WorkerHost], bool]) -> bool:
        """Hit the next worker at this moment. It counts when that comes."""
        self._world.ambushes.lay(Ambush(name, moment, self._rng.randrange(25), hit))
        return False

    def kill_node(self) -> bool:
        """SIGKILL all workers, stores and gateways of a node at once."""
        node = self._pick(("n0", "n1"))
        hosts = [host for host in self._world.servers() if self._world.node_of(host) == node]
        killed = [self._kill_and_restart(host) for host in hosts]
        return any(killed)

    def shrink_worker(self) -> bool:
        """A worker dies and comes back with another pool: others take some of its memory."""
        worker = self._pick(self._workers())
        first = next(p for p in self._world.plan.workers if p.name == worker.name)
        blocks = self._rng.randrange(first.blocks // 2 + 1, first.blocks + 1)
        worker.plan = dataclasses.replace(worker.plan, blocks=blocks)
        worker.least_blocks = min(worker.least_blocks, blocks)
        return self._kill_and_restart(worker)

    def shrink_store(self) -> bool:
        """A store dies and comes back with another budget."""
        store = self._store()
        if store is None:
            return False
        blocks = self._rng.choice((0, 2, 6, 64))
        store.plan = dataclasses.replace(store.plan, budget_blocks=blocks)
        return self._kill_and_restart(store)

    def _kill_and_restart(self, host: Host) -> bool:
        if not host.up:
            return False
        self.kill(host)
        self._later(1500, self.restart, host)
        return True

    def kill_controller(self) -> bool:
        """SIGKILL the controller."""
        if not self._world.controller.up:
            return False
        self._world.controller.kill()
        self._later(300, self.replace_controller)
        return True

    def kill(self, host: Host) -> None:
        """End a process; the others hear of it."""
        if not host.up:
            return
        host.kill()
        self._tell_gone(host)
        world = self._world
        if isinstance(host, WorkerHost):
            for store in world.stores.values():
                if store.plan.node == host.plan.node:
                    self._tell(store, 100, store.writer_gone, host.ref)
        elif isinstance(host, StoreHost):
            for worker in world.workers.values():
                self._tell(worker, 100, worker.store_gone, StoreId(host.name))

    def false_alarm(self) -> bool:
        """The controller is told that a process is dead, and it is not."""
        host = self._pick(self._world.servers())
        if host.up:
            self._tell_gone(host)
        return host.up

    def _tell_gone(self, host: Host) -> None:
        life = Incarnation(host.life)
        match host:
            case WorkerHost():
                self._tell_controller(WorkerGone(host.ref))
            case StoreHost():
                self._tell_controller(StoreGone(StoreId(host.name), life))
            case GatewayHost():
                self._tell_controller(GatewayGone(GatewayId(host.name), life))

    def restart(self, host: Host) -> None:
        """Start a process anew, if it is down."""
        if not host.up:
            self._world.note(f"restart {host.name}")
            host.start()
            self.tell_members()

    def replace_controller(self) -> None:
        """Start the next controller, if none is up."""
        world = self._world
        if not world.controller.up:
            world.controller = ControllerHost(world, world.controller.epoch + 1)
            world.note(f"start {world.controller.name}")
            world.controller.start()

    def rival_controller(self) -> bool:
        """The controller stops, is taken for dead and replaced, and then goes on."""
        old = self._world.controller
        if not old.up or old.stopped:
            return False
        old.stop()
        self.replace_stopped_controller()
        self._later(1000, old.go_on)
        return True

    def replace_stopped_controller(self) -> None:
        """Everybody turns to a new controller while the old one still has a process."""
        world = self._world
        old = world.controller
        self._rivals.append(old)
        world.controller = ControllerHost(world, old.epoch + 1)
        world.controller.start()
        patience_ms = self._rng.choice((400, 3000))
        for stream in list(old.streams):
            self._later(patience_ms, stream.cut)

    def controller_for(self, host: Host) -> ControllerHost:
        """Whom a process connects to: now and then one that has been replaced, if it still runs."""
        for old in self._rivals:
            if old.up and not old.stopped and host.random() < 0.2:
                return old
        return self._world.controller

    def rival(self, name: str) -> ControllerHost | None:
        """A controller that was replaced while it still had a process."""
        return next((old for old in self._rivals if old.name == name), None)

    def _tell_controller(self, event: object) -> None:
        controller = self._world.controller
        self._tell(controller, 200, controller.drive, event)

    def _tell(self, host: Host, longest_ms: int, act: Act, *args: Any) -> None:
        """Have a process hear of something, in this life of it."""
        self._later(longest_ms, host.take, host.life, act, args)

    def tell_members(self) -> None:
        """Ray tells the controller who is there, as of when it hears it."""
        self._later(200, self._members)

    def _members(self) -> None:
        controller = self._world.controller
        controller.take(controller.life, self._hear_members, (controller,))

    def _hear_members(self, controller: ControllerHost) -> None:
        controller.drive(self._world.members())

    # ---- silence ----

    def stop_worker(self) -> bool:
        """SIGSTOP a worker for a while."""
        return self.stop(self._pick(self._workers()), 800)

    def stop_worker_long(self) -> bool:
        """SIGSTOP a worker for so long that everybody gives it up."""
        return self.stop(self._pick(self._workers()), LONG_MS)

    def stop_store(self) -> bool:
        """SIGSTOP a store for a while."""
        store = self._store()
        return store is not None and self.stop(store, 800)

    def stop_store_long(self) -> bool:
        """SIGSTOP a store beyond every deadline."""
        store = self._store()
        return store is not None and self.stop(store, LONG_MS)

    def stop_gateway(self) -> bool:
        """SIGSTOP a gateway for a while."""
        return self.stop(self._pick(list(self._world.gateways.values())), 800)

    def stop_gateway_long(self) -> bool:
        """SIGSTOP a gateway beyond every deadline."""
        return self.stop(self._pick(list(self._world.gateways.values())), LONG_MS)

    def stop_controller(self) -> bool:
        """SIGSTOP the controller for a while."""
        return self.stop(self._world.controller, 800)

    def stop(self, host: Host, longest_ms: int, least_ms: int = 0) -> bool:
        """SIGSTOP, and SIGCONT some time later: ``least_ms``, and up to ``longest_ms`` more."""
        if not host.up or host.stopped:
            return False
        host.stop()
        delay_ms = least_ms + self._rng.randrange(1, longest_ms + 1)
        self._world.engine.after(delay_ms, self._go_on, host, host.life)
        return True

    def _go_on(self, host: Host, life: int) -> None:
        if host.up and host.life == life and host.stopped:
            host.go_on()

    def slow_store(self) -> bool:
        """A store is slow for a while, now and then beyond what its callers wait."""
        store = self._store()
        if store is None or store.slow_ms:
            return False
        store.slow_ms = self._rng.choice((5, 50, 700))
        self._later(LONG_MS, self._quick_again, store)
        return True

    def _quick_again(self, store: StoreHost) -> None:
        store.slow_ms = 0

    # ---- links ----

    def part_pair(self) -> bool:
        """Two processes cannot reach each other for a while."""
        return self.partitions.pair(self._rng, one_way=False)

    def part_pair_one_way(self) -> bool:
        """What one process sends to another does not arrive for a while."""
        return self.partitions.pair(self._rng, one_way=True)

    def part_nodes(self) -> bool:
        """The two nodes cannot reach each other for a while."""
        return self.partitions.nodes(self._rng, one_way=False)

    def part_nodes_one_way(self) -> bool:
        """What one node sends to the other does not arrive for a while."""
        return self.partitions.nodes(self._rng, one_way=True)

    def cut_report(self) -> bool:
        """A report stream breaks."""
        return self._cut(self._world.controller)

    def cut_link(self) -> bool:
        """A stream of a gateway breaks: a worker's link, its reports, or a client's."""
        return self._cut(self._pick(list(self._world.gateways.values())))

    def cut_client(self) -> bool:
        """A client's connection breaks."""
        client = self._pick(list(self._world.clients.values()))
        return client.up and client.cut()

    def abort_client(self) -> bool:
        """A user no longer wants the answer."""
        client = self._pick(list(self._world.clients.values()))
        return client.up and client.abort()

    def _cut(self, host: Host) -> bool:
        streams = list(host.streams)
        if streams:
            self._pick(streams).cut()
        return bool(streams)

    # ---- the rest ----

    def rot(self) -> bool:
        """A bit flips in a store's memory."""
        store = self._store()
        pages = [] if store is None else sorted(store.slab)
        if store is not None and pages:
            self.rot_page(store, self._pick(pages))
        return bool(pages)

    def rot_page(self, store: StoreHost, page: int) -> None:
        """A bit flips in one page."""
        block = store.slab[page]
        store.slab[page] = (block[0] ^ 1, *block[1:])
        self._world.rotted = True

    def drain_worker(self) -> bool:
        """A worker is drained, then replaced."""
        return self.orderly.drain_and_replace(self._rng, self._pick(self._workers()))

    def drain_gateway(self) -> bool:
        """A gateway is drained, then replaced."""
        gateways = list(self._world.gateways.values())
        return self.orderly.drain_and_replace(self._rng, self._pick(gateways))

    def rolling_restart(self) -> bool:
        """Every worker and gateway is drained and replaced, one after the other."""
        return self.orderly.roll(self._rng)

    def fickle_controller(self) -> bool:
        """A worker's planes shall leave, or return, until the next reply says otherwise.

        Of those whose tail is in use, one if there is any: its blocks have to move.
        """
        hosts = [worker for worker in self._world.workers.values() if worker.up]
        full = [host for host in hosts if host.core.snapshot()["blocks_in_tail"]]
        if hosts:
            worker = self._pick(full or hosts)
            snapshot = worker.core.snapshot()
            rule = PrecisionRule(shed=snapshot["planes"] == "held")
            epoch = snapshot["epoch_seen"]
            reply = ReportReply(epoch=epoch, number=0, resync=False, precision=rule)
            worker.take(worker.life, worker.drive, (ReportAnswered(reply),))
        return bool(hosts)

    def make_whole(self) -> None:
        """From here on nothing breaks: start what is down, go on with what is stopped."""
        world = self._world
        self.partitions.heal()
        self._world.ambushes.clear()
        for store in world.stores.values():
            store.slow_ms = 0
        for rival in self._rivals:
            if rival.up and rival is not world.controller:
                rival.kill()
        self.replace_controller()
        hosts = world.servers()
        for host in (world.controller, *hosts):
            if host.stopped:
                host.go_on()
        for host in hosts:
            self.restart(host)

    def _pick(self, among: Sequence[T]) -> T:
        return among[self._rng.randrange(len(among))]

    def _workers(self) -> list[WorkerHost]:
        return list(self._world.workers.values())

    def _store(self) -> StoreHost | None:
        stores = list(self._world.stores.values())
        return self._pick(stores) if stores else None

    def _later(self, longest_ms: int, act: Act, *args: Any) -> None:
        delay = self._rng.randrange(1, longest_ms + 1)
        self._world.engine.after(delay, act, *args)
