"""Both ways into and out of a store do the same: gRPC is the oracle of the same-node path."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from deepinfer.kvstore import link
from deepinfer.kvstore.client import Path, StoreClient
from deepinfer.kvstore.core.config import StoreConfig
from deepinfer.kvstore.core.ids import Incarnation, WorkerId, WorkerRef
from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.core.messages import StoreStatus as S
from kvstore_kit import (
    PAGE,
    TOKEN,
    WRITER,
    Store,
    buffers,
    draft,
    keeping,
    payload,
    running_store,
    ticket,
    until,
)

PATHS: tuple[Path, Path] = ("memfd", "grpc")
either_path = pytest.mark.parametrize("path", PATHS)


async def swap_out(client: StoreClient, number: int, blocks: int, *, spare: int = 2) -> None:
    """Reserve, put and commit, each with success."""
    t = ticket(number)
    assert (await client.reserve(t, (blocks + spare) * PAGE, epoch=1)).status is S.OK
    put = await client.put(t, draft(t, blocks), payload(number, blocks))
    assert put.status is S.OK, put
    assert (await client.commit(t)).status is S.OK


@pytest.mark.parametrize("get_path", PATHS)
@pytest.mark.parametrize("put_path", PATHS)
def test_what_was_put_comes_back(put_path: Path, get_path: Path) -> None:
    async def main() -> None:
        async with running_store() as store:
            writer, reader = store.client(put_path), store.client(get_path)
            for number, blocks in enumerate((1, 3, 23, 40), start=1):
                await swap_out(writer, number, blocks)
                kept: list[memoryview] = []
                got = await reader.get(ticket(number), keeping(kept))
                assert (got.status, got.path) == (S.OK, get_path)
                assert got.payload_bytes == blocks * PAGE
                assert kept == payload(number, blocks)
                manifest = got.manifest
                assert manifest is not None
                expected = draft(ticket(number), blocks)
                assert manifest.token_ids == expected.token_ids
                assert manifest.payload_hash != 0
                assert (await writer.release(ticket(number), epoch=1)).status is S.OK
            await store.check_empty()

    asyncio.run(main())


def test_random_payloads_come_back_the_same_over_both_paths() -> None:
    async def main() -> None:
        rng = random.Random(2024)
        async with running_store() as store:
            clients = {path: store.client(path) for path in PATHS}
            for number in range(1, 40):
                blocks = rng.randint(1, 20)
                await swap_out(clients[rng.choice(PATHS)], number, blocks)
                seen = {}
                for path, client in clients.items():
                    kept: list[memoryview] = []
                    got = await client.get(ticket(number), keeping(kept))
                    seen[path] = (got.status, got.manifest, got.payload_bytes, kept)
                assert seen["memfd"] == seen["grpc"]
                assert seen["grpc"][0] is S.OK
                await clients["grpc"].release(ticket(number), epoch=1)
            await store.check_empty()

    asyncio.run(main())


@either_path
def test_a_payload_may_be_written_by_a_function(path: Path) -> None:
    async def main() -> None:
        async with running_store() as store:
            client = store.client(path)
            blocks = payload(5, 23)

            def fill(first: int, buffer: memoryview) -> None:
                for at in range(len(buffer) // PAGE):
                    buffer[at * PAGE : (at + 1) * PAGE] = blocks[first + at]

            t = ticket(1)
            await client.reserve(t, 23 * PAGE, epoch=1)
            assert (await client.put(t, draft(t, 23), fill)).status is S.OK
            await client.commit(t)
            kept: list[memoryview] = []
            assert (await client.get(t, keeping(kept))).status is S.OK
            assert kept == blocks

    asyncio.run(main())


@pytest.mark.parametrize("steady", [True, False])
@either_path
def test_a_long_payload_may_be_written_twice_but_not_twice_differently(
    path: Path, steady: bool
) -> None:
    """20 MiB: over gRPC it is not kept between hashing and sending it."""
    block, blocks = 1 << 20, 20

    async def main() -> None:
        asked: list[int] = []

        def fill(first: int, buffer: memoryview) -> None:
            times = asked.count(first)
            asked.append(first)
            for at in range(len(buffer) // block):
                mark = first + at + 1 + (0 if steady else 100 * times)
                buffer[at * block : (at + 1) * block] = bytes([mark]) * block

        async with running_store(
            budget_bytes=32 << 20, page_bytes=block, slab_bytes=32 << 20
        ) as store:
            client = store.client(path)
            t = ticket(1)
            await client.reserve(t, blocks * block, epoch=1)
            put = await client.put(t, draft(t, blocks, block_bytes=block), fill)
            if path == "grpc" and not steady:
                assert put.status is S.BAD_PAYLOAD
                assert "wrong hash" in put.detail
                return
            assert put.status is S.OK
            assert asked == [*range(0, blocks, 2)] * (2 if path == "grpc" else 1)
            await client.commit(t)
            kept: list[memoryview] = []
            assert (await client.get(t, keeping(kept))).status is S.OK
            assert [view[-1] for view in kept] == list(range(1, blocks + 1))

    asyncio.run(main())


@either_path
def test_what_a_function_raises_is_heard_and_its_put_is_over(path: Path) -> None:
    block, blocks = 1 << 20, 20

    async def main() -> None:
        asked = 0

        def fill(first: int, buffer: memoryview) -> None:
            nonlocal asked
            asked += 1
            if asked > (12 if path == "grpc" else 2):  # over gRPC: while it is sent
                raise ZeroDivisionError

        async with running_store(
            budget_bytes=32 << 20, page_bytes=block, slab_bytes=32 << 20
        ) as store:
            client = store.client(path)
            await client.reserve(ticket(1), blocks * block, epoch=1)
            with pytest.raises(ZeroDivisionError):
                await client.put(ticket(1), draft(ticket(1), blocks, block_bytes=block), fill)
            await until(store, puts=0)
            assert (await client.resolve(ticket(1))).status is S.SEALED
            await store.check_empty()

    asyncio.run(main())


@either_path
def test_only_its_writer_commits_a_payload(path: Path) -> None:
    async def main() -> None:
        async with running_store() as store:
            writer = store.client(path)
            await writer.reserve(ticket(1), 4 * PAGE, epoch=1)
            assert (await writer.put(ticket(1), draft(ticket(1), 2), payload(1, 2))).status is S.OK
            other = store.client(path, writer=WorkerRef(WorkerId("worker-1"), Incarnation(1)))
            await other.get(ticket(1), lambda manifest: None)  # has it connect
            assert (await other.commit(ticket(1))).status is S.NOT_YOURS
            assert (await other.get(ticket(1), lambda manifest: None)).status is S.UNKNOWN_TICKET
            assert (await writer.commit(ticket(1))).status is S.OK

    asyncio.run(main())


# ---- refusals: the same status over either path, and nothing is left behind ----------------------

Refusal = Callable[[Store, StoreClient], Awaitable[S]]


async def without_reservation(_: Store, client: StoreClient) -> S:
    return (await client.put(ticket(1), draft(ticket(1), 2), payload(1, 2))).status


async def by_another_writer(store: Store, client: StoreClient) -> S:
    other = WorkerRef(WorkerId("worker-1"), Incarnation(1))
    await client.reserve(ticket(1), 4 * PAGE, epoch=1, writer=other)
    return (await client.put(ticket(1), draft(ticket(1), 2), payload(1, 2))).status


async def by_an_earlier_life(store: Store, client: StoreClient) -> S:
    await client.reserve(ticket(1), 4 * PAGE, epoch=1)
    later = WorkerRef(WRITER.worker, Incarnation(WRITER.incarnation + 1))
    await client.reserve(ticket(2), 4 * PAGE, epoch=1, writer=later)
    return (await client.put(ticket(1), draft(ticket(1), 2), payload(1, 2))).status


async def sealed(_: Store, client: StoreClient) -> S:
    await client.reserve(ticket(1), 4 * PAGE, epoch=1)
    assert (await client.resolve(ticket(1))).status is S.SEALED
    return (await client.put(ticket(1), draft(ticket(1), 2), payload(1, 2))).status


async def larger_than_reserved(_: Store, client: StoreClient) -> S:
    await client.reserve(ticket(1), 2 * PAGE - 1, epoch=1)
    return (await client.put(ticket(1), draft(ticket(1), 2), payload(1, 2))).status


async def blocks_of_another_size(_: Store, client: StoreClient) -> S:
    await client.reserve(ticket(1), 4 * PAGE, epoch=1)
    half = draft(ticket(1), 4, block_bytes=PAGE // 2)
    return (await client.put(ticket(1), half, payload(1, 4, block_bytes=PAGE // 2))).status


async def of_another_run(_: Store, client: StoreClient) -> S:
    await client.reserve(ticket(1), 4 * PAGE, epoch=1)
    return (await client.put(ticket(1), draft(ticket(2), 2), payload(1, 2))).status


async def already_committed(_: Store, client: StoreClient) -> S:
    await swap_out(client, 1, 2)
    return (await client.put(ticket(1), draft(ticket(1), 2), payload(1, 2))).status


async def read_of_nothing(_: Store, client: StoreClient) -> S:
    return (await client.get(ticket(1), buffers)).status


async def read_before_commit(_: Store, client: StoreClient) -> S:
    await client.reserve(ticket(1), 4 * PAGE, epoch=1)
    assert (await client.put(ticket(1), draft(ticket(1), 2), payload(1, 2))).status is S.OK
    return (await client.get(ticket(1), buffers)).status


async def read_refused_by_its_reader(_: Store, client: StoreClient) -> S:
    await swap_out(client, 1, 2)
    return (await client.get(ticket(1), lambda manifest: None)).status


REFUSALS: list[tuple[Refusal, S]] = [
    (without_reservation, S.UNKNOWN_TICKET),
    (by_another_writer, S.NOT_YOURS),
    (by_an_earlier_life, S.SEALED),
    (sealed, S.SEALED),
    (larger_than_reserved, S.BAD_PAYLOAD),
    (blocks_of_another_size, S.BAD_PAYLOAD),
    (of_another_run, S.BAD_PAYLOAD),
    (already_committed, S.COMMITTED),
    (read_of_nothing, S.UNKNOWN_TICKET),
    (read_before_commit, S.UNKNOWN_TICKET),
    (read_refused_by_its_reader, S.BAD_PAYLOAD),
]


@pytest.mark.parametrize(("refusal", "status"), REFUSALS, ids=[r.__name__ for r, _ in REFUSALS])
@either_path
def test_refused(path: Path, refusal: Refusal, status: S) -> None:
    async def main() -> None:
        async with running_store() as store:
            client = store.client(path)
            assert await refusal(store, client) is status
            for number in (1, 2):
                await client.release(ticket(number), epoch=1)
            await store.check_empty()

    asyncio.run(main())


def test_the_budget_counts_and_takes_back_what_a_payload_does_not_use() -> None:
    async def main() -> None:
        async with running_store(budget_bytes=10 * PAGE) as store:
            client = store.client("auto")
            assert (await client.reserve(ticket(1), 7 * PAGE, epoch=1)).status is S.OK
            over = await client.reserve(ticket(2), 4 * PAGE, epoch=1)
            assert over.status is S.OVER_BUDGET
            assert (over.used_bytes, over.budget_bytes) == (7 * PAGE, 10 * PAGE)
            await client.put(ticket(1), draft(ticket(1), 2), payload(1, 2))
            assert (await client.commit(ticket(1))).used_bytes == 2 * PAGE
            assert (await client.reserve(ticket(2), 8 * PAGE, epoch=1)).status is S.OK

    asyncio.run(main())


def test_an_old_controller_is_refused() -> None:
    async def main() -> None:
        async with running_store() as store:
            client = store.client("auto")
            await client.reserve(ticket(1), PAGE, epoch=5)
            assert (await client.reserve(ticket(2), PAGE, epoch=4)).status is S.STALE_EPOCH
            assert (await client.release(ticket(1), epoch=4)).status is S.STALE_EPOCH
            assert (await client.release(ticket(1), epoch=5)).status is S.OK

    asyncio.run(main())


def test_a_reader_that_is_slow_keeps_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The payload is released and its room wanted after the pages were lent, before the copy."""
    monkeypatch.setattr(link, "INLINE_BYTES", 0)  # as a longer payload's: copied in a thread

    async def main() -> None:
        async with running_store(budget_bytes=4 * PAGE) as store:
            with ThreadPoolExecutor(1) as executor:
                client = store.client("memfd", executor=executor)
                other = store.client("grpc")
                await swap_out(client, 1, 2)
                kept: list[memoryview] = []
                lent, gate = asyncio.Event(), threading.Event()

                def into(manifest: Manifest) -> list[memoryview]:
                    kept[:] = buffers(manifest)
                    executor.submit(gate.wait, 10)  # the copy comes behind this
                    lent.set()
                    return kept

                read = asyncio.create_task(client.get(ticket(1), into))
                await lent.wait()
                assert (await other.release(ticket(1), epoch=1)).status is S.OK
                assert (await store.numbers())["used_bytes"] == 2 * PAGE
                over = await other.reserve(ticket(2), 3 * PAGE, epoch=1)
                assert over.status is S.OVER_BUDGET
                await swap_out(other, 3, 2, spare=0)
                gate.set()
                assert (await read).status is S.OK
                assert kept == payload(1, 2)
                await until(store, used_bytes=2 * PAGE)

    asyncio.run(main())


def test_a_large_payload_passes_both_ways() -> None:
    """64 MB: many times a message's limit."""

    async def main() -> None:
        block = 1 << 20
        async with running_store(
            budget_bytes=64 << 20, page_bytes=block, slab_bytes=32 << 20
        ) as store:
            blocks = [memoryview(random.Random(9).randbytes(block))] * 64
            for number, path in enumerate(PATHS):
                client = store.client(path)
                t = ticket(number)
                assert (await client.reserve(t, 64 << 20, epoch=1)).status is S.OK
                put = await client.put(t, draft(t, 64, block_bytes=block), blocks)
                assert (put.status, put.path) == (S.OK, path)
                assert (await client.commit(t)).status is S.OK
                kept: list[memoryview] = []
                got = await client.get(t, keeping(kept))
                assert (got.status, got.payload_bytes) == (S.OK, 64 << 20)
                assert kept == blocks
                await client.release(t, epoch=1)

    asyncio.run(main())


def test_reservations_expire() -> None:
    async def main() -> None:
        async with running_store(config=StoreConfig(reservation_ms=100)) as store:
            client = store.client("auto")
            await client.reserve(ticket(1), PAGE, epoch=1)
            await asyncio.sleep(0.3)
            await store.check_empty()
            put = await client.put(ticket(1), draft(ticket(1), 1), payload(1, 1))
            assert put.status is S.SEALED

    asyncio.run(main())


def test_without_the_token_nothing_is_done() -> None:
    async def main() -> None:
        async with running_store() as store:
            with pytest.raises(ValueError, match="token = ''"):
                store.client("grpc", token="")
            for token in ("another token", TOKEN[:-1]):
                client = store.client("grpc", token=token)
                refused = await client.reserve(ticket(1), PAGE, epoch=1)
                assert refused.status is S.UNREACHABLE
                assert refused.detail.startswith("UNAUTHENTICATED")
                put = await client.put(ticket(1), draft(ticket(1), 1), payload(1, 1))
                assert put.detail.startswith("UNAUTHENTICATED")
                got = await client.get(ticket(1), buffers)
                assert got.detail.startswith("UNAUTHENTICATED")
                assert await client.stats() is None
            await store.check_empty()

    asyncio.run(main())
