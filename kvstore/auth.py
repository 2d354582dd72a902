"""The bearer token that every call must carry; whatever is not allowed is refused."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

HEADER = "authorization"


def credentials(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata that carries the token; nothing when there is none to carry."""
    return ((HEADER, f"Bearer {token}"),) if token else ()


class BearerInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # not at run time
    """Refuses every call, of whatever method, whose metadata lacks the token."""

    def __init__(self, token: str) -> None:
        if not token:
            raise ValueError("token = '': must be a non-empty string")
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Hand the call on, or answer UNAUTHENTICATED."""
        for name, value in handler_call_details.invocation_metadata or ():
            given = value.encode() if isinstance(value, str) else value
            if name == HEADER and hmac.compare_digest(given, self._expected):
                return await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a valid bearer token is required")
