"""Copies between a pool and a real store: each ends with exactly one answer, whatever happens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepinfer.kvstore.core.ids import Run, StoreId
from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.core.messages import StoreStatus
from deepinfer.kvstore.core.precision import Precision
from deepinfer.workers.core.events import (
    REFUSALS,
    AbortPut,
    CancelFetch,
    Commit,
    CommitReply,
    FetchDone,
    PutDone,
    Resolve,
    ResolveReply,
    StoreGone,
)
from deepinfer.workers.pool import PagedPool
from deepinfer.workers.swap import KvIdentity
from kvstore_kit import Store
from support.swapper_bench import FETCH, IDENTITY, LAYOUT, PUT, STORE, TICKET, Bench, run


def test_what_went_out_comes_in_at_other_blocks() -> None:
    async def main(store: Store) -> None:
        bench = Bench(store)
        await bench.put()
        done = await bench.fetch()
        assert (done.status, done.blocks, done.token_ids) == (StoreStatus.OK, 3, PUT.token_ids)
        firsts = [int(bench.pool.storage[block][0]) for block in range(8)]
        assert firsts == [4, 2, 2, 4, 5, 5, 7, 8], "blocks 3, 4, 1 went to 0, 5, 2"
        await bench.swapper.close()

    run(main)


def test_an_abort_before_the_copy_has_begun_is_answered() -> None:
    async def main(store: Store) -> None:
        bench = Bench(store)
        await bench.reserve()
        bench.swapper.put(PUT)
        bench.swapper.abort_put(AbortPut(TICKET, STORE))
        assert await bench.answer() == PutDone(TICKET, False, 0, 0, "aborted")
        bench.swapper.fetch(FETCH)
        bench.swapper.cancel_fetch(CancelFetch(TICKET, FETCH.run))
        done = await bench.answer()
        assert isinstance(done, FetchDone)
        assert (done.status, done.detail) == (StoreStatus.UNREACHABLE, "cancelled")
        assert bench.events.empty()
        await bench.swapper.close()

    run(main)


def test_a_ticket_without_a_reservation_is_refused() -> None:
    async def main(store: Store) -> None:
        bench = Bench(store)
        bench.swapper.put(PUT)
        done = await bench.answer()
        assert isinstance(done, PutDone)
        assert not done.ok
        assert done.detail.startswith("unknown_ticket")
        bench.swapper.resolve(Resolve(TICKET, STORE))
        assert await bench.answer() == ResolveReply(TICKET, StoreStatus.SEALED)
        await bench.swapper.close()

    run(main)


def test_another_models_payload_does_not_touch_the_pool() -> None:
    async def main(store: Store) -> None:
        await Bench(store).put()
        bench = Bench(store, identity=KvIdentity(model="another"))
        before = bench.pool.storage.clone()
        done = await bench.fetch()
        assert done.status is StoreStatus.BAD_PAYLOAD
        assert done.detail == "manifest.model = 'a model', here it must be 'another'"
        assert bool((bench.pool.storage == before).all())
        await bench.swapper.close()

    run(main)


def test_a_store_at_another_address_is_another_life() -> None:
    async def main(store: Store) -> None:
        bench = Bench(store)
        await bench.put()
        bench.swapper.learn({STORE: "127.0.0.1:1"})
        assert await bench.answer() == StoreGone(STORE)
        bench.swapper.commit(Commit(TICKET, STORE))
        assert await bench.answer() == CommitReply(TICKET, StoreStatus.UNREACHABLE)
        await bench.swapper.close()

    run(main)


def test_an_unknown_store_is_unreachable() -> None:
    async def main(store: Store) -> None:
        bench = Bench(store)
        nowhere = StoreId("elsewhere")
        bench.swapper.put(PUT._replace(store=nowhere))
        put = await bench.answer()
        assert isinstance(put, PutDone)
        assert not put.ok
        bench.swapper.fetch(FETCH._replace(store=nowhere))
        fetched = await bench.answer()
        assert isinstance(fetched, FetchDone)
        assert fetched.status is StoreStatus.UNREACHABLE
        bench.swapper.commit(Commit(TICKET, nowhere))
        assert await bench.answer() == CommitReply(TICKET, StoreStatus.UNREACHABLE)
        bench.swapper.resolve(Resolve(TICKET, nowhere))
        assert await bench.answer() == ResolveReply(TICKET, StoreStatus.UNREACHABLE)
        await bench.swapper.close()

    run(main)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": "fp8"}, "dtype"),
        ({"encoding": "offset-binary"}, "encoding"),
        ({"layout": "kv1:other"}, "layout"),
        ({"precision": "fp4"}, "precision"),
        ({"run": Run(1, 8)}, "run"),
        ({"token_ids": tuple(range(8))}, "blocks"),
    ],
)
def test_each_mismatch_is_named(change: dict[str, object], named: str) -> None:
    pool = PagedPool(LAYOUT, 8)
    manifest = IDENTITY.draft(pool, PUT)
    assert IDENTITY.refusal(pool, manifest, FETCH) is None
    other: Manifest = replace(manifest, **change)  # type: ignore[arg-type]
    refusal = IDENTITY.refusal(pool, other, FETCH)
    assert refusal is not None
    reason, words = refusal
    assert reason == named
    assert reason in REFUSALS
    assert words.startswith(f"manifest.{named} = ")


def test_the_worst_precision_travels_with_the_payload() -> None:
    async def main(store: Store) -> None:
        bench = Bench(store)
        await bench.reserve()
        bench.swapper.put(PUT._replace(precision=Precision.MIXED))
        put = await bench.answer()
        assert isinstance(put, PutDone)
        assert put.ok
        bench.swapper.commit(Commit(TICKET, STORE))
        await bench.answer()
        done = await bench.fetch()
        assert done.status is StoreStatus.OK
        assert done.precision is Precision.MIXED
        await bench.swapper.close()

    run(main)


def test_a_payload_that_needs_more_room_is_refused() -> None:
    pool = PagedPool(LAYOUT, 8)
    small = FETCH._replace(block_ids=(0, 5))
    refusal = IDENTITY.refusal(pool, IDENTITY.draft(pool, PUT), small)
    assert refusal == ("blocks", "3 blocks, room for 2")
