"""A client's process: the SDK's core, one request, and a caller with a life of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepinfer.client.core.config import ClientConfig
from deepinfer.client.core.events import (
    AbortAnswered,
    AbortRequested,
    CloseStream,
    Deliver,
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
from deepinfer.client.core.resume import ClientCore
from deepinfer.deploy.sim.checker import ViolationError
from deepinfer.deploy.sim.host import Host
from deepinfer.deploy.sim.network import Stream
from deepinfer.deploy.sim.plan import FINISH_MS, ClientPlan
from deepinfer.gateway.core.events import EndStream
from deepinfer.kvstore.core.ids import RequestId, Seq
from deepinfer.kvstore.core.messages import Accepted, Delta, Finished, PromptDelta
from deepinfer.kvstore.core.requests import FinishReason, SamplingParams

if TYPE_CHECKING:
    from deepinfer.deploy.sim.world import World


class ClientHost(Host):
    """One client with one request."""

    __slots__ = (
        "_attempts",
        "_due",
        "aborted",
        "ended_ms",
        "failure",
        "plan",
        "request",
        "sampling",
        "succeeded",
        "wants_notices",
    )

    kind = "client"

    def __init__(self, world: World, plan: ClientPlan) -> None:
        super().__init__(world, plan.name, Tick())
        self.plan = plan
        self.sampling = SamplingParams(
            max_tokens=plan.max_tokens,
            min_tokens=plan.min_tokens,
            n=plan.choices,
            stop=("stop",) if plan.stop_pair is not None else (),
            logprobs=0 if plan.seed % 5 < 3 else None,
            prompt_logprobs=0 if plan.seed % 3 == 0 else None,
        )
        self.wants_notices = plan.seed % 2 == 0
        self._attempts: dict[Stream, int] = {}
        self._due = 0
        self.request: RequestId | None = None
        """Set once the request is accepted: from then on it has to finish."""
        self.aborted = False
        self.failure: Fail | None = None
        self.succeeded = False
        self.ended_ms: int | None = None
        self._performers = {
            OpenGenerate: self._open,
            OpenResume: self._open,
            CloseStream: self._close,
            Deliver: self._deliver,
            SendAbort: self._send_abort,
            Wait: self._wait,
            Succeed: self._succeed,
            Fail: self._fail,
        }

    def start(self) -> None:
        """Come, and send the request."""
        super().start()
        self.core = ClientCore(
            tuple(self.world.gateways),
            self.plan.choices,
            ClientConfig(
                accept_timeout_ms=800,
                backoff_max_ms=500,
                connect_give_up_ms=10 * FINISH_MS,
                give_up_ms=10 * FINISH_MS,
            ),
        )
        self.drive(Start(self.random()))
        for after_ms in self.plan.cut_after_ms:
            self.after(after_ms, self.cut)
        if self.plan.abort_after_ms is not None:
            self.after(self.plan.abort_after_ms, self.abort)
        if self.plan.vanish_after_ms is not None:
            self.after(self.plan.vanish_after_ms, self.vanish)

    # ---- what a caller may do ----

    def abort(self) -> bool:
        """The user no longer wants it; False if it has ended."""
        if self.ended_ms is not None:
            return False
        self.aborted = True
        self.drive(AbortRequested())
        return True

    def vanish(self) -> None:
        """The process ends without a word."""
        for stream in list(self._attempts):
            stream.cut()
        self.kill()

    def cut(self) -> bool:
        """The connection breaks; False if there is none."""
        streams = list(self._attempts)
        for stream in streams:
            stream.cut()
        return bool(streams)

    # ---- streams ----

    def _open(self, effect: OpenGenerate | OpenResume) -> None:
        gateway = self.world.gateways[effect.endpoint]
        stream = Stream(
            self.world.network,
            self,
            gateway,
            arrive_a=self._got,
            arrive_b=gateway.from_client,
            down_a=self._broken,
            down_b=gateway.client_gone,
        )
        self._attempts[stream] = effect.attempt
        stream.send(self, effect)

    def _got(self, stream: Stream, message: Any) -> None:
        attempt = self._attempts.get(stream)
        if attempt is None:
            return
        if isinstance(message, EndStream):
            self._ended(stream, message.code.value, message.message)
            stream.cut()
        else:
            if isinstance(message, Accepted):
                self.world.history.reopened(self.name)
            self.drive(Got(attempt, message))

    def _broken(self, stream: Stream) -> None:
        self._ended(stream, "UNAVAILABLE", "connection lost")

    def _ended(self, stream: Stream, code: str, detail: str) -> None:
        attempt = self._attempts.pop(stream, None)
        if attempt is not None:
            self.drive(StreamEnded(attempt, code, detail, self.random()))

    def _close(self, effect: CloseStream) -> None:
        for stream, attempt in list(self._attempts.items()):
            if attempt == effect.attempt:
                del self._attempts[stream]
                stream.cut()

    def _send_abort(self, effect: SendAbort) -> None:
        attempt = effect.attempt
        self.call(
            self.world.gateways[effect.endpoint],
            effect,
            self.world.gateways[effect.endpoint].serve_abort,
            lambda _: self.drive(AbortAnswered(attempt, True, self.random())),
            lambda: self.drive(AbortAnswered(attempt, False, self.random())),
            400,
        )

    def _wait(self, effect: Wait) -> None:
        self._due += 1
        delay = max(0, effect.due_ms - self.now_ms)
        self.after(delay, self._woken, self._due)

    def _woken(self, due: int) -> None:
        if due == self._due:
            self.drive(Tick(self.random()))

    # ---- what the caller gets ----

    def _deliver(self, effect: Deliver) -> None:
        message = effect.message
        history = self.world.history
        if isinstance(message, Accepted):
            if self.request is not None and self.request != message.request:
                raise ViolationError(f"{self.name}: accepted as {self.request}, {message.request}")
            self.request = message.request
        elif isinstance(message, PromptDelta):
            assert self.request is not None, message
            history.scored(self.name, Seq(self.request, 0), message.position, message.tokens)
        elif isinstance(message, Delta):
            assert self.request is not None, message
            seq = Seq(self.request, message.choice)
            history.delivered(self.name, seq, message.index, message.tokens)
        elif isinstance(message, Finished):
            assert self.request is not None, message
            seq = Seq(self.request, message.choice)
            history.finished(self.name, seq, message.reason, provoked=self._provoked())

    def _provoked(self) -> tuple[FinishReason, ...]:
        provoked = []
        if self.aborted:
            provoked.append(FinishReason.ABORT)
        if self.plan.deadline_after_ms is not None:
            provoked.append(FinishReason.DEADLINE)
        if self.world.may_refuse(self.plan):
            provoked.append(FinishReason.ERROR)
        return tuple(provoked)

    def _succeed(self, effect: Succeed) -> None:
        self._end()
        self.succeeded = True
        assert self.request is not None, "succeeded without a request"
        self.world.history.succeeded(self.name, self.request)

    def _fail(self, effect: Fail) -> None:
        self._end()
        self.failure = effect
        excused = {
            Failure.ABORTED: self.aborted,
            Failure.EXHAUSTED: self.world.may_refuse(self.plan) or self.request is None,
            Failure.UNAVAILABLE: self.request is None,
        }
        if not excused.get(effect.failure, False):
            raise ViolationError(f"{self.name}: {self.request} failed: {effect}")

    def _end(self) -> None:
        if self.ended_ms is not None:
            raise ViolationError(f"{self.name}: ended twice")
        self.ended_ms = self.engine.now_ms
