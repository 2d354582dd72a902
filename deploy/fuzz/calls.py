"""RPC handlers called without sockets: a service, and the calls that an input stands for.

An input is a list of calls (``shapes.Records``). A unary call is made and left running; a message
of a streaming call goes to that call's open stream. Two more kinds of record let time pass and end
the open streams. Each input meets a service made for it alone, so that it does the same every time.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError, Message

from deepinfer.deploy.fuzz.shapes import records

TICK: Final = "(time passes)"
END: Final = "(streams end)"
DETAILS_MAX: Final = 8_000
"""Characters of a status: gRPC carries it in the trailers, which are bounded."""
_TURNS: Final = 3
"""Of the loop after each record: a handler that waits for nothing is through by then."""


class AbortedError(Exception):
    """A handler has ended its call with a status."""


class UndocumentedError(AssertionError):
    """A handler has ended its call with a status that its service does not name."""


@dataclass(slots=True)
class Service:
    """Handlers, and what is around them."""

    methods: Mapping[str, Any]
    """gRPC's handler of each method, by its name."""
    codes: frozenset[grpc.StatusCode]
    """Statuses that its handlers may end with."""
    tick: Callable[[], object]
    """Let much time pass."""
    check: Callable[[], object]
    """Raise AssertionError if something is left that should not be, once all calls have ended."""
    close: Callable[[], Any]
    """Give everything back; a coroutine function."""


@dataclass(slots=True)
class _Context:
    """What a handler sees of its call."""

    codes: frozenset[grpc.StatusCode]
    serialize: Callable[[Any], bytes] | None
    written: int = 0
    ended: list[Any] = field(default_factory=list)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: object = ()
    ) -> None:
        if code not in self.codes:
            raise UndocumentedError(f"{code.name}: {details}")
        assert len(details) <= DETAILS_MAX, f"a status of {len(details)} characters"
        details.encode()
        raise AbortedError(f"{code.name}: {details}")

    async def write(self, message: Any) -> None:
        if self.serialize is not None:
            self.serialize(message)
        self.written += 1
        await asyncio.sleep(0)

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.ended.append(callback)

    def cancelled(self) -> bool:
        return False


class _Requests:
    """The messages of one streaming call, as they come."""

    def __init__(self) -> None:
        self.waiting: asyncio.Queue[Any] = asyncio.Queue(64)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        message = await self.waiting.get()
        if message is None:
            raise StopAsyncIteration
        return message


class Calls:
    """Makes the calls of one input."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._names = (*service.methods, TICK, END)
        self._streams: dict[str, tuple[_Requests, asyncio.Task[None]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def make(self, data: bytes) -> None:
        """Make them, end them, and see that nothing is left.

        Raises whatever a handler has raised that is no status of its service.
        """
        try:
            for kind, message in records(data):
                self._one(self._names[kind % len(self._names)], message)
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
            self._end()
            for _ in range(_TURNS):
                await asyncio.sleep(0)
        finally:
            for task in self._tasks:
                task.cancel()
            outcomes = await asyncio.gather(*self._tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(
                outcome, AbortedError | asyncio.CancelledError
            ):
                raise outcome
        self._service.check()

    def _one(self, name: str, message: bytes) -> None:
        if name == TICK:
            self._service.tick()
        elif name == END:
            self._end()
        else:
            handler = self._service.methods[name]
            try:
                request = handler.request_deserializer(message)
            except DecodeError:
                return  # gRPC itself refuses it
            if handler.request_streaming:
                self._say(name, handler, request)
            else:
                self._start(handler, request)

    def _say(self, name: str, handler: Any, message: Any) -> None:
        open_stream = self._streams.get(name)
        if open_stream is None or open_stream[1].done():
            requests = _Requests()
            open_stream = self._streams[name] = requests, self._start(handler, requests)
        if not open_stream[0].waiting.full():
            open_stream[0].waiting.put_nowait(message)

    def _start(self, handler: Any, request: Any) -> asyncio.Task[None]:
        context = _Context(self._service.codes, handler.response_serializer)
        task = asyncio.create_task(_serve(handler, request, context))
        self._tasks.append(task)
        return task

    def _end(self) -> None:
        for requests, _ in self._streams.values():
            if not requests.waiting.full():
                requests.waiting.put_nowait(None)
        self._streams.clear()


async def _serve(handler: Any, request: Any, context: _Context) -> None:
    """Call a handler as gRPC does."""
    kind = f"{'stream' if handler.request_streaming else 'unary'}_"
    serve = getattr(handler, kind + ("stream" if handler.response_streaming else "unary"))
    try:
        if inspect.isasyncgenfunction(serve):
            async for message in serve(request, context):
                await context.write(message)
            return
        answer = await serve(request, context)
        if not handler.response_streaming:
            await context.write(answer)
    finally:
        for callback in context.ended:
            callback(context)


def handlers_of(add: Callable[[Any, Any], None], servicer: object) -> dict[str, Any]:
    """The handlers that a generated ``add_…_to_server`` registers, by method."""
    found: dict[str, Any] = {}
    server = SimpleNamespace(
        add_generic_rpc_handlers=lambda _: None,
        add_registered_method_handlers=lambda _, handlers: found.update(handlers),
    )
    add(servicer, server)
    return found


def numbered(
    names: Sequence[str], calls: Sequence[tuple[str, Message | bytes]]
) -> list[tuple[int, bytes]]:
    """Calls by name as records."""
    every = (*names, TICK, END)
    return [
        (every.index(name), said if isinstance(said, bytes) else said.SerializeToString())
        for name, said in calls
    ]
