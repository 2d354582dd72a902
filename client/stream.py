"""One request's events, as the caller iterates over them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from deepinfer.client.driver import Driver
from deepinfer.client.results import Completion, Event


class AsyncStream:
    """The events of one request: an asynchronous iterator and context manager.

    Ends after the last ``Finished``. Raises what ``deepinfer.client.errors`` lists. Leaving it
    before the end (``abort``, ``aclose``, the context manager, cancelling an iteration, or
    dropping it) aborts the request.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._loop = asyncio.get_running_loop()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        try:
            event = await self._driver.next()
        except asyncio.CancelledError:
            self._driver.abort()
            raise
        if event is None:
            raise StopAsyncIteration
        return event

    async def completion(self) -> Completion:
        """Pass over the remaining events and wait for the end.

        Raises:
            DeadlineExceeded: the request's deadline passed first.
            DeepInferError: it failed; see the tree.
        """
        async for _ in self:
            pass
        return self._driver.completion()

    @property
    def request_id(self) -> str:
        """The request's id; empty until it is accepted."""
        return self._driver.request_id

    def abort(self) -> None:
        """Abort the request unless it has ended; returns at once.

        Whoever iterates, now or later, gets ``Aborted``.
        """
        self._driver.abort()

    async def aclose(self) -> None:
        """Abort the request unless it has ended, and wait (for a while) until a gateway knows.

        Whoever iterates, now or later, gets ``Aborted``.
        """
        await self._driver.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._driver.abort)
