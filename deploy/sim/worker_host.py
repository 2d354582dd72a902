"""A worker's process: its core, its pool, the step engine and the copies in and out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepinfer.deploy.sim.ambush import Moment
from deepinfer.deploy.sim.checker import ViolationError
from deepinfer.deploy.sim.copies import Ahead, Fetch, Put
from deepinfer.deploy.sim.host import Reporter
from deepinfer.deploy.sim.model import evidence, kv_in, kv_of, rank_in, sample, stored
from deepinfer.deploy.sim.network import Stream
from deepinfer.deploy.sim.plan import WorkerPlan
from deepinfer.deploy.sim.planes import SimPlanes
from deepinfer.kvstore.core import events as store_events
from deepinfer.kvstore.core.events import PutId
from deepinfer.kvstore.core.ids import (
    GatewayId,
    Incarnation,
    NodeId,
    Run,
    StoreId,
    Ticket,
    WorkerId,
    WorkerRef,
)
from deepinfer.kvstore.core.messages import Departure, ReportReply, StoreReply, StoreStatus
from deepinfer.kvstore.core.precision import precision_of
from deepinfer.kvstore.core.requests import Token
from deepinfer.workers.core.core import WorkerCore
from deepinfer.workers.core.events import (
    AbortPut,
    CancelFetch,
    CancelPrefetch,
    Chunk,
    Commit,
    CommitReply,
    FetchDone,
    FetchPayload,
    ForgetSeq,
    FromGateway,
    GatewayDown,
    GatewayUp,
    GiveUp,
    PrefetchPayload,
    PutDone,
    PutPayload,
    Report,
    ReportAnswered,
    ReportsUp,
    Resolve,
    ResolveReply,
    RestorePlanes,
    RunStep,
    SendToGateway,
    ShedPlanes,
    StepDone,
    StepOutput,
    StepPlan,
    StepScores,
    StoreGone,
    Tick,
)

if TYPE_CHECKING:
    from deepinfer.deploy.sim.gateway_host import GatewayHost
    from deepinfer.deploy.sim.world import World

_CALL_MS = 400
_COMMITTED = (StoreStatus.OK, StoreStatus.COMMITTED)


class WorkerHost(Reporter):
    """One worker. ``pool[block][slot]`` is the KV number stored there."""

    __slots__ = (
        "_ahead",
        "_committed",
        "_fetches",
        "_links",
        "_planes",
        "_puts",
        "_revoked",
        "_store_lives",
        "_stuck",
        "least_blocks",
        "plan",
        "pool",
        "ref",
    )

    kind = "worker"

    def __init__(self, world: World, plan: WorkerPlan) -> None:
        super().__init__(world, plan.name, Tick())
        self.plan = plan
        self.least_blocks = plan.blocks
        """Blocks of the smallest pool that it has had."""
        self.ref = WorkerRef(WorkerId(plan.name), Incarnation(0))
        self.pool: list[list[int]] = []
        self._links: dict[GatewayId, Stream] = {}
        self._puts: dict[Ticket, Put] = {}
        self._fetches: dict[tuple[Ticket, Run], Fetch] = {}
        self._ahead: dict[Ticket, Ahead] = {}
        self._revoked: set[PutId] = set()
        self._store_lives: dict[Ticket, Incarnation] = {}
        self._committed: set[Ticket] = set()
        """Tickets of which a store has told this life that they are committed."""
        self._stuck = False
        self._performers = {
            SendToGateway: self._send_to_gateway,
            RunStep: self._run_step,
            PutPayload: self._put_payload,
            AbortPut: self._abort_put,
            Commit: self._commit,
            Resolve: self._resolve,
            FetchPayload: self._fetch_payload,
            CancelFetch: self._cancel_fetch,
            PrefetchPayload: self._prefetch_payload,
            CancelPrefetch: self._cancel_prefetch,
            Report: self._report,
            ForgetSeq: self._forget_seq,
            ShedPlanes: lambda effect: self._planes.shed(effect),
            GiveUp: self._give_up,
            RestorePlanes: lambda effect: self._planes.restore(effect),
        }

    def start(self) -> None:
        """A new life: an empty pool and a core that knows nothing."""
        super().start()
        self.ref = WorkerRef(WorkerId(self.name), Incarnation(self.life))
        blocks = self.plan.blocks + self.plan.tail_blocks
        self.pool = [[0] * self.world.block_size for _ in range(blocks)]
        self._planes = SimPlanes(self)
        self._links = {}
        self._puts = {}
        self._fetches = {}
        self._ahead = {}
        self._revoked = set()
        self._store_lives = {}
        self._stuck = False
        self._committed = set()
        self.core = WorkerCore(
            self.ref, NodeId(self.plan.node), self.world.worker_config(self.plan)
        )
        self.begin_ticking()
        self.begin_reporting()
        for gateway in self.world.gateways.values():
            self.after(1 + self.within(19), self._link, gateway)

    def leftovers(self) -> list[str]:
        """What the worker still holds."""
        if not self.up:
            return [f"{self.name} is down"]
        numbers = self.core.snapshot()
        left = [f"{self.name} has {numbers['residents']}"] if numbers["residents"] else []
        held = ("blocks_held", "blocks_quarantined", "blocks_promised")
        left += [f"{self.name} {name} = {numbers[name]}" for name in held if numbers[name]]
        left += [f"{self.name} keeps {ticket} ahead" for ticket in self._ahead]
        if not left and numbers["blocks_free"] != numbers["blocks_total"]:
            left.append(
                f"{self.name} has {numbers['blocks_free']} of {numbers['blocks_total']} blocks"
            )
        away = self.plan.tail_blocks > 0 and numbers["planes"] != "held"
        if away and self.world.plan.precision != "fp8":  # nobody else wants them back
            left.append(f"{self.name}'s planes are {numbers['planes']}")
        return left

    def held(self) -> int:
        """Sequences that it has: what a drain waits for."""
        return len(self.core.residents)

    # ---- gateways ----

    def _link(self, gateway: GatewayHost) -> None:
        reachable = self.world.network.reachable(self.name, gateway.name)
        if not gateway.up or gateway.stopped or not reachable:
            self.after(20, self._link, gateway)
            return
        name = GatewayId(gateway.name)
        ref = self.ref
        stream = Stream(
            self.world.network,
            self,
            gateway,
            arrive_a=self._from_gateway,
            arrive_b=lambda _, message: gateway.from_worker(ref, message),
            down_a=self._unlinked,
            down_b=lambda stream: gateway.unlinked(ref, stream),
        )
        self._links[name] = stream
        gateway.linked(ref, stream)
        self.drive(GatewayUp(name))

    def _unlinked(self, stream: Stream) -> None:
        gateway = self.world.gateways[stream.peer(self).name]
        name = GatewayId(gateway.name)
        if self._links.get(name) is stream:
            del self._links[name]
            self.drive(GatewayDown(name))
            self.after(1 + self.within(39), self._link, gateway)

    def _from_gateway(self, stream: Stream, message: Any) -> None:
        name = GatewayId(stream.peer(self).name)
        if self._links.get(name) is stream:
            self.drive(FromGateway(name, message))

    def _send_to_gateway(self, effect: SendToGateway) -> None:
        link = self._links.get(effect.gateway)
        if link is not None:
            link.send(self, effect.message)

    # ---- steps ----

    def _run_step(self, effect: RunStep) -> None:
        plan, step_ms = effect.plan, self.plan.step_ms
        levels = self.world.plan.levels
        rows = sum(len(chunk.token_ids) for chunk in plan.chunks)
        may_w8a8 = 0 < self.world.plan.w8a8_rows <= rows
        if not 0 <= plan.level < levels and not (plan.level == levels and may_w8a8):
            raise ViolationError(f"{self}: a step at level {plan.level} of {levels}")
        self._planes.check_level(plan.level)
        self.world.ambushes.has_come(Moment.STEP, self)
        delay = step_ms + self.within(step_ms)
        contexts = [self._context(chunk, plan.level) for chunk in plan.chunks]
        if plan.moves:
            self.after(delay // 2, self._move, plan)
        else:
            self._check_chunks(plan, contexts)
        self.after(delay, self._stepped, plan, contexts)

    def _move(self, plan: StepPlan) -> None:
        """Copy blocks within the pool, some time after the plan was made."""
        for source, target in plan.moves:
            self._planes.check_blocks((source, target))
            self.pool[target] = list(self.pool[source])

    def _check_chunks(self, plan: StepPlan, contexts: list[list[int]]) -> None:
        for chunk, kv in zip(plan.chunks, contexts, strict=True):
            self._check_reads(chunk, kv)

    def _context(self, chunk: Chunk, level: int) -> list[int]:
        """The KV that the chunk must find and leave, by the tokens that the core has for it."""
        tokens = self.core.residents[chunk.seq].tokens
        end = chunk.start + len(chunk.token_ids)
        if chunk.token_ids != tuple(tokens[chunk.start : end]):
            raise ViolationError(f"{self}: step computes other tokens than {tokens}: {chunk}")
        if len(chunk.block_table) * self.world.block_size < end:
            raise ViolationError(f"{self}: block table too short: {chunk}")
        prompt_tokens = len(chunk.record.prompt_ids)
        if chunk.sample and (end != len(tokens) or prompt_tokens + chunk.index != end):
            raise ViolationError(f"{self}: samples at the wrong place: {chunk}")
        self.world.history.check_sequence(chunk.seq, tokens[:end])
        if chunk.record.exact and level != 0:
            raise ViolationError(f"{self}: {chunk.seq} is exact, in a step at level {level}")
        return kv_of(tokens[:end])

    def get_stuck(self) -> bool:
        """The device does not answer any more: no step of this life ends."""
        if not self.up or self._stuck:
            return False
        self._stuck = True
        return True

    def _give_up(self, effect: GiveUp) -> None:
        """A step has not ended in time: it is stuck, or this process was stopped for as long."""
        self.world.havoc.give_up(self)

    def _stepped(self, plan: StepPlan, contexts: list[list[int]]) -> None:
        if self._stuck:
            return
        size, levels = self.world.block_size, self.world.plan.levels
        self._planes.check_level(plan.level)
        step_rank = precision_of(plan.level, levels).rank
        ranks = []
        for chunk, kv in zip(plan.chunks, contexts, strict=True):
            rank = max(step_rank, self._check_reads(chunk, kv))
            ranks.append(rank)
            for position in range(chunk.start, len(kv)):
                block = self.pool[chunk.block_table[position // size]]
                block[position % size] = stored(kv[position], rank)
        outputs, scores = [], []
        for chunk, kv, rank in zip(plan.chunks, contexts, ranks, strict=True):
            self._check_reads(chunk, kv)
            if chunk.sample:
                token = self._sample(chunk, kv[-1], rank, step_rank)
                outputs.append(StepOutput(chunk.seq, chunk.run, token))
            if chunk.score_ids:
                scores.append(StepScores(chunk.seq, chunk.run, self._score(chunk, kv)))
        self.drive(StepDone(plan.step, tuple(outputs), (), tuple(scores)))

    def _score(self, chunk: Chunk, kv: list[int]) -> tuple[Token, ...]:
        if not chunk.start <= chunk.score_from <= len(kv) - len(chunk.score_ids):
            raise ViolationError(f"{self}: scores rows that it does not compute: {chunk}")
        rows = kv[chunk.score_from :]
        return tuple(
            Token(token, *evidence(behind, chunk.run))
            for token, behind in zip(chunk.score_ids, rows, strict=False)
        )

    def _sample(self, chunk: Chunk, kv: int, rank: int, step_rank: int) -> Token:
        run, noise = chunk.run, rank
        if self.world.plan.noisy:  # two runs seldom agree, and one not always with itself
            noise = 2 * ((run.epoch + run.counter) % 4) + self.within(2)
        token = sample(kv, chunk.record, chunk.seq.choice, chunk.index, noise)
        return Token(token, *evidence(kv, run, step_rank))

    def _check_reads(self, chunk: Chunk, kv: list[int]) -> int:
        """Every chunk must find the KV of exactly the tokens before it, from begin to end.

        Returns the rank of the worst precision in it: an exact request's is the best.
        """
        size, worst = self.world.block_size, 0
        self._planes.check_blocks(chunk.block_table)
        for start in range(0, chunk.start, size):
            end = min(start + size, chunk.start)
            block = chunk.block_table[start // size]
            values = self.pool[block][: end - start]
            if [kv_in(value) for value in values] != kv[start:end]:
                raise ViolationError(
                    f"{self}: {chunk.seq} reads KV at {start}..{end - 1} of block {block}"
                    " that is not its own"
                )
            worst = max(worst, *map(rank_in, values))
        if worst and chunk.record.exact:
            raise ViolationError(f"{self}: {chunk.seq} is exact, and attends KV of rank {worst}")
        return worst

    def _forget_seq(self, effect: ForgetSeq) -> None:
        """The model keeps nothing between steps."""

    def copy_delay_ms(self) -> int:
        """How long the copy of one block takes."""
        return 1 + self.within(self.plan.copy_ms)

    # ---- swap out ----

    def _put_payload(self, effect: PutPayload) -> None:
        put = Put(self, effect)
        self._puts[effect.ticket] = put
        self.world.ambushes.has_come(Moment.PUT, self)
        put.begin()

    def put_done(self, put: Put, done: PutDone) -> None:
        """A copy out has ended."""
        self._store_lives[done.ticket] = put.store_life
        del self._puts[done.ticket]
        self.drive(done)

    def _abort_put(self, effect: AbortPut) -> None:
        put = self._puts.get(effect.ticket)
        if put is not None:
            put.abort()

    def on_revoke(self, put_id: PutId) -> None:
        """A store takes a put's pages back."""
        self._revoked.add(put_id)
        for put in self._puts.values():
            if put.put_id == put_id:
                put.abort()

    def revoked(self, put_id: PutId) -> bool:
        """Whether a store has said that the put's pages may not be written any more."""
        return put_id in self._revoked

    def _commit(self, effect: Commit) -> None:
        ticket = effect.ticket
        body = store_events.Commit(ticket, self.ref, self._store_lives.get(ticket))

        def answered(reply: StoreReply) -> None:
            if reply.status in _COMMITTED:
                self._committed.add(ticket)
            self.drive(CommitReply(ticket, reply.status))

        store = self.world.stores[effect.store]
        lost = StoreReply(ticket, StoreStatus.UNREACHABLE, 0, 0)
        self.world.ambushes.has_come(Moment.COMMIT, self)
        self.call(store, body, store.serve, answered, lambda: answered(lost), _CALL_MS)

    def _resolve(self, effect: Resolve) -> None:
        ticket = effect.ticket
        body = store_events.Resolve(ticket, self.ref, self._store_lives.get(ticket))

        def answered(reply: StoreReply) -> None:
            if reply.status in _COMMITTED:
                self._committed.add(ticket)
            self.drive(ResolveReply(ticket, reply.status))

        store = self.world.stores[effect.store]
        lost = StoreReply(ticket, StoreStatus.UNREACHABLE, 0, 0)
        self.call(store, body, store.serve, answered, lambda: answered(lost), _CALL_MS)

    def store_gone(self, store: StoreId) -> None:
        """A store's connection has broken."""
        self.drive(StoreGone(store))

    # ---- swap in ----

    def _fetch_payload(self, effect: FetchPayload) -> None:
        ahead = self._ahead.pop(effect.ticket, None)
        if (ahead is not None) != effect.ahead:
            raise ViolationError(f"{self}: {effect.ticket} is held ahead, or not: {effect}")
        fetch = Fetch(self, effect, ahead)
        self._fetches[effect.ticket, effect.run] = fetch
        self.world.ambushes.has_come(Moment.FETCH, self)
        fetch.begin()

    def fetch_done(self, done: FetchDone) -> None:
        """A copy in has ended."""
        del self._fetches[done.ticket, done.run]
        self.drive(done)

    def _cancel_fetch(self, effect: CancelFetch) -> None:
        fetch = self._fetches.get((effect.ticket, effect.run))
        if fetch is not None:
            fetch.cancel()

    def _prefetch_payload(self, effect: PrefetchPayload) -> None:
        if effect.ticket in self._ahead:
            raise ViolationError(f"{self}: {effect.ticket} is fetched ahead a second time")
        ahead = self._ahead[effect.ticket] = Ahead(self, effect)
        ahead.begin()

    def _cancel_prefetch(self, effect: CancelPrefetch) -> None:
        if self._ahead.pop(effect.ticket, None) is None:
            raise ViolationError(f"{self}: {effect.ticket} is not held ahead")

    # ---- controller ----

    def _report(self, effect: Report) -> None:
        for departed in effect.report.departed:
            if departed.why is Departure.SWAPPED and departed.ticket not in self._committed:
                raise ViolationError(
                    f"{self}: {departed.seq} has left its blocks, and nobody has said that"
                    f" {departed.ticket} is committed"
                )
        self.send_report(effect.report)

    def on_report_link(self) -> None:
        """A new stream to a controller is open."""
        self.drive(ReportsUp())

    def on_report_reply(self, reply: ReportReply) -> None:
        """The controller answered a report."""
        self.drive(ReportAnswered(reply))
