"""The synchronous client: ``AsyncClient`` on an event loop in a thread of its own.

All clients of a process share that thread, for gRPC's asynchronous side works best with one loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar, Unpack

from deepinfer.client.aio import AsyncClient
from deepinfer.client.core.config import ClientConfig
from deepinfer.client.errors import ClientClosed
from deepinfer.client.request import Message, Options, Prompt
from deepinfer.client.results import Completion, Event, Model
from deepinfer.client.stream import AsyncStream
from deepinfer.client.tls import TlsOptions

R = TypeVar("R")


class Portal:
    """The thread and its loop; started for the first client, stopped after the last."""

    _shared: ClassVar[Portal | None] = None
    _users: ClassVar[int] = 0
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="deepinfer-client", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls) -> Portal:
        """The shared portal, with one more user."""
        with cls._lock:
            if cls._shared is None:
                cls._shared = Portal()
            cls._users += 1
            return cls._shared

    def release(self) -> None:
        """One user less; the last one stops the thread."""
        with Portal._lock:
            Portal._users -= 1
            if Portal._users:
                return
            Portal._shared = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def call(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine there and wait for it; an interrupt here cancels it there.

        Raises:
            ClientClosed: the thread has ended, or ends meanwhile.
        """
        try:
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:  # its loop is closed
            work.close()
            raise ClientClosed("the client is closed") from None
        try:
            return future.result()
        except CancelledError:
            raise ClientClosed("the client was closed during the call") from None
        except BaseException:
            future.cancel()
            raise

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            # Calls of other threads that have come since: they must not wait for ever.
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()


class Stream:
    """The events of one request: an iterator and context manager; see ``AsyncStream``.

    Leaving it before the end (``close``, the context manager, or an interrupt) aborts the request.
    """

    def __init__(self, portal: Portal, stream: AsyncStream) -> None:
        self._portal = portal
        self._stream = stream

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        event = self._portal.call(self._next())
        if event is None:
            raise StopIteration
        return event

    async def _next(self) -> Event | None:
        return await anext(self._stream, None)

    def completion(self) -> Completion:
        """Wait for the end."""
        return self._portal.call(self._stream.completion())

    @property
    def request_id(self) -> str:
        """The request's id; empty until it is accepted."""
        return self._stream.request_id

    def abort(self) -> None:
        """Abort the request unless it has ended; returns at once, and from any thread."""
        with contextlib.suppress(RuntimeError):  # the client is closed, and has aborted it
            self._portal.loop.call_soon_threadsafe(self._stream.abort)

    def close(self) -> None:
        """Abort the request unless it has ended, and wait (for a while) until a gateway knows."""
        self._portal.call(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Client:
    """Talks to a cluster through any of its gateways; see ``AsyncClient``.

    May be used from several threads. A context manager: leaving it closes it.

    Raises:
        ValueError: as ``AsyncClient``.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        token: str,
        tls: bool | TlsOptions = False,
        config: ClientConfig | None = None,
    ) -> None:
        self._client = AsyncClient(endpoints, token=token, tls=tls, config=config)
        self._portal: Portal | None = Portal.acquire()

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Send a request and return its events; see ``AsyncClient.stream``."""

        async def start() -> AsyncStream:
            return self._client.stream(prompt, **options)

        portal = self._open_portal()
        return Stream(portal, portal.call(start()))

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Send a request and wait for its end; see ``AsyncClient.stream``."""
        return self._open_portal().call(self._client.generate(prompt, **options))

    def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Completion:
        """Send messages and wait for the answer; see ``AsyncClient.stream``."""
        return self._open_portal().call(self._client.chat(messages, **options))

    def status(self) -> dict[str, Any]:
        """The cluster's status document."""
        return self._open_portal().call(self._client.status())

    def models(self) -> tuple[Model, ...]:
        """The models that are served."""
        return self._open_portal().call(self._client.models())

    def abort(
        self, request_id: str, *, resume_key: str | None = None, claim: int = 2**31, n: int = 1
    ) -> None:
        """End a request and free all it holds; see ``AsyncClient.abort``."""
        self._open_portal().call(
            self._client.abort(request_id, resume_key=resume_key, claim=claim, n=n)
        )

    def close(self) -> None:
        """Abort what is under way and close the connections; harmless when closed."""
        portal, self._portal = self._portal, None
        if portal is not None:
            try:
                portal.call(self._client.close())
            finally:
                portal.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open_portal(self) -> Portal:
        if self._portal is None:
            raise ClientClosed("the client is closed")
        return self._portal
