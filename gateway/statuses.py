"""Statuses that carry a ``google.rpc`` detail: a code, a sentence for people, fields for programs.

====================  ============================================================================
BadRequest            a field is out of range: INVALID_ARGUMENT
QuotaFailure          a bound was met: RESOURCE_EXHAUSTED
ErrorInfo             every other end of a stream that is no success
====================  ============================================================================
"""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # has no stubs
from grpc_status import rpc_status

from deepinfer.gateway.core.events import Code, EndStream
from deepinfer.kvstore.core.requests import InvalidRequestError


def invalid(error: InvalidRequestError) -> grpc.Status:
    """INVALID_ARGUMENT, naming the field."""
    violation = error_details_pb2.BadRequest.FieldViolation(
        field=error.name, description=str(error)
    )
    detail = error_details_pb2.BadRequest(field_violations=[violation])
    return _status(grpc.StatusCode.INVALID_ARGUMENT, str(error), detail)


def exhausted(message: str) -> grpc.Status:
    """RESOURCE_EXHAUSTED: ``message`` names the bound, its value, and what to do."""
    violation = error_details_pb2.QuotaFailure.Violation(description=message)
    detail = error_details_pb2.QuotaFailure(violations=[violation])
    return _status(grpc.StatusCode.RESOURCE_EXHAUSTED, message, detail)


def ended(effect: EndStream) -> grpc.Status:
    """How a stream ends that does not end well."""
    if effect.code is Code.RESOURCE_EXHAUSTED:
        return exhausted(effect.message)
    detail = error_details_pb2.ErrorInfo(reason=effect.code.value, domain="deepinfer")
    return _status(grpc.StatusCode[effect.code.value], effect.message, detail)


async def abort(context: grpc.aio.ServicerContext[Any, Any], status: grpc.Status) -> NoReturn:
    """End a call with a status."""
    await context.abort(status.code, status.details, status.trailing_metadata)


def _status(code: grpc.StatusCode, message: str, detail: Message) -> grpc.Status:
    number: int = code.value[0]
    status = status_pb2.Status(code=number, message=message)
    status.details.add().Pack(detail)
    return rpc_status.to_status(status)
