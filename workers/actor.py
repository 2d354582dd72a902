"""The worker as a process: a detached, restartable, asynchronous Ray actor.

``deploy/`` wraps ``WorkerActor`` with ``ray.remote`` and creates it by name (``max_restarts=-1,
max_task_retries=0``). It loads its model and begins to report by itself, so that one that Ray has
restarted serves again although nobody calls it. Nothing in this module imports Ray: how to find
the controller is a function it is given.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from deepinfer.kvstore.client import Path as StorePath
from deepinfer.kvstore.core.ids import Incarnation
from deepinfer.kvstore.core.messages import Order
from deepinfer.kvstore.core.precision import LEVELS_MAX
from deepinfer.proto.failpoints import Failpoints
from deepinfer.proto.redaction import hide
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.gpu.settings import GpuSettings
from deepinfer.workers.model.levels import FP8_PRODUCTS, WEIGHTS
from deepinfer.workers.quality_settings import QualitySettings

if TYPE_CHECKING:
    from deepinfer.workers.shell import WorkerShell

log = logging.getLogger(__name__)

BEFORE_TORCH: Final = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Environment that torch reads when it is imported, unless it is set already: large tensors lie in
huge pages, where the system lets a process ask for them. A decode step reads every weight once:
steps were seen to become 2 to 5% shorter, and to differ less from process to process."""

EXIT_DEVICE_FAILED = 70
"""The process's exit status when its device has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """All that one worker process is told; picklable.

    Raises:
        ValueError: worker, node or token is empty, threads is below 1, unknown weights or
            products, a number of levels that there cannot be, or both shed and start_shed.
    """

    worker: str
    node: str
    model_path: str
    """A Hugging Face folder or a GGUF file."""
    kv_cache_dtype: str = "auto"
    threads: int = 1
    """Compute threads, set explicitly: Ray would leave one."""
    deterministic: bool = False
    """A request's logits are the same bits whatever shares its steps; ``gpu`` must say so too."""
    gpu: GpuSettings | None = None
    """None: the CPU computes."""
    weights: str = "auto"
    """``nested``: those of a plain checkpoint are nested; a nested one is so either way."""
    precision_levels: int = 2
    """Levels of a nested model: FP16, FP8, and those between them."""
    fp8_products: str = "w8a16"
    """``w8a8``: large steps of a nested model in FP8 have their activations in FP8 too."""
    shed: bool = False
    """The lower planes of a nested model may leave the device for KV blocks, and come back."""
    shed_head: bool = False
    """Those of the LM head too."""
    start_shed: bool = False
    """The lower planes of a nested model are never loaded: all of it is computed in FP8."""
    quality: QualitySettings | None = None
    """None: every KV dtype is served, whatever it does to the model."""
    store_path: StorePath = "auto"
    failed_start_exit_s: float | None = None
    """A process that could not start says why for so long and then exits, for Ray to start anew;
    None: it stays, as tests in one process want."""
    token: str = field(repr=False)
    config: WorkerConfig
    """``block_bytes`` must be what the model's layout says; ``cache_salt`` is set here."""

    def __post_init__(self) -> None:
        for name in ("worker", "node", "token"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: must not be")
        if self.threads < 1:
            raise ValueError(f"threads = {self.threads}: must be 1 or more")
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights = {self.weights!r}: must be {' or '.join(WEIGHTS)}")
        if self.fp8_products not in FP8_PRODUCTS:
            allowed = " or ".join(FP8_PRODUCTS)
            raise ValueError(f"fp8_products = {self.fp8_products!r}: must be {allowed}")
        if not 1 <= self.precision_levels <= LEVELS_MAX:
            raise ValueError(
                f"precision_levels = {self.precision_levels}: must be 1 to {LEVELS_MAX}"
            )
        if self.shed and self.start_shed:
            raise ValueError(
                "shed = True: must be False with start_shed, which leaves none to shed"
            )


class WorkerActor:
    """One worker. Construct it inside a running event loop, as Ray does for async actors.

    ``find_controller`` returns the address of the controller's ``Control`` service; it raises
    LookupError while there is none.
    """

    def __init__(
        self, settings: WorkerSettings, find_controller: Callable[[], Awaitable[str]]
    ) -> None:
        hide(settings.token)
        self._settings = settings
        self._find_controller = find_controller
        # The wall clock rises with every life, and needs no storage.
        self._incarnation = Incarnation(time.time_ns() // 1000)
        self._shell: asyncio.Future[WorkerShell] = asyncio.get_running_loop().create_future()
        self._progress = (0, 0)
        self._notes: tuple[str, ...] = ()
        self._starting = asyncio.create_task(self._start())

    async def order(self, order: Order, directory: Mapping[str, str]) -> None:
        """Carry out a controller's order; its outcome shows in the reports.

        ``directory`` maps the ids of the gateway and the store in the order to host:port.
        """
        (await self._ready()).order(order, directory)

    async def drain(self) -> None:
        """Take nobody new from here on; the controller moves the residents away."""
        (await self._ready()).drain()

    async def status(self) -> dict[str, object]:
        """Levels and counters as plain values."""
        return (await self._ready()).status()

    async def ping(self) -> str:
        """The worker's name: its event loop is alive, and its model is loaded."""
        await self._ready()
        return self._settings.worker

    async def incarnation(self) -> int:
        """Microseconds since 1970 when this life began: higher in every later one."""
        return self._incarnation

    async def pid(self) -> int:
        """The process's id, once the model is loaded."""
        await self._ready()
        return os.getpid()

    async def load_progress(self) -> tuple[int, int]:
        """Bytes of weights read, and how many there are (0 while that is not known)."""
        return self._progress

    async def notes(self) -> tuple[str, ...]:
        """What the device has to say of itself, a line each: its memory, by purpose."""
        await self._ready()
        return self._notes

    async def stop(self) -> None:
        """End the engine's thread and hang up on everyone."""
        self._starting.cancel()
        await asyncio.gather(self._starting, return_exceptions=True)
        if self._shell.done() and not self._shell.cancelled() and not self._shell.exception():
            await self._shell.result().stop()

    def _loading(self, bytes_read: int, bytes_total: int) -> None:
        self._progress = (bytes_read, bytes_total)

    async def _ready(self) -> WorkerShell:
        return await asyncio.shield(self._shell)

    async def _start(self) -> None:
        for name, value in BEFORE_TORCH.items():
            os.environ.setdefault(name, value)
        try:
            from deepinfer.workers.assembly import assemble, open_device

            failpoints = Failpoints.from_environment()
            device = await asyncio.to_thread(open_device, self._settings, failpoints, self._loading)
            self._loading(self._progress[1], self._progress[1])  # some weights are not needed
            shell = assemble(
                self._settings,
                self._incarnation,
                device,
                failpoints,
                find_controller=self._find_controller,
                die=_die,
            )
            self._notes = device.notes
            self._shell.set_result(shell)
            log.info("worker %s serves (incarnation %d)", self._settings.worker, self._incarnation)
        except asyncio.CancelledError:
            self._shell.cancel()
            raise
        except Exception as error:
            log.exception("worker %s cannot start", self._settings.worker)
            self._shell.set_exception(error)
            delay_s = self._settings.failed_start_exit_s
            if delay_s is not None:
                asyncio.get_running_loop().call_later(delay_s, os._exit, 1)


def _die(_: BaseException) -> None:
    """End the process: after a device error a retry would land on the same broken state."""
    logging.shutdown()
    os._exit(EXIT_DEVICE_FAILED)
