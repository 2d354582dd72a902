"""How actors find each other by name through Ray: the functions that the launcher hands them.

Picklable by reference; each looks the controller up anew, so that a restarted one is found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAMESPACE = "deepinfer"
"""The Ray namespace of all of a cluster's actors."""
CONTROLLER = "controller"
ASK_TIMEOUT_S = 10.0
"""A controller that does not answer by then is asked anew, or whoever asked is told so."""


@dataclass(frozen=True, slots=True)
class RayController:
    """The controller of one namespace. Every call raises LookupError while there is none."""

    namespace: str

    async def address(self) -> str:
        """Where its ``Control`` service is, host:port."""
        answer: str = await self._ask("address")
        return answer

    async def status(self) -> Mapping[str, object]:
        """Its status document."""
        answer: Mapping[str, object] = await self._ask("status")
        return answer

    async def _ask(self, method: str) -> Any:
        import asyncio

        import ray
        from ray.exceptions import RayError

        try:
            handle = await asyncio.to_thread(ray.get_actor, CONTROLLER, namespace=self.namespace)
            return await asyncio.wait_for(getattr(handle, method).remote(), ASK_TIMEOUT_S)
        except (ValueError, RayError, TimeoutError) as error:
            why = str(error) or f"nothing within {ASK_TIMEOUT_S:g} s"
            raise LookupError(f"the controller does not answer: {why}") from error
