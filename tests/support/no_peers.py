"""The surroundings of a controller that is alone."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping

from deepinfer.controller.core.events import Members, Peer
from deepinfer.kvstore.core.ids import Incarnation, WorkerRef
from deepinfer.kvstore.core.messages import Order


class NoPeers:
    """Orders to nobody, and a directory of nobody."""

    def send(
        self, worker: WorkerRef, order: Order, directory: Mapping[str, str]
    ) -> Awaitable[None]:
        raise AssertionError("there is no worker")

    async def members(self) -> Members:
        return Members(workers={}, stores={}, gateways={})

    async def life(self, peer: Peer) -> Incarnation | None:
        return None

    async def restart(self, name: str, life: Incarnation) -> None:
        raise RuntimeError(f"{name} has no process of its own")
