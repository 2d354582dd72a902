"""The client's core: one request, received exactly once over as many streams as it takes.

Before ``Accepted`` nothing has been promised: a failed attempt is simply made again. After it the
request will finish, so the client comes back with everything it has, to one endpoint after the
other, until nothing has been heard for ``give_up_ms``.
"""

from __future__ import annotations

from deepinfer.client.core.config import ClientConfig
from deepinfer.client.core.events import (
    AbortAnswered,
    AbortRequested,
    CloseStream,
    Deliver,
    Effect,
    Event,
    Fail,
    Failure,
    Got,
    OpenGenerate,
    OpenResume,
    SendAbort,
    Start,
    StreamEnded,
    Succeed,
    Tick,
    Wait,
)
from deepinfer.client.core.failures import failure_of
from deepinfer.kvstore.core.ids import RequestId, Run
from deepinfer.kvstore.core.messages import (
    Accepted,
    Delta,
    Finished,
    Notice,
    PromptDelta,
    ToClient,
)
from deepinfer.kvstore.core.precision import Precision
from deepinfer.kvstore.core.requests import FinishReason

_NOT_BY_TOKENS = (FinishReason.ERROR, FinishReason.ABORT, FinishReason.DEADLINE)
"""Ends that do not show in a choice's tokens, which are all that a resuming client tells of it."""


class ClientCore:
    """Receives one request exactly once.

    Args:
        endpoints: where gateways are; tried in turn. At least one.
        choices: the request's ``n``.
        deadline_ms: the request's, from its start. Its gateway ends it then; this is for when none
            can be heard.
    """

    def __init__(
        self,
        endpoints: tuple[str, ...],
        choices: int = 1,
        config: ClientConfig | None = None,
        *,
        deadline_ms: int | None = None,
    ) -> None:
        if not endpoints:
            raise ValueError("endpoints = (): must be at least one address")
        self.config = config or ClientConfig()
        self._endpoints = endpoints
        self._endpoint = 0
        self._tokens: list[list[int]] = [[] for _ in range(choices)]
        self._precisions: list[list[Precision]] = [[] for _ in range(choices)]
        """In which mode each of them was generated."""
        self._reduced = False
        """Whether any of them was not in FP16."""
        self._scored = 0
        """Prompt tokens' log-probabilities received, from the second token on."""
        self._finishes: list[FinishReason | None] = [None] * choices
        self._refusal: Finished | None = None
        """The first end of a choice with an error."""
        self._notices: dict[tuple[int, Run], int] = {}
        self._accepted: Accepted | None = None
        self._attempt = 0
        """The number of the newest attempt; also what claims are counted by."""
        self._open = False
        """Whether that attempt's stream is open, as far as known."""
        self._heard = False
        """Whether that attempt has brought ``Accepted``."""
        self._opened_ms = 0
        self._progress_ms = 0
        self._failures = 0
        """Attempts in a row that brought nothing new."""
        self._trouble = ""
        """How the last of them ended."""
        self._contradictions = 0
        """How many of them contradicted what is here."""
        self._refusing: set[int] = set()
        """Endpoints that were full, or not to be trusted, when asked to accept."""
        self._retry_ms: int | None = None
        self._deadline_ms = deadline_ms
        self._late_ms: int | None = None
        """When the client itself ends the request."""
        self._aborts = 0
        self._aborting = False
        self._over = False
        self._effects: list[Effect] = []

    @property
    def over(self) -> bool:
        """Whether the request has succeeded or failed."""
        return self._over

    @property
    def accepted(self) -> Accepted | None:
        """The first ``Accepted``: id and resume key."""
        return self._accepted

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """Take one event and return what has to be done, in order."""
        if not self._over:
            match event:
                case Start(jitter):
                    self._endpoint = int(jitter * len(self._endpoints)) % len(self._endpoints)
                    self._progress_ms = now_ms
                    if self._deadline_ms is not None:
                        self._late_ms = now_ms + self._deadline_ms + self.config.deadline_slack_ms
                    self._open_next(now_ms)
                case Got(attempt, message):
                    if attempt == self._attempt and self._open:
                        self._got(message, now_ms)
                case StreamEnded():
                    if event.attempt == self._attempt and self._open:
                        self._open = False
                        if self._aborting:
                            self._unaccepted()
                        else:
                            self._ended(event, now_ms)
                case AbortRequested():
                    self._abort(now_ms)
                case AbortAnswered(attempt, ok, jitter):
                    if attempt == self._attempt and self._aborting:
                        self._abort_answered(ok, now_ms, jitter)
                case Tick(jitter):
                    self._tick(now_ms, jitter)
        effects, self._effects = self._effects, []
        return effects

    # ---- attempts -------------------------------------------------------------------------

    def _open_next(self, now_ms: int) -> None:
        self._attempt += 1
        self._open, self._heard, self._retry_ms = True, False, None
        self._opened_ms = now_ms
        endpoint = self._endpoints[self._endpoint]
        if self._accepted is None:
            self._effects.append(OpenGenerate(self._attempt, endpoint))
        else:
            self._effects.append(
                OpenResume(
                    self._attempt,
                    endpoint,
                    self._accepted.request,
                    self._accepted.resume_key,
                    self._attempt,
                    tuple(tuple(tokens) for tokens in self._tokens),
                    self._scored,
                    self.precisions() if self._reduced else (),
                )
            )
        self._wait(now_ms + self.config.accept_timeout_ms)

    def _wait(self, due_ms: int) -> None:
        if self._late_ms is not None and not self._aborting:
            due_ms = min(due_ms, self._late_ms)
        self._effects.append(Wait(due_ms))

    def _again(self, code: str, detail: str, now_ms: int, jitter: float) -> None:
        """Make another attempt: at the next endpoint, after a wait that doubles each time."""
        self._close_stream()
        self._trouble = detail
        config = self.config
        patience_ms = config.connect_give_up_ms if self._accepted is None else config.give_up_ms
        if now_ms - self._progress_ms >= patience_ms:
            self._fail(Failure.UNAVAILABLE, code, detail)
            return
        self._endpoint = (self._endpoint + 1) % len(self._endpoints)
        self._retry_ms = now_ms + self._backoff_ms(self._failures, jitter)
        self._failures += 1
        self._wait(self._retry_ms)

    def _backoff_ms(self, failures: int, jitter: float) -> int:
        longest = min(self.config.backoff_max_ms, self.config.backoff_first_ms << min(failures, 16))
        return max(1, int(longest * (1.0 + jitter) / 2))

    def _tick(self, now_ms: int, jitter: float) -> None:
        """Do what is due; whatever is not yet is waited for anew, as this Wait is spent."""
        late_ms = None if self._aborting else self._late_ms
        if late_ms is not None and now_ms >= late_ms:
            self._close_stream()
            detail = f"the deadline of {self._deadline_ms} ms has passed, and no gateway says so"
            self._fail(Failure.DEADLINE, "DEADLINE_EXCEEDED", detail)
        elif self._retry_ms is not None:
            if now_ms < self._retry_ms:
                self._wait(self._retry_ms)
            elif self._aborting:
                self._retry_ms = None
                self._send_abort()
            else:
                self._open_next(now_ms)
        elif self._open and not self._heard:
            config = self.config
            patience_ms = config.abort_accept_ms if self._aborting else config.accept_timeout_ms
            waited_ms = now_ms - self._opened_ms
            if waited_ms < patience_ms:
                self._wait(self._opened_ms + patience_ms)
            elif self._aborting:
                self._unaccepted()
            else:
                endpoint = self._endpoints[self._endpoint]
                self._again("UNAVAILABLE", f"{endpoint}: silent for {waited_ms} ms", now_ms, jitter)
        elif late_ms is not None:
            self._wait(late_ms)

    def _ended(self, end: StreamEnded, now_ms: int) -> None:
        code, detail = end.code, end.detail
        if self._heard and now_ms - self._opened_ms >= self.config.backoff_max_ms:
            # It was in a gateway's hands until now, though nothing new came of it: a request may
            # wait for longer than patience lasts. One that is lost again and again is not.
            self._progress_ms, self._failures = now_ms, 0
        refused = end.untrusted or code == "RESOURCE_EXHAUSTED"
        if refused and self._accepted is None:  # another endpoint may do better
            self._refusing.add(self._endpoint)
            if len(self._refusing) == len(self._endpoints):
                kind = Failure.UNTRUSTED if end.untrusted else Failure.EXHAUSTED
                self._fail(kind, code, detail)
            else:
                self._again(code, detail, now_ms, end.jitter)
        elif (failure := failure_of(code)) is not None:
            self._fail(failure, code, detail)
        else:
            self._again(code, detail, now_ms, end.jitter)

    def _fail(self, failure: Failure, code: str, detail: str) -> None:
        self._over = True
        self._effects.append(Fail(failure, code, detail))

    # ---- messages -------------------------------------------------------------------------

    def _got(self, message: ToClient, now_ms: int) -> None:
        match message:
            case Accepted():
                self._heard = True
                if self._accepted is None:
                    self._accepted = message
                    self._progressed(now_ms)
                    self._effects.append(Deliver(message))
                    if self._aborting:
                        self._close_stream()
                        self._send_abort()
                elif message.request != self._accepted.request:
                    self._contradiction(f"{message.request} answers for another request", now_ms)
            case PromptDelta():
                self._prompt_delta(message, now_ms)
            case Delta():
                self._delta(message, now_ms)
            case Notice():
                key = (message.seq.choice, message.run)
                if message.number > self._notices.get(key, -1):
                    self._notices[key] = message.number
                    self._effects.append(Deliver(message))
            case Finished():
                self._finished(message, now_ms)

    def _progressed(self, now_ms: int) -> None:
        self._progress_ms, self._failures, self._contradictions = now_ms, 0, 0

    def _contradiction(self, detail: str, now_ms: int) -> None:
        """What was said cannot follow what is here. What is here was delivered: insist on it."""
        self._contradictions += 1
        if self._contradictions < self.config.contradictions_max:
            self._again("INTERNAL", detail, now_ms, 0.0)
        else:
            self._close_stream()
            self._fail(Failure.PROTOCOL, "INTERNAL", detail)

    def _choice_is_known(self, choice: int) -> bool:
        return self._accepted is not None and 0 <= choice < len(self._tokens)

    def _prompt_delta(self, delta: PromptDelta, now_ms: int) -> None:
        start, end = delta.position - 1, delta.position - 1 + len(delta.tokens)
        if start >= 0 and end <= self._scored:
            return  # nothing new
        if start != self._scored or self._accepted is None:
            self._contradiction(
                f"log-probabilities of the prompt from position {delta.position} on do not "
                f"continue the {self._scored} received",
                now_ms,
            )
            return
        self._progressed(now_ms)
        self._scored = end
        self._effects.append(Deliver(delta))

    def _delta(self, delta: Delta, now_ms: int) -> None:
        choice, start = delta.choice, delta.index
        known = self._choice_is_known(choice)
        if known and self._finishes[choice] in _NOT_BY_TOKENS:
            return  # a gateway that took over does not know of this end
        if not known or self._finishes[choice] is not None:
            self._contradiction(f"tokens of choice {choice}, which is not running", now_ms)
            return
        have, said = self._tokens[choice], [token.id for token in delta.tokens]
        if start >= 0 and have[start : start + len(said)] == said:
            return  # nothing new
        if start != len(have):  # its text could not be cut where its tokens would have to be
            self._contradiction(
                f"choice {choice}: {len(said)} tokens from {start} on do not continue "
                f"the {len(have)} received",
                now_ms,
            )
            return
        self._progressed(now_ms)
        have.extend(said)
        precisions = [token.precision for token in delta.tokens]
        self._precisions[choice].extend(precisions)
        self._reduced = self._reduced or any(p is not Precision.FP16 for p in precisions)
        self._effects.append(Deliver(delta))

    def _finished(self, message: Finished, now_ms: int) -> None:
        choice = message.choice
        if not self._choice_is_known(choice):
            self._contradiction(f"the end of choice {choice}, which does not exist", now_ms)
            return
        if self._finishes[choice] is not None:
            return
        if message.tokens != len(self._tokens[choice]):
            self._contradiction(
                f"choice {choice} ends after {message.tokens} tokens, "
                f"{len(self._tokens[choice])} were received",
                now_ms,
            )
            return
        self._progressed(now_ms)
        self._finishes[choice] = message.reason
        self._effects.append(Deliver(message))
        if message.reason is FinishReason.ERROR and self._refusal is None:
            self._refusal = message
        if None in self._finishes:
            return
        self._close_stream()
        if self._refusal is None:
            self._over = True
            self._effects.append(Succeed())
        else:
            code = self._refusal.code or "INTERNAL"
            self._fail(failure_of(code) or Failure.FAILED, code, self._refusal.message)

    # ---- aborting -------------------------------------------------------------------------

    def _abort(self, now_ms: int) -> None:
        if self._aborting:
            return
        self._aborting = True
        self._retry_ms = None
        if self._accepted is not None:
            self._close_stream()
            self._send_abort()
        elif self._open:  # a gateway may have accepted it already: wait for the id
            self._opened_ms = now_ms
            self._wait(now_ms + self.config.abort_accept_ms)
        else:
            self._unaccepted()

    def _close_stream(self) -> None:
        if self._open:
            self._open = False
            self._effects.append(CloseStream(self._attempt))

    def _unaccepted(self) -> None:
        """Nobody is known to have accepted it; if somebody has, the orphan ends by itself."""
        self._close_stream()
        self._fail(Failure.ABORTED, "CANCELLED", "aborted before it was accepted")

    def _send_abort(self) -> None:
        assert self._accepted is not None
        self._attempt += 1
        self._aborts += 1
        self._effects.append(
            SendAbort(
                self._attempt,
                self._endpoints[self._endpoint],
                self._accepted.request,
                self._accepted.resume_key,
                self._attempt,
            )
        )

    def _abort_answered(self, ok: bool, now_ms: int, jitter: float) -> None:
        if ok or self._aborts >= self.config.abort_attempts_max:
            told = "aborted" if ok else "aborted; no gateway could be told, its grace ends it"
            self._fail(Failure.ABORTED, "CANCELLED", told)
            return
        self._endpoint = (self._endpoint + 1) % len(self._endpoints)
        self._retry_ms = now_ms + self._backoff_ms(self._aborts, jitter)
        self._wait(self._retry_ms)

    # ---- looking in -----------------------------------------------------------------------

    @property
    def unanswered(self) -> str | None:
        """Why the last attempt failed, if no endpoint serves the request although all were tried.

        A stream that was lost is taken up again first: that attempt does not count.
        """
        tries = len(self._endpoints) + (self._accepted is not None)
        return self._trouble if self._failures >= tries and not self._over else None

    def received(self) -> tuple[tuple[int, ...], ...]:
        """The token ids received so far, for each choice."""
        return tuple(tuple(tokens) for tokens in self._tokens)

    def precisions(self) -> tuple[tuple[Precision, ...], ...]:
        """The modes in which these tokens were generated, for each choice."""
        return tuple(tuple(precisions) for precisions in self._precisions)

    def request(self) -> RequestId | None:
        """The request's id, once it was accepted."""
        return None if self._accepted is None else self._accepted.request

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        assert not self._effects, "effects are handed out with the event that caused them"
        assert not (self._open and self._retry_ms is not None), "open, and waiting to open"
        for tokens, precisions in zip(self._tokens, self._precisions, strict=True):
            assert len(tokens) == len(precisions), "a token without its precision"
        if self._accepted is None:
            assert not any(self._tokens), "tokens before Accepted"
        if not self._over and self._attempt and not self._open:
            assert self._retry_ms is not None or self._aborting, "nothing will ever happen"
