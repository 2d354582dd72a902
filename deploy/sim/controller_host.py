"""One life of the controller's process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepinfer.controller.core.core import ControllerCore
from deepinfer.controller.core.events import (
    CallKind,
    CallStore,
    OrderFailed,
    Peer,
    PeerKind,
    Reply,
    SendOrder,
    StepDown,
    StoreAnswered,
    Tick,
)
from deepinfer.deploy.sim.host import Host
from deepinfer.deploy.sim.network import Stream
from deepinfer.kvstore.core.messages import (
    GatewayReport,
    Order,
    Release,
    Reserve,
    StoreReply,
    StoreReport,
    StoreStatus,
    WorkerReport,
)

if TYPE_CHECKING:
    from deepinfer.deploy.sim.world import World


class ControllerHost(Host):
    """One controller; the next one is another object with a higher epoch."""

    __slots__ = ("_links", "epoch")

    kind = "controller"

    def __init__(self, world: World, epoch: int) -> None:
        super().__init__(world, f"k{epoch}", Tick())
        self.epoch = epoch
        self._links: dict[Peer, Stream] = {}
        self._performers = {
            Reply: self._reply,
            SendOrder: self._send_order,
            CallStore: self._call_store,
            StepDown: self._step_down,
        }

    def start(self) -> None:
        """Begin, knowing only who should be there."""
        super().start()
        self.core = ControllerCore(self.epoch, self.world.controller_config())
        self.drive(self.world.members())
        self.begin_ticking()

    def leftovers(self) -> list[str]:
        """What the controller has not forgotten."""
        known = self.core.snapshot()["sequences"]
        return [f"{self.name} knows {known}"] if known else []

    # ---- reports ----

    def on_report(self, stream: Stream, report: Any) -> None:
        """A report has come on a stream; the reply goes back on it."""
        self._links[_peer(report)] = stream
        self.drive(report)

    def on_report_stream_down(self, stream: Stream) -> None:
        """A reporter's stream has broken."""
        for peer in [peer for peer, link in self._links.items() if link is stream]:
            del self._links[peer]

    def _reply(self, effect: Reply) -> None:
        link = self._links.get(effect.to)
        if link is not None:
            link.send(self, effect.reply)

    # ---- orders and calls ----

    def _send_order(self, effect: SendOrder) -> None:
        worker = self.world.workers[effect.worker.worker]
        order = effect.order.order

        def failed() -> None:
            self.drive(OrderFailed(effect.worker, order))

        def run(body: Order, reply: Any) -> None:
            # Ray calls the actor by name: its current life gets what was meant for an earlier one.
            worker.drive(body)
            reply("taken")

        self.call(worker, effect.order, run, lambda _: None, failed, 1500)

    def _call_store(self, effect: CallStore) -> None:
        store = self.world.stores[effect.store]
        call = effect.call
        kind = CallKind.RESERVE if isinstance(call, Reserve) else CallKind.RELEASE
        assert isinstance(call, Reserve | Release)

        def answered(reply: StoreReply) -> None:
            self.drive(StoreAnswered(effect.store, reply, kind))

        def failed() -> None:
            answered(StoreReply(call.ticket, StoreStatus.UNREACHABLE, 0, 0))

        self.call(store, call, store.serve, answered, failed, 400)

    def _step_down(self, effect: StepDown) -> None:
        self.kill()


def _peer(report: WorkerReport | StoreReport | GatewayReport) -> Peer:
    match report:
        case WorkerReport():
            return Peer(PeerKind.WORKER, report.worker, report.incarnation)
        case StoreReport():
            return Peer(PeerKind.STORE, report.store, report.incarnation)
        case GatewayReport():
            return Peer(PeerKind.GATEWAY, report.gateway, report.incarnation)
