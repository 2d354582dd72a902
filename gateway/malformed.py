"""Requests that are no protobuf: the client's fault, and said so.

gRPC would answer UNKNOWN and log a traceback for each.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeAlias

import grpc
from google.protobuf.message import DecodeError

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]"


class Malformed(NamedTuple):
    """Stands for a request that could not be decoded."""

    why: str


class RefuseMalformed(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not at run time
    """Answers INVALID_ARGUMENT to single requests that do not decode."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Wrap the handler's decoder, and the handler so that it never sees what did not decode."""
        found = await continuation(handler_call_details)
        handler: Any = found  # its parts are not in gRPC's stubs
        if handler is None or handler.request_streaming:
            return found
        serve = handler.unary_stream if handler.response_streaming else handler.unary_unary
        decode = handler.request_deserializer

        def decode_or_say_why(data: bytes) -> object:
            try:
                return decode(data)
            except DecodeError as error:
                return Malformed(str(error))

        async def refuse_or_serve(request: object, context: Any) -> object:
            if isinstance(request, Malformed):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, request.why)
            return await serve(request, context)

        wrap = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return wrap(refuse_or_serve, decode_or_say_why, handler.response_serializer)
