"""One WorkerCore between naive gateways, a naive store and a controller that does what it likes.

KV is a number that depends on every token up to its position, so a step or a payload that reads
another sequence's block, a torn one or a stale one is seen at once. Tokens are drawn anew whenever
they are sampled, as on a device that does not repeat itself: what a gateway holds need not be what
the worker would compute again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from deepinfer.kvstore.core.ids import (
    GatewayId,
    Incarnation,
    NodeId,
    RequestId,
    Run,
    Seq,
    StoreId,
    Ticket,
    WorkerId,
    WorkerRef,
)
from deepinfer.kvstore.core.messages import (
    Ack,
    Admit,
    Attach,
    Attached,
    AttachRefused,
    Departed,
    Notice,
    Order,
    ReportReply,
    Scores,
    StoreStatus,
    SwapIn,
    SwapOut,
    ToGateway,
    Tokens,
    ToWorker,
    WorkerReport,
)
from deepinfer.kvstore.core.requests import FinishReason, RequestRecord, SamplingParams, Token
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.core.core import WorkerCore
from deepinfer.workers.core.events import (
    AbortPut,
    CancelFetch,
    Commit,
    CommitReply,
    FetchDone,
    FetchPayload,
    FromGateway,
    GatewayDown,
    GatewayUp,
    PutDone,
    PutPayload,
    Report,
    ReportAnswered,
    Resolve,
    ResolveReply,
    RunStep,
    SendToGateway,
    StepDone,
    StepOutput,
    StepPlan,
    Tick,
    WorkerEvent,
)

STORE = StoreId("s")
STOP = 1
NEVER = Run(0, 0)
WORKER = WorkerRef(WorkerId("w"), Incarnation(7))


def kv_of(token_ids: Sequence[int]) -> list[int]:
    """The KV number of each position: a chain over all tokens up to it."""
    chain, value = [], 0
    for token in token_ids:
        value = hash((value, token))
        chain.append(value)
    return chain


@dataclass
class Request:
    record: RequestRecord
    gateway: GatewayId
    run: Run = NEVER
    """The highest run that was ordered."""
    held: list[int] = field(default_factory=list)
    attached: Run | None = None
    finished: FinishReason | None = None

    @property
    def seq(self) -> Seq:
        return Seq(self.record.request, 0)


@dataclass
class Copy:
    effect: PutPayload | FetchPayload
    stopped: bool = False


class World:
    """Everything around the core. ``queue_*`` are links in order; ``orders`` may be shuffled."""

    def __init__(self, rng: Random, config: WorkerConfig, requests: Sequence[Request]) -> None:
        self.rng = rng
        self.config = config
        self.core = WorkerCore(WORKER, NodeId("n"), config)
        self.now_ms = 0
        self.step_pace = rng.choice([0.05, 0.3, 1.0])
        """How soon steps end, against all else that goes on."""
        self.pool = [[0] * config.block_size for _ in range(config.blocks_total)]
        self.requests = {request.seq: request for request in requests}
        self.links_up = {request.gateway: True for request in requests}
        self.to_gateway: dict[GatewayId, deque[ToGateway]] = {}
        self.to_worker: dict[GatewayId, deque[ToWorker]] = {}
        self.step: tuple[StepPlan, dict[Seq, list[int]]] | None = None
        self.puts: dict[Ticket, Copy] = {}
        self.fetches: dict[tuple[Ticket, Run], Copy] = {}
        self.calls: list[Commit | Resolve] = []
        self.staged: dict[Ticket, tuple[tuple[int, ...], list[list[int]]]] = {}
        self.committed: dict[Ticket, tuple[tuple[int, ...], list[list[int]]]] = {}
        self.sealed: dict[Ticket, None] = {}
        self.orders: list[Order] = []
        self.counter = 0
        self.epoch = 1
        self.report: WorkerReport | None = None
        self.departed: list[Departed] = []
        self.sent: dict[tuple[Seq, Run, int], Token] = {}
        for gateway in self.links_up:
            self.to_gateway[gateway] = deque()
            self.to_worker[gateway] = deque()

    # ---- driving the core ------------------------------------------------------------------

    def drive(self, event: WorkerEvent) -> None:
        for effect in self.core.handle(event, self.now_ms):
            self.perform(effect)
        self.core.check()
        self._check_busy()

    def perform(self, effect: object) -> None:
        match effect:
            case SendToGateway(gateway, message):
                self._remember(message)
                if self.links_up[gateway]:
                    self.to_gateway[gateway].append(message)
            case RunStep(plan):
                assert self.step is None, "two steps in flight"
                texts = {c.seq: list(self.core.residents[c.seq].tokens) for c in plan.chunks}
                self.step = (plan, texts)
                self._check_step()
            case PutPayload():
                self.puts[effect.ticket] = Copy(effect)
            case AbortPut(ticket, _):
                self.staged.pop(ticket, None)
                if ticket in self.puts:
                    self.puts[ticket].stopped = True
            case FetchPayload():
                for block in effect.block_ids:
                    self.pool[block] = [-1] * self.config.block_size
                self.fetches[effect.ticket, effect.run] = Copy(effect)
            case CancelFetch(ticket, run):
                if (ticket, run) in self.fetches:
                    self.fetches[ticket, run].stopped = True
            case Commit() | Resolve():
                self.calls.append(effect)
            case Report(report):
                self._reported(report)
            case _:
                pass

    def _check_busy(self) -> None:
        """What a step or a copy in flight touches can be given to nobody."""
        tables = [list(copy.effect.block_ids) for copy in self.puts.values()]
        tables += [list(copy.effect.block_ids) for copy in self.fetches.values()]
        if self.step is not None:
            tables += [list(chunk.block_table) for chunk in self.step[0].chunks]
        blocks = self.core._roster.blocks
        takeable = {*blocks._free, *blocks._cached}
        for table in tables:
            assert not takeable & set(table), f"blocks in use can be allocated: {table}"

    def _remember(self, message: object) -> None:
        """A run says the same token at the same place each time."""
        if isinstance(message, Tokens):
            for place, token in enumerate(message.tokens, message.index):
                known = self.sent.setdefault((message.seq, message.run, place), token)
                assert known == token, f"{message.seq} {message.run} changed token {place}"

    def _reported(self, report: WorkerReport) -> None:
        assert 0 <= report.blocks_free <= report.blocks_total
        assert self.report is None or report.number == self.report.number + 1
        self.report = report
        known = [(d.seq, d.run) for d in self.departed]
        self.departed += [d for d in report.departed if (d.seq, d.run) not in known]

    # ---- the device ------------------------------------------------------------------------

    def _check_step(self) -> None:
        """Each chunk finds the KV of exactly the tokens before it."""
        assert self.step is not None
        plan, texts = self.step
        written: set[int] = set()
        assert len({chunk.seq for chunk in plan.chunks}) == len(plan.chunks)
        assert len(plan.chunks) <= self.config.max_batch_seqs
        assert sum(len(c.token_ids) for c in plan.chunks) <= self.config.max_batch_tokens
        for chunk in plan.chunks:
            size, text = self.config.block_size, texts[chunk.seq]
            end = chunk.start + len(chunk.token_ids)
            assert list(chunk.token_ids) == text[chunk.start : end]
            assert 0 < len(chunk.token_ids) <= self.config.prefill_chunk_tokens
            for position, value in enumerate(kv_of(text[: chunk.start])):
                found = self.pool[chunk.block_table[position // size]][position % size]
                assert found == value, f"{chunk.seq} reads foreign KV at {position}"
            blocks = {chunk.block_table[p // size] for p in range(chunk.start, end)}
            assert not blocks & written, "two sequences write one block"
            written |= blocks

    def end_step(self) -> None:
        if self.step is None:
            return
        self._check_step()
        plan, texts = self.step
        self.step = None
        outputs = []
        for chunk in plan.chunks:
            size = self.config.block_size
            end = chunk.start + len(chunk.token_ids)
            values = kv_of(texts[chunk.seq][:end])
            for position in range(chunk.start, end):
                self.pool[chunk.block_table[position // size]][position % size] = values[position]
            if chunk.sample:
                token = Token(self.rng.randrange(1, 40))
                outputs.append(StepOutput(chunk.seq, chunk.run, token))
        self.drive(StepDone(plan.step, tuple(outputs)))

    def end_put(self, ticket: Ticket, *, ok: bool = True) -> None:
        copy = self.puts.pop(ticket)
        effect = copy.effect
        assert isinstance(effect, PutPayload)
        data = [list(self.pool[block]) for block in effect.block_ids]
        if not copy.stopped:
            flat = [value for block in data for value in block]
            tokens = len(effect.token_ids)
            assert flat[:tokens] == kv_of(effect.token_ids), f"torn payload {ticket}"
        ok = ok and not copy.stopped and ticket not in self.sealed
        if ok:
            self.staged[ticket] = (effect.token_ids, data)
        self.drive(PutDone(ticket, ok, len(data) * self.config.block_bytes, 5))

    def end_fetch(self, key: tuple[Ticket, Run], *, ok: bool = True) -> None:
        copy = self.fetches.pop(key)
        effect = copy.effect
        ticket, run = key
        payload = self.committed.get(ticket)
        for block in effect.block_ids:
            self.pool[block] = [-2] * self.config.block_size
        if payload is None or copy.stopped or not ok:
            self.drive(FetchDone(ticket, run, StoreStatus.UNKNOWN_TICKET, (), 0, 3))
            return
        token_ids, data = payload
        for block, values in zip(effect.block_ids, data, strict=False):
            self.pool[block] = list(values)
        self.drive(FetchDone(ticket, run, StoreStatus.OK, token_ids, len(data), 3))

    # ---- the store's calls -----------------------------------------------------------------

    def end_call(self, *, lost: bool = False, unheard: bool = False) -> None:
        call = self.calls.pop(0)
        ticket = call.ticket
        status = StoreStatus.UNREACHABLE
        if not unheard:
            status = self._serve(call)
        if lost:
            status = StoreStatus.UNREACHABLE
        reply = CommitReply if isinstance(call, Commit) else ResolveReply
        self.drive(reply(ticket, status))

    def _serve(self, call: Commit | Resolve) -> StoreStatus:
        ticket = call.ticket
        if isinstance(call, Commit):
            if ticket in self.staged and ticket not in self.sealed:
                self.committed[ticket] = self.staged.pop(ticket)
            if ticket in self.committed:
                return StoreStatus.OK
            return StoreStatus.SEALED if ticket in self.sealed else StoreStatus.UNKNOWN_TICKET
        if ticket in self.committed:
            return StoreStatus.COMMITTED
        self.sealed[ticket] = None
        self.staged.pop(ticket, None)
        return StoreStatus.SEALED

    # ---- the gateways ----------------------------------------------------------------------

    def deliver_to_gateway(self, gateway: GatewayId) -> None:
        message = self.to_gateway[gateway].popleft()
        request = self.requests[message.seq]
        if isinstance(message, Notice):
            return
        assert not isinstance(message, Scores), "nobody here asks for log-probabilities"
        answers = self.to_worker[gateway]
        if request.gateway != gateway:
            answers.append(AttachRefused(message.seq, message.run, None))
        elif isinstance(message, Attach):
            if request.attached is not None and message.run < request.attached:
                answers.append(AttachRefused(message.seq, message.run, request.attached))
                return
            request.attached = message.run
            answers.append(Attached(message.seq, message.run, request.record, tuple(request.held)))
        elif message.run == request.attached:
            self._hold(request, message)
            finished = request.finished is not None
            answers.append(Ack(message.seq, message.run, len(request.held), finished))

    @staticmethod
    def _hold(request: Request, message: Tokens) -> None:
        held = request.held
        if message.index > len(held):
            return
        ids = [token.id for token in message.tokens]
        known = held[message.index : message.index + len(ids)]
        assert ids[: len(known)] == known, f"{message.seq}: a token sent before has changed"
        assert request.finished is None or len(ids) == len(known), "tokens after the end"
        held += ids[len(known) :]
        if message.finish is not None:
            assert message.index + len(ids) == len(held)
            request.finished = message.finish

    def deliver_to_worker(self, gateway: GatewayId) -> None:
        self.drive(FromGateway(gateway, self.to_worker[gateway].popleft()))

    def break_link(self, gateway: GatewayId) -> None:
        self.links_up[gateway] = False
        self.to_gateway[gateway].clear()
        self.to_worker[gateway].clear()
        self.drive(GatewayDown(gateway))

    def mend_link(self, gateway: GatewayId) -> None:
        self.links_up[gateway] = True
        self.drive(GatewayUp(gateway))

    def move_gateway(self, request: Request) -> None:
        """The client resumes elsewhere, and has not received everything.

        Sometimes another worker has taken part since, and went on with other tokens.
        """
        if request.finished is not None:
            return
        rng = self.rng
        request.gateway = rng.choice(list(self.links_up))
        request.held = request.held[: rng.randint(0, len(request.held))]
        request.attached = None
        if rng.random() < 0.7:
            room = request.record.sampling.max_tokens - 1 - len(request.held)
            request.held += [rng.randrange(2, 40) for _ in range(rng.randint(0, min(room, 3)))]
            request.attached = self.mint()

    # ---- the controller --------------------------------------------------------------------

    def mint(self) -> Run:
        self.counter += 1
        return Run(self.epoch, self.counter)

    def admit(self, request: Request) -> Admit:
        order = self.mint()
        request.run = order
        prompt = len(request.record.prompt_ids)
        total = prompt + request.record.sampling.max_tokens
        tokens = prompt + len(request.held)
        return Admit(order, request.seq, order, request.gateway, tokens, total)

    def swap_in(self, request: Request) -> SwapIn | None:
        tickets = sorted(ticket for ticket in self.committed if ticket.seq == request.seq)
        if not tickets:
            return None
        ticket = tickets[-1]
        token_ids, data = self.committed[ticket]
        admit = self.admit(request)
        return SwapIn(
            admit.order,
            admit.seq,
            admit.run,
            admit.gateway,
            ticket,
            STORE,
            len(token_ids),
            len(data),
            admit.max_total_tokens,
        )

    def swap_out(self, request: Request) -> SwapOut:
        """For the run that is here, or for the newest one that was ordered."""
        order = self.mint()
        resident = self.core.residents.get(request.seq)
        run = request.run if resident is None else resident.run
        return SwapOut(order, request.seq, run, Ticket(request.seq, run, order), STORE)

    def answer_report(self, *, resync: bool = False) -> None:
        if self.report is not None:
            reply = ReportReply(epoch=self.epoch, number=self.report.number, resync=resync)
            self.drive(ReportAnswered(reply))

    # ---- time ------------------------------------------------------------------------------

    def tick(self, ms: int = 50) -> None:
        self.now_ms += ms
        self.drive(Tick())


def make_request(
    name: str, prompt_ids: Sequence[int], max_tokens: int, gateway: str, *, min_tokens: int = 0
) -> Request:
    record = RequestRecord(
        request=RequestId(name),
        prompt_ids=tuple(prompt_ids),
        sampling=SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens),
        arrival_ms=0,
        seed=0,
        stop_token_ids=(STOP,),
    )
    return Request(record, GatewayId(gateway))
