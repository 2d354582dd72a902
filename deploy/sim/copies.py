"""Copies between a worker's pool and a store's slab, block by block, as a shell makes them.

On one node the worker reads and writes the mapped slab itself; between nodes the payload travels
in a stream and the store's handler does it. Either way nothing is hashed but what was copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from deepinfer.deploy.sim.checker import ViolationError
from deepinfer.deploy.sim.model import kv_in, kv_of, rank_in
from deepinfer.deploy.sim.store_host import Block, Mapped, Mapping, PutStream, Slab, hash_blocks
from deepinfer.kvstore.core.events import BeginGet, BeginPut, FinishPut, GetGrant, PutGrant, PutId
from deepinfer.kvstore.core.ids import Incarnation
from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.core.messages import StoreReply, StoreStatus
from deepinfer.kvstore.core.precision import Precision
from deepinfer.workers.core.events import (
    FetchDone,
    FetchPayload,
    PrefetchPayload,
    PutDone,
    PutPayload,
)

if TYPE_CHECKING:
    from deepinfer.deploy.sim.worker_host import WorkerHost

_CALL_MS = 400


class Put:
    """One copy out of the pool; it ends in exactly one ``PutDone``."""

    __slots__ = (
        "_aborted",
        "_asked",
        "_copied",
        "_mapping",
        "_over",
        "_store",
        "_worker",
        "put_id",
        "store_life",
    )

    def __init__(self, worker: WorkerHost, asked: PutPayload) -> None:
        self._worker = worker
        self._asked = asked
        self._store = worker.world.stores[asked.store]
        self.store_life = Incarnation(self._store.life)
        """The life of the store that the worker is connected to."""
        self.put_id: PutId | None = None
        self._copied: list[Block] = []
        self._aborted = False
        self._over = False
        body = BeginPut(
            asked.ticket,
            worker.ref,
            len(asked.block_ids) * worker.world.block_bytes,
            worker.plan.node == self._store.plan.node,
            self.store_life,
        )
        self._mapping = Mapping(worker.ref, body)

    def begin(self) -> None:
        """Ask for pages, or copy to host memory at once if the payload goes by stream."""
        if self._mapping.body.shared:
            self._worker.call(
                self._store,
                self._mapping,
                self._store.serve_put,
                self._granted,
                lambda: self._end(ok=False, detail="no answer"),
                _CALL_MS,
            )
        else:
            self._copy_to_host()

    def abort(self) -> None:
        """Stop at the next block."""
        self._aborted = True

    def _read_block(self) -> Block:
        """Copy the next block out of the pool; it must hold what the payload will claim."""
        worker, asked = self._worker, self._asked
        number = len(self._copied)
        size = worker.world.block_size
        start, end = number * size, min((number + 1) * size, len(asked.token_ids))
        block = tuple(worker.pool[asked.block_ids[number]])
        if number == 0:
            worker.world.history.check_sequence(asked.seq, list(asked.token_ids))
        seq, values = asked.seq, block[: end - start]
        if list(map(kv_in, values)) != kv_of(asked.token_ids)[start:end]:
            raise ViolationError(f"{worker}: {asked.seq} swaps out KV that is not its own")
        worst, exact = max(map(rank_in, values)), worker.world.history.record(seq.request).exact
        if worst > asked.precision.rank or (exact and asked.precision.rank):
            raise ViolationError(
                f"{worker}: {asked.seq} swaps out KV of rank {worst} as {asked.precision.value}"
            )
        self._copied.append(block)
        return block

    # ---- same node ----

    def _granted(self, granted: Mapped[PutGrant]) -> None:
        grant, slab = granted.body, granted.slab
        if grant.put is None:
            self._end(ok=False, detail=grant.status.value)
            return
        self.put_id = grant.put
        self._write(grant, slab)

    def _write(self, grant: PutGrant, slab: Slab) -> None:
        assert grant.put is not None
        worker = self._worker
        if self._aborted or worker.revoked(grant.put):
            self._end(ok=False, detail="aborted")
            return
        number = len(self._copied)
        if number < len(self._asked.block_ids):
            worker.after(worker.copy_delay_ms(), self._written, grant, slab)
            return
        body = FinishPut(
            ticket=self._asked.ticket,
            put=grant.put,
            received_bytes=number * worker.world.block_bytes,
            hash_ok=True,
            manifest=self._manifest(),
        )
        # What the slab holds is verified by the store: it reads the pages itself.
        worker.call(
            self._store,
            body,
            self._store.serve_finish_put,
            self._finished,
            lambda: self._end(ok=False, detail="no answer"),
            _CALL_MS,
        )

    def _written(self, grant: PutGrant, slab: Slab) -> None:
        """A block's copy has ended; one under way is not stopped by an abort."""
        page = grant.pages[len(self._copied)]
        slab[page] = self._read_block()
        self._write(grant, slab)

    def _finished(self, reply: StoreReply) -> None:
        self._end(ok=reply.status is StoreStatus.OK, detail=reply.status.value)

    # ---- between nodes ----

    def _copy_to_host(self) -> None:
        worker = self._worker
        if self._aborted:
            self._end(ok=False, detail="aborted")
        elif len(self._copied) < len(self._asked.block_ids):
            worker.after(worker.copy_delay_ms(), self._at_host)
        else:
            worker.call(
                self._store,
                PutStream(self._mapping.body, tuple(self._copied), self._manifest()),
                self._store.serve_put_stream,
                self._received,
                lambda: self._end(ok=False, detail="no answer"),
                _CALL_MS,
            )

    def _at_host(self) -> None:
        self._read_block()
        self._copy_to_host()

    def _received(self, status: StoreStatus) -> None:
        self._end(ok=status is StoreStatus.OK, detail=status.value)

    def _manifest(self) -> Manifest:
        world = self._worker.world
        payload_hash = hash_blocks(tuple(self._copied))
        return Manifest(
            dtype="fp16",
            layout="sim",
            block_bytes=world.block_bytes,
            blocks=len(self._copied),
            payload_bytes=len(self._copied) * world.block_bytes,
            token_ids=self._asked.token_ids,
            state=self._asked.state,
            precision=self._asked.precision.value,
            model="sim",
            run=self._asked.run,
            group_blocks=len(self._copied),
            group_hashes=(payload_hash,),
            payload_hash=payload_hash,
        )

    def _end(self, *, ok: bool, detail: str) -> None:
        if self._over:
            return
        self._over = True
        worker = self._worker
        self._mapping.closed = True
        if self._mapping.body.shared:
            delay = 1 + worker.within(5)
            worker.engine.after(
                delay, self._store.take, self.store_life, self._store.close, (self._mapping,)
            )
        payload_bytes = len(self._copied) * worker.world.block_bytes
        worker.put_done(self, PutDone(self._asked.ticket, ok, payload_bytes, 1, detail))


class Fetch:
    """One copy into the pool; it ends in exactly one ``FetchDone``."""

    __slots__ = (
        "_ahead",
        "_asked",
        "_cancelled",
        "_mapping",
        "_over",
        "_store",
        "_store_life",
        "_used_ahead",
        "_worker",
    )

    def __init__(self, worker: WorkerHost, asked: FetchPayload, ahead: Ahead | None) -> None:
        self._worker = worker
        self._asked = asked
        self._ahead = ahead
        self._used_ahead = False
        self._store = worker.world.stores[asked.store]
        self._store_life = Incarnation(self._store.life)
        self._cancelled = False
        self._over = False
        self._mapping = Mapping(worker.ref, BeginGet(asked.ticket, self._store_life))

    def begin(self) -> None:
        """Take what was fetched ahead, or ask for the pages, or for the bytes."""
        if self._ahead is not None:
            self._ahead.when_over(self._from_ahead)
        else:
            self._ask()

    def _from_ahead(self, blocks: tuple[Block, ...], manifest: Manifest | None) -> None:
        if manifest is None:
            self._ask()
        else:
            self._used_ahead = True
            self._received((StoreStatus.OK, blocks, manifest))

    def _ask(self) -> None:
        worker, store = self._worker, self._store
        if worker.plan.node == store.plan.node:
            worker.call(
                store, self._mapping, store.serve_get, self._granted, self._no_answer, _CALL_MS
            )
        else:
            worker.call(
                store,
                self._mapping.body,
                store.serve_get_stream,
                self._received,
                self._no_answer,
                _CALL_MS,
            )

    def cancel(self) -> None:
        """Stop at the next block."""
        self._cancelled = True

    def _no_answer(self) -> None:
        self._end(StoreStatus.UNREACHABLE, None, 0)

    def _granted(self, granted: Mapped[GetGrant]) -> None:
        grant, slab = granted.body, granted.slab
        if grant.read is None:
            self._end(grant.status, None, 0)
            return
        assert grant.manifest is not None
        self._copy(grant.manifest, grant.pages, slab, 0)

    def _copy(self, manifest: Manifest, pages: tuple[int, ...], slab: Slab, done: int) -> None:
        worker = self._worker
        if self._cancelled:
            self._end(StoreStatus.UNREACHABLE, None, 0)
        elif done < min(len(pages), len(self._asked.block_ids)):
            worker.after(worker.copy_delay_ms(), self._copied, manifest, pages, slab, done)
        else:
            self._verify(manifest, done)

    def _copied(self, manifest: Manifest, pages: tuple[int, ...], slab: Slab, done: int) -> None:
        """A block's copy has ended; one under way is not stopped by a cancellation."""
        block = self._worker.pool[self._asked.block_ids[done]]
        block[:] = slab.get(pages[done]) or [0] * len(block)
        self._copy(manifest, pages, slab, done + 1)

    def _received(self, answer: tuple[StoreStatus, tuple[Block, ...], Manifest | None]) -> None:
        status, blocks, manifest = answer
        if manifest is None:
            self._end(status, None, 0)
        else:
            self._copy(manifest, tuple(range(len(blocks))), dict(enumerate(blocks)), 0)

    def _verify(self, manifest: Manifest, done: int) -> None:
        copied = tuple(tuple(self._worker.pool[block]) for block in self._asked.block_ids[:done])
        whole = done == manifest.blocks and hash_blocks(copied) == manifest.payload_hash
        if not whole and (self._used_ahead or not self._worker.world.rotted):
            raise ViolationError(
                f"{self._worker}: payload of {self._asked.ticket} is not what was committed"
            )
        self._end(StoreStatus.OK if whole else StoreStatus.BAD_PAYLOAD, manifest, done)

    def _end(self, status: StoreStatus, manifest: Manifest | None, done: int) -> None:
        if self._over:
            return
        self._over = True
        worker, asked = self._worker, self._asked
        self._mapping.closed = True
        delay = 1 + worker.within(5)
        worker.engine.after(
            delay, self._store.take, self._store_life, self._store.close, (self._mapping,)
        )
        token_ids = manifest.token_ids if manifest is not None else ()
        payload_bytes = done * worker.world.block_bytes
        used = self._used_ahead if asked.ahead else None
        worker.fetch_done(
            FetchDone(
                asked.ticket,
                asked.run,
                status,
                token_ids,
                done,
                1,
                payload_bytes,
                precision=Precision(manifest.precision) if manifest else Precision.FP16,
                ahead=used,
            )
        )


class Ahead:
    """One payload on its way to host memory, or there: whole and verified, or not at all."""

    __slots__ = ("_answer", "_asked", "_then", "_worker")

    def __init__(self, worker: WorkerHost, asked: PrefetchPayload) -> None:
        self._worker = worker
        self._asked = asked
        self._answer: tuple[tuple[Block, ...], Manifest | None] | None = None
        self._then: Callable[[tuple[Block, ...], Manifest | None], None] | None = None

    def begin(self) -> None:
        """Ask for the bytes."""
        store = self._worker.world.stores[self._asked.store]
        self._worker.call(
            store,
            BeginGet(self._asked.ticket, Incarnation(store.life)),
            store.serve_get_stream,
            self._came,
            lambda: self._end((), None),
            _CALL_MS,
        )

    def when_over(self, then: Callable[[tuple[Block, ...], Manifest | None], None]) -> None:
        """Call ``then`` with the payload once it is there; without a manifest if none comes."""
        if self._answer is not None:
            then(*self._answer)
        else:
            self._then = then

    def _came(self, answer: tuple[StoreStatus, tuple[Block, ...], Manifest | None]) -> None:
        _, blocks, manifest = answer
        if manifest is not None and hash_blocks(blocks) != manifest.payload_hash:
            manifest = None
        self._end(blocks, manifest)

    def _end(self, blocks: tuple[Block, ...], manifest: Manifest | None) -> None:
        if self._answer is None:
            self._answer = blocks, manifest
            if self._then is not None:
                self._then(blocks, manifest)
