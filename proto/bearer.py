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
MISSING = "the metadata need authorization: Bearer <token>"
WRONG = "the bearer token is not this cluster's"

Metadata: TypeAlias = tuple[tuple[str, str], ...]


def bearer(token: str) -> Metadata:
    """Metadata that carry the token.

    Raises:
        ValueError: the token is empty, or has what no header may have.
    """
    if not token:
        raise ValueError("token = '': must not be empty")
    if token != token.strip() or not all(" " <= c <= "~" for c in token):
        # Not shown: all but one character may be right.
        raise ValueError("token: must be printable ASCII; what was read from a file needs .strip()")
    return ((HEADER, f"Bearer {token}"),)


class RequireToken(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not at run time
    """Refuses every call, known or not, without ``authorization: Bearer <token>``.

    Args:
        token: the cluster's.
        open_methods: ``/package.Service/Method`` of the calls that need none. What is not named
            here is refused, so that a service added later starts out closed.

    Raises:
        ValueError: as ``bearer``.
    """

    def __init__(self, token: str, *, open_methods: Collection[str] = ()) -> None:
        self._expected = bearer(token)[0][1].encode()
        self._open = frozenset(open_methods)
        # A handler of this kind answers unary and streaming calls alike, and waits for no message.
        self._missing = grpc.stream_stream_rpc_method_handler(_deny(MISSING))
        self._wrong = grpc.stream_stream_rpc_method_handler(_deny(WRONG))

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
        denied = self._missing
        for key, value in handler_call_details.invocation_metadata or ():
            if key == HEADER:
                said = value.encode() if isinstance(value, str) else value
                if hmac.compare_digest(said, self._expected):
                    return await continuation(handler_call_details)
                denied = self._wrong
        return denied


def _deny(
    why: str,
) -> Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext[bytes, bytes]], Awaitable[NoReturn]]:
    async def deny(
        _: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> NoReturn:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, why)

    return deny
