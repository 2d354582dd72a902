"""The bearer token on every RPC between the cluster's processes and its clients.

It lives beside the contracts because it is part of each of them, and needs nothing of ours.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio

HEADER = "authorization"

Metadata: TypeAlias = tuple[tuple[str, str], ...]


def bearer(token: str) -> Metadata:
    """Metadata that carry the token.

    Raises:
        ValueError: the token is empty.
    """
    if not token:
        raise ValueError("token = '': must not be empty")
    return ((HEADER, f"Bearer {token}"),)


class RequireToken(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not at run time
    """Refuses every call, known or not, without ``authorization: Bearer <token>``.

    Args:
        token: the cluster's.
        open_methods: ``/package.Service/Method`` of the calls that need none. What is not named
            here is refused, so that a service added later starts out closed.

    Raises:
        ValueError: the token is empty.
    """

    def __init__(self, token: str, *, open_methods: Collection[str] = ()) -> None:
        self._expected = bearer(token)[0][1].encode()
        self._open = frozenset(open_methods)
        # A handler of this kind answers unary and streaming calls alike, and waits for no message.
        self._denied = grpc.stream_stream_rpc_method_handler(_deny)

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Let a call through that has the token, or needs none."""
        if handler_call_details.method in self._open:
            return await continuation(handler_call_details)
        for key, value in handler_call_details.invocation_metadata or ():
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
