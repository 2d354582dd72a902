"""What every client has been told, held against what it should have been told.

The history knows each request's whole answer in advance (``model.answer``), so every token is
judged the moment it reaches its client, and all of it once more when the simulation ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer.deploy.sim.model import Answer, answer
from deepinfer.kvstore.core.ids import RequestId, Seq
from deepinfer.kvstore.core.requests import FinishReason, RequestRecord


class ViolationError(AssertionError):
    """A promise was broken."""


@dataclass(slots=True)
class _Told:
    """What one client knows of one choice."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None


class History:
    """Answers by request, and what each client has received."""

    __slots__ = ("_answers", "_records", "_stop_pairs", "_told", "client_of")

    def __init__(self) -> None:
        self._answers: dict[Seq, Answer] = {}
        self._records: dict[RequestId, RequestRecord] = {}
        self._stop_pairs: dict[RequestId, tuple[int, int] | None] = {}
        self._told: dict[str, dict[int, _Told]] = {}
        self.client_of: dict[RequestId, str] = {}
        """Who sent each request."""

    def minted(self, client: str, record: RequestRecord, stop_pair: tuple[int, int] | None) -> None:
        """A gateway has given a request its id."""
        if record.request in self._records:
            raise ViolationError(f"request id {record.request} was minted twice")
        self._records[record.request] = record
        self.client_of[record.request] = client
        self._stop_pairs[record.request] = stop_pair

    def record(self, request: RequestId) -> RequestRecord:
        """The request as its first gateway accepted it."""
        return self._records[request]

    def stop_pair(self, request: RequestId) -> tuple[int, int] | None:
        """The two tokens that spell the request's stop string."""
        return self._stop_pairs[request]

    def answer(self, seq: Seq) -> Answer:
        """The whole answer of one choice."""
        found = self._answers.get(seq)
        if found is None:
            record = self._records[seq.request]
            found = answer(record, seq.choice, self._stop_pairs[seq.request])
            self._answers[seq] = found
        return found

    def delivered(self, client: str, seq: Seq, index: int, tokens: tuple[int, ...]) -> None:
        """The client's caller got ``tokens`` from position ``index`` on."""
        told = self._told.setdefault(client, {}).setdefault(seq.choice, _Told())
        if told.finish is not None:
            raise ViolationError(f"{client}: {seq} got tokens after its end")
        if index != len(told.tokens):
            raise ViolationError(
                f"{client}: {seq} got position {index} when {len(told.tokens)} was due"
            )
        told.tokens.extend(tokens)
        due = self.answer(seq).tokens[: len(told.tokens)]
        if tuple(told.tokens) != due:
            raise ViolationError(f"{client}: {seq} got {told.tokens}, should be {due}")

    def finished(
        self, client: str, seq: Seq, reason: FinishReason, *, may_be: tuple[FinishReason, ...]
    ) -> None:
        """The client's caller was told that the choice has ended.

        ``may_be``: early ends that this client provoked (an abort, a deadline).
        """
        told = self._told.setdefault(client, {}).setdefault(seq.choice, _Told())
        if told.finish is not None:
            raise ViolationError(f"{client}: {seq} ended twice: {told.finish}, {reason}")
        told.finish = reason
        if reason in may_be:
            return
        whole = self.answer(seq)
        if reason is not whole.finish or len(told.tokens) != len(whole.tokens):
            raise ViolationError(
                f"{client}: {seq} ended as {reason.value} after {len(told.tokens)} tokens,"
                f" should be {whole.finish.value} after {len(whole.tokens)}"
            )
