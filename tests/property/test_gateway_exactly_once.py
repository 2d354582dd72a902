"""A client's tokens are one worker history, each once, whatever links, gateways and runs do.

Two gateway cores, a client core and workers that are simulated here, over links that lose, double
and reorder. Every run computes its own tokens: a token's id is made of the run and of all tokens
before it, so that one from a run that had another past is told by its id alone.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.client.core import events as c
from deepinfer.client.core.config import ClientConfig
from deepinfer.client.core.resume import ClientCore
from deepinfer.gateway.core import events as g
from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.gateway.core.gateway import GatewayCore
from deepinfer.kvstore.core.ids import (
    GatewayId,
    Incarnation,
    RequestId,
    Run,
    Seq,
    StreamId,
    WorkerId,
    WorkerRef,
)
from deepinfer.kvstore.core.messages import (
    Ack,
    Attach,
    Attached,
    Delta,
    Finished,
    ToGateway,
    Tokens,
    ToWorker,
)
from deepinfer.kvstore.core.requests import FinishReason, RequestRecord, SamplingParams, Token
from support.requests import record

MAX_TOKENS = 24
GATEWAYS = 2


def record_of(name: str) -> RequestRecord:
    return record(name, sampling=SamplingParams(max_tokens=MAX_TOKENS))


def token_of(run: int, before: tuple[int, ...]) -> int:
    """The token that a run computes behind ``before``."""
    return run << 24 | zlib.crc32(repr((run, before)).encode()) & 0xFFFFFF


def assert_one_history(tokens: tuple[int, ...]) -> None:
    """Each token was computed from exactly those before it."""
    for index, token in enumerate(tokens):
        assert token == token_of(token >> 24, tokens[:index]), f"token {index} has another past"


@dataclass
class Worker:
    """A run on its worker."""

    seq: Seq
    run: Run
    ref: WorkerRef
    gateway: int
    tokens: list[int] | None = None
    """None until it is attached."""
    acked: int = 0
    sent: int = 0
    dropped: bool = False


@dataclass
class Link:
    """One attempt of the client at a gateway."""

    attempt: int
    gateway: int
    stream: StreamId
    down: list[g.ToStream | g.EndStream] = field(default_factory=list)


class World:
    """Everything that can happen to one request, but for stop strings and aborts."""

    def __init__(self) -> None:
        self.now_ms = 0
        self.lives = [1] * GATEWAYS
        self.gateways = [self.new_gateway(i) for i in range(GATEWAYS)]
        self.client = ClientCore(
            tuple(map(str, range(GATEWAYS))),
            1,
            ClientConfig(connect_give_up_ms=10**9, give_up_ms=10**9),
        )
        self.links: dict[int, Link] = {}
        self.streams = 0
        self.seq = Seq(RequestId("none"), 0)
        """What the client was given last: a gateway mints an id for each Generate."""
        self.workers: list[Worker] = []
        self.to_gateway: list[tuple[int, WorkerRef, ToGateway]] = []
        self.to_worker: list[tuple[int, WorkerRef, ToWorker]] = []
        self.delivered: list[int] = []
        self.finished: list[FinishReason] = []
        self.succeeded = False

    def new_gateway(self, index: int) -> GatewayCore:
        return GatewayCore(
            GatewayId(str(index)),
            Incarnation(self.lives[index]),
            GatewayConfig(max_delta_tokens=3),
            now_ms=self.now_ms,
        )

    # ---- carrying effects ------------------------------------------------------------------

    def tell_client(self, event: c.Event) -> None:
        for effect in self.client.handle(event, self.now_ms):
            match effect:
                case c.OpenGenerate(attempt, endpoint):
                    link = self.open(attempt, endpoint)
                    fresh = record_of(f"r{attempt}")
                    self.seq = Seq(fresh.request, 0)
                    self.tell_gateway(link.gateway, g.Generate(link.stream, fresh, "key"))
                case c.OpenResume(attempt, endpoint, request, key, claim, received):
                    link = self.open(attempt, endpoint)
                    known = record_of(request)
                    self.tell_gateway(
                        link.gateway, g.Resume(link.stream, known, key, claim, received)
                    )
                case c.CloseStream(attempt):
                    self.links.pop(attempt, None)
                case c.Deliver(Delta() as delta):
                    assert delta.index == len(self.delivered)
                    self.delivered += [token.id for token in delta.tokens]
                case c.Deliver(Finished() as finished):
                    assert finished.tokens == len(self.delivered)
                    self.finished.append(finished.reason)
                case c.Succeed():
                    self.succeeded = True
                case c.Fail():
                    raise AssertionError(f"the client failed: {effect}")

    def open(self, attempt: int, endpoint: str) -> Link:
        self.streams += 1
        link = self.links[attempt] = Link(attempt, int(endpoint), StreamId(self.streams))
        return link

    def tell_gateway(self, index: int, event: g.Event) -> None:
        for effect in self.gateways[index].handle(event, self.now_ms):
            match effect:
                case g.ToStream(stream) | g.EndStream(stream):
                    for link in self.links.values():
                        if link.stream == stream:
                            link.down.append(effect)
                case g.SendToWorker(worker, message):
                    self.to_worker.append((index, worker, message))

    def tell_worker(self, gateway: int, ref: WorkerRef, message: ToWorker) -> None:
        for worker in self.workers:
            if worker.run != message.run or worker.ref != ref or worker.gateway != gateway:
                continue
            match message:
                case Attached():
                    if worker.tokens is None:
                        worker.tokens = list(message.tokens)
                        worker.acked = len(message.tokens)
                    elif tuple(worker.tokens[: len(message.tokens)]) == message.tokens:
                        worker.acked = len(message.tokens)
                    else:
                        worker.tokens, worker.acked = list(message.tokens), len(message.tokens)
                case Ack():
                    worker.acked = max(worker.acked, message.next_index)
                case _:
                    worker.dropped = True

    # ---- what happens ----------------------------------------------------------------------

    def start(self, jitter: float) -> None:
        self.tell_client(c.Start(jitter))

    def place(self, gateway: int, other_worker: bool) -> None:
        run = Run(1, len(self.workers) + 1)
        ref = WorkerRef(WorkerId(f"w{run.counter if other_worker else 0}"), Incarnation(1))
        self.workers.append(Worker(self.seq, run, ref, gateway))
        self.attach(len(self.workers) - 1)

    def attach(self, which: int) -> None:
        if self.workers:
            worker = self.workers[which % len(self.workers)]
            message = Attach(worker.seq, worker.run, worker.ref)
            self.to_gateway.append((worker.gateway, worker.ref, message))

    def compute(self, which: int, steps: int, *, repeat: bool = True) -> None:
        """Compute some tokens; send them alone, or all that were not acknowledged."""
        if not self.workers:
            return
        worker = self.workers[-1 - which % len(self.workers)]
        if worker.tokens is None:
            return
        for _ in range(min(steps, MAX_TOKENS - len(worker.tokens))):
            worker.tokens.append(token_of(worker.run.counter, tuple(worker.tokens)))
        start = worker.acked if repeat else max(worker.acked, worker.sent)
        worker.sent = len(worker.tokens)
        new = tuple(Token(token) for token in worker.tokens[start:])
        finish = FinishReason.LENGTH if len(worker.tokens) == MAX_TOKENS else None
        message = Tokens(worker.seq, worker.run, start, new, finish)
        self.to_gateway.append((worker.gateway, worker.ref, message))

    def arrive_at_gateway(self, which: int, again: bool) -> None:
        if self.to_gateway:
            which %= len(self.to_gateway)
            entry = self.to_gateway[which] if again else self.to_gateway.pop(which)
            self.tell_gateway(entry[0], g.FromWorker(entry[1], entry[2]))

    def arrive_at_worker(self, which: int, again: bool) -> None:
        if self.to_worker:
            which %= len(self.to_worker)
            self.tell_worker(*(self.to_worker[which] if again else self.to_worker.pop(which)))

    def lose(self, which: int) -> None:
        for box in (self.to_gateway, self.to_worker):
            if box:
                box.pop(which % len(box))

    def stream_moves(self, count: int) -> None:
        for attempt in sorted(self.links):
            for _ in range(count):
                link = self.links.get(attempt)
                if link is None or not link.down:
                    break
                effect = link.down.pop(0)
                if isinstance(effect, g.EndStream):
                    del self.links[attempt]
                    self.tell_client(c.StreamEnded(attempt, effect.code.value, effect.message, 0.5))
                else:
                    self.tell_client(c.Got(attempt, effect.message))
                    self.tell_gateway(link.gateway, g.StreamReady(link.stream))

    def stream_breaks(self, noticed: bool) -> None:
        for attempt, link in sorted(self.links.items()):
            del self.links[attempt]
            if noticed:
                self.tell_gateway(link.gateway, g.StreamClosed(link.stream))
            self.tell_client(c.StreamEnded(attempt, "UNAVAILABLE", "broken", 0.5))

    def gateway_restarts(self, index: int) -> None:
        self.lives[index] += 1
        self.gateways[index] = self.new_gateway(index)
        for attempt, link in sorted(self.links.items()):
            if link.gateway == index:
                del self.links[attempt]
                self.tell_client(c.StreamEnded(attempt, "UNAVAILABLE", "gone", 0.5))

    def time_passes(self, ms: int) -> None:
        self.now_ms += ms
        for index in range(GATEWAYS):
            self.tell_gateway(index, g.Tick())
        self.tell_client(c.Tick(0.5))

    def check(self) -> None:
        assert_one_history(tuple(self.delivered))
        assert self.client.received() == (tuple(self.delivered),)
        self.client.check()
        for gateway in self.gateways:
            gateway.check()

    def serve_well(self) -> None:
        """For a moment nothing is lost: runs of the newest placement get somewhere."""
        for _ in range(3):
            for _ in range(len(self.to_gateway)):
                self.arrive_at_gateway(0, False)
            for _ in range(len(self.to_worker)):
                self.arrive_at_worker(0, False)
            self.compute(0, 2)
            self.stream_moves(3)

    def happen(self, chance: Random) -> None:
        """One thing, good or bad."""

        def which() -> int:
            return chance.randrange(1 << 16)

        serving = [link.gateway for link in self.links.values()]
        match chance.choices(range(11), (6, 3, 8, 10, 6, 3, 8, 2, 1, 4, 8))[0]:
            case 0:
                mistaken = chance.random() < 0.2 or not serving
                where = chance.randrange(GATEWAYS) if mistaken else chance.choice(serving)
                self.place(where, chance.random() < 0.7)
            case 1:
                self.attach(which())
            case 2:
                which_run = chance.choice((0, 0, which()))
                self.compute(which_run, chance.randint(1, 3), repeat=chance.random() < 0.3)
            case 3:
                self.arrive_at_gateway(which(), chance.random() < 0.2)
            case 4:
                self.arrive_at_worker(which(), chance.random() < 0.2)
            case 5:
                self.lose(which())
            case 6:
                self.stream_moves(chance.randint(1, 3))
            case 7:
                self.stream_breaks(chance.random() < 0.5)
            case 8:
                self.gateway_restarts(chance.randrange(GATEWAYS))
            case 9:
                self.time_passes(chance.choice((1, 60, 60, 500, 500, 3_000, 6_000, 70_000)))
            case 10:
                self.serve_well()
        self.check()

    def finish(self) -> None:
        """When the faults stop, the request ends, with all its tokens."""
        for _ in range(60):
            if self.succeeded:
                break
            self.time_passes(500)
            for link in list(self.links.values()):
                self.place(link.gateway, True)
            for _ in range(5):
                self.serve_well()
            self.check()
        assert self.succeeded
        assert self.finished == [FinishReason.LENGTH]
        assert len(self.delivered) == MAX_TOKENS


def live_through(seed: int) -> World:
    """Run one schedule."""
    world, chance = World(), Random(seed)
    world.start(chance.random())
    for _ in range(120):
        world.happen(chance)
        if world.succeeded:
            break
    world.finish()
    return world


@settings(max_examples=300)
@given(st.integers(0, 2**32))
def test_tokens_are_one_history_each_once(seed: int) -> None:
    live_through(seed)


def test_the_schedules_reach_the_faults() -> None:
    reached: Counter[str] = Counter()
    for seed in range(60):
        world = live_through(seed)
        for gateway in world.gateways:
            reached.update(gateway.counters)
        reached["streamed_before_the_end"] += len(world.delivered) > 0
    for counter in (
        "takeovers_total",
        "resumes_total",
        "orphans_total",
        "attaches_refused_total",
        "tokens_outdated_total",
        "tokens_unattached_total",
        "tokens_after_gap_dropped_total",
        "tokens_repeated_total",
    ):
        assert reached[counter] >= 5, f"{counter}: {reached}"
