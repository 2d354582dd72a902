"""The bearer token on every call to the controller; what is not listed is denied as well."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc

HEADER = "authorization"


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata that carry the token."""
    return ((HEADER, f"Bearer {token}"),)


class RequireToken(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not at run time
    """Refuses every call, known or not, without ``authorization: Bearer <token>``.

    Raises:
        ValueError: the token is empty.
    """

    def __init__(self, token: str) -> None:
        if not token:
            raise ValueError("token = '': must not be empty")
        self._expected = bearer(token)[0][1].encode()
        # A handler of this kind answers unary and streaming calls alike, and waits for no message.
        self._denied = grpc.stream_stream_rpc_method_handler(_deny)

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Let a call with the token through."""
        for key, value in handler_call_details.invocation_metadata:
            if key == HEADER:
                said = value.encode() if isinstance(value, str) else value
                if hmac.compare_digest(said, self._expected):
                    return await continuation(handler_call_details)
        return self._denied


async def _deny(
    _: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
) -> NoReturn:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED, "the metadata need authorization: Bearer <token>"
    )
