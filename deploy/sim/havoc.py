"""Everything that can break, and how the survivors hear of it.

A death is seen by those who are connected, a little later and each on its own; Ray confirms it to
the controller and starts the process anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from deepinfer.controller.core.events import Drain, GatewayGone, StoreGone, WorkerGone
from deepinfer.deploy.sim.controller_host import ControllerHost
from deepinfer.deploy.sim.engine import Act
from deepinfer.deploy.sim.gateway_host import GatewayHost
from deepinfer.deploy.sim.host import Host
from deepinfer.deploy.sim.store_host import StoreHost
from deepinfer.deploy.sim.worker_host import WorkerHost
from deepinfer.kvstore.core.ids import GatewayId, Incarnation, StoreId, WorkerId
from deepinfer.kvstore.core.messages import ReportReply
from deepinfer.kvstore.core.precision import PrecisionRule
from deepinfer.workers.core.events import ReportAnswered, StartDrain

if TYPE_CHECKING:
    from deepinfer.deploy.sim.world import World

T = TypeVar("T")
LONG_MS = 3500
"""Longer than any patience of the cores."""


class Havoc:
    """Breaks things in a world. Methods without arguments choose their victim at random."""

    __slots__ = ("_rivals", "_world")

    def __init__(self, world: World) -> None:
        self._world = world
        self._rivals: list[ControllerHost] = []
        """Controllers that were replaced while they were stopped."""

    # ---- death ----

    def kill_worker(self) -> None:
        """SIGKILL a worker; it comes back after a while."""
        self._kill_and_restart(self._pick(list(self._world.workers.values())))

    def kill_store(self) -> None:
        """SIGKILL a store: its payloads are gone."""
        store = self._store()
        if store is not None:
            self._kill_and_restart(store)

    def kill_gateway(self) -> None:
        """SIGKILL a gateway: its records are gone."""
        self._kill_and_restart(self._pick(list(self._world.gateways.values())))

    def _kill_and_restart(self, host: Host) -> None:
        self.kill(host)
        self._later(1500, self.restart, host)

    def kill_controller(self) -> None:
        """SIGKILL the controller."""
        if self._world.controller.up:
            self._world.controller.kill()
            self._later(300, self.replace_controller)

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

    def false_alarm(self) -> None:
        """The controller is told that a process is dead, and it is not."""
        world = self._world
        hosts = [*world.workers.values(), *world.stores.values(), *world.gateways.values()]
        host = self._pick(hosts)
        if host.up:
            self._tell_gone(host)

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

    def rival_controller(self) -> None:
        """The controller stops, is taken for dead and replaced, and then goes on."""
        old = self._world.controller
        if old.up and not old.stopped:
            old.stop()
            self.replace_stopped_controller()
            self._later(1000, old.go_on)

    def replace_stopped_controller(self) -> None:
        """Everybody turns to a new controller while the old one still has a process."""
        world = self._world
        old = world.controller
        self._rivals.append(old)
        world.controller = ControllerHost(world, old.epoch + 1)
        world.controller.start()
        for stream in list(old.streams):
            self._later(400, stream.cut)

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

    def stop_worker(self) -> None:
        """SIGSTOP a worker for a while."""
        self.stop(self._pick(list(self._world.workers.values())), 800)

    def stop_worker_long(self) -> None:
        """SIGSTOP a worker for so long that everybody gives it up."""
        self.stop(self._pick(list(self._world.workers.values())), LONG_MS)

    def stop_store(self) -> None:
        """SIGSTOP a store for a while."""
        self._stop_store(800)

    def stop_store_long(self) -> None:
        """SIGSTOP a store beyond every deadline."""
        self._stop_store(LONG_MS)

    def _stop_store(self, longest_ms: int) -> None:
        store = self._store()
        if store is not None:
            self.stop(store, longest_ms)

    def stop_gateway(self) -> None:
        """SIGSTOP a gateway for a while."""
        self.stop(self._pick(list(self._world.gateways.values())), 800)

    def stop_gateway_long(self) -> None:
        """SIGSTOP a gateway beyond every deadline."""
        self.stop(self._pick(list(self._world.gateways.values())), LONG_MS)

    def stop_controller(self) -> None:
        """SIGSTOP the controller for a while."""
        self.stop(self._world.controller, 800)

    def stop(self, host: Host, longest_ms: int) -> None:
        """SIGSTOP, and SIGCONT some time later."""
        if host.up and not host.stopped:
            host.stop()
            self._later(longest_ms, self._go_on, host, host.life)

    def _go_on(self, host: Host, life: int) -> None:
        if host.up and host.life == life and host.stopped:
            host.go_on()

    # ---- the rest ----

    def cut_report(self) -> None:
        """A report stream breaks."""
        self._cut(self._world.controller)

    def cut_link(self) -> None:
        """A stream of a gateway breaks: a worker's link, its reports, or a client's."""
        self._cut(self._pick(list(self._world.gateways.values())))

    def cut_client(self) -> None:
        """A client's connection breaks."""
        client = self._pick(list(self._world.clients.values()))
        if client.up:
            client.cut()

    def abort_client(self) -> None:
        """A user no longer wants the answer."""
        client = self._pick(list(self._world.clients.values()))
        if client.up:
            client.abort()

    def _cut(self, host: Host) -> None:
        streams = list(host.streams)
        if streams:
            self._pick(streams).cut()

    def rot(self) -> None:
        """A bit flips in a store's memory."""
        store = self._store()
        pages = [] if store is None else sorted(store.slab)
        if store is not None and pages:
            self.rot_page(store, self._pick(pages))

    def rot_page(self, store: StoreHost, page: int) -> None:
        """A bit flips in one page."""
        block = store.slab[page]
        store.slab[page] = (block[0] ^ 1, *block[1:])
        self._world.rotted = True

    def drain_worker(self) -> None:
        """A worker is drained, then replaced."""
        worker = self._pick(list(self._world.workers.values()))
        if worker.up:
            self.drain(worker)
            self._later(2000, self._replaced, worker, worker.life)

    def drain(self, worker: WorkerHost) -> None:
        """A worker is told to drain, and now and then the controller too."""
        worker.take(worker.life, worker.drive, (StartDrain(),))
        if self._world.engine.rng.random() < 0.5:
            controller = self._world.controller
            self._tell(controller, 100, self._hear_of_drain, controller, worker, worker.life)

    def _hear_of_drain(self, controller: ControllerHost, worker: WorkerHost, life: int) -> None:
        """A Drain names no life: whoever drains waits for the answer before the worker ends."""
        if worker.up and worker.life == life:
            controller.drive(Drain(WorkerId(worker.name)))

    def _replaced(self, worker: WorkerHost, life: int) -> None:
        if worker.up and worker.life == life:
            self._kill_and_restart(worker)

    def fickle_controller(self) -> None:
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

    def make_whole(self) -> None:
        """From here on nothing breaks: start what is down, go on with what is stopped."""
        world = self._world
        for rival in self._rivals:
            if rival.up and rival is not world.controller:
                rival.kill()
        self.replace_controller()
        hosts = [*world.workers.values(), *world.stores.values(), *world.gateways.values()]
        for host in (world.controller, *hosts):
            if host.stopped:
                host.go_on()
        for host in hosts:
            self.restart(host)

    def _pick(self, among: Sequence[T]) -> T:
        return among[self._world.engine.rng.randrange(len(among))]

    def _store(self) -> StoreHost | None:
        stores = list(self._world.stores.values())
        return self._pick(stores) if stores else None

    def _later(self, longest_ms: int, act: Act, *args: Any) -> None:
        delay = self._world.engine.rng.randrange(1, longest_ms + 1)
        self._world.engine.after(delay, act, *args)
