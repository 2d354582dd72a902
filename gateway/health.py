"""Whether a request sent to this gateway now would be served: ``grpc.health.v1``.

The answer is the controller's, asked for when somebody wants to know, and at most once a second
however many want to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deepinfer.kvstore.core.ids import GatewayId
from deepinfer.proto import inference_pb2

FRESH_S = 1.0
"""How long an answer of the controller counts."""
ASK_TIMEOUT_S = 2.0
INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
SERVICES = frozenset({"", INFERENCE})
"""What health is told of; the empty name means the server."""

Status: TypeAlias = Callable[[], Awaitable[Mapping[str, object]]]
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """Knows whether requests are served here.

    They are if the controller answers, has heard from all it waits for after its start, hears this
    gateway, and has a worker that takes requests; and not any more once this gateway drains.

    Args:
        gateway: whose health it is.
        status: asks the controller for its status document; may raise OSError, RuntimeError or
            LookupError.
    """

    def __init__(self, gateway: GatewayId, status: Status) -> None:
        self._gateway = gateway
        self._status = status
        self._asking: asyncio.Task[bool] | None = None
        self._asked_s = 0.0
        self.draining = asyncio.Event()

    def drain(self) -> None:
        """From now on nothing is served; whoever watches is told at once."""
        self.draining.set()

    async def serving(self) -> bool:
        """Whether a request sent now would be served."""
        if self.draining.is_set():
            return False
        now_s = time.monotonic()
        if self._asking is None or (self._asking.done() and now_s - self._asked_s >= FRESH_S):
            self._asked_s = now_s
            self._asking = asyncio.create_task(self._ask())
        # All who ask meanwhile wait for this answer; one who leaves does not take it from them.
        return await asyncio.shield(self._asking) and not self.draining.is_set()

    async def _ask(self) -> bool:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                return _serves(await self._status(), self._gateway)
        except (OSError, RuntimeError, LookupError):  # TimeoutError is an OSError
            return False


def _serves(document: Mapping[str, Any], gateway: GatewayId) -> bool:
    """Read the controller's status document (``controller.core.snapshot``)."""
    this = document.get("gateways", {}).get(gateway, {})
    workers = document.get("workers", {}).values()
    return (
        bool(document.get("ready"))
        and bool(this.get("alive"))
        and any(worker["state"] == "serving" for worker in workers)
    )


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # has no annotations
    """``grpc.health.v1.Health`` for the server and for ``deepinfer.v1.Inference``."""

    def __init__(self, health: Health) -> None:
        self._health = health

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """NOT_FOUND for a service that is not here."""
        if request.service not in SERVICES:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"service {request.service[:80]!r} is not served here"
            )
        return health_pb2.HealthCheckResponse(status=await self._now())

    async def List(
        self, request: health_pb2.HealthListRequest, context: Context
    ) -> health_pb2.HealthListResponse:
        """The status of all there is."""
        now = health_pb2.HealthCheckResponse(status=await self._now())
        return health_pb2.HealthListResponse(statuses=dict.fromkeys(sorted(SERVICES), now))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> NoReturn:
        """The status now and after each change, until the caller leaves.

        SERVICE_UNKNOWN for a service that is not here, as the protocol wants it.
        """
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        said: object = None
        while True:
            status = await self._now() if request.service in SERVICES else unknown
            if status != said:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                said = status
            if self._health.draining.is_set():
                await asyncio.sleep(FRESH_S)  # nothing changes any more but the caller's patience
                continue
            try:
                await asyncio.wait_for(self._health.draining.wait(), FRESH_S)
            except TimeoutError:
                continue

    async def _now(self) -> health_pb2.HealthCheckResponse.ServingStatus:
        return SERVING if await self._health.serving() else NOT_SERVING
