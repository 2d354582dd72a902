"""One store's core and memory, in one event loop: what the gRPC and the same-node side share.

Nothing here is a thread's business but zeroing fresh slabs and hashing; the core is only ever
called from the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from deepinfer.kvstore import hashing, transfers
from deepinfer.kvstore.copier import FILL_THREADS, join, submit
from deepinfer.kvstore.core.config import StoreConfig
from deepinfer.kvstore.core.events import (
    AbortPut,
    Answer,
    BeginGet,
    BeginPut,
    Call,
    CallBody,
    CallId,
    Commit,
    EndGet,
    Event,
    FinishPut,
    GetGrant,
    PutGrant,
    PutId,
    ReadId,
    Reply,
    Report,
    Resolve,
    RevokePut,
    Tick,
)
from deepinfer.kvstore.core.ids import Incarnation, NodeId, StoreId
from deepinfer.kvstore.core.manifest import GROUPS_MAX, Manifest
from deepinfer.kvstore.core.messages import (
    Release,
    Reserve,
    StoreReply,
    StoreReport,
    StoreStatus,
)
from deepinfer.kvstore.core.store import StoreCore
from deepinfer.kvstore.host_pool import SLAB_BYTES, HostPool
from deepinfer.proto.failpoints import Failpoints

TICK_S = 0.05
FOLLOW_THREADS = FILL_THREADS
"""For one payload: as many as its writer has."""
LONG_BYTES = transfers.LONG_BYTES if FOLLOW_THREADS == 1 else 64 << 20
"""From here on a payload is hashed in threads while it is written; one thread is no faster than the
loop, but steps of long payloads are longer than the loop could be kept from its other work."""
VERIFY_INLINE_BYTES = 8 << 20
"""Up to here the loop hashes by itself, in a few hundred microseconds at most: as long as a chunk
over gRPC takes it, and little more than handing it to a thread and back would."""


class StoreRuntime:
    """Performs the core's effects. ``tick`` must run as long as it is used."""

    def __init__(
        self,
        *,
        store: StoreId,
        incarnation: Incarnation,
        node: NodeId,
        budget_bytes: int,
        page_bytes: int,
        config: StoreConfig,
        slab_bytes: int = SLAB_BYTES,
        clock_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
        failpoints: Failpoints | None = None,
    ) -> None:
        self._failpoints = failpoints or Failpoints()
        self.core = StoreCore(
            store=store,
            incarnation=incarnation,
            node=node,
            budget_bytes=budget_bytes,
            page_bytes=page_bytes,
            config=config,
        )
        self.pool = HostPool(
            page_bytes=page_bytes,
            slab_bytes=min(slab_bytes, budget_bytes),
            name=f"kv-{store}"[:200],
        )
        self.on_report: Callable[[StoreReport], None] | None = None
        """Hears of reports; they are lost while it is None."""
        self._clock_ms = clock_ms
        self._calls = 0
        self._revoke: dict[PutId, Callable[[], None]] = {}
        self._threads = ThreadPoolExecutor(FOLLOW_THREADS + 1, thread_name_prefix="kvstore")

    def close(self) -> None:
        """Unmap everything. The callers see to it that no put or read is under way."""
        self._threads.shutdown()
        self.pool.close()

    # ---- the core ----

    def control(self, body: Reserve | Release | Commit | Resolve) -> StoreReply:
        """A call without pages."""
        reply = self._call(body)
        assert isinstance(reply, StoreReply)
        if reply.status is StoreStatus.OK:
            if isinstance(body, Reserve):
                self._failpoints.hit("after_reserve")
            elif isinstance(body, Commit):
                self._failpoints.hit("before_commit_reply")
        return reply

    def grant_put(self, body: BeginPut, on_revoke: Callable[[], None]) -> PutGrant:
        """Grant pages; they are not to be used before ``map_granted``, unless ``mapped``.

        ``on_revoke`` is called at most once, until the put ends.
        """
        grant = self._call(body)
        assert isinstance(grant, PutGrant)
        if grant.put is not None:
            self._revoke[grant.put] = on_revoke
        return grant

    async def map_granted(self, grant: PutGrant) -> PutGrant:
        """The grant once its pages are mapped; or, if that fails, the refusal in its place."""
        if grant.put is None:
            return grant
        try:
            await self._grow()
        except BaseException as error:
            self.abort_put(grant.put)
            if isinstance(error, OSError):  # the node's memory is less than the budget says
                return PutGrant(grant.ticket, StoreStatus.OVER_BUDGET, None, ())
            raise
        return grant

    async def begin_put(self, body: BeginPut, on_revoke: Callable[[], None]) -> PutGrant:
        """Grant pages that are mapped. ``on_revoke`` is called at most once, until the put ends."""
        return await self.map_granted(self.grant_put(body, on_revoke))

    def finish_put(
        self, grant: PutGrant, manifest: Manifest, received_bytes: int, hash_ok: bool
    ) -> StoreReply:
        """The put's writer has stopped."""
        assert grant.put is not None
        self._failpoints.hit("mid_put")
        self._revoke.pop(grant.put, None)
        reply = self._call(FinishPut(grant.ticket, grant.put, received_bytes, hash_ok, manifest))
        assert isinstance(reply, StoreReply)
        return reply

    def abort_put(self, put: PutId) -> None:
        """The put's writer has stopped and is not to be believed."""
        self._revoke.pop(put, None)
        self.send(AbortPut(put))

    def begin_get(self, body: BeginGet) -> GetGrant:
        """Pin a payload's pages; ``end_get`` must follow an OK."""
        grant = self._call(body)
        assert isinstance(grant, GetGrant)
        if grant.read is not None:
            self._failpoints.hit("mid_get")
        return grant

    def end_get(self, read: ReadId) -> None:
        """Unpin."""
        self.send(EndGet(read))

    def send(self, event: Event) -> Reply | None:
        """Give the core an event, perform what it wants, return its answer if it was a call."""
        answer: Reply | None = None
        for effect in self.core.handle(event, self._clock_ms()):
            match effect:
                case Answer(_, reply):
                    answer = reply
                case RevokePut(put):
                    revoke = self._revoke.pop(put, None)
                    if revoke is not None:
                        revoke()
                case Report(report):
                    if self.on_report is not None:
                        self.on_report(report)
        return answer

    def _call(self, body: CallBody) -> Reply:
        self._calls += 1
        reply = self.send(Call(CallId(self._calls), body))
        assert reply is not None, body
        return reply

    def counters(self) -> dict[str, float]:
        """Totals since this life began, by the names they are exported under."""
        counts = self.core.counters
        return {f"deepinfer_store_{name}_total": float(count) for name, count in counts.items()}

    async def tick(self) -> None:
        """Give the core the time until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.send(Tick())

    # ---- the memory ----

    @property
    def mapped(self) -> bool:
        """Whether every page in use lies in a mapped slab: a put has not to wait for its own."""
        return self.pool.pages_mapped >= self.core.pages_touched

    def follow(self, grant: PutGrant, group_bytes: int) -> hashing.Follower | hashing.LongFollower:
        """What hashes a put's pages behind its writer; a long payload's in threads."""
        runs = list(self.pool.runs(grant.pages))
        groups = hashing.Groups(sum(map(len, runs)), group_bytes)
        size = groups.payload_bytes
        if size < LONG_BYTES or size > GROUPS_MAX * group_bytes:
            return hashing.Follower(runs, groups)
        return hashing.LongFollower(runs, groups)

    def follow_on(self, follower: hashing.LongFollower, written: int) -> None:
        """Have what is written hashed; returns at once."""
        if follower.written(written):
            follower.jobs = [job for job in follower.jobs if not job.done()]
            if len(follower.jobs) < FOLLOW_THREADS:
                follower.jobs.append(self._threads.submit(follower.some))

    async def verify(
        self, manifest: Manifest, follower: hashing.Follower | hashing.LongFollower
    ) -> bool:
        """Whether the put's pages hold what the manifest says; in threads."""
        loop = asyncio.get_running_loop()
        if isinstance(follower, hashing.LongFollower):
            follower.written(follower.groups.payload_bytes)
            helpers = submit(self._threads, FOLLOW_THREADS - 1, follower.some)
            await loop.run_in_executor(
                self._threads, join, [*follower.jobs, *helpers], follower.some
            )
        return await loop.run_in_executor(self._threads, follower.matches, manifest)

    async def _grow(self) -> None:
        if not self.mapped:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._threads, self.pool.grow_to, self.core.pages_touched)
