"""Writers that stop, die, are cut off or revoked in the middle of a put over shared memory."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import kvstore_writer
from deepinfer.kvstore.client import StoreClient
from deepinfer.kvstore.core.config import StoreConfig
from deepinfer.kvstore.core.ids import Incarnation, WorkerId, WorkerRef
from deepinfer.kvstore.core.messages import StoreStatus as S
from kvstore_kit import (
    PAGE,
    WRITER,
    Store,
    draft,
    keeping,
    payload,
    running_store,
    ticket,
    until,
)

OTHER = WorkerRef(WorkerId("worker-1"), Incarnation(1))
SCRIPT = Path(kvstore_writer.__file__)


@asynccontextmanager
async def parked_writer(store: Store, blocks: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that has written one of its blocks and waits."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIPT),
        store.address,
        str(blocks),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        assert (await asyncio.wait_for(process.stdout.readline(), 30)).strip() == b"parked"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        assert process.stdin is not None
        process.stdin.close()


async def swap_out_beside(store: Store, blocks: int) -> None:
    """Another worker's payload, under ticket 2."""
    client = store.client("memfd", writer=OTHER)
    assert (await client.reserve(ticket(2), blocks * PAGE, epoch=1)).status is S.OK
    put = await client.put(ticket(2), draft(ticket(2), blocks), payload(2, blocks))
    assert put.status is S.OK
    assert (await client.commit(ticket(2))).status is S.OK


async def keep_reserved(client: StoreClient) -> None:
    while True:
        await client.reserve(ticket(1), 3 * PAGE, epoch=1, writer=WRITER)
        await asyncio.sleep(0.05)


async def read_back(store: Store, blocks: int) -> None:
    kept: list[memoryview] = []
    client = store.client("memfd", writer=OTHER)
    assert (await client.get(ticket(2), keeping(kept))).status is S.OK
    assert kept == payload(2, blocks)


def test_pages_of_a_stopped_writer_are_not_lent_again_until_it_lets_go() -> None:
    async def main() -> None:
        config = StoreConfig(reservation_ms=300)
        async with running_store(budget_bytes=5 * PAGE, config=config) as store:
            client = store.client("grpc", writer=OTHER)
            renewing = asyncio.create_task(keep_reserved(client))  # however long it takes to start
            async with parked_writer(store, 2) as process:
                process.send_signal(signal.SIGSTOP)
                renewing.cancel()
                # Its reservation runs out; what it was lent stays set aside, the rest is free.
                await until(store, tickets_reserved=0, pages_quarantined=2, pages_free=3)
                over = await client.reserve(ticket(3), 4 * PAGE, epoch=1)
                assert (over.status, over.used_bytes) == (S.OVER_BUDGET, 2 * PAGE)
                await swap_out_beside(store, 3)
                await asyncio.sleep(0.3)
                assert (await store.numbers())["pages_quarantined"] == 2

                process.send_signal(signal.SIGCONT)
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(b"go on\n")
                assert (await process.stdout.readline()).strip() == S.SEALED.value.encode()
                await until(store, pages_quarantined=0, pages_free=2)
                await read_back(store, 3)

    asyncio.run(main())


def test_pages_of_a_killed_writer_are_free_after_the_grace() -> None:
    async def main() -> None:
        config = StoreConfig(dma_grace_ms=400)
        async with running_store(budget_bytes=4 * PAGE, config=config) as store:
            client = store.client("grpc", writer=OTHER)
            await client.reserve(ticket(1), 3 * PAGE, epoch=1, writer=WRITER)
            async with parked_writer(store, 2) as process:
                process.kill()
                await process.wait()
                await until(store, tickets_reserved=0, pages_quarantined=2, used_bytes=2 * PAGE)
                # A dead writer's reservations are refused from now on.
                again = await client.reserve(ticket(4), PAGE, epoch=1, writer=WRITER)
                assert again.status is S.NOT_YOURS
                await asyncio.sleep(0.2)
                assert (await store.numbers())["pages_quarantined"] == 2
                await until(store, pages_quarantined=0, used_bytes=0, within_s=2.0)
            await swap_out_beside(store, 4)
            await read_back(store, 4)

    asyncio.run(main())


class Gate:
    """A ``Fill`` that waits at its first block until it may go on."""

    def __init__(self) -> None:
        self.parked = asyncio.Event()
        self.open = threading.Event()
        self.loop = asyncio.get_running_loop()
        self.done = False

    def __call__(self, first: int, buffer: memoryview) -> None:
        self.loop.call_soon_threadsafe(self.parked.set)
        assert self.open.wait(20)
        buffer[:] = bytes(len(buffer))
        self.done = True


def test_a_revoked_put_ends_sealed_and_gives_its_pages_back() -> None:
    async def main() -> None:
        async with running_store() as store:
            client = store.client("memfd")
            await client.reserve(ticket(1), 3 * PAGE, epoch=1)
            gate = Gate()
            put = asyncio.create_task(client.put(ticket(1), draft(ticket(1), 2), gate))
            await gate.parked.wait()
            assert (await client.release(ticket(1), epoch=1)).used_bytes == 2 * PAGE
            gate.open.set()
            assert (await put).status is S.SEALED
            await until(store, used_bytes=0)
            await store.check_empty()

    asyncio.run(main())


def test_a_cancelled_put_gives_its_pages_back_only_when_its_copy_has_ended() -> None:
    async def main() -> None:
        async with running_store() as store:
            client = store.client("memfd")
            await client.reserve(ticket(1), 3 * PAGE, epoch=1)
            gate = Gate()
            put = asyncio.create_task(client.put(ticket(1), draft(ticket(1), 2), gate))
            await gate.parked.wait()
            put.cancel()
            await asyncio.sleep(0.05)
            put.cancel()
            await asyncio.sleep(0.05)
            assert not put.done()
            assert (await store.numbers())["puts"] == 1
            gate.open.set()
            with pytest.raises(asyncio.CancelledError):
                await put
            assert gate.done
            await until(store, puts=0, used_bytes=3 * PAGE)

    asyncio.run(main())


def test_a_writer_whose_connection_broke_acknowledges_over_the_next_one() -> None:
    async def main() -> None:
        async with running_store() as store:
            client = store.client("memfd")
            await client.reserve(ticket(1), 3 * PAGE, epoch=1)
            gate = Gate()
            put = asyncio.create_task(client.put(ticket(1), draft(ticket(1), 2), gate))
            await gate.parked.wait()
            assert client._link is not None
            client._link._frames.sock.shutdown(socket.SHUT_RDWR)
            assert (await client.resolve(ticket(1))).status is S.SEALED
            await asyncio.sleep(0.1)
            assert (await store.numbers())["pages_quarantined"] == 2
            gate.open.set()
            assert (await put).status in (S.UNREACHABLE, S.SEALED)
            assert (await store.numbers())["pages_quarantined"] == 2
            await client.reserve(ticket(2), 2 * PAGE, epoch=1)
            again = await client.put(ticket(2), draft(ticket(2), 2), payload(2, 2))
            assert (again.status, again.path) == (S.OK, "memfd")
            await until(store, pages_quarantined=0, used_bytes=2 * PAGE)

    asyncio.run(main())


def test_a_commit_reaches_the_store_over_grpc_when_the_connection_broke() -> None:
    async def main() -> None:
        async with running_store() as store:
            client = store.client("memfd")
            for number, broken in ((1, False), (2, True), (3, True)):
                await client.reserve(ticket(number), 2 * PAGE, epoch=1)
                put = await client.put(ticket(number), draft(ticket(number), 2), payload(number, 2))
                assert put.status is S.OK
                link = client._link
                assert link is not None
                if broken:
                    link._frames.sock.shutdown(socket.SHUT_RDWR)
                if number == 3:  # the client has noticed, too
                    await asyncio.wait_for(link._unmapped.wait(), 2)
                    assert not link.alive
                done = await client.commit(ticket(number))
                assert (done.status, done.used_bytes) == (S.OK, 2 * number * PAGE)
                assert done.budget_bytes == 64 * PAGE

    asyncio.run(main())


def test_a_put_that_takes_too_long_is_unreachable_and_leaves_nothing() -> None:
    async def main() -> None:
        async with running_store() as store:
            client = store.client("memfd")
            await client.reserve(ticket(1), 3 * PAGE, epoch=1)
            gate = Gate()
            asyncio.get_running_loop().call_later(0.4, gate.open.set)
            put = await client.put(ticket(1), draft(ticket(1), 2), gate, timeout_s=0.1)
            assert put.status is S.UNREACHABLE
            assert gate.done
            await until(store, puts=0)
            assert (await client.resolve(ticket(1))).status is S.SEALED
            await store.check_empty()

    asyncio.run(main())


def test_a_new_life_of_the_store_unmaps_the_old_slabs_before_it_maps_its_own() -> None:
    async def main() -> None:
        events: list[str] = []

        def on_map(address: int, length: int):  # type: ignore[no-untyped-def]
            assert address % 4096 == 0
            events.append(f"map {length}")
            return lambda: events.append("unmap")

        async with running_store(slab_bytes=4 * PAGE) as store:
            client = store.client("auto", on_map=on_map)
            port = int(store.address.rpartition(":")[2])
            await client.reserve(ticket(1), 6 * PAGE, epoch=1)
            put = await client.put(ticket(1), draft(ticket(1), 6), payload(1, 6))
            assert (put.status, put.path) == (S.OK, "memfd")
            assert events == [f"map {4 * PAGE}"] * 2
            await store.actor.stop()
            async with running_store(slab_bytes=4 * PAGE, port=port) as successor:
                # The ticket's life is over, and this is how its writer hears of it.
                for _ in range(100):
                    said = await client.commit(ticket(1))
                    if said.status is not S.UNREACHABLE:
                        break
                    await asyncio.sleep(0.05)
                assert said.status is S.STALE_STORE
                await client.reserve(ticket(2), 2 * PAGE, epoch=1)
                put = await client.put(ticket(2), draft(ticket(2), 2), payload(2, 2))
                assert (put.status, put.path) == (S.OK, "memfd")
                assert events == [f"map {4 * PAGE}"] * 2 + ["unmap"] * 2 + [f"map {4 * PAGE}"]
                assert (await client.commit(ticket(2))).status is S.OK
                await client.close()
                store.clients.clear()
                assert (await successor.numbers())["committed"] == 1

    asyncio.run(main())


def test_a_second_process_cannot_speak_for_a_writer() -> None:
    async def main() -> None:
        async with running_store(budget_bytes=4 * PAGE) as store:
            client = store.client("grpc", writer=OTHER)
            await client.reserve(ticket(1), 3 * PAGE, epoch=1, writer=WRITER)
            async with parked_writer(store, 2):
                impostor = store.client("memfd")  # this process, under the other one's name
                put = await impostor.put(ticket(1), draft(ticket(1), 2), payload(1, 2))
                assert put.status is S.UNREACHABLE

    asyncio.run(main())
