"""One request, driven: the core's effects performed over gRPC, its deliveries made into events."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field

import grpc

from deepinfer.client import results, tls, wire
from deepinfer.client.channels import Channels
from deepinfer.client.core.config import ClientConfig
from deepinfer.client.core.events import (
    AbortAnswered,
    AbortRequested,
    CloseStream,
    Deliver,
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
from deepinfer.client.core.resume import ClientCore
from deepinfer.client.errors import (
    Aborted,
    ClientClosed,
    DeadlineExceeded,
    DeepInferError,
    ProtocolError,
)
from deepinfer.kvstore.core.ids import RequestId
from deepinfer.kvstore.core.messages import (
    Accepted,
    Delta,
    Finished,
    Notice,
    PromptDelta,
    ToClient,
)
from deepinfer.kvstore.core.precision import Precision, packed
from deepinfer.kvstore.core.requests import CHOICES_MAX
from deepinfer.proto import inference_pb2

ABORT_TIMEOUT_S = 2.0
ABORT_PATIENCE_S = 5.0
"""How long ``aclose`` waits for a gateway to take the abort; an orphan ends by itself."""
CLOSED_MAX = 5
"""How often in a row an endpoint may close a connection before it said anything: one that goes
down does so too, but not again and again."""


@dataclass(slots=True)
class _ChoiceSoFar:
    """What a choice has brought until now."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[results.TokenLogprob] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


class Driver:
    """Runs one request to its end, on the event loop that it was made on.

    It goes on receiving while nobody asks; what waits is bounded by the request's max_tokens.
    """

    def __init__(
        self,
        channels: Channels,
        request: inference_pb2.GenerateRequest,
        config: ClientConfig,
        ended: Callable[[Driver], None],
    ) -> None:
        self._channels = channels
        self._request = request
        self._config = config
        self._ended = ended
        choices = request.sampling_params.n if request.sampling_params.HasField("n") else 1
        choices = min(max(1, choices), CHOICES_MAX)  # any other n is refused by the gateway
        deadline_ms = request.deadline_ms if request.HasField("deadline_ms") else None
        self._core = ClientCore(channels.endpoints, choices, config, deadline_ms=deadline_ms)
        self._choices = [_ChoiceSoFar() for _ in range(choices)]
        scored = request.sampling_params.HasField("prompt_logprobs")
        self._prompt_logprobs: list[results.TokenLogprob | None] = [None] if scored else []
        self._finished: dict[int, results.Choice] = {}
        self._accepted: inference_pb2.Accepted | None = None
        self._reconnects = 0
        self._retrying = False
        """Whether the caller has been told that no endpoint answers."""
        self._raw = inference_pb2.GenerateResponse()
        self._call_error: grpc.aio.AioRpcError | None = None
        self._closed: Counter[str] = Counter()
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._events: asyncio.Queue[results.Event | DeepInferError | None] = asyncio.Queue()
        self._over = asyncio.Event()
        self._start_s = time.perf_counter()
        self._tell(Start(random.random()))

    # ---- for the stream --------------------------------------------------------------------

    async def next(self) -> results.Event | None:
        """Wait for the next event; None at the end. Raises what ended the request."""
        event = await self._events.get()
        if event is None or isinstance(event, DeepInferError):
            self._events.put_nowait(None)  # for whoever asks once more
        if isinstance(event, DeepInferError):
            raise event
        return event

    def completion(self) -> results.Completion:
        """What was received, once the request has ended.

        Raises:
            DeadlineExceeded: the request's deadline passed first.
            ClientClosed: the stream was closed before its end.
        """
        if self._accepted is None or len(self._finished) < len(self._choices):
            raise ClientClosed("the stream was closed before its end")
        completion = self._completion()
        late = [c for c in completion.choices if c.finish_reason == "deadline"]
        if late:
            raise DeadlineExceeded(late[0].message, completion)
        return completion

    @property
    def request_id(self) -> str:
        """The request's id; empty until it is accepted."""
        return self._accepted.request_id if self._accepted is not None else ""

    def abort(self) -> None:
        """Abort the request unless it has ended; returns at once."""
        self._tell(AbortRequested())

    async def close(self) -> None:
        """Abort the request unless it has ended, and wait (for a while) until a gateway knows."""
        self.abort()
        try:
            async with asyncio.timeout(ABORT_PATIENCE_S):
                await self._over.wait()
        except TimeoutError:
            self._finish(Aborted("aborted; no gateway could be told", request_id=self.request_id))
        tasks = list(self._calls.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        waiting = [self._events.get_nowait() for _ in range(self._events.qsize())]
        for event in waiting:
            if event is None or isinstance(event, DeepInferError):
                self._events.put_nowait(event)

    # ---- the core --------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        for effect in self._core.handle(event, time.monotonic_ns() // 1_000_000):
            match effect:
                case OpenGenerate() | OpenResume():
                    self._start(effect.attempt, self._run(effect))
                case SendAbort():
                    self._start(effect.attempt, self._send_abort(effect))
                case CloseStream(attempt):
                    task = self._calls.pop(attempt, None)
                    if task is not None:
                        task.cancel()
                case Wait(due_ms):
                    self._wait(due_ms)
                case Deliver(message):
                    self._deliver(message)
                case Succeed():
                    self._finish(None)
                case Fail():
                    self._finish(self._error_of(effect))
        self._tell_of_retries()

    def _tell_of_retries(self) -> None:
        trouble = self._core.unanswered
        if trouble is None:
            self._retrying = False
        elif self._request.include_events and not (self._retrying or self._over.is_set()):
            self._retrying = True
            accepted = self._accepted is not None
            patience_ms = self._config.give_up_ms if accepted else self._config.connect_give_up_ms
            self._events.put_nowait(
                results.Retrying(accepted=accepted, patience_s=patience_ms / 1000, detail=trouble)
            )

    def _start(self, attempt: int, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._calls[attempt] = task
        task.add_done_callback(lambda _: self._calls.pop(attempt, None))

    def _wait(self, due_ms: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, due_ms / 1e3 - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(
            delay_s, lambda: self._tell(Tick(random.random()))
        )

    def _error_of(self, fail: Fail) -> DeepInferError | None:
        if fail.failure is Failure.DEADLINE:
            return DeadlineExceeded(fail.detail, self._so_far(fail.detail))
        if fail.failure is Failure.FAILED and self._finished:
            said = (c.message for c in self._finished.values() if c.finish_reason == "error")
            fail = fail._replace(detail=next(said, "") or fail.detail)
        return wire.error_of(fail, self.request_id, self._call_error)

    def _finish(self, error: DeepInferError | None) -> None:
        if self._over.is_set():
            return
        self._over.set()
        if self._timer is not None:
            self._timer.cancel()
        self._events.put_nowait(error)
        self._ended(self)

    # ---- calls -----------------------------------------------------------------------------

    async def _run(self, opening: OpenGenerate | OpenResume) -> None:
        """Read one attempt's stream to its end."""
        attempt = opening.attempt
        stub, metadata = self._channels.stub(opening.endpoint), self._channels.metadata
        if isinstance(opening, OpenGenerate):
            call = stub.Generate(self._request, metadata=metadata)
        else:
            self._reconnects += 1
            call = stub.Resume(self._resume_request(opening), metadata=metadata)
        untrusted = False
        try:
            async for response in call:
                message = wire.message_from(response, RequestId(self.request_id))
                self._raw = response
                self._tell(Got(attempt, message))
        except grpc.aio.AioRpcError as error:
            self._call_error = error
            untrusted = self._is_untrusted(opening.endpoint, error)
            advice = tls.advice(error, secure=self._channels.secure(opening.endpoint))
            code, detail = error.code().name, f"{opening.endpoint}: {error.details()}{advice}"
        except ProtocolError as error:
            code, detail = "UNIMPLEMENTED", f"{opening.endpoint}: {error}"
        else:
            code, detail = "OK", ""
        finally:
            call.cancel()
        self._tell(StreamEnded(attempt, code, detail, random.random(), untrusted))

    def _is_untrusted(self, endpoint: str, error: grpc.aio.AioRpcError) -> bool:
        self._closed[endpoint] = self._closed[endpoint] + 1 if tls.closed_at_once(error) else 0
        return tls.handshake_failed(error) or self._closed[endpoint] >= CLOSED_MAX

    def _resume_request(self, opening: OpenResume) -> inference_pb2.ResumeRequest:
        assert self._accepted is not None, "the core resumes what was accepted"
        modes = opening.precisions or ((),) * len(opening.received)
        return inference_pb2.ResumeRequest(
            request_id=opening.request,
            resume_key=opening.resume_key,
            claim=opening.claim,
            request=self._request,
            progress=[
                inference_pb2.ChoiceProgress(
                    index=index, token_ids=tokens, precisions=packed(precisions)
                )
                for index, (tokens, precisions) in enumerate(
                    zip(opening.received, modes, strict=True)
                )
            ],
            arrival_ms=self._accepted.arrival_ms,
            prompt_logprobs=opening.scored,
        )

    async def _send_abort(self, abort: SendAbort) -> None:
        request = inference_pb2.AbortRequest(
            request_id=abort.request,
            resume_key=abort.resume_key,
            claim=abort.claim,
            n=len(self._choices),
        )
        stub, ok = self._channels.stub(abort.endpoint), True
        try:
            await stub.Abort(request, metadata=self._channels.metadata, timeout=ABORT_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            ok = False
        self._tell(AbortAnswered(abort.attempt, ok, random.random()))

    # ---- deliveries ------------------------------------------------------------------------

    def _deliver(self, message: ToClient) -> None:
        """Make an event of a message; ``_raw`` is the response that it was read from."""
        now_s = time.perf_counter()
        match message:
            case Accepted():
                self._accepted = self._raw.accepted
                event: results.Event = results.Accepted(
                    request_id=message.request,
                    resume_key=message.resume_key,
                    prompt_tokens=message.prompt_tokens,
                    gateway=self._accepted.gateway,
                )
            case PromptDelta():
                logprobs = wire.logprobs_from(self._raw.prompt.logprobs)
                self._prompt_logprobs += logprobs
                event = results.PromptDelta(position=message.position, logprobs=logprobs)
            case Delta():
                choice, chunk = self._choices[message.choice], self._raw.chunk
                token_ids = tuple(chunk.token_ids)
                logprobs = wire.logprobs_from(chunk.output_logprobs)
                choice.token_ids += token_ids
                choice.texts.append(chunk.text)
                choice.logprobs += logprobs
                choice.times_s += [now_s] * len(token_ids)
                event = results.Delta(
                    choice=message.choice,
                    position=message.index,
                    token_ids=token_ids,
                    text=chunk.text,
                    logprobs=logprobs,
                )
            case Notice():
                event = wire.notice_event(message)
            case Finished():
                finished = self._choice_of(message, now_s)
                self._finished[message.choice] = finished
                event = results.Finished(choice=finished, text=self._raw.complete.text)
        self._events.put_nowait(event)

    def _choice_of(self, message: Finished, now_s: float) -> results.Choice:
        so_far, complete = self._choices[message.choice], self._raw.complete
        so_far.texts.append(complete.text)
        match complete.WhichOneof("matched_stop"):
            case "matched_stop_str":
                matched: str | int | None = complete.matched_stop_str
            case "matched_token_id":
                matched = complete.matched_token_id
            case _:
                matched = None
        return results.Choice(
            index=message.choice,
            text="".join(so_far.texts),
            token_ids=tuple(so_far.token_ids),
            finish_reason=message.reason.value,
            message=message.message,
            matched_stop=matched,
            logprobs=tuple(so_far.logprobs),
            usage=results.Usage(
                prompt_tokens=complete.prompt_tokens,
                cached_tokens=complete.cached_tokens,
                completion_tokens=len(so_far.token_ids),
                mixed_tokens=complete.tokens_mixed,
                fp8_tokens=complete.tokens_fp8,
                w8a8_tokens=complete.tokens_w8a8,
            ),
            swaps=wire.swaps_from(complete.swap_stats),
            timings=self._timings(
                so_far,
                now_s,
                gateway_ttft_s=complete.ttft_us / 1e6 if complete.ttft_us else None,
                gateway_tpot_s=complete.tpot_us / 1e6 if complete.tpot_us else None,
            ),
        )

    def _so_far(self, why: str) -> results.Completion:
        """What was received of a request whose end no gateway has told."""
        now_s, accepted = time.perf_counter(), self._accepted
        precisions = self._core.precisions()
        for index, so_far in enumerate(self._choices):
            if index not in self._finished:
                self._finished[index] = results.Choice(
                    index=index,
                    text="".join(so_far.texts),
                    token_ids=tuple(so_far.token_ids),
                    finish_reason="deadline",
                    message=why,
                    matched_stop=None,
                    logprobs=tuple(so_far.logprobs),
                    usage=results.Usage(
                        prompt_tokens=0 if accepted is None else accepted.prompt_tokens,
                        completion_tokens=len(so_far.token_ids),
                        mixed_tokens=precisions[index].count(Precision.MIXED),
                        fp8_tokens=precisions[index].count(Precision.FP8),
                        w8a8_tokens=precisions[index].count(Precision.W8A8),
                    ),
                    swaps=results.SwapStats(),
                    timings=self._timings(so_far, now_s),
                )
        return self._completion()

    def _completion(self) -> results.Completion:
        """Of the choices that have ended."""
        return results.Completion(
            request_id=self.request_id,
            choices=tuple(self._finished[index] for index in sorted(self._finished)),
            prompt_logprobs=tuple(self._prompt_logprobs),
        )

    def _timings(
        self,
        so_far: _ChoiceSoFar,
        now_s: float,
        *,
        gateway_ttft_s: float | None = None,
        gateway_tpot_s: float | None = None,
    ) -> results.Timings:
        times_s = so_far.times_s
        return results.Timings(
            ttft_s=times_s[0] - self._start_s if times_s else None,
            intervals_s=tuple(b - a for a, b in itertools.pairwise(times_s)),
            total_s=now_s - self._start_s,
            reconnects=self._reconnects,
            gateway_ttft_s=gateway_ttft_s,
            gateway_tpot_s=gateway_tpot_s,
        )
