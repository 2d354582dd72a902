"""The worker's shell: it turns the world into events, and performs what the core answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from deepinfer.kvstore.core.ids import GatewayId, StoreId
from deepinfer.kvstore.core.messages import Order, ToGateway, WorkerReport
from deepinfer.workers.core.core import SWAP_COUNTERS, WorkerCore
from deepinfer.workers.core.events import (
    AbortPut,
    CancelFetch,
    CancelPrefetch,
    Commit,
    FetchPayload,
    ForgetSeq,
    GiveUp,
    PlanesRestored,
    PlanesShed,
    PrefetchPayload,
    PutPayload,
    Report,
    Resolve,
    RestorePlanes,
    RunStep,
    SendToGateway,
    ShedPlanes,
    StartDrain,
    StepDone,
    Tick,
    WorkerEffect,
    WorkerEvent,
)
from deepinfer.workers.engine import Engine, EngineThread
from deepinfer.workers.planes import Planes

log = logging.getLogger(__name__)

TICK_S = 0.05


class Gateways(Protocol):
    """Links to gateways: ``workers.links.GatewayLinks``, or a test's."""

    def learn(self, addresses: Mapping[GatewayId, str]) -> None: ...

    def send(self, gateway: GatewayId, message: ToGateway) -> None: ...

    async def close(self) -> None: ...


class Reports(Protocol):
    """The link to the controller: ``workers.links.ReportLink``, or a test's."""

    def send(self, report: WorkerReport) -> None: ...

    async def close(self) -> None: ...


class Swapper(Protocol):
    """Copies and the store's calls: ``workers.swap.StoreSwapper``, or a test's.

    Each method starts something; its answer is an event. (Those of prefetches have none.)
    """

    def learn(self, addresses: Mapping[StoreId, str]) -> None: ...

    def put(self, effect: PutPayload) -> None: ...

    def abort_put(self, effect: AbortPut) -> None: ...

    def commit(self, effect: Commit) -> None: ...

    def resolve(self, effect: Resolve) -> None: ...

    def fetch(self, effect: FetchPayload) -> None: ...

    def cancel_fetch(self, effect: CancelFetch) -> None: ...

    def prefetch(self, effect: PrefetchPayload) -> None: ...

    def cancel_prefetch(self, effect: CancelPrefetch) -> None: ...

    async def close(self) -> None: ...


def monotonic_ms() -> int:
    """Milliseconds of a clock that never goes back."""
    return time.monotonic_ns() // 1_000_000


def exported(name: str) -> str:
    """The name under which a count of the core's is exported."""
    if name in SWAP_COUNTERS:
        return name
    base, brace, labels = name.partition("{")
    return f"deepinfer_worker_{base}_total{brace}{labels}"


def _after_the_step(effect: WorkerEffect) -> bool:
    return not isinstance(effect, RunStep)


class WorkerShell:
    """One core, its engine thread and its links, on one event loop.

    ``die`` is called, on any thread, when the device or the core has failed: their state is
    unknown, so the process must exit and be started anew. ``gauges`` are levels of the device that
    never change, by exported name; ``planes`` may leave the device. Created on the loop that it
    lives on; ``connect`` before ``start``.
    """

    def __init__(
        self,
        core: WorkerCore,
        engine: Engine,
        *,
        die: Callable[[BaseException], None],
        clock_ms: Callable[[], int] = monotonic_ms,
        gauges: Mapping[str, float] | None = None,
        planes: Planes | None = None,
    ) -> None:
        self.core = core
        self._planes = planes
        self._moving_planes: asyncio.Task[None] | None = None
        self._gauges = dict(gauges or {})
        self._die = die
        self._clock_ms = clock_ms
        self._loop = asyncio.get_running_loop()
        self._device = engine
        self._engine = EngineThread(engine, self._step_done, die)
        self._gateways: Gateways | None = None
        self._reports: Reports | None = None
        self._swapper: Swapper | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._stopped = False
        self._performers: dict[type, Callable[..., None]] = {
            RunStep: lambda effect: self._engine.submit(effect.plan),
            ForgetSeq: lambda effect: None,  # Nothing here outlives a step.
            GiveUp: self._give_up,
            ShedPlanes: lambda effect: self._begin_with_planes(self._shed()),
            RestorePlanes: lambda effect: self._begin_with_planes(self._restore()),
        }

    def connect(self, gateways: Gateways, reports: Reports, swapper: Swapper) -> None:
        """Take the links; their events come through ``feed``."""
        self._gateways, self._reports, self._swapper = gateways, reports, swapper
        self._performers |= {
            SendToGateway: lambda effect: gateways.send(effect.gateway, effect.message),
            Report: lambda effect: reports.send(effect.report),
            PutPayload: swapper.put,
            AbortPut: swapper.abort_put,
            Commit: swapper.commit,
            Resolve: swapper.resolve,
            FetchPayload: swapper.fetch,
            CancelFetch: swapper.cancel_fetch,
            PrefetchPayload: swapper.prefetch,
            CancelPrefetch: swapper.cancel_prefetch,
        }

    def start(self) -> None:
        """Begin to tick: from here on the core reports and keeps its deadlines."""
        self._ticking = self._loop.create_task(self._tick())

    def feed(self, event: WorkerEvent) -> None:
        """Let the core hear something, on the loop's thread; after ``stop`` it hears nothing."""
        if self._stopped:
            return
        try:
            effects = self.core.handle(event, self._clock_ms())
            # The device waits for its next step; everything else can be done while it runs.
            for effect in sorted(effects, key=_after_the_step):
                self._perform(effect)
        except Exception as error:
            log.exception("the worker's core failed over %s", type(event).__name__)
            self._die(error)

    def order(self, order: Order, directory: Mapping[str, str]) -> None:
        """A controller's order, with the addresses of gateways and stores by their ids."""
        assert self._gateways is not None, "connect comes first"
        assert self._swapper is not None, "connect comes first"
        self._gateways.learn({GatewayId(name): where for name, where in directory.items()})
        self._swapper.learn({StoreId(name): where for name, where in directory.items()})
        self.feed(order)

    def drain(self) -> None:
        """Take nobody new; the controller moves the residents away."""
        self.feed(StartDrain())

    def status(self) -> dict[str, object]:
        """Levels and counts; plain values only."""
        return {**self.core.snapshot(), "kv_saturations": self._device.kv_saturations}

    def counters(self) -> dict[str, float]:
        """Counts since this life began, and its gauges, by the names they are exported under."""
        counts = {**self.core.metrics(), "kv_saturations": self._device.kv_saturations}
        return self._gauges | {exported(name): float(count) for name, count in counts.items()}

    async def stop(self) -> None:
        """Close the links and end the engine's thread after its step."""
        self._stopped = True
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking
        if self._moving_planes is not None:
            await self._moving_planes
        for part in (self._gateways, self._reports, self._swapper):
            if part is not None:
                await part.close()
        await asyncio.to_thread(self._engine.stop)

    def _perform(self, effect: WorkerEffect) -> None:
        self._performers[type(effect)](effect)

    def _give_up(self, effect: GiveUp) -> None:
        log.error("%s: the worker ends", effect.why)
        self._die(TimeoutError(effect.why))

    def _step_done(self, done: StepDone) -> None:
        # Called by the engine's thread. A loop that has closed needs no results.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.feed, done)

    def _begin_with_planes(self, work: Coroutine[Any, Any, None]) -> None:
        """One at a time: the core asks for the next when it knows how the last one ended."""
        self._moving_planes = self._loop.create_task(work)

    async def _shed(self) -> None:
        assert self._planes is not None, "a core without planes never sheds"
        try:
            await asyncio.to_thread(self._planes.shed)
        except Exception as error:
            log.exception("the lower planes could not be given up")
            self._die(error)
            return
        log.info("the weights' lower planes are away: %d blocks more", self._planes.tail_blocks)
        self.feed(PlanesShed())

    async def _restore(self) -> None:
        assert self._planes is not None, "a core without planes never restores any"
        began = time.monotonic()
        try:
            wait = await asyncio.to_thread(self._planes.restore)
            if wait is not None:
                await asyncio.to_thread(wait)
        except Exception as error:  # the core counts it, and asks again
            log.exception("the lower planes did not come back")
            self.feed(PlanesRestored(False, str(error)))
            return
        log.info("the lower planes are back after %.0f ms", (time.monotonic() - began) * 1e3)
        self.feed(PlanesRestored(True))

    async def _tick(self) -> None:
        while True:
            self.feed(Tick())
            await asyncio.sleep(TICK_S)
