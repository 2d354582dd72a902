"""A worker in one process, without servers: the same core and engine, driven in a plain loop.

It is the oracle of "an unpressed run" for benches and tests, and the shortest way to try a model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from deepinfer.kvstore.core.ids import (
    GatewayId,
    Incarnation,
    NodeId,
    RequestId,
    Run,
    Seq,
    WorkerId,
    WorkerRef,
)
from deepinfer.kvstore.core.messages import (
    Ack,
    Admit,
    Attach,
    Attached,
    Scores,
    ToGateway,
    Tokens,
)
from deepinfer.kvstore.core.requests import FinishReason, RequestRecord, SamplingParams, Token
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.core.core import WorkerCore
from deepinfer.workers.core.events import (
    FromGateway,
    RunStep,
    SendToGateway,
    WorkerEffect,
    WorkerEvent,
)
from deepinfer.workers.engine import Engine

GATEWAY = GatewayId("local")
REF = WorkerRef(WorkerId("local"), Incarnation(1))


class PoolTooSmallError(ValueError):
    """A request that the pool can never hold; says both numbers."""

    def __init__(self, tokens: int, blocks_needed: int, blocks_total: int) -> None:
        super().__init__(
            f"prompt and max_tokens are {tokens} tokens: they need {blocks_needed} KV blocks, "
            f"the pool has {blocks_total}"
        )


@dataclass(slots=True)
class Completion:
    """What one sequence has generated; ``finish`` is None while it runs."""

    record: RequestRecord
    choice: int
    tokens: list[Token] = field(default_factory=list)
    scores: list[Token] = field(default_factory=list)
    """The prompt's tokens from the second on with their log-probabilities, if asked for."""
    finish: FinishReason | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]


class LocalEngine:
    """Generates for a list of requests in one loop. Time is counted in steps, not read.

    Sequences are admitted in order, each once the pool can hold all that the admitted ones may
    come to, so that nothing is ever short of blocks.
    """

    def __init__(self, engine: Engine, config: WorkerConfig) -> None:
        self.core = WorkerCore(REF, NodeId("local"), config)
        self.config = config
        self.engine = engine
        self.completions: dict[Seq, Completion] = {}
        self.now_ms = 0
        self._events: deque[WorkerEvent] = deque()
        self._counter = 0
        self._requests = 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        seed: int = 0,
        stop_token_ids: Sequence[int] = (),
    ) -> list[Completion]:
        """Run every prompt (``n`` times each) to its end; results in the order of prompts.

        A request without ``sampling.seed`` draws from ``seed``. ``stop_token_ids`` are the
        model's end-of-sequence ids; a request's own are added, and ``ignore_eos`` leaves these out.

        Raises PoolTooSmallError for a request that can never fit, and what the device raises.
        """
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        done: list[Completion] = []
        for prompt, params in zip(prompts, each, strict=True):
            done += self.add(prompt, params, seed=seed, stop_token_ids=stop_token_ids)
        waiting = deque(done)
        admitted = 0
        while any(completion.finish is None for completion in done):
            while waiting and self._blocks(waiting[0]) + admitted <= self.config.blocks_total:
                admitted += self._blocks(waiting[0])
                self.admit(waiting.popleft())
            running = [c for c in done if c.finish is None]
            self.advance()
            admitted -= sum(self._blocks(c) for c in running if c.finish is not None)
        self.drain()
        return done

    def add(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        seed: int = 0,
        stop_token_ids: Sequence[int] = (),
    ) -> list[Completion]:
        """Make a request known without running it: one completion for each choice."""
        self._requests += 1
        eos = () if sampling.ignore_eos else tuple(stop_token_ids)
        record = RequestRecord(
            request=RequestId(f"local-{self._requests}"),
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            arrival_ms=self.now_ms,
            seed=seed if sampling.seed is None else sampling.seed,
            stop_token_ids=(*eos, *sampling.stop_token_ids),
        )
        made = [Completion(record, seq.choice) for seq in record.seqs()]
        for completion in made:
            if self._blocks(completion) > self.config.blocks_total:
                tokens = len(prompt_ids) + sampling.max_tokens
                raise PoolTooSmallError(tokens, self._blocks(completion), self.config.blocks_total)
            self.completions[Seq(record.request, completion.choice)] = completion
        return made

    def admit(self, completion: Completion) -> Run:
        """Place a sequence, with the tokens it has so far; returns its run."""
        seq = Seq(completion.record.request, completion.choice)
        run = self.mint()
        tokens = len(completion.record.prompt_ids) + len(completion.tokens)
        total = len(completion.record.prompt_ids) + completion.record.sampling.max_tokens
        self.feed(Admit(run, seq, run, GATEWAY, tokens, total))
        return run

    def mint(self) -> Run:
        """The next number for a run or an order."""
        self._counter += 1
        return Run(1, self._counter)

    def feed(self, event: WorkerEvent) -> None:
        """Let something happen; its consequences follow in ``advance``."""
        self._events.append(event)

    def advance(self) -> bool:
        """Handle one event; False if there was none."""
        if not self._events:
            return False
        event = self._events.popleft()
        self.now_ms += 1
        for effect in self.core.handle(event, self.now_ms):
            self.perform(effect)
        return True

    def drain(self) -> None:
        """Handle events until none is left."""
        while self.advance():
            pass

    def perform(self, effect: WorkerEffect) -> None:
        """Do what the core asks, at once. No controller listens, and nobody orders a swap."""
        if isinstance(effect, RunStep):
            self.feed(self.engine.run(effect.plan))
        elif isinstance(effect, SendToGateway):
            self._hear(effect.message)

    def _hear(self, message: ToGateway) -> None:
        completion = self.completions[message.seq]
        if isinstance(message, Attach):
            held, scored = tuple(completion.token_ids), len(completion.scores)
            attached = Attached(message.seq, message.run, completion.record, held, scored)
            self.feed(FromGateway(GATEWAY, attached))
        elif isinstance(message, Scores):
            known = len(completion.scores) - (message.position - 1)
            completion.scores += message.tokens[known:]
            self._acknowledge(completion, message)
        elif isinstance(message, Tokens):
            known = len(completion.tokens) - message.index
            completion.tokens += message.tokens[known:]
            completion.finish = message.finish
            self._acknowledge(completion, message)

    def _acknowledge(self, completion: Completion, message: Scores | Tokens) -> None:
        held, finished = len(completion.tokens), completion.finish is not None
        scored = len(completion.scores)
        ack = Ack(message.seq, message.run, held, finished, scored)
        self.feed(FromGateway(GATEWAY, ack))

    def _blocks(self, completion: Completion) -> int:
        record = completion.record
        return self.config.blocks_for(len(record.prompt_ids) + record.sampling.max_tokens)
