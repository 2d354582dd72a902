"""Very many requests from a process of their own: `bench overload` starts it as a module.

It reads one line of JSON from standard input (see ``Orders``), writes one when it is connected, and
one with what has come of everything when the time is over. Its requests come whether earlier ones
have been answered or not; or, if no rate is given, each takes the place of one that has ended.

=======  =========================================================================================
plain    read as fast as it comes
slow     read with pauses over a connection that takes few bytes ahead
idle     never read again once it was accepted
=======  =========================================================================================
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc

from deepinfer.deploy.bench.known import Heard
from deepinfer.deploy.bench.soak_load import SMALL_WINDOW
from deepinfer.proto import inference_pb2, inference_pb2_grpc
from deepinfer.proto.bearer import bearer

SLOW_SHARE, IDLE_SHARE = 0.05, 0.02
IDLE_MAX = 100
"""Streams that a process leaves unread at a time."""
SLOW_READ_S = (0.05, 0.3)
"""A slow reader's pauses between two messages."""
LATE_S = 0.05
"""Arrivals that are overdue by more are counted: the load was then less than was asked for."""
NICENESS = 10
"""Clients are on other machines as a rule: here they give way to what is measured."""
KEPT = 4_000
"""Times of each kind that are kept for their distribution."""
CHANNEL = (("grpc.enable_http_proxy", 0),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the process is to do."""

    endpoint: str
    token: str
    requests: list[dict[str, Any]]
    """``prompt_ids``, ``max_tokens``, ``temperature``, ``seed`` and the right ``token_ids``."""
    seconds: float
    rate: float
    """Requests a second; 0: as many as ``streams`` at once."""
    streams: int
    seed: int
    all_plain: bool


@dataclass(slots=True)
class Came:
    """What has come of the requests."""

    sent: int = 0
    late: int = 0
    """Sent later than they should have been, for this process was busy."""
    accepted: int = 0
    complete: int = 0
    tokens: int = 0
    """That clients have received."""
    wrong: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    """By status and the bound that was named."""
    refused_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    unread: int = 0
    """Idle streams."""


class Process:
    """The load of one process."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._draw = Random(orders.seed)
        self._plain = grpc.aio.insecure_channel(orders.endpoint, options=CHANNEL)
        self._small = grpc.aio.insecure_channel(orders.endpoint, options=SMALL_WINDOW)
        self._metadata = bearer(orders.token)
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = 0
        self._over = asyncio.Event()
        self.came = Came()

    async def run(self) -> None:
        """Connect, say so, and load until the time is over."""
        await asyncio.gather(self._plain.channel_ready(), self._small.channel_ready())
        _say({"connected": True})
        orders = self._orders
        until_s = time.perf_counter() + orders.seconds
        if orders.rate:
            async for _ in self._arrivals(until_s):
                self._start(self._kind())
        else:
            for _ in range(orders.streams):
                self._start("plain", until_s)
            await asyncio.sleep(orders.seconds)
        self._over.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._plain.close(None)
        await self._small.close(None)

    async def _arrivals(self, until_s: float) -> AsyncIterator[None]:
        """A Poisson process of arrivals."""
        due_s = time.perf_counter()
        while due_s < until_s:
            now_s = time.perf_counter()
            if due_s > now_s:
                await asyncio.sleep(due_s - now_s)
            elif now_s - due_s > LATE_S:
                self.came.late += 1
                await asyncio.sleep(0)
            if time.perf_counter() > until_s:
                return
            yield
            due_s += self._draw.expovariate(self._orders.rate)

    def _kind(self) -> str:
        if self._orders.all_plain:
            return "plain"
        drawn = self._draw.random()
        if drawn < SLOW_SHARE:
            return "slow"
        return "idle" if drawn < SLOW_SHARE + IDLE_SHARE and self._idle < IDLE_MAX else "plain"

    def _start(self, kind: str, until_s: float | None = None) -> None:
        task = asyncio.create_task(self._one(kind) if until_s is None else self._again(until_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _again(self, until_s: float) -> None:
        while time.perf_counter() < until_s:
            await self._one("plain")

    async def _one(self, kind: str) -> None:
        asked = self._draw.choice(self._orders.requests)
        request = inference_pb2.GenerateRequest()
        request.tokenized.input_ids.extend(asked["prompt_ids"])
        sampling = request.sampling_params
        sampling.max_tokens, sampling.ignore_eos = asked["max_tokens"], True
        sampling.temperature, sampling.seed = asked["temperature"], asked["seed"]
        channel = self._plain if kind == "plain" else self._small
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=self._metadata)
        began_s = time.perf_counter()
        self.came.sent += 1
        self._idle += kind == "idle"
        try:
            await self._read(kind, asked, call, began_s)
        except grpc.aio.AioRpcError as error:
            if not self._over.is_set():  # or it was called off from here
                self._failed(error, time.perf_counter() - began_s)
        finally:
            self._idle -= kind == "idle"
            call.cancel()

    async def _read(self, kind: str, asked: dict[str, Any], call: Any, began_s: float) -> None:
        heard = Heard(asked["token_ids"])
        async for response in call:
            match response.WhichOneof("response"):
                case "accepted":
                    self.came.accepted += 1
                    if kind == "idle":
                        self.came.unread += 1
                        await self._over.wait()
                        return
                case "chunk":
                    if not heard.tokens:
                        _keep(self.came.ttft_s, time.perf_counter() - began_s)
                    heard.hear(response.chunk.position, response.chunk.token_ids)
                    self.came.tokens += len(response.chunk.token_ids)
                case "complete":
                    heard.end(len(asked["token_ids"]))
                    self.came.complete += 1
            if heard.wrong:
                self.came.wrong.append(heard.wrong)
                return
            if kind == "slow":
                await asyncio.sleep(self._draw.uniform(*SLOW_READ_S))

    def _failed(self, error: grpc.aio.AioRpcError, took_s: float) -> None:
        code, details = error.code().name, error.details() or ""
        bound = re.search(r"max_\w+", details)
        reason = bound[0] if bound else details[:120]
        self.came.refused[f"{code}: {reason}"] += 1
        if code == "RESOURCE_EXHAUSTED":
            _keep(self.came.refused_s, took_s)


def _keep(times: list[float], value: float) -> None:
    """Keep the latest ones."""
    times.append(value)
    if len(times) > 2 * KEPT:
        del times[:KEPT]


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


async def main(orders: Orders) -> None:
    """Do it, and say what came."""
    process = Process(orders)
    await process.run()
    came = process.came
    _say(
        {
            "sent": came.sent,
            "late": came.late,
            "accepted": came.accepted,
            "complete": came.complete,
            "tokens": came.tokens,
            "wrong": came.wrong[:20],
            "wrong_count": len(came.wrong),
            "refused": dict(came.refused),
            "refused_s": came.refused_s[-KEPT:],
            "ttft_s": came.ttft_s[-KEPT:],
            "unread": came.unread,
        }
    )


if __name__ == "__main__":
    os.nice(NICENESS)
    asyncio.run(main(Orders(**json.loads(sys.stdin.readline()))))
