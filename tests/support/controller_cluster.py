"""A naive cluster around a ControllerCore: it carries what its fake peers and the core say.

Messages go through ``Cluster.carry``, which a test may make lossy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from deepinfer.controller.core.config import ControllerConfig
from deepinfer.controller.core.core import ControllerCore
from deepinfer.controller.core.events import (
    CallKind,
    CallStore,
    Drain,
    Effect,
    Event,
    GatewayGone,
    Members,
    Reply,
    SendOrder,
    StepDown,
    StoreAnswered,
    StoreGone,
    Tick,
    WorkerGone,
)
from deepinfer.kvstore.core.ids import GatewayId, Seq, StoreId, WorkerId
from deepinfer.kvstore.core.messages import (
    GatewayReport,
    Order,
    Release,
    ReportReply,
    Reserve,
    StoreReport,
    WorkerReport,
)
from support.controller_peers import FakeGateway, FakeRequest, FakeStore, FakeWorker, seq

_O = TypeVar("_O", bound=Order)


class Cluster:
    """The core and its fake peers, in 50 ms rounds."""

    def __init__(self, config: ControllerConfig | None = None, epoch: int = 1) -> None:
        self.config = config or ControllerConfig()
        self.core = ControllerCore(epoch, self.config)
        self.now_ms = 1000
        self.workers: dict[WorkerId, FakeWorker] = {}
        self.stores: dict[StoreId, FakeStore] = {}
        self.gateways: dict[GatewayId, FakeGateway] = {}
        self.effects: list[Effect] = []
        """Everything the core has asked for."""
        self.carry: Callable[[object], bool] = lambda message: True
        """Whether a message arrives."""
        self.recomputed = 0

    def worker(self, name: str, blocks_total: int, node: str = "n") -> FakeWorker:
        made = self.workers[WorkerId(name)] = FakeWorker(self, name, blocks_total, node)
        return made

    def store(self, name: str = "store", budget_bytes: int = 10**9, node: str = "n") -> FakeStore:
        made = self.stores[StoreId(name)] = FakeStore(self, name, budget_bytes, node)
        return made

    def gateway(self, name: str = "gw") -> FakeGateway:
        made = self.gateways[GatewayId(name)] = FakeGateway(GatewayId(name))
        return made

    def start(self) -> None:
        """Tell the core who should be there, and let everyone report."""
        self.tell(
            Members(
                workers={w.id: None for w in self.workers.values()},
                stores={s.id: None for s in self.stores.values()},
                gateways={g.id: None for g in self.gateways.values()},
            )
        )
        self.round()

    def submit(
        self, name: str, prompt: int, max_tokens: int, *, gateway: str = "gw", claim: int = 1
    ) -> Seq:
        request = FakeRequest(prompt, max_tokens, self.now_ms, claim)
        self.gateways[GatewayId(gateway)].requests[seq(name)] = request
        return seq(name)

    def tell(self, event: Event) -> None:
        """Give the core an event and do what it asks for, as far as messages arrive."""
        for effect in self.core.handle(event, self.now_ms):
            self.effects.append(effect)
            if not self.carry(effect):
                continue
            match effect:
                case SendOrder(ref, order):
                    worker = self.workers.get(ref.worker)
                    if worker is not None and worker.alive and worker.ref == ref:
                        worker.order(order)
                case CallStore(store_id, call):
                    self._call(store_id, call)
                case Reply(peer, reply):
                    self._answer(peer.id, reply)
                case StepDown():
                    raise AssertionError("nobody else is there")
        self.core.check()

    def _call(self, store_id: StoreId, call: Reserve | Release) -> None:
        store = self.stores[store_id]
        kind = CallKind.RESERVE if isinstance(call, Reserve) else CallKind.RELEASE
        if store.answers:
            reply = store.call(call)
            answer = StoreAnswered(store_id, reply, kind)
            if self.carry(answer):
                self.tell(answer)

    def _answer(self, peer: str, reply: ReportReply) -> None:
        worker, gateway = self.workers.get(WorkerId(peer)), self.gateways.get(GatewayId(peer))
        if worker is not None:
            worker.answered(reply)
        elif gateway is not None:
            gateway.answered(reply)

    def report(self) -> None:
        for gateway in list(self.gateways.values()):
            if gateway.alive:
                self._send(gateway.report())
        for worker in self.workers.values():
            if worker.alive:
                self._send(worker.report())
        for store in self.stores.values():
            self._send(store.report())

    def _send(self, report: WorkerReport | StoreReport | GatewayReport) -> None:
        if self.carry(report):
            self.tell(report)

    def round(self, *, steps: int = 1) -> None:
        """50 ms: workers step, everyone reports, the core hears a tick."""
        self.now_ms += 50
        for _ in range(steps):
            for worker in self.workers.values():
                if worker.alive:
                    worker.step()
        self.report()
        self.tell(Tick())

    def run(self, until: Callable[[], bool], rounds: int = 2000) -> int:
        """Go round until something holds; return how many rounds it took."""
        for count in range(rounds):
            if until():
                return count
            self.round()
        raise AssertionError(f"did not come about in {rounds} rounds")

    def kill(self, worker: FakeWorker, *, announced: bool = True) -> None:
        worker.alive = False
        if announced:
            self.tell(WorkerGone(worker.ref))

    def restart_controller(self) -> None:
        self.core = ControllerCore(self.core.epoch + 1, self.config)
        self.start()

    def drain(self, peer: str, grace_ms: int | None = None) -> None:
        self.tell(Drain(WorkerId(peer), grace_ms))

    def drained(self, peer: str) -> bool:
        level = self.core.drain_level(peer)
        return level is not None and level.drained

    def lose_gateway(self, name: str) -> None:
        gateway = self.gateways.pop(GatewayId(name))
        gateway.alive = False
        self.tell(GatewayGone(gateway.id, gateway.incarnation))

    def lose_store(self, store: FakeStore) -> None:
        old = store.incarnation
        store.restart()
        self.tell(StoreGone(store.id, old))

    def sent(self, *kinds: type[_O]) -> list[_O]:
        """Distinct orders of some kinds that were sent, in order."""
        orders = [e.order for e in self.effects if isinstance(e, SendOrder)]
        return list(dict.fromkeys(order for order in orders if isinstance(order, kinds)))

    def status(self) -> dict[str, Any]:
        """The core's snapshot."""
        return self.core.snapshot()

    def state(self, name: Seq) -> str | None:
        """A sequence's state as the core sees it; None if it knows none."""
        for found in self.status()["sequences"]:
            if found["request"] == name.request:
                return str(found["state"])
        return None

    def finished(self) -> list[Seq]:
        return [name for gateway in self.gateways.values() for name in gateway.finished]
