"""The record of one request: the truth about it, as long as its gateway lives.

A choice's tokens and what is known of them::

    0            sent          visible          held
    |-- client --|-- may go out --|-- to be scanned for stop strings --|
"""

from __future__ import annotations

import hmac
from itertools import islice

from deepinfer.gateway.core.events import Code, Resume, Scan
from deepinfer.gateway.core.measures import Measures
from deepinfer.gateway.core.scores import PromptScores, Taken
from deepinfer.gateway.core.usage import Meter
from deepinfer.kvstore.core.ids import Run, Seq, StreamId, WorkerRef
from deepinfer.kvstore.core.messages import RequestLevel, Tokens
from deepinfer.kvstore.core.precision import Precision
from deepinfer.kvstore.core.requests import FinishReason, RequestRecord, Token

_RECORD_BYTES = 1_000
_PROMPT_TOKEN_BYTES = 8
_TOKEN_BYTES = 120
_LOGPROB_BYTES = 90


class Choice:
    """One choice of a request: its tokens, who may add to them, and its end."""

    __slots__ = (
        "attached",
        "cached",
        "finish",
        "finish_code",
        "finish_message",
        "meter",
        "needs_scan",
        "reported_tokens",
        "scan_asked",
        "scanned",
        "scores",
        "sent",
        "seq",
        "tokens",
        "with_logprobs",
        "worker",
    )

    def __init__(self, seq: Seq, record: RequestRecord, meter: Meter) -> None:
        self.seq = seq
        self.tokens: list[Token] = []
        self.attached: Run | None = None
        """The highest run that has attached."""
        self.worker: WorkerRef | None = None
        """Whose run that is; None while no run may speak."""
        self.finish: FinishReason | None = None
        self.finish_message = ""
        self.finish_code = ""
        """The status behind a refusal."""
        self.scores = PromptScores(record.scores_due(seq.choice))
        self.cached = 0
        """Prompt tokens that the run of the first token found in a prefix cache."""
        self.with_logprobs = record.sampling.logprobs is not None
        self.needs_scan = bool(record.sampling.stop)
        self.scan_asked = 0
        """Tokens handed out for scanning so far."""
        self.scanned = 0
        """Tokens known to hold no stop string."""
        self.sent = 0
        """Tokens that a client has or may have: never cut away."""
        self.reported_tokens = 0
        """``held_tokens`` in the last report that named this choice."""
        self.meter = meter

    @property
    def visible(self) -> int:
        """Tokens that may go out."""
        return self.scanned if self.needs_scan else len(self.tokens)

    @property
    def complete(self) -> bool:
        """Whether the choice has ended and all of it may go out."""
        return self.finish is not None and self.visible == len(self.tokens)

    def token_ids(self) -> tuple[int, ...]:
        """Ids of every token held."""
        return tuple(token.id for token in self.tokens)

    def agrees_with(self, received: tuple[int, ...]) -> bool:
        """Whether a client that has ``received`` can go on behind it here.

        Not if a token behind it came from another client without its log-probabilities.
        """
        held = self.tokens
        if self.with_logprobs and any(t.logprob is None for t in held[len(received) :]):
            return False
        return len(received) <= len(held) and all(
            token.id == token_id for token, token_id in zip(held, received, strict=False)
        )

    def take(self, said: Tokens, max_tokens: int, now_ms: int) -> Taken:
        """Add what the attached run says, from the first token that is not held yet.

        All or nothing: a message that starts behind the tokens held (or comes before the prompt's
        log-probabilities have), contradicts them, or goes beyond ``max_tokens`` changes nothing.
        """
        if self.finish is not None:
            return Taken.ENDED
        held, start, end = len(self.tokens), said.index, said.index + len(said.tokens)
        failed = said.finish is FinishReason.ERROR
        if start > held or not (self.scores.complete or failed):
            return Taken.AFTER_GAP
        if start < 0 or end > max_tokens or (said.finish is not None and end < held):
            return Taken.CONTRADICTING
        overlap = zip(islice(self.tokens, start, None), said.tokens, strict=False)
        if any(old.id != new.id for old, new in overlap):
            return Taken.CONTRADICTING
        if end > held:
            if held == 0:
                self.cached = said.cached
            self.tokens.extend(said.tokens[held - start :])
            self.meter.tokens_arrived(said.run, end - held, now_ms)
        if said.finish is not None:
            self.end(said.finish)
        return Taken.ACCEPTED

    def end(self, reason: FinishReason, message: str = "", code: str = "") -> None:
        """End here, with every token held."""
        self.finish, self.finish_message, self.finish_code = reason, message, code

    def tokens_in(self, precision: Precision) -> int:
        """How many of the tokens were generated in that mode."""
        return sum(1 for token in self.tokens if token.precision is precision)

    def hold(self, received: tuple[int, ...], record: RequestRecord) -> None:
        """Take what a client has for the truth, and its end too if these are all there will be."""
        self.tokens = [Token(token_id) for token_id in received]
        held = len(received)
        if held == 0:
            return
        if received[-1] in record.stop_token_ids and held > record.sampling.min_tokens:
            self.end(FinishReason.STOP)
        elif held >= record.sampling.max_tokens:
            self.end(FinishReason.LENGTH)

    def heard_of(self, received: tuple[int, ...], precisions: tuple[Precision, ...]) -> None:
        """A client that has ``received`` goes on here: in these modes, or () if all were FP16.

        Another run may have sent it the same tokens from steps in other modes than those held.
        """
        self.sent = max(self.sent, len(received))
        said = precisions or (Precision.FP16,) * len(received)
        for index, precision in enumerate(said):
            token = self.tokens[index]
            if token.precision is not precision:
                self.tokens[index] = token._replace(precision=precision)

    def stop_at(self, tokens: int) -> None:
        """A stop string ends within token number ``tokens``: drop what follows.

        What a client may have stays, so a match that comes too late ends the choice there.
        """
        del self.tokens[max(tokens, self.sent) :]
        self.scan_asked = self.scanned = len(self.tokens)
        self.end(FinishReason.STOP)

    def next_scan(self) -> Scan | None:
        """The scan that is due, marked as asked for."""
        if not self.needs_scan or self.scan_asked == len(self.tokens):
            return None
        start, self.scan_asked = self.scan_asked, len(self.tokens)
        return Scan(self.seq, start, tuple(token.id for token in self.tokens[start:]))

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        assert 0 <= self.sent <= len(self.tokens), f"{self.seq}: sent more than is held"
        assert self.scanned <= self.scan_asked <= len(self.tokens), f"{self.seq}: scanned too far"
        assert self.worker is None or self.attached is not None, f"{self.seq}: attached no run"


class Entry:
    """One request at this gateway."""

    __slots__ = (
        "choices",
        "claim",
        "code",
        "message",
        "record",
        "resume_key",
        "stream",
    )

    def __init__(
        self,
        record: RequestRecord,
        resume_key: str,
        claim: int,
        since_ms: int | None,
        measures: Measures,
    ) -> None:
        self.record = record
        self.resume_key = resume_key
        self.claim = claim
        self.stream: StreamId | None = None
        self.code = Code.OK
        self.message = ""
        """How its streams end, once every choice has."""
        self.choices = [Choice(seq, record, Meter(measures, since_ms)) for seq in record.seqs()]

    @property
    def ended(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish is not None for choice in self.choices)

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        for choice in self.choices:
            choice.check()
            assert len(choice.tokens) <= self.record.sampling.max_tokens, f"{choice.seq}: too long"
            scores = choice.scores
            assert len(scores.tokens) <= scores.due, f"{choice.seq}: too many scores"
            assert scores.complete or not choice.tokens, f"{choice.seq}: tokens before scores"

    def bytes(self) -> int:
        """About what the record costs in memory."""
        sampling = self.record.sampling
        tokens = sum(len(choice.tokens) for choice in self.choices)
        scores = sum(len(choice.scores.tokens) for choice in self.choices)
        return (
            _RECORD_BYTES
            + _PROMPT_TOKEN_BYTES * len(self.record.prompt_ids)
            + (_TOKEN_BYTES + _LOGPROB_BYTES * (sampling.logprobs or 0)) * tokens
            + (_TOKEN_BYTES + _LOGPROB_BYTES * (sampling.prompt_logprobs or 0)) * scores
        )

    def level(self, choice: Choice, *, cancelled: bool = False) -> RequestLevel:
        """State one choice for the controller."""
        record = self.record
        return RequestLevel(
            seq=choice.seq,
            claim=self.claim,
            cancelled=cancelled,
            prompt_tokens=len(record.prompt_ids),
            max_tokens=record.sampling.max_tokens,
            held_tokens=len(choice.tokens),
            arrival_ms=record.arrival_ms,
            priority=record.priority,
            deadline_ms=record.deadline_ms,
            exact=record.exact,
            attached=choice.attached if choice.worker is not None else None,
        )


def resume_refusal(event: Resume, entry: Entry | None) -> tuple[Code, str] | None:
    """Why a Resume is refused for what it says; None if it may be served."""
    sampling = event.record.sampling
    if len(event.received) != sampling.n:
        return Code.INVALID_ARGUMENT, f"progress of {len(event.received)} choices, n = {sampling.n}"
    longest = max(len(received) for received in event.received)
    if longest > sampling.max_tokens:
        return (
            Code.INVALID_ARGUMENT,
            f"progress of {longest} tokens, max_tokens = {sampling.max_tokens}",
        )
    due = event.record.scores_due(0)
    if event.scored > due or (event.received[0] and event.scored < due):
        return (
            Code.INVALID_ARGUMENT,
            f"prompt_logprobs = {event.scored}: must be {due} in front of generated tokens, "
            "and never more",
        )
    if entry is None:
        return None
    if not hmac.compare_digest(entry.resume_key.encode(), event.resume_key.encode()):
        return Code.PERMISSION_DENIED, "the resume key is not this request's"
    if event.claim < entry.claim:
        return Code.ABORTED, f"attempt {event.claim} is older than attempt {entry.claim}"
    if not _same_request(entry.record, event.record):
        return Code.INVALID_ARGUMENT, "the request is not the one that was accepted under this id"
    return None


def _same_request(held: RequestRecord, said: RequestRecord) -> bool:
    return held.prompt_ids == said.prompt_ids and held.sampling == said.sampling
