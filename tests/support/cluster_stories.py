"""Requests sent to a cluster in a set order, what their clients saw, and what must hold of it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from deepinfer.client import AsyncClient, Choice, Delta, Event, Notice
from deepinfer.deploy.cluster import Cluster
from deepinfer.deploy.watch import Watched, watch
from support.cluster import Oracle, assert_nothing_left, counters

R = TypeVar("R")

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SEEDED: dict[str, Any] = {
    "temperature": 0.75,
    "top_p": 0.875,
    "top_k": 40,
    "repetition_penalty": 1.125,
    "seed": 11,
    "ignore_eos": True,
}
BLOCK_SIZE = 64
BLOCKS = 3
PROMPT = 70
"""Two blocks: two prompts do not fit in three."""
OUTPUT = 100
"""Long enough that the second request comes while the first still runs; three blocks in all."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a story."""

    prompt: tuple[int, ...]
    sampling: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Seen:
    """What its client saw of it, in order."""

    watched: Watched
    choice: Choice
    events: tuple[tuple[float, Event], ...]
    """Each with the time of its arrival, in seconds."""

    def first(self, kind: type[Event] | str) -> float:
        """When the first event of a type came, or the first notice of a kind."""
        return next(when for when, event in self.events if _is(event, kind))


def _is(event: Event, kind: type[Event] | str) -> bool:
    if isinstance(kind, str):
        return isinstance(event, Notice) and event.kind == kind
    return isinstance(event, kind)


def prompt(seed: int, tokens: int = PROMPT) -> tuple[int, ...]:
    """Byte tokens that no other seed begins with: nothing of it is in a prefix cache."""
    rng = random.Random(seed)
    return tuple(rng.randrange(256) for _ in range(tokens))


async def one_after_another(
    client: AsyncClient, asks: list[Ask], when: type[Event] | str
) -> list[Seen]:
    """Send each request once the one before it has seen ``when``; return how all of them went."""
    running = []
    for ask in asks:
        ready = asyncio.Event()
        running.append(asyncio.create_task(_follow(client, ask, when, ready)))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait({running[-1], waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
    return list(await asyncio.gather(*running))


async def _follow(
    client: AsyncClient, ask: Ask, when: type[Event] | str, ready: asyncio.Event
) -> Seen:
    events: list[tuple[float, Event]] = []
    watched = Watched("")

    def tell(_: Watched, event: Event) -> None:
        events.append((time.perf_counter(), event))
        if _is(event, when):
            ready.set()

    async with client.stream(ask.prompt, include_events=True, **ask.sampling) as stream:
        choice = await watch(stream, watched, tell)
    return Seen(watched, choice, tuple(events))


def story(
    cluster: Cluster, asks: list[Ask], when: type[Event] | str = Delta
) -> tuple[list[Seen], dict[str, float]]:
    """Send the requests ``one_after_another``, check that nothing is left; return what was seen
    and what the cluster has counted meanwhile.
    """
    return counting(cluster, lambda client: one_after_another(client, asks, when))


def counting(
    cluster: Cluster, tell: Callable[[AsyncClient], Coroutine[Any, Any, R]]
) -> tuple[R, dict[str, float]]:
    """Let something happen, check that nothing is left; return its outcome and what was counted."""

    async def run() -> tuple[R, dict[str, float]]:
        before = await counters(cluster)
        async with AsyncClient(list(cluster.endpoints), token=cluster.token) as client:
            outcome = await asyncio.wait_for(tell(client), 60)
        await assert_nothing_left(cluster)
        after = await counters(cluster)
        return outcome, {name: after[name] - before.get(name, 0) for name in after}

    return asyncio.run(run())


def assert_right(oracle: Oracle, asks: list[Ask], seen: list[Seen]) -> None:
    for ask, one in zip(asks, seen, strict=True):
        assert one.choice.finish_reason == "length"
        assert one.choice.token_ids == oracle.answer(ask.prompt, **ask.sampling)


def assert_computed_once(asks: list[Ask], counted: dict[str, float]) -> None:
    """Every token but each answer's last went through the model exactly once."""
    tokens = sum(len(ask.prompt) + ask.sampling["max_tokens"] - 1 for ask in asks)
    assert counted["prefix_hit_tokens"] == 0
    assert counted["recomputed"] == 0
    assert counted["tokens_computed"] == tokens
