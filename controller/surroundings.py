"""Ray behind the shell's ports: orders are actor calls, members are named actors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
import ray.util
from ray.exceptions import RayError

from deepinfer.controller.core.events import Members, Peer
from deepinfer.controller.ports import OrderError
from deepinfer.kvstore.core.ids import GatewayId, Incarnation, StoreId, WorkerId, WorkerRef
from deepinfer.kvstore.core.messages import Order

LIFE_TIMEOUT_S = 0.15
"""Who does not answer by then is taken for dead. One that lives is believed again soon, and what
it was doing is computed anew elsewhere; Ray itself takes more than a second to notice a death.
Asked only once a stream has broken: so long a death stays unnoticed, and no longer.
"""
RESTART_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorNames:
    """How actors are named: the kind's prefix begins the name, and the name is the peer's id."""

    worker: str = "worker-"
    store: str = "store-"
    gateway: str = "gateway-"


class RayOrders:
    """Implements ``ports.Orders``: ``worker.order.remote(order, directory)``."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._handles: dict[str, Any] = {}
        self._greetings: dict[str, asyncio.Task[None]] = {}

    def greet(self, worker: str) -> None:
        """Open the way to a worker ahead of its first order: that takes Ray up to two seconds."""
        if worker not in self._handles and worker not in self._greetings:
            task = asyncio.create_task(self._greet(worker))
            self._greetings[worker] = task
            task.add_done_callback(lambda _: self._greetings.pop(worker, None))

    async def _greet(self, worker: str) -> None:
        try:
            handle: Any = await asyncio.to_thread(ray.get_actor, worker, namespace=self._namespace)
            await handle.incarnation.remote()
        except (ValueError, RayError):
            return  # it is not up yet, or gone: the next look at the members tries again
        self._handles[worker] = handle

    def send(
        self, worker: WorkerRef, order: Order, directory: Mapping[str, str]
    ) -> Awaitable[None]:
        """Submit the call at once; the awaitable raises ``OrderError`` if it failed."""
        try:
            handle = self._handles.get(worker.worker)
            if handle is None:
                handle = ray.get_actor(worker.worker, namespace=self._namespace)
                self._handles[worker.worker] = handle
            answer = handle.order.remote(order, dict(directory))
        except (ValueError, RayError) as error:
            return self._failed(worker, error)
        return self._finish(worker, answer)

    async def _failed(self, worker: WorkerRef, error: Exception) -> None:
        raise OrderError(f"{worker.worker}: {error}") from error

    async def _finish(self, worker: WorkerRef, answer: Any) -> None:
        try:
            await answer
        except RayError as error:
            self._handles.pop(worker.worker, None)
            raise OrderError(f"{worker.worker}: {type(error).__name__}") from error


class RayDirectory:
    """Implements ``ports.Directory`` from the named actors of one namespace.

    ``greet`` is called with the name of every worker at each look.
    """

    def __init__(
        self, namespace: str, names: ActorNames, greet: Callable[[str], None] | None = None
    ) -> None:
        self._namespace = namespace
        self._names = names
        self._greet = greet

    async def members(self) -> Members:
        """Everyone by name; lives are told by reports.

        Raises:
            RuntimeError: Ray did not answer.
        """
        try:
            listed = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
        except RayError as error:
            raise RuntimeError(f"named actors cannot be listed: {error}") from error
        here = sorted(entry["name"] for entry in listed if entry["namespace"] == self._namespace)
        names = self._names
        for name in here:
            if self._greet is not None and name.startswith(names.worker):
                self._greet(name)
        return Members(
            workers={WorkerId(n): None for n in here if n.startswith(names.worker)},
            stores={StoreId(n): None for n in here if n.startswith(names.store)},
            gateways={GatewayId(n): None for n in here if n.startswith(names.gateway)},
        )

    async def life(self, peer: Peer) -> Incarnation | None:
        """Ask the actor of that name for its incarnation; None if it does not answer in time."""
        try:
            async with asyncio.timeout(LIFE_TIMEOUT_S):
                handle: Any = await asyncio.to_thread(
                    ray.get_actor, peer.id, namespace=self._namespace
                )
                return Incarnation(await handle.incarnation.remote())
        except (ValueError, TimeoutError, RayError):
            return None

    async def restart(self, name: str, life: Incarnation) -> None:
        """Kill the actor's process, if it is in that life; Ray starts it again.

        Raises:
            RuntimeError: Ray, or the actor, did not answer.
        """
        try:
            handle: Any = await asyncio.to_thread(ray.get_actor, name, namespace=self._namespace)
            answer: Any = handle.incarnation.remote()
            if await asyncio.wait_for(answer, RESTART_TIMEOUT_S) == life:
                await asyncio.to_thread(ray.kill, handle, no_restart=False)
        except (ValueError, TimeoutError, RayError) as error:
            raise RuntimeError(f"{name} cannot be restarted: {error}") from error
