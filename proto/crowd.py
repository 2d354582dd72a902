"""How many calls a server has at a time: more are refused with the bound's name, its value, and
what to do.

gRPC's own bound (``maximum_concurrent_rpcs``) says none of these. It lives beside the contracts
because every server has it.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler]]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class BoundedCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not at run time
    """Refuses calls with RESOURCE_EXHAUSTED while ``most`` are under way.

    Args:
        most: how many.
        name: what the bound is called, with the setting that it comes from if there is one.
        advice: what whoever is refused may do.
    """

    def __init__(self, most: int, *, name: str, advice: str) -> None:
        if most < 1:
            raise ValueError(f"most = {most}: must be 1 or more")
        self._most = most
        self._why = f"{name} = {most}: so many calls are under way here; {advice}"
        self.calls = 0
        """Under way now."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        """Wrap the handler, so that its calls are counted to their ends."""
        found = await continuation(handler_call_details)
        handler: Any = found  # its parts are not in gRPC's stubs
        if handler is None:
            return found
        kind = f"{'stream' if handler.request_streaming else 'unary'}_"
        kind += "stream" if handler.response_streaming else "unary"
        make: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        serve = self._counted(getattr(handler, kind))
        wrapped: Handler = make(serve, handler.request_deserializer, handler.response_serializer)
        return wrapped

    def _counted(self, serve: Any) -> Any:
        async def counted(request: Any, context: Context) -> Any:
            await self._enter(context)
            try:
                return await serve(request, context)
            finally:
                self.calls -= 1

        async def counted_stream(request: Any, context: Context) -> AsyncIterator[Any]:
            await self._enter(context)
            try:
                async for response in serve(request, context):
                    yield response
            finally:
                self.calls -= 1

        # gRPC tells by the function's kind how a handler answers.
        return counted_stream if inspect.isasyncgenfunction(serve) else counted

    async def _enter(self, context: Context) -> None:
        if self.calls >= self._most:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, self._why)
        self.calls += 1
