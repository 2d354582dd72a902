"""A KV store's process: its core, its slab, and the handlers that read and write it for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from deepinfer.deploy.sim.checker import ViolationError
from deepinfer.deploy.sim.host import Reporter
from deepinfer.deploy.sim.plan import StorePlan
from deepinfer.kvstore.core.events import (
    AbortPut,
    Answer,
    BeginGet,
    BeginPut,
    Call,
    CallId,
    EndGet,
    FinishPut,
    GetGrant,
    PutGrant,
    PutId,
    Report,
    ReportAnswered,
    ReportLinkUp,
    RevokePut,
    Tick,
    WriterGone,
)
from deepinfer.kvstore.core.ids import Incarnation, NodeId, StoreId, WorkerRef
from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.core.messages import ReportReply, StoreStatus
from deepinfer.kvstore.core.store import StoreCore

if TYPE_CHECKING:
    from deepinfer.deploy.sim.world import World

T = TypeVar("T")
Block = tuple[int, ...]
"""A block's content: the KV number of each of its positions."""
Slab = dict[int, Block]
"""Pages by number. Whoever holds the object has it mapped."""


class Mapping(Generic[T]):
    """One connection over which a worker of the same node asks for pages, and then uses them."""

    __slots__ = ("body", "closed", "worker")

    def __init__(self, worker: WorkerRef, body: T) -> None:
        self.worker = worker
        self.body = body
        self.closed = False
        """Set by the worker once it will not touch the pages again."""

    def __repr__(self) -> str:
        return f"Mapping({self.body!r})"


class Mapped(Generic[T]):
    """What comes back over it: the grant, and the slab as mapped into the worker."""

    __slots__ = ("body", "slab")

    def __init__(self, grant: T, slab: Slab) -> None:
        self.body = grant
        self.slab = slab

    def __repr__(self) -> str:
        return f"Mapped({self.body!r})"


class PutStream:
    """A payload sent over the network: what the worker copied, and what it says about it."""

    __slots__ = ("blocks", "manifest", "request")

    def __init__(self, request: BeginPut, blocks: tuple[Block, ...], manifest: Manifest) -> None:
        self.request = request
        self.blocks = blocks
        self.manifest = manifest

    def __repr__(self) -> str:
        return f"PutStream({self.request!r}, {len(self.blocks)} blocks)"


class StoreHost(Reporter):
    """One store."""

    __slots__ = (
        "_calls",
        "_departed",
        "_lent",
        "_mappings",
        "_pages",
        "_remote_puts",
        "_replies",
        "plan",
        "slab",
        "slow_ms",
    )

    kind = "store"

    def __init__(self, world: World, plan: StorePlan) -> None:
        super().__init__(world, plan.name, Tick())
        self.plan = plan
        self.slow_ms = 0
        """How much longer than usual everything may take."""
        self.slab: Slab = {}
        self._calls = 0
        self._replies: dict[CallId, Callable[[Any], None]] = {}
        self._pages: dict[PutId, tuple[int, ...]] = {}
        self._remote_puts: set[PutId] = set()
        self._departed: set[WorkerRef] = set()
        """Workers of this node whose process has exited: their connections are closed."""
        self._mappings: dict[Mapping[Any], list[EndGet | AbortPut]] = {}
        self._lent: dict[PutId, tuple[Mapping[Any], tuple[int, ...]]] = {}
        """Pages that workers of this node write into."""
        self._performers = {Answer: self._answer, RevokePut: self._revoke, Report: self._report}

    def start(self) -> None:
        """A new life: an empty slab and a core that knows nothing."""
        super().start()
        self.slab = {}
        self._replies = {}
        self._pages = {}
        self._remote_puts = set()
        self._departed = set()
        self._mappings = {}
        self._lent = {}
        block_bytes = self.world.block_bytes
        self.core = StoreCore(
            store=StoreId(self.name),
            incarnation=Incarnation(self.life),
            node=NodeId(self.plan.node),
            budget_bytes=self.plan.budget_blocks * block_bytes,
            page_bytes=block_bytes,
            config=self.world.store_config(self.plan),
        )
        self.begin_ticking()
        self.begin_reporting()

    def leftovers(self) -> list[str]:
        """What the store still holds."""
        if not self.up:
            return [f"{self.name} is down"]
        numbers = self.core.snapshot()
        held = ("used_bytes", "tickets_reserved", "tickets_committed", "puts", "reads")
        left = [f"{self.name} {name} = {numbers[name]}" for name in held if numbers[name]]
        lost = numbers["pages_total"] - numbers["pages_free"]
        return [*left, f"{self.name} lacks {lost} pages"] if lost else left

    # ---- calls ----

    def serve(self, body: Any, reply: Callable[[Any], None]) -> None:
        """Hand a call to the core; its Answer is the reply."""
        if self.slow_ms:
            self.after(1 + self.within(self.slow_ms), self._serve, body, reply)
        else:
            self._serve(body, reply)

    def _serve(self, body: Any, reply: Callable[[Any], None]) -> None:
        self._calls += 1
        call = CallId(self._calls)
        self._replies[call] = reply
        self.drive(Call(call, body))

    def _answer(self, effect: Answer) -> None:
        self._replies.pop(effect.call)(effect.reply)

    def serve_get(self, job: Mapping[BeginGet], reply: Callable[[Any], None]) -> None:
        """Begin a read for a worker of this node, which reads the slab itself."""

        def granted(grant: GetGrant) -> None:
            if grant.read is not None:
                self._hold(job, EndGet(grant.read))
            reply(Mapped(grant, self.slab))

        self.serve(job.body, granted)

    def serve_put(self, job: Mapping[BeginPut], reply: Callable[[Any], None]) -> None:
        """Begin a put for a worker of this node, which writes into the slab itself."""

        def granted(grant: PutGrant) -> None:
            if grant.put is not None:
                self._pages[grant.put] = grant.pages
                self._lend(job, grant.put, grant.pages)
                self._hold(job, AbortPut(grant.put))
            reply(Mapped(grant, self.slab))

        self.serve(job.body, granted)

    def serve_finish_put(self, body: FinishPut, reply: Callable[[Any], None]) -> None:
        """A worker of this node has written a payload into the slab: read it, and hash it."""
        self._lent.pop(body.put, None)
        pages = self._pages.get(body.put, ())[: body.manifest.blocks]
        written = tuple(self.slab.get(page, ()) for page in pages)
        hash_ok = hash_blocks(written) == body.manifest.payload_hash
        self.serve(body._replace(hash_ok=hash_ok), reply)

    def _lend(self, job: Mapping[Any], put: PutId, pages: tuple[int, ...]) -> None:
        """Pages go to a writer: nobody who lives may still write into them."""
        for other, held in self._lent.values():
            if not other.closed and not set(held).isdisjoint(pages):
                raise ViolationError(f"{self}: lends pages {pages}, {other} may write {held}")
        self._lent[put] = (job, pages)

    def _hold(self, job: Mapping[Any], let_go: EndGet | AbortPut) -> None:
        """Pages are granted over a connection; when it closes, its worker has let go of them."""
        self._mappings.setdefault(job, []).append(let_go)
        if job.closed or job.worker in self._departed:
            self.close(job)

    def close(self, job: Mapping[Any]) -> None:
        """The connection has closed."""
        for let_go in self._mappings.pop(job, ()):
            if isinstance(let_go, AbortPut):
                self._lent.pop(let_go.put, None)
            self.drive(let_go)

    def serve_put_stream(self, stream: PutStream, reply: Callable[[Any], None]) -> None:
        """Receive a whole payload over the network, page by page."""

        def granted(grant: PutGrant) -> None:
            if grant.put is None:
                reply(grant.status)
                return
            self._remote_puts.add(grant.put)
            self._receive(stream, grant.put, grant.pages, 0, reply)

        self.serve(stream.request, granted)

    def _receive(
        self,
        stream: PutStream,
        put: PutId,
        pages: tuple[int, ...],
        done: int,
        reply: Callable[[Any], None],
    ) -> None:
        if put not in self._remote_puts:  # revoked
            self.drive(AbortPut(put))
            reply(StoreStatus.SEALED)
            return
        if done < len(stream.blocks):
            self.slab[pages[done]] = stream.blocks[done]
            self.after(
                1 + self.within(self.slow_ms), self._receive, stream, put, pages, done + 1, reply
            )
            return
        self._remote_puts.discard(put)
        received = tuple(self.slab[page] for page in pages[:done])
        body = FinishPut(
            ticket=stream.request.ticket,
            put=put,
            received_bytes=done * self.world.block_bytes,
            hash_ok=hash_blocks(received) == stream.manifest.payload_hash,
            manifest=stream.manifest,
        )
        self.serve(body, lambda answered: reply(answered.status))

    def serve_get_stream(self, body: BeginGet, reply: Callable[[Any], None]) -> None:
        """Send a whole payload over the network."""

        def granted(grant: GetGrant) -> None:
            if grant.read is None:
                reply((grant.status, (), None))
            else:
                self._send(grant, (), reply)

        self.serve(body, granted)

    def _send(self, grant: GetGrant, sent: tuple[Block, ...], reply: Callable[[Any], None]) -> None:
        assert grant.read is not None
        if len(sent) < len(grant.pages):
            page = self.slab.get(grant.pages[len(sent)], ())
            self.after(1 + self.within(self.slow_ms), self._send, grant, (*sent, page), reply)
            return
        self.drive(EndGet(grant.read))
        reply((StoreStatus.OK, sent, grant.manifest))

    # ---- the core's other effects ----

    def _revoke(self, effect: RevokePut) -> None:
        if not effect.shared:
            self._remote_puts.discard(effect.put)
            return
        worker = self.world.workers[effect.writer.worker]
        delay = 1 + self.within(9)
        self.engine.after(
            delay, worker.take, effect.writer.incarnation, worker.on_revoke, (effect.put,)
        )

    def _report(self, effect: Report) -> None:
        self.send_report(effect.report)

    def on_report_link(self) -> None:
        """A new stream to a controller is open."""
        self.drive(ReportLinkUp())

    def on_report_reply(self, reply: ReportReply) -> None:
        """The controller answered a report."""
        self.drive(ReportAnswered(reply))

    def writer_gone(self, writer: WorkerRef) -> None:
        """A worker's process has exited: its connections are closed and its pidfd fires."""
        self._departed.add(writer)
        for job in [job for job in self._mappings if job.worker == writer]:
            if isinstance(job.body, BeginGet):
                self.close(job)
            else:
                for let_go in self._mappings.pop(job):
                    if isinstance(let_go, AbortPut):
                        self._lent.pop(let_go.put, None)
        self.drive(WriterGone(writer))


def hash_blocks(blocks: tuple[Block, ...]) -> int:
    """The hash over a payload's bytes."""
    return hash(blocks) & 0xFFFF_FFFF_FFFF_FFFF
