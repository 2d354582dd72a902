"""What the controller's shell needs of its surroundings; Ray in production, fakes in tests."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Protocol

from deepinfer.controller.core.events import Members, Peer
from deepinfer.kvstore.core.ids import Incarnation, WorkerRef
from deepinfer.kvstore.core.messages import Order, Release, Reserve, StoreReply


class OrderError(RuntimeError):
    """A call to a worker failed: it may or may not have run."""


class Orders(Protocol):
    """The way to the workers."""

    def send(
        self, worker: WorkerRef, order: Order, directory: Mapping[str, str]
    ) -> Awaitable[None]:
        """Submit the order at once, so that orders to one worker keep their order.

        ``directory`` maps the gateway's and the store's id in the order to host:port. The
        awaitable raises ``OrderError`` if the call failed.
        """
        ...


class StoreCalls(Protocol):
    """The way to the stores."""

    async def call(self, address: str, call: Reserve | Release) -> StoreReply:
        """Return the store's answer; ``StoreStatus.UNREACHABLE`` if there was none in time."""
        ...

    async def close(self) -> None: ...


class Directory(Protocol):
    """Who should be there, and whether they are."""

    async def members(self) -> Members:
        """Everyone by name. Raises OSError or RuntimeError if that cannot be found out now."""
        ...

    async def life(self, peer: Peer) -> Incarnation | None:
        """The life that answers under the peer's name now; None if nobody does."""
        ...

    async def restart(self, name: str, life: Incarnation) -> None:
        """End this life of a worker or gateway, and have the next one begin; nothing if it is over.

        Raises OSError or RuntimeError if that cannot be done now.
        """
        ...
