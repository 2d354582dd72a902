"""Many streams of one client in a process of its own: `bench streams` starts it as a module.

It reads one line of JSON from standard input (see ``Orders``) and writes two to standard output:
when every stream is accepted, and when every one has ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepinfer.client import Accepted, AsyncClient, AsyncStream, DeepInferError
from deepinfer.client.core.config import ClientConfig
from deepinfer.deploy.bench.procfs import number

PATIENCE_MS = 120_000
"""For the first word of a stream: all are opened at once, and one of them is the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the process is to do."""

    endpoints: tuple[str, ...]
    token: str
    streams: int
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a process holds now."""

    rss_bytes: int
    fds: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Read it from /proc.

        Raises:
            OSError: there is no such process, or it is another user's.
        """
        status = Path(f"/proc/{pid}/status").read_text()
        return cls(
            rss_bytes=1024 * number(status, "VmRSS"),
            fds=len(os.listdir(f"/proc/{pid}/fd")),
            threads=number(status, "Threads"),
        )


async def run(orders: Orders) -> None:
    """Open all streams, wait until they are accepted, and read them to their ends."""
    config = ClientConfig(accept_timeout_ms=PATIENCE_MS, connect_give_up_ms=PATIENCE_MS)
    async with AsyncClient(orders.endpoints, token=orders.token, config=config) as client:
        await client.status()  # so that what the first call of all costs is no stream's
        before = Footprint.of(os.getpid())
        began_s = time.perf_counter()
        streams = [
            client.stream(
                [1 + i % 200] * orders.prompt_tokens,
                max_tokens=orders.max_tokens,
                temperature=0.0,
                ignore_eos=True,
            )
            for i in range(orders.streams)
        ]
        firsts = await asyncio.gather(*(_first(stream) for stream in streams))
        _say(
            {
                "accepted": sum(firsts),
                "opening_s": time.perf_counter() - began_s,
                "before": asdict(before),
                "with_all": asdict(Footprint.of(os.getpid())),
            }
        )
        ends = Counter(await asyncio.gather(*(_end(stream) for stream in streams)))
        _say({"ends": dict(sorted(ends.items()))})


async def _first(stream: AsyncStream) -> bool:
    try:
        return isinstance(await anext(stream), Accepted)
    except DeepInferError:
        return False


async def _end(stream: AsyncStream) -> str:
    """The finish reason, or the name of the error."""
    try:
        return (await stream.completion()).finish_reason
    except DeepInferError as error:
        return type(error).__name__


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(run(Orders(**json.loads(sys.stdin.readline()))))
