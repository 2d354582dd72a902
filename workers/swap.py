"""Moves payloads between the pool and the stores, while other requests go on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from deepinfer.kvstore.client import Fill, Path, StoreClient, Take, Wait
from deepinfer.kvstore.core.ids import Run, StoreId, Ticket, WorkerRef
from deepinfer.kvstore.core.layout import KvLayout
from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.core.messages import StoreStatus
from deepinfer.kvstore.core.precision import Precision
from deepinfer.proto.failpoints import Failpoints
from deepinfer.workers.core.events import (
    AbortPut,
    CancelFetch,
    CancelPrefetch,
    Commit,
    CommitReply,
    FetchDone,
    FetchPayload,
    PrefetchPayload,
    PutDone,
    PutPayload,
    Resolve,
    ResolveReply,
    StoreGone,
    WorkerEvent,
)
from deepinfer.workers.pool import Fence, PagedPool
from deepinfer.workers.prefetch import Prefetcher

log = logging.getLogger(__name__)

PRECISIONS = tuple(precision.value for precision in Precision)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvIdentity:
    """What a payload must share with a pool to be of use there."""

    model: str
    """Fingerprint of config and weights."""
    key_scales: str = ""
    """Names the powers of two that K is kept times (``KeyScales.digest``); empty: none."""

    def layout(self, layout: KvLayout) -> str:
        """What manifests call a pool's layout: bytes under other exponents mean something else."""
        name = layout.fingerprint()
        return f"{name}:key_exponents={self.key_scales}" if self.key_scales else name

    def draft(self, pool: PagedPool, effect: PutPayload) -> Manifest:
        """Describe the payload of a put; hashes are filled in by whoever copies it."""
        layout = pool.layout
        return Manifest.draft(
            dtype=layout.dtype.name,
            layout=self.layout(layout),
            block_bytes=layout.block_bytes,
            blocks=len(effect.block_ids),
            token_ids=effect.token_ids,
            state=effect.state,
            precision=effect.precision.value,
            model=self.model,
            run=effect.run,
        )

    def refusal(
        self, pool: PagedPool, manifest: Manifest, effect: FetchPayload
    ) -> tuple[str, str] | None:
        """Why a payload is of no use to this fetch, and in words; None if it is of use."""
        layout = pool.layout
        pairs = {
            "dtype": (manifest.dtype, layout.dtype.name),
            "encoding": (manifest.encoding, "native"),
            "layout": (manifest.layout, self.layout(layout)),
            "block_bytes": (manifest.block_bytes, layout.block_bytes),
            "model": (manifest.model, self.model),
            "run": (manifest.run, effect.ticket.run),
            "blocks": (manifest.blocks, layout.blocks_for(manifest.tokens)),
        }
        for name, (found, wanted) in pairs.items():
            if found != wanted:
                return name, f"manifest.{name} = {found!r}, here it must be {wanted!r}"
        if manifest.precision not in PRECISIONS:
            legal = ", ".join(PRECISIONS)
            return (
                "precision",
                f"manifest.precision = {manifest.precision!r}, must be one of {legal}",
            )
        if manifest.blocks > len(effect.block_ids):
            return "blocks", f"{manifest.blocks} blocks, room for {len(effect.block_ids)}"
        return None


class StoreSwapper:
    """Puts, fetches and the calls around them, each in a task; one client a store.

    The pool's bytes are copied in the client's threads, behind a fence: every step that was
    launched before the put or the fetch was asked for. ``PutDone`` and ``FetchDone`` are fed when
    nothing touches the blocks any more, no thread and no copy of the card, whatever happened.
    Belongs to one event loop. ``node`` is where the worker runs: stores of other nodes are reached
    over gRPC.
    """

    def __init__(
        self,
        ref: WorkerRef,
        pool: PagedPool,
        identity: KvIdentity,
        feed: Callable[[WorkerEvent], None],
        *,
        token: str,
        path: Path = "auto",
        node: str | None = None,
        failpoints: Failpoints | None = None,
    ) -> None:
        self._ref = ref
        self._pool = pool
        self._identity = identity
        self._feed = feed
        self._token = token
        self._path: Path = path
        self._node = node
        self._failpoints = failpoints or Failpoints()
        self._addresses: dict[StoreId, str] = {}
        self._clients: dict[StoreId, StoreClient] = {}
        self._puts: dict[Ticket, asyncio.Task[PutDone]] = {}
        self._fetches: dict[tuple[Ticket, Run], asyncio.Task[FetchDone]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._register = None if pool.copies is None else pool.copies.register
        self.prefetcher = Prefetcher(self._register, pool.layout.block_bytes)

    def learn(self, addresses: Mapping[StoreId, str]) -> None:
        """Take addresses from an order; a store at another address is another life of it."""
        for store, address in addresses.items():
            if self._addresses.get(store, address) != address:
                old = self._clients.pop(store, None)
                if old is not None:
                    self._keep(asyncio.ensure_future(old.close()))
                    self._feed(StoreGone(store))
            self._addresses[store] = address

    def put(self, effect: PutPayload) -> None:
        # Now: steps that are launched by the time the copy begins are none of its business.
        task = self._keep(asyncio.ensure_future(self._put(effect, self._pool.fence())))
        self._puts[effect.ticket] = task
        # Not in the task: one that is cancelled before it has begun would never say so.
        task.add_done_callback(lambda ended: self._put_ended(effect, ended))

    def abort_put(self, effect: AbortPut) -> None:
        task = self._puts.get(effect.ticket)
        if task is not None:
            task.cancel()

    def commit(self, effect: Commit) -> None:
        self._keep(asyncio.ensure_future(self._commit(effect)))

    def resolve(self, effect: Resolve) -> None:
        self._keep(asyncio.ensure_future(self._resolve(effect)))

    def fetch(self, effect: FetchPayload) -> None:
        # Whoever had these blocks before may have been in the last step.
        task = self._keep(asyncio.ensure_future(self._fetch(effect, self._pool.fence())))
        self._fetches[effect.ticket, effect.run] = task
        task.add_done_callback(lambda ended: self._fetch_ended(effect, ended))

    def cancel_fetch(self, effect: CancelFetch) -> None:
        task = self._fetches.get((effect.ticket, effect.run))
        if task is not None:
            task.cancel()

    def prefetch(self, effect: PrefetchPayload) -> None:
        self.prefetcher.begin(effect, self._client(effect.store))

    def cancel_prefetch(self, effect: CancelPrefetch) -> None:
        self.prefetcher.drop(effect.ticket)

    async def close(self) -> None:
        """Stop every copy, wait until none runs, and hang up."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.prefetcher.close()
        for client in self._clients.values():
            await client.close()
        self._clients.clear()

    # ---- out -------------------------------------------------------------------------------

    async def _put(self, effect: PutPayload, fence: Fence) -> PutDone:
        client = self._client(effect.store)
        if client is None:
            return PutDone(effect.ticket, False, 0, 0, f"no address of store {effect.store}")
        self._failpoints.hit("before_reserve")
        result = await client.put(
            effect.ticket,
            self._identity.draft(self._pool, effect),
            self._filler(effect.block_ids, fence),
        )
        good = result.status is StoreStatus.OK
        detail = "" if good else f"{result.status.value}: {result.detail}"
        return PutDone(effect.ticket, good, result.payload_bytes, result.copy_us, detail)

    def _put_ended(self, effect: PutPayload, task: asyncio.Task[PutDone]) -> None:
        self._puts.pop(effect.ticket, None)
        if task.cancelled():
            done = PutDone(effect.ticket, False, 0, 0, "aborted")
        elif (error := task.exception()) is not None:
            log.error("put of %s", effect.ticket, exc_info=error)
            done = PutDone(effect.ticket, False, 0, 0, str(error))
        else:
            done = task.result()
        if not done.ok:
            log.info("put of %s failed: %s", effect.ticket, done.detail)
        self._feed(done)

    def _filler(self, block_ids: Sequence[int], fence: Fence) -> Fill:
        block_bytes = self._pool.layout.block_bytes

        def fill(first: int, buffer: memoryview) -> Wait | None:
            count = len(buffer) // block_bytes
            wait = self._pool.begin_out(block_ids[first : first + count], buffer, fence)
            self._failpoints.hit("mid_copy")
            return wait

        return fill

    async def _commit(self, effect: Commit) -> None:
        client = self._client(effect.store)
        status = StoreStatus.UNREACHABLE
        if client is not None:
            self._failpoints.hit("before_commit")
            status = (await client.commit(effect.ticket)).status
            if status is StoreStatus.OK:
                self._failpoints.hit("after_commit_before_free")
        self._feed(CommitReply(effect.ticket, status))

    async def _resolve(self, effect: Resolve) -> None:
        client = self._client(effect.store)
        status = StoreStatus.UNREACHABLE
        if client is not None:
            status = (await client.resolve(effect.ticket)).status
        self._feed(ResolveReply(effect.ticket, status))

    # ---- in --------------------------------------------------------------------------------

    async def _fetch(self, effect: FetchPayload, fence: Fence) -> FetchDone:
        client = self._client(effect.store)
        if client is None:
            return _unfetched(effect, StoreStatus.UNREACHABLE, f"no address of {effect.store}")
        done = await self._take_in(client, effect, fence) if effect.ahead else None
        if done is None:
            done = await self._copy_in(client, effect, fence)
        if done.status is StoreStatus.OK:
            self._failpoints.hit("after_fetch_before_report")
        return done

    def _fetch_ended(self, effect: FetchPayload, task: asyncio.Task[FetchDone]) -> None:
        self._fetches.pop((effect.ticket, effect.run), None)
        if effect.ahead:
            self.prefetcher.drop(effect.ticket)
        if task.cancelled():
            done = _unfetched(effect, StoreStatus.UNREACHABLE, "cancelled")
        elif (error := task.exception()) is not None:
            log.error("fetch of %s", effect.ticket, exc_info=error)
            done = _unfetched(effect, StoreStatus.UNREACHABLE, str(error))
        else:
            done = task.result()
        if done.status is not StoreStatus.OK:
            log.info("fetch of %s: %s: %s", effect.ticket, done.status.value, done.detail)
        self._feed(done)

    async def _copy_in(self, client: StoreClient, effect: FetchPayload, fence: Fence) -> FetchDone:
        """Fetch into the effect's blocks, each part once its hash was found right.

        A payload that proves wrong further on leaves what came before it in blocks that are the
        sequence's own and are computed anew.
        """
        refused: tuple[str, str] | None = None
        damage = "manifest"

        def into(manifest: Manifest) -> Take | None:
            nonlocal refused, damage
            damage = "bytes"
            refused = self._identity.refusal(self._pool, manifest, effect)
            return None if refused else self._taker(effect.block_ids, fence)

        result = await client.get(effect.ticket, into)
        if result.status is StoreStatus.BAD_PAYLOAD:
            reason, detail = refused or (damage, result.detail)
            return _unfetched(effect, result.status, detail, reason)
        if result.status is not StoreStatus.OK or result.manifest is None:
            return _unfetched(effect, result.status, result.detail)
        ahead = False if effect.ahead else None
        return _fetched(effect, result.manifest, result.copy_us, ahead)

    async def _take_in(
        self, client: StoreClient, effect: FetchPayload, fence: Fence
    ) -> FetchDone | None:
        """As ``_copy_in``, of what was fetched ahead; None if that is of no use.

        The time is counted from here: what came before held nobody up.
        """
        started = time.perf_counter_ns()
        arrived = await self.prefetcher.payload(effect.ticket)
        if arrived is None:
            return None
        manifest, payload = arrived
        if (refused := self._identity.refusal(self._pool, manifest, effect)) is not None:
            log.info("what was fetched ahead as %s: %s", effect.ticket, refused[1])
            return None
        result = await client.take(manifest, payload, self._taker(effect.block_ids, fence))
        if result.status is not StoreStatus.OK:
            log.warning("what was fetched ahead as %s: %s", effect.ticket, result.detail)
            return None
        return _fetched(effect, manifest, (time.perf_counter_ns() - started) // 1000, True)

    def _taker(self, block_ids: Sequence[int], fence: Fence) -> Take:
        block_bytes = self._pool.layout.block_bytes

        def take(first: int, buffer: memoryview) -> Wait | None:
            count = len(buffer) // block_bytes
            wait = self._pool.begin_in(block_ids[first : first + count], buffer, fence)
            self._failpoints.hit("mid_fetch")
            return wait

        return take

    # ---- both ------------------------------------------------------------------------------

    def _client(self, store: StoreId) -> StoreClient | None:
        address = self._addresses.get(store)
        if address is None:
            return None
        client = self._clients.get(store)
        if client is None:
            client = StoreClient(
                address,
                self._ref,
                token=self._token,
                path=self._path,
                node=self._node,
                on_map=self._register,
            )
            self._clients[store] = client
        return client

    def _keep(self, task: asyncio.Task[_T]) -> asyncio.Task[_T]:
        """Hold a reference until the task ends: the loop itself does not."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _fetched(
    effect: FetchPayload, manifest: Manifest, copy_us: int, ahead: bool | None
) -> FetchDone:
    return FetchDone(
        effect.ticket,
        effect.run,
        StoreStatus.OK,
        manifest.token_ids,
        manifest.blocks,
        copy_us,
        manifest.payload_bytes,
        precision=Precision(manifest.precision),
        ahead=ahead,
    )


def _unfetched(
    effect: FetchPayload, status: StoreStatus, detail: str, refused: str = ""
) -> FetchDone:
    return FetchDone(
        effect.ticket,
        effect.run,
        status,
        (),
        0,
        0,
        detail=detail,
        ahead=False if effect.ahead else None,
        refused=refused,
    )
