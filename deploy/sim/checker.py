"""What every client has been told, held against what it may be told.

Without noise, and where weights do not give way, the whole answer is known in advance, and every
token is compared with it. With noise, where a token that is computed twice may come out
differently, each token carries evidence of what it was sampled from: it must be exactly what its
client has, and the runs that speak on one stream never go back. It also says in which mode it was
sampled, and so shows what the shares in the end have to be.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer.deploy.sim.model import chain, evidence, kv_of, whole_answer
from deepinfer.gateway.core.events import ChoiceUsage
from deepinfer.kvstore.core.ids import RequestId, Run, Seq
from deepinfer.kvstore.core.precision import Precision
from deepinfer.kvstore.core.requests import FinishReason, RequestRecord, Token


class ViolationError(AssertionError):
    """A promise was broken."""


@dataclass(slots=True)
class _Told:
    """What one client knows of one choice."""

    kv: int
    """The KV behind the last token."""
    tokens: list[int] = field(default_factory=list)
    precisions: list[Precision] = field(default_factory=list)
    """In which mode each of them was generated."""
    usage: ChoiceUsage | None = None
    """What a gateway has summed up last."""
    scored: int = 0
    """Prompt tokens whose log-probabilities it has."""
    run: int = 0
    finish: FinishReason | None = None


class History:
    """Requests by id, and what each client has received."""

    __slots__ = ("_answers", "_nested", "_noisy", "_records", "_stop_pairs", "_told", "client_of")

    def __init__(self, *, noisy: bool, nested: bool = False) -> None:
        self._noisy = noisy
        self._nested = nested
        """The weights give way: only answers of exact requests are known in advance."""
        self._answers: dict[Seq, tuple[int, ...]] = {}
        self._records: dict[RequestId, RequestRecord] = {}
        self._stop_pairs: dict[RequestId, tuple[int, int] | None] = {}
        self._told: dict[tuple[str, int], _Told] = {}
        self.client_of: dict[RequestId, str] = {}
        """Who sent each request."""

    def minted(self, client: str, record: RequestRecord, stop_pair: tuple[int, int] | None) -> None:
        """A gateway has given a client's request its id. ``stop_pair`` spell the stop string."""
        if record.request in self._records:
            raise ViolationError(f"request id {record.request} was minted twice")
        self._records[record.request] = record
        self._stop_pairs[record.request] = stop_pair
        self.client_of[record.request] = client

    def record(self, request: RequestId) -> RequestRecord:
        """The request as its first gateway accepted it."""
        return self._records[request]

    def stop_pair(self, request: RequestId) -> tuple[int, int] | None:
        """The two tokens that spell the request's stop string."""
        return self._stop_pairs[request]

    def check_sequence(self, seq: Seq, tokens: list[int]) -> None:
        """A worker computes with these tokens: they must be the request's, as far as is known."""
        record = self._records[seq.request]
        prompt = record.prompt_ids
        if tuple(tokens[: len(prompt)]) != prompt[: len(tokens)]:
            raise ViolationError(f"{seq} is computed from {tokens}, its prompt is {prompt}")
        generated = tuple(tokens[len(prompt) :])
        if self._foreknown(record) and generated != self._answer(seq)[: len(generated)]:
            raise ViolationError(f"{seq} goes on with {generated}, should be {self._answer(seq)}")
        if len(generated) > record.sampling.max_tokens:
            raise ViolationError(
                f"{seq} has {len(generated)} of {record.sampling.max_tokens} tokens"
            )

    def _foreknown(self, record: RequestRecord) -> bool:
        return not self._noisy and (record.exact or not self._nested)

    def _answer(self, seq: Seq) -> tuple[int, ...]:
        found = self._answers.get(seq)
        if found is None:
            found = whole_answer(self._records[seq.request], seq.choice)
            self._answers[seq] = found
        return found

    def _known(self, client: str, seq: Seq) -> _Told:
        told = self._told.get((client, seq.choice))
        if told is None:
            told = _Told(kv_of(self._records[seq.request].prompt_ids)[-1])
            self._told[client, seq.choice] = told
        return told

    def reopened(self, client: str) -> None:
        """The client has a new stream, perhaps from a gateway that got its tokens from other runs.

        What it says next must still continue exactly what the client has.
        """
        for (name, _), told in self._told.items():
            if name == client:
                told.run = 0

    def scored(self, client: str, seq: Seq, position: int, tokens: tuple[Token, ...]) -> None:
        """The client's caller got the log-probabilities of prompt tokens from ``position`` on."""
        told, record = self._known(client, seq), self._records[seq.request]
        if position != told.scored + 1 or told.tokens:
            raise ViolationError(
                f"{client}: {seq} got log-probabilities from position {position} on,"
                f" behind {told.scored} of them and {len(told.tokens)} tokens"
            )
        told.scored += len(tokens)
        behind = kv_of(record.prompt_ids)
        for place, token in enumerate(tokens, position):
            context, _ = evidence(behind[place - 1], Run(0, 0))
            if (token.id, token.logprob) != (record.prompt_ids[place], context):
                raise ViolationError(f"{client}: {seq} position {place} of the prompt has {token}")

    def delivered(self, client: str, seq: Seq, index: int, tokens: tuple[Token, ...]) -> None:
        """The client's caller got ``tokens`` from position ``index`` on."""
        told = self._known(client, seq)
        if told.finish is not None:
            raise ViolationError(f"{client}: {seq} got tokens after its end")
        if index != len(told.tokens):
            raise ViolationError(
                f"{client}: {seq} got position {index} when {len(told.tokens)} was due"
            )
        record = self._records[seq.request]
        if told.scored != record.scores_due(seq.choice):
            raise ViolationError(
                f"{client}: {seq} got tokens before its prompt's log-probabilities"
            )
        for token in tokens:
            if self._ended(seq, told.tokens) is not None:
                raise ViolationError(f"{client}: {seq} goes on behind its end: {told.tokens}")
            if token.logprob is None and record.sampling.logprobs is not None:
                raise ViolationError(
                    f"{client}: {seq} token {len(told.tokens)} lacks its log-probability"
                )
            if token.logprob is not None:
                self._check_origin(client, seq, told, token)
            told.tokens.append(token.id)
            told.precisions.append(token.precision)
            told.kv = chain(told.kv, token.id)
        if self._foreknown(record) and tuple(told.tokens) != self._answer(seq)[: len(told.tokens)]:
            raise ViolationError(
                f"{client}: {seq} got {told.tokens}, should be {self._answer(seq)}"
            )

    def _check_origin(self, client: str, seq: Seq, told: _Told, token: Token) -> None:
        context, _ = evidence(told.kv, Run(0, 0))
        if token.logprob != context:
            raise ViolationError(
                f"{client}: {seq} token {len(told.tokens)} was sampled behind other tokens"
                f" than {told.tokens}"
            )
        ((run, rank),) = token.top
        if token.precision.rank != rank:
            raise ViolationError(
                f"{client}: {seq} token {len(told.tokens)} is called {token.precision.value},"
                f" its step was of rank {rank:g}"
            )
        if run < told.run:
            raise ViolationError(
                f"{client}: {seq} token {len(told.tokens)} comes from run {run},"
                f" after one of run {told.run}"
            )
        told.run = run

    def _ended(self, seq: Seq, tokens: list[int]) -> FinishReason | None:
        """Why the choice ends with these tokens, if it does."""
        record = self._records[seq.request]
        if not tokens:
            return None
        if tuple(tokens[-2:]) == self._stop_pairs[seq.request]:
            return FinishReason.STOP
        if tokens[-1] in record.stop_token_ids and len(tokens) > record.sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(tokens) >= record.sampling.max_tokens else None

    def accounted(self, client: str, choice: int, usage: ChoiceUsage) -> None:
        """A gateway tells the client what a choice has cost, with its end."""
        told = self._told.get((client, choice))
        if told is not None:
            told.usage = usage

    def _check_shares(self, client: str, seq: Seq, told: _Told) -> None:
        usage = told.usage
        if usage is None:
            return
        reduced = Precision.MIXED, Precision.FP8, Precision.W8A8
        found = (
            usage.completion_tokens,
            usage.tokens_mixed,
            usage.tokens_fp8,
            usage.tokens_w8a8,
        )
        if found != (len(told.tokens), *map(told.precisions.count, reduced)):
            raise ViolationError(
                f"{client}: {seq} is told of {found} tokens, mixed, FP8 and W8A8 ones: "
                f"{told.precisions}"
            )

    def finished(
        self, client: str, seq: Seq, reason: FinishReason, *, provoked: tuple[FinishReason, ...]
    ) -> None:
        """The client's caller was told that the choice has ended.

        ``provoked`` are early ends of this client's own making (an abort, a deadline).
        """
        told = self._known(client, seq)
        if told.finish is not None:
            raise ViolationError(f"{client}: {seq} ended twice: {told.finish}, {reason}")
        told.finish = reason
        self._check_shares(client, seq, told)
        due = self._ended(seq, told.tokens)
        if reason is not due and reason not in provoked:
            raise ViolationError(
                f"{client}: {seq} ended as {reason.value} after {told.tokens}, due is {due}"
            )

    def succeeded(self, client: str, request: RequestId) -> None:
        """The client's caller was told that this was all of it."""
        for seq in self._records[request].seqs():
            if self._known(client, seq).finish is None:
                raise ViolationError(f"{client}: succeeded before {seq} had ended")
