"""The load of ``bench stops``: clients that ask without a pause, and a book of what they saw."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deepinfer.client import Accepted, AsyncClient, ClientConfig, DeepInferError, Delta
from deepinfer.deploy.oracle import Answer, Question

CONNECT_MS = 15_000
"""The SDK's default: how long a request may go without being accepted before it fails."""


@dataclass(slots=True)
class Book:
    """What became of the requests of one phase."""

    finished: int = 0
    tokens: int = 0
    reconnects: int = 0
    swaps: int = 0
    changed: int = 0
    """Finished with other tokens than the model gives alone."""
    failed: list[str] = field(default_factory=list)
    """Accepted, and not finished: why."""
    refused: list[str] = field(default_factory=list)
    """Not accepted: why."""
    longest_gap_s: float = 0.0
    """Between two tokens of one stream."""

    def figures(self) -> dict[str, object]:
        """As JSON."""
        return {
            "finished": self.finished,
            "tokens": self.tokens,
            "reconnects": self.reconnects,
            "swaps": self.swaps,
            "changed": self.changed,
            "failed": self.failed,
            "refused": len(self.refused),
            "refusals": sorted(set(self.refused))[:5],
            "longest_gap_s": self.longest_gap_s,
        }


class Load:
    """So many clients; each sends its next request as soon as it has the answer to the last one.

    ``book`` may be changed for another at any time: a request counts where it ends.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        token: str,
        asked: Sequence[tuple[Question, Answer]],
        *,
        streams: int,
        seed: int,
    ) -> None:
        self.book = Book()
        self._client = AsyncClient(
            list(endpoints), token=token, config=ClientConfig(connect_give_up_ms=CONNECT_MS)
        )
        self._asked = asked
        self._random = random.Random(seed)
        self._stopping = False
        self.running: dict[int, bool] = {}
        """Requests under way, by a number: whether accepted."""
        self._number = 0
        self._changed = asyncio.Event()
        self._tasks = [asyncio.create_task(self._ask_on()) for _ in range(streams)]

    async def until_busy(self, timeout_s: float) -> None:
        """Wait until as many requests as there are clients have been accepted.

        Raises:
            TimeoutError: they are not in time.
        """
        async with asyncio.timeout(timeout_s):
            await self._until(lambda: sum(self.running.values()) == len(self._tasks))

    async def end(self, *, at_once: bool) -> None:
        """No further request; wait for those under way.

        ``at_once``: the cluster stops, and who has not been accepted need not try any longer.
        """
        self._stopping = True
        if at_once:
            await self._until(lambda: not any(self.running.values()))
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()
        broken = [t.exception() for t in self._tasks if not t.cancelled() and t.exception()]
        if broken:
            raise RuntimeError("a client of the load has failed") from broken[0]

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    async def _ask_on(self) -> None:
        while not self._stopping:
            self._number += 1
            number = self._number
            try:
                await self._ask(number, *self._random.choice(self._asked))
            finally:
                self.running.pop(number, None)
                self._changed.set()

    async def _ask(self, number: int, question: Question, answer: Answer) -> None:
        self.running[number] = False
        sampling = dict(question.sampling)
        last_s: float | None = None
        try:
            async with self._client.stream(
                list(answer.prompt_ids), seed=question.seed, **sampling
            ) as stream:
                async for event in stream:
                    now_s = time.monotonic()
                    if isinstance(event, Accepted):
                        self.running[number] = True
                        self._changed.set()
                    elif isinstance(event, Delta):
                        if last_s is not None:
                            gap_s = now_s - last_s
                            self.book.longest_gap_s = max(self.book.longest_gap_s, gap_s)
                        last_s = now_s
                completion = await stream.completion()
        except DeepInferError as error:
            where = self.book.failed if self.running[number] else self.book.refused
            where.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(0.05)
            return
        [choice] = completion.choices
        self.book.finished += 1
        self.book.tokens += len(choice.token_ids)
        self.book.reconnects += choice.timings.reconnects
        self.book.swaps += choice.swaps.swaps
        self.book.changed += choice.token_ids != answer.token_ids
