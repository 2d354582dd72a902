"""The controller's loop: each event goes to the core, each effect is performed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import structlog

from deepinfer.controller.core.core import ControllerCore
from deepinfer.controller.core.events import (
    CallKind,
    CallStore,
    Drain,
    Effect,
    Event,
    GatewayGone,
    Members,
    OrderFailed,
    Peer,
    PeerKind,
    Reply,
    Report,
    SendOrder,
    StepDown,
    StoreAnswered,
    StoreGone,
    Tick,
    WorkerGone,
)
from deepinfer.controller.ports import Directory, OrderError, Orders, StoreCalls
from deepinfer.controller.tally import Tally
from deepinfer.kvstore.core.ids import GatewayId, Incarnation, StoreId, WorkerId, WorkerRef
from deepinfer.kvstore.core.messages import (
    Admit,
    Prefetch,
    ReportReply,
    Reserve,
    StoreReply,
    StoreStatus,
    SwapIn,
    SwapOut,
)
from deepinfer.proto.failpoints import Failpoints

log = structlog.get_logger(__name__)

TICK_S = 0.05
MEMBERS_S = 1.0
WORKERS_COUNTERS = (
    "requests_swapped_total",
    "requests_resumed_total",
    "kv_cpu_offload_blocks_total",
    "kv_cpu_offload_bytes_total",
    "kv_cpu_offload_failed_total",
    "kv_cpu_reload_blocks_total",
    "deepinfer_worker_prefetches_total",
    "deepinfer_worker_prefetches_used_total",
    "deepinfer_worker_prefetches_wasted_total",
    "cpu_offload_seconds",
    "cpu_reload_seconds",
)
"""Counted where the copies are made; here they stand in every document, also before the first."""
KV_QUALITY = {
    "kl_nats": "deepinfer_worker_kv_quality_kl_nats",
    "agreement": "deepinfer_worker_kv_quality_agreement_ratio",
    "key_scales": "deepinfer_worker_kv_key_scales",
}
"""What a worker that measured its KV's quality says of it, and by which gauge."""
RECONNECT_S = 0.15
"""How long a peer whose stream broke may take to open another before it may count as gone."""


def wall_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Milliseconds of a clock that never goes back."""
    return time.monotonic_ns() // 1_000_000


class Shell:
    """Owns the core. Use it in one event loop only."""

    def __init__(
        self,
        core: ControllerCore,
        *,
        orders: Orders,
        stores: StoreCalls,
        directory: Directory,
        step_down: Callable[[int], None],
        clock_ms: Callable[[], int] = monotonic_ms,
        failpoints: Failpoints | None = None,
    ) -> None:
        self.core = core
        self._failpoints = failpoints or Failpoints()
        self._orders = orders
        self._stores = stores
        self._directory = directory
        self._step_down = step_down
        self._clock_ms = clock_ms
        self._addresses: dict[str, str] = {}
        """Where gateways and stores are, host:port, by id."""
        self.tally = Tally()
        self._streams: dict[Peer, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- events ----------------------------------------------------------------------------

    def tell(self, event: Event) -> ReportReply | None:
        """Give the core an event and perform its effects; a report's answer is returned."""
        reply = None
        for effect in self.core.handle(event, self._clock_ms()):
            reply = self._perform(effect) or reply
        return reply

    def report(
        self, peer: Peer, report: Report, address: str, counters: Mapping[str, float]
    ) -> ReportReply | None:
        """Take in a report with what only the shell keeps: where the peer is, and its counters."""
        if self.tally.take(peer, counters) and address:
            self._addresses[peer.id] = address
        reply = self.tell(report)
        if not self.core.ready:
            self._failpoints.hit("mid_recovery")
        return reply

    def stream_opened(self, peer: Peer) -> None:
        """A peer has opened a stream of reports."""
        self._streams[peer] = self._streams.get(peer, 0) + 1

    def stream_broken(self, peer: Peer) -> None:
        """One of its streams has ended; unless it opens another, see whether it lives."""
        left = self._streams[peer] - 1
        if left:
            self._streams[peer] = left
            return
        del self._streams[peer]
        self._start(self._confirm(peer))

    async def _confirm(self, peer: Peer) -> None:
        # Asked at once: whoever was killed does not answer, and its requests wait for this.
        life, _ = await asyncio.gather(self._directory.life(peer), asyncio.sleep(RECONNECT_S))
        if peer in self._streams or life == peer.incarnation:
            return
        log.info("peer is gone", kind=peer.kind.value, id=peer.id, incarnation=peer.incarnation)
        match peer.kind:
            case PeerKind.WORKER:
                self.tell(WorkerGone(WorkerRef(WorkerId(peer.id), peer.incarnation)))
            case PeerKind.STORE:
                self.tell(StoreGone(StoreId(peer.id), peer.incarnation))
            case PeerKind.GATEWAY:
                self.tell(GatewayGone(GatewayId(peer.id), peer.incarnation))

    def drain(self, wanted: Drain) -> None:
        """Empty a worker or a gateway."""
        before = self.core.drain_level(wanted.peer)
        if before is not None and before.serving:
            log.info("draining", peer=wanted.peer, grace_ms=wanted.grace_ms)
        self.tell(wanted)

    async def restart(self, name: str, life: Incarnation) -> bool:
        """Restart a worker or gateway, if that life of it is drained; whether it is.

        Raises:
            OSError, RuntimeError: it could not be done.
        """
        level = self.core.drain_level(name)
        if level is None or not level.drained or level.life != life:
            return False
        log.info("restarting", peer=name, incarnation=life)
        await self._directory.restart(name, life)
        return True

    # ---- effects ---------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> ReportReply | None:
        match effect:
            case Reply(_, reply):
                return reply
            case SendOrder():
                self._send(effect)
            case CallStore():
                self._start(self._call(effect))
            case StepDown(epoch):
                log.warning("another controller has a higher epoch", epoch=epoch)
                self._step_down(epoch)
        return None

    def _send(self, effect: SendOrder) -> None:
        worker, order = effect
        names: tuple[str, ...] = ()
        if isinstance(order, Admit):
            names = (order.gateway,)
        elif isinstance(order, SwapIn):
            names = (order.gateway, order.store)
        elif isinstance(order, SwapOut | Prefetch) and order.store is not None:
            names = (order.store,)
        directory = {name: self._addresses[name] for name in names if name in self._addresses}
        log.debug("order", worker=worker.worker, order=type(order).__name__, seq=str(order.seq))
        self._failpoints.hit("before_order")
        sent = self._orders.send(worker, order, directory)
        self._failpoints.hit("after_order")

        async def sending() -> None:
            try:
                await sent
            except OrderError as error:
                log.info("order failed", worker=worker.worker, error=str(error))
                self.tell(OrderFailed(worker, order.order))

        self._start(sending())

    async def _call(self, effect: CallStore) -> None:
        store, call = effect
        self._failpoints.hit("before_store_call")
        address = self._addresses.get(store)
        if address is None:
            reply = StoreReply(call.ticket, StoreStatus.UNREACHABLE, 0, 0)
        else:
            reply = await self._stores.call(address, call)
        kind = CallKind.RESERVE if isinstance(call, Reserve) else CallKind.RELEASE
        self.tell(StoreAnswered(store, reply, kind))

    # ---- the loop --------------------------------------------------------------------------

    async def run(self) -> None:
        """Tick, and keep the members known, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._tick())
                tasks.create_task(self._watch_members())
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._stores.close()

    async def _tick(self) -> None:
        while True:
            self.tell(Tick())
            await asyncio.sleep(TICK_S)

    async def _watch_members(self) -> None:
        known: Members | None = None
        while True:
            try:
                members = await self._directory.members()
            except (OSError, RuntimeError) as error:
                log.warning("members are unknown", error=str(error))
            else:
                if members != known:
                    known = members
                    self.tell(members)
            await asyncio.sleep(MEMBERS_S)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a call ended in a bug", exc_info=error)

    # ---- seeing it -------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The core's snapshot; counters that peers keep are summed over them and added.

        ``kv_quality`` has the workers that measured it.
        """
        found: dict[str, Any] = self.core.snapshot()
        counters = self.tally.totals()
        for name in WORKERS_COUNTERS:
            counters.setdefault(name, 0.0)
        found["counters"] = counters | found["counters"]
        found["kv_quality"] = {
            peer.id: {name: samples[gauge] for name, gauge in KV_QUALITY.items()}
            for peer, samples in self.tally.peers()
            if all(gauge in samples for gauge in KV_QUALITY.values())
        }
        found["addresses"] = dict(self._addresses)
        found["now_ms"] = wall_ms()
        return found
