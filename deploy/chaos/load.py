"""Streams through the SDK that run at the same time, and what they are asked."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from deepinfer.client import AsyncClient, DeepInferError
from deepinfer.deploy.chaos.history import History
from deepinfer.deploy.oracle import Answer, Question

POLL_S = 0.005
STREAM_PATIENCE_S = 120.0
PROMPT_MIN, PROMPT_MAX = 16, 48
TEMPERATURE = 0.8


def questions(count: int, max_tokens: int, vocabulary: int, *, seed: int = 7) -> list[Question]:
    """Prompts of 16 to 48 random ids; every other one draws its tokens."""
    draw = random.Random(seed)
    return [
        Question(
            prompt=tuple(
                draw.randrange(vocabulary) for _ in range(draw.randint(PROMPT_MIN, PROMPT_MAX))
            ),
            sampling={
                "max_tokens": max_tokens,
                "temperature": 0.0 if i % 2 == 0 else TEMPERATURE,
                "ignore_eos": True,
            },
            seed=i,
        )
        for i in range(count)
    ]


@dataclass(slots=True)
class Load:
    """Streams that run at the same time."""

    histories: list[History]
    tasks: list[asyncio.Task[int]]
    began: float
    """By ``perf_counter``."""

    @classmethod
    def start(cls, client: AsyncClient, asked: Sequence[tuple[Question, Answer]]) -> Load:
        """Send every question at once."""
        histories = [History(answer.token_ids) for _, answer in asked]

        async def one(question: Question, history: History) -> int:
            stream = client.stream(
                question.prompt, include_events=True, seed=question.seed, **question.sampling
            )
            try:
                async with asyncio.timeout(STREAM_PATIENCE_S), stream:
                    async for event in stream:
                        history.hear(event)
                    return (await stream.completion()).timings.reconnects
            except (DeepInferError, TimeoutError) as error:
                history.error = f"{type(error).__name__}: {error}"
                return 0

        tasks = [
            asyncio.create_task(one(question, history))
            for (question, _), history in zip(asked, histories, strict=True)
        ]
        return cls(histories, tasks, time.perf_counter())

    @property
    def running(self) -> bool:
        return not all(task.done() for task in self.tasks)

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(history.error for history in self.histories if history.error)

    async def until(self, tokens: int) -> None:
        """Wait until every stream has brought that many tokens, or has ended."""
        while True:
            if all(h.tokens >= tokens or h.ended for h in self.histories):
                return
            await asyncio.sleep(POLL_S)

    async def end(self) -> int:
        """Wait for every stream; returns how often they reconnected."""
        return sum(await asyncio.gather(*self.tasks))
