"""Many swaps at once over both paths, cut off at random: nothing is left behind."""

from __future__ import annotations

import asyncio
import random

import pytest

from deepinfer.kvstore.client import Deadlines, StoreClient
from deepinfer.kvstore.core.ids import Incarnation, WorkerId, WorkerRef
from deepinfer.kvstore.core.messages import StoreStatus as S
from kvstore_kit import PAGE, draft, keeping, payload, running_store, ticket

SWAPS = 150


async def swap(rng: random.Random, clients: list[StoreClient], number: int) -> S:
    """One swap out and back; return how far it came. The bytes are checked where they come."""
    writer, reader = rng.choice(clients), rng.choice(clients)
    t, blocks = ticket(number), rng.randint(1, 6)
    reserved = await writer.reserve(t, (blocks + rng.randint(0, 2)) * PAGE, epoch=1)
    if reserved.status is not S.OK:
        return reserved.status
    put = asyncio.create_task(writer.put(t, draft(t, blocks), payload(number, blocks)))
    fate = rng.random()
    if fate < 0.3:
        await asyncio.sleep(rng.random() * 0.004)
        if fate < 0.15:
            put.cancel()
        else:
            await reader.release(t, epoch=1)
    try:
        status = (await put).status
    except asyncio.CancelledError:
        status = S.UNREACHABLE
    if status is S.OK and rng.random() < 0.9:
        status = (await writer.commit(t)).status
    if status is not S.OK:
        status = (await writer.resolve(t)).status
    kept: list[memoryview] = []
    got = await reader.get(t, keeping(kept))
    if got.status is S.OK:
        assert kept == payload(number, blocks)
    return status


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_left_behind(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        async with running_store(budget_bytes=24 * PAGE) as store:
            workers = [WorkerRef(WorkerId(f"worker-{i}"), Incarnation(1)) for i in range(2)]
            deadlines = Deadlines(call_s=20.0)
            by_worker = [
                [store.client(path, writer=ref, deadlines=deadlines) for path in ("memfd", "grpc")]
                for ref in workers
            ]
            ends: list[S] = []

            async def one_after_another(numbers: range) -> None:
                for number in numbers:
                    ends.append(await swap(rng, rng.choice(by_worker), number))
                    await by_worker[0][1].release(ticket(number), epoch=1)

            lanes = 4
            async with asyncio.TaskGroup() as tasks:
                for lane in range(lanes):
                    tasks.create_task(one_after_another(range(lane, SWAPS, lanes)))
            assert ends.count(S.SEALED) > 0
            assert ends.count(S.OK) > SWAPS // 5
            for _ in range(100):
                if (await store.numbers())["used_bytes"] == 0:
                    break
                await asyncio.sleep(0.02)
            await store.check_empty()
            runtime = store.actor._runtime
            assert runtime is not None
            runtime.core.check()

    asyncio.run(main())
