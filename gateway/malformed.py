"""Requests that do not decode: the client's fault, and said so, by the field if it can be found.

gRPC would answer UNKNOWN and log a traceback for each.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeAlias

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from deepinfer.gateway import statuses
from deepinfer.kvstore.core.requests import InvalidRequestError
from deepinfer.proto import inference_pb2

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]"

_DELIMITED = 2  # the wire type of strings, bytes and messages

_REQUESTS: dict[str, Descriptor] = {
    f"/{service.full_name}/{method.name}": method.input_type
    for service in inference_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


class Malformed(NamedTuple):
    """Stands for a request that could not be decoded."""

    error: InvalidRequestError


def why_malformed(data: bytes, message: Descriptor | None) -> InvalidRequestError:
    """Say what is wrong with a request that does not decode."""
    broken = InvalidRequestError("request", f"{len(data)} bytes", "a protobuf message of this call")
    if message is None:
        return broken
    try:
        return _not_text(data, message, "") or broken
    except DecodeError:
        return broken


def _not_text(data: bytes, message: Descriptor, prefix: str) -> InvalidRequestError | None:
    """The first string field that is no UTF-8; raises DecodeError for what is no protobuf."""
    seen: dict[int, int] = {}
    fields = UnknownFieldSet(Empty.FromString(data))  # to Empty every field is unknown
    for index in range(len(fields)):
        entry = fields[index]
        place = seen.get(entry.field_number, 0)
        seen[entry.field_number] = place + 1
        field = message.fields_by_number.get(entry.field_number)
        if field is None or entry.wire_type != _DELIMITED:
            continue
        name = prefix + field.name + (f"[{place}]" if field.is_repeated else "")
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                entry.data.decode()
            except UnicodeDecodeError as error:
                return InvalidRequestError(name, entry.data[: error.start + 8], "UTF-8")
        elif field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
            found = _not_text(entry.data, field.message_type, f"{name}.")
            if found is not None:
                return found
    return None


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
        message = _REQUESTS.get(handler_call_details.method)

        def decode_or_say_why(data: bytes) -> object:
            try:
                return decode(data)
            except DecodeError:
                return Malformed(why_malformed(data, message))

        async def refuse_or_serve(request: object, context: Any) -> object:
            if isinstance(request, Malformed):
                await statuses.abort(context, statuses.invalid(request.error))
            return await serve(request, context)

        wrap = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return wrap(refuse_or_serve, decode_or_say_why, handler.response_serializer)
