"""`deepinfer bench prefetch`: what a swap-in waits for its payload, fetched ahead and not.

A worker's own swapper puts a payload into a store in another process and fetches it over gRPC, as
between two nodes but on loopback: a real network is slower, and adds to what is saved. Timed from
the order to copy, with the blocks allocated, until everything is in them and verified. Both ways
take turns in one run, each first in every other round.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from deepinfer.deploy.bench.handoff_peers import store_process
from deepinfer.deploy.bench.results import write_result
from deepinfer.kvstore.client import StoreClient
from deepinfer.kvstore.core.ids import (
    Incarnation,
    RequestId,
    Run,
    Seq,
    StoreId,
    Ticket,
    WorkerId,
    WorkerRef,
)
from deepinfer.kvstore.core.layout import KvLayout, resolve_kv_dtype
from deepinfer.kvstore.core.messages import StoreStatus
from deepinfer.kvstore.core.states import State
from deepinfer.workers.core.events import (
    Commit,
    CommitReply,
    FetchDone,
    FetchPayload,
    PrefetchPayload,
    PutDone,
    PutPayload,
    WorkerEvent,
)
from deepinfer.workers.pool import PagedPool
from deepinfer.workers.swap import KvIdentity, StoreSwapper

LAYOUT: Final = KvLayout(
    dtype=resolve_kv_dtype("fp16"), layers=36, kv_heads=2, head_dim=128, block_size=16
)
"""Qwen2.5-3B's: 576 KiB a block of 16 tokens."""
TOKENS: Final = (48, 512, 2048)
WARM_UP: Final = 2
STORE: Final = StoreId("store-bench")


def run_prefetch(
    *, tokens: tuple[int, ...], rounds: int, output: Path, console: Console
) -> dict[str, Any]:
    """Measure payloads of so many tokens; write ``prefetch.json``; return what it holds.

    Raises:
        RuntimeError: the store did not do what it was asked.
    """
    blocks = sorted({LAYOUT.blocks_for(count) for count in tokens})
    results = asyncio.run(_measure(blocks, rounds))
    figures = {"path": "gRPC on loopback", "block_bytes": LAYOUT.block_bytes, "results": results}
    sizes = " ".join(f"--tokens {count}" for count in tokens)
    write_result(
        output / "prefetch.json", f"deepinfer bench prefetch {sizes} --rounds {rounds}", figures
    )
    table = Table(title="a swap-in's copy from another node's store: medians in ms")
    for name in ("MiB", "from the store", "fetched ahead", "ratio"):
        table.add_column(name, justify="right")
    for one in results:
        table.add_row(
            f"{one['payload_bytes'] / 2**20:.1f}",
            f"{one['from_store_ms']:.2f}",
            f"{one['ahead_ms']:.2f}",
            f"{one['ratio']:.1f}",
        )
    console.print(table)
    return figures


async def _measure(sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    bytes_max = sizes[-1] * LAYOUT.block_bytes
    async with store_process(LAYOUT, 2 * bytes_max) as (address, token):
        events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        writer = WorkerRef(WorkerId("bench"), Incarnation(os.getpid()))
        pool = PagedPool(LAYOUT, 2 * sizes[-1])
        swapper = StoreSwapper(
            writer,
            pool,
            KvIdentity(model="none: zeros"),
            events.put_nowait,
            token=token,
            path="grpc",
        )
        client = StoreClient(address, writer, token=token, path="grpc")
        swapper.learn({STORE: address})
        try:
            return [await _size(swapper, client, events, size, rounds) for size in sizes]
        finally:
            await swapper.close()
            await client.close()


async def _size(
    swapper: StoreSwapper,
    client: StoreClient,
    events: asyncio.Queue[WorkerEvent],
    blocks: int,
    rounds: int,
) -> dict[str, Any]:
    seq, run = Seq(RequestId(f"bench-{blocks}"), 0), Run(1, 1)
    ticket = Ticket(seq, run, Run(1, 2))
    size_bytes = blocks * LAYOUT.block_bytes
    reserved = await client.reserve(ticket, size_bytes, epoch=1)
    if reserved.status is not StoreStatus.OK:
        raise RuntimeError(f"reserve: {reserved.status.value} {reserved.detail}")
    token_ids = tuple(range(blocks * LAYOUT.block_size))
    swapper.put(PutPayload(ticket, STORE, seq, run, tuple(range(blocks)), token_ids, State.DECODE))
    put = await events.get()
    if not isinstance(put, PutDone) or not put.ok:
        raise RuntimeError(f"put: {put}")
    swapper.commit(Commit(ticket, STORE))
    if await events.get() != CommitReply(ticket, StoreStatus.OK):
        raise RuntimeError("the payload was not committed")
    taken_ms: dict[bool, list[float]] = {False: [], True: []}
    for number in range(WARM_UP + rounds):
        for ahead in (False, True) if number % 2 else (True, False):
            if ahead:
                await _bring(swapper, ticket, blocks)
            fetch = FetchPayload(
                ticket,
                STORE,
                seq,
                Run(2 + ahead, number),
                tuple(range(blocks, 2 * blocks)),
                ahead,
            )
            started = time.perf_counter()
            swapper.fetch(fetch)
            done = await events.get()
            took_ms = (time.perf_counter() - started) * 1e3
            if not isinstance(done, FetchDone) or done.status is not StoreStatus.OK:
                raise RuntimeError(f"fetch: {done}")
            if bool(done.ahead) is not ahead:
                raise RuntimeError(f"fetched {'' if ahead else 'not '}ahead, and not so taken")
            if number >= WARM_UP:
                taken_ms[ahead].append(round(took_ms, 3))
    await client.release(ticket, epoch=1)
    from_store_ms, ahead_ms = median(taken_ms[False]), median(taken_ms[True])
    return {
        "blocks": blocks,
        "payload_bytes": size_bytes,
        "from_store_ms": from_store_ms,
        "ahead_ms": ahead_ms,
        "ratio": round(from_store_ms / ahead_ms, 2),
        "rounds_from_store_ms": taken_ms[False],
        "rounds_ahead_ms": taken_ms[True],
    }


async def _bring(swapper: StoreSwapper, ticket: Ticket, blocks: int) -> None:
    """Return when the payload lies in host memory: that is not what is timed."""
    swapper.prefetch(PrefetchPayload(ticket, STORE, blocks))
    while await swapper.prefetcher.payload(ticket) is None:
        if ticket not in swapper.prefetcher.tickets:
            raise RuntimeError("the payload did not come")
        await asyncio.sleep(0.001)  # the buffer is still being made
