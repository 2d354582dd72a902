"""The gateway's gRPC services: ``Inference`` for clients, ``WorkerLink`` for workers.

Handlers translate, tell the shell, and write what it hands them. Errors:

===================  =======================================================================
UNAUTHENTICATED      no bearer token, or a wrong one (``proto.bearer.Guard``), by any call but those
                     that ``proto.access`` leaves open
PERMISSION_DENIED    a token of another role; or the resume key does not belong to the request id
INVALID_ARGUMENT     a field is out of range, ``google.rpc.BadRequest`` names it; or no protobuf
NOT_FOUND            another model is served
RESOURCE_EXHAUSTED   a bound of this gateway, or no pool could ever hold the request
UNAVAILABLE          the gateway is full (to a Resume), is stopping, or reaches no controller
ABORTED              a newer attempt of the same client is served
===================  =======================================================================
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from deepinfer.gateway import client_wire, statuses, wire
from deepinfer.gateway.core.events import AbortRequest, Code, StreamReady, ToStream
from deepinfer.gateway.health import Health, HealthService
from deepinfer.gateway.intake import Ask, UnknownModelError, build_record, check_ids
from deepinfer.gateway.keys import is_resume_key, mint_request_id, resume_key, seed_of
from deepinfer.gateway.malformed import RefuseMalformed
from deepinfer.gateway.shell import ClientStream, Shell, WorkerLink
from deepinfer.kvstore.core.ids import RequestId
from deepinfer.kvstore.core.messages import Accepted, Delta, Finished, Notice, PromptDelta
from deepinfer.kvstore.core.requests import InvalidRequestError, RequestRecord
from deepinfer.proto import inference_pb2, inference_pb2_grpc, link_pb2, link_pb2_grpc
from deepinfer.proto.bearer import Guard
from deepinfer.proto.bundle import bundles
from deepinfer.proto.crowd import BoundedCalls

MESSAGE_BYTES_MAX = 4 << 20
"""Of a message to a client, and of a request as it was first sent."""
RECEIVE_BYTES_MAX = 16 << 20
"""Of any message from a client or a worker. A Resume brings the request and all its tokens: one
that was accepted must not become too large to be resumed."""
INLINE_CHARS_MAX = 8_192
"""Longer inputs are tokenized in a thread, so that the other streams go on."""
LONG_INPUTS_BYTES_MAX = 64 << 20
"""Of requests with such inputs that are being tokenized, or wait for it, at a time."""
CALLS_SPARE = 1_024
"""Calls besides ``max_streams`` that may be under way: short ones, watches, workers' links."""
CHOICES_MAX = 64
STATUS_SEQUENCES_MAX = 5_000
"""A few hundred bytes each, so that the document fits ``MESSAGE_BYTES_MAX``."""
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # or a second server on the port would silently take half the calls
    ("grpc.max_receive_message_length", RECEIVE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # or gRPC waits a minute for the answer
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)

Status: TypeAlias = Callable[[], Awaitable[Mapping[str, object]]]
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """What clients call.

    Args:
        shell: the gateway.
        secret: the cluster's secret, from which resume keys are made.
        status: asks the controller for its status document; may raise what ``ControllerAccess``
            says.
    """

    def __init__(self, shell: Shell, secret: bytes, status: Status) -> None:
        self._shell = shell
        self._secret = secret
        self._status = status
        self._tokenizing_bytes = 0

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        """Accept a request and stream its tokens."""
        if (full := self._shell.full()) is not None:
            # Unread: those that are kept would pay for its tokenizing.
            await statuses.abort(context, statuses.exhausted(full))
        request_id = mint_request_id(self._shell.gateway)
        ask, record = await self._record(request, request_id, self._shell.now_ms(), context)
        stream = self._shell.generate(
            record,
            resume_key(self._secret, request_id),
            continues_text=ask.continues_text,
            include_events=ask.include_events,
        )
        await self._write_all(stream, context)

    async def Resume(self, request: inference_pb2.ResumeRequest, context: Context) -> None:
        """Go on behind what the client has."""
        await self._check_key(request.request_id, request.resume_key, context)
        now_ms = self._shell.now_ms()
        arrival_ms = request.arrival_ms if 0 < request.arrival_ms < now_ms else now_ms
        request_id = RequestId(request.request_id)
        ask, record = await self._record(request.request, request_id, arrival_ms, context)
        try:
            received, precisions = client_wire.received_from(request.progress, record.sampling.n)
            for choice, tokens in enumerate(received):
                # A worker computes their KV, and every text is made of them.
                check_ids(f"progress[{choice}].token_ids", tokens, self._shell.card.vocab_size)
        except InvalidRequestError as error:
            await statuses.abort(context, statuses.invalid(error))
        stream = self._shell.resume(
            record,
            request.resume_key,
            claim=request.claim,
            received=received,
            precisions=precisions,
            scored=request.prompt_logprobs,
            continues_text=ask.continues_text,
            include_events=ask.include_events,
        )
        self._shell.failpoints.hit("mid_resume")
        await self._write_all(stream, context)

    async def Abort(
        self, request: inference_pb2.AbortRequest, context: Context
    ) -> inference_pb2.AbortResponse:
        """End a request, known here or not, and free all it holds."""
        await self._check_key(request.request_id, request.resume_key, context)
        choices = max(1, request.n)
        if choices > CHOICES_MAX:
            allowed = f"at most {CHOICES_MAX}"
            error = InvalidRequestError("n", request.n, allowed)
            await statuses.abort(context, statuses.invalid(error))
        self._shell.tell(AbortRequest(RequestId(request.request_id), request.claim, choices))
        return inference_pb2.AbortResponse()

    async def GetStatus(
        self, request: inference_pb2.GetStatusRequest, context: Context
    ) -> inference_pb2.GetStatusResponse:
        """The controller's status document, with this gateway's counts added.

        Of ``sequences`` only so many are listed as fit a message; ``sequences_left_out`` counts
        the others.
        """
        try:
            document = dict(await self._status())
        except (OSError, RuntimeError, LookupError) as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        listed = document.get("sequences")
        if isinstance(listed, list):
            document["sequences"] = listed[:STATUS_SEQUENCES_MAX]
            document["sequences_left_out"] = max(0, len(listed) - STATUS_SEQUENCES_MAX)
        document["gateway"] = {"name": self._shell.gateway, **self._shell.snapshot()}
        return inference_pb2.GetStatusResponse(json=json.dumps(document, sort_keys=True))

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """The one model that is served."""
        card = self._shell.card
        return inference_pb2.ListModelsResponse(
            models=[
                inference_pb2.ModelInfo(
                    id=card.model,
                    max_context_tokens=card.max_context_tokens,
                    vocab_size=card.vocab_size,
                    eos_token_ids=card.eos_token_ids,
                    kv_cache_dtype=card.kv_cache_dtype,
                    has_chat_template=card.has_chat_template,
                )
            ]
        )

    async def _check_key(self, request_id: str, key: str, context: Context) -> None:
        if not is_resume_key(self._secret, request_id, key):
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                f"resume_key does not belong to request_id {request_id[:80]!r}",
            )

    async def _record(
        self,
        said: inference_pb2.GenerateRequest,
        request_id: RequestId,
        arrival_ms: int,
        context: Context,
    ) -> tuple[Ask, RequestRecord]:
        def build(ask: Ask) -> RequestRecord:
            return build_record(
                ask,
                self._shell.card,
                request_id,
                arrival_ms=arrival_ms,
                default_seed=seed_of(request_id),
                lifetime_ms=self._shell.core.config.lifetime_ms,
            )

        size = said.ByteSize()
        if size > MESSAGE_BYTES_MAX:
            self._shell.refused("request_bytes")
            await statuses.abort(
                context,
                statuses.exhausted(
                    f"the request takes {size:,} bytes: must be at most {MESSAGE_BYTES_MAX:,}; "
                    "send fewer tokens"
                ),
            )
        try:
            ask = client_wire.ask_from(said)
            if ask.input_chars <= INLINE_CHARS_MAX:
                return ask, build(ask)
            return ask, await self._build_long(ask, build, size, context)
        except InvalidRequestError as error:
            self._shell.refused("invalid")
            await statuses.abort(context, statuses.invalid(error))
        except UnknownModelError as error:
            self._shell.refused("unknown_model")
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))

    async def _build_long(
        self, ask: Ask, build: Callable[[Ask], RequestRecord], size: int, context: Context
    ) -> RequestRecord:
        """Tokenize in a thread, unless too much waits for that already."""
        if self._tokenizing_bytes + size > LONG_INPUTS_BYTES_MAX:
            self._shell.refused("long_inputs")
            await statuses.abort(
                context,
                statuses.exhausted(
                    f"long_inputs_bytes_max = {LONG_INPUTS_BYTES_MAX:,}: requests of "
                    f"{self._tokenizing_bytes:,} bytes are being tokenized here and this one has "
                    f"{size:,}; try again later, or at another gateway"
                ),
            )
        self._tokenizing_bytes += size
        try:
            return await asyncio.to_thread(build, ask)
        finally:
            self._tokenizing_bytes -= size

    async def _write_all(self, stream: ClientStream, context: Context) -> None:
        try:
            effect = await stream.next()
            while isinstance(effect, ToStream):
                self._hit(effect.message)
                await stream.write(context.write(self._response(stream, effect)))
                if isinstance(effect.message, Accepted):
                    self._shell.failpoints.hit("after_accept")
                self._shell.tell(StreamReady(stream.stream))
                effect = await stream.next()
        finally:
            self._shell.close_stream(stream)
        if effect.code is not Code.OK:
            await statuses.abort(context, statuses.ended(effect))

    def _hit(self, message: object) -> None:
        if isinstance(message, Delta) and message.index > 0:
            self._shell.failpoints.hit("mid_stream")
        elif isinstance(message, Finished):
            self._shell.failpoints.hit("before_finish")

    def _response(self, stream: ClientStream, effect: ToStream) -> inference_pb2.GenerateResponse:
        token_bytes = self._shell.card.tokenizer.token_bytes
        match effect.message:
            case Accepted() as accepted:
                return client_wire.accepted_to(accepted, stream.record, self._shell.gateway)
            case Delta() as delta:
                text = stream.texts[delta.choice].push(tuple(t.id for t in delta.tokens))
                asked = stream.record.sampling.logprobs is not None
                return client_wire.delta_to(delta, text, token_bytes if asked else None)
            case PromptDelta() as prompt:
                return client_wire.prompt_to(prompt, token_bytes)
            case Notice() as notice:
                return client_wire.notice_to(notice)
            case Finished() as finished:
                assert effect.usage is not None, "the core sends usage with every Finished"
                shown = stream.texts[finished.choice]
                return client_wire.finished_to(
                    finished,
                    effect.usage,
                    shown.finish(),
                    stop_string=shown.stop_string,
                    stop_token=shown.stop_token(finished.reason),
                )


class WorkerLinkService(link_pb2_grpc.WorkerLinkServicer):
    """What workers connect to."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    async def Connect(
        self, request_iterator: AsyncIterator[link_pb2.FromWorker], context: Context
    ) -> None:
        """Carry one worker's messages, both ways, until either side ends it."""
        try:
            hello = await anext(request_iterator, None)
            if hello is None or hello.WhichOneof("message") != "hello":
                raise wire.LinkError("the first message must be hello")
            if hello.more:
                raise wire.LinkError("hello.more: must be empty")
            link = self._shell.open_link(wire.worker_ref_from(hello.hello.worker))
        except wire.LinkError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        writer = asyncio.create_task(self._write(link, context))
        reader = asyncio.create_task(self._read(link, request_iterator))
        try:
            done, _ = await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
            problems = [e for task in done if (e := task.exception()) is not None]
        finally:
            self._shell.close_link(link)
            for task in (writer, reader):
                task.cancel()
            await asyncio.gather(writer, reader, return_exceptions=True)
        for problem in problems:
            if isinstance(problem, wire.LinkError):
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))
            raise problem
        if link.broken:
            await context.abort(grpc.StatusCode.ABORTED, "replaced by a newer link, or too slow")

    async def _write(self, link: WorkerLink, context: Context) -> None:
        while (messages := await link.next()) is not None:
            for bundle in bundles(map(wire.to_worker, messages)):
                await context.write(bundle)

    async def _read(self, link: WorkerLink, messages: AsyncIterator[link_pb2.FromWorker]) -> None:
        async for bundle in messages:
            for message in wire.link_messages(bundle):
                self._shell.from_worker(link, wire.from_worker(message, link.worker))


def build_server(
    shell: Shell,
    *,
    token: str,
    cluster_token: str | None,
    secret: bytes,
    status: Status,
    health: Health,
) -> grpc.aio.Server:
    """The public server: Inference, health and reflection; not bound, not started.

    ``token`` is the clients'. ``cluster_token``: workers connect here too, with this one; None:
    they connect to a server of ``build_link_server``.
    """
    guard = Guard(client=token, cluster=cluster_token)
    server = _server(guard, shell.core.config.max_streams + CALLS_SPARE)
    inference_pb2_grpc.add_InferenceServicer_to_server(
        InferenceService(shell, secret, status), server
    )
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(health), server)
    files = [inference_pb2, health_pb2]
    if cluster_token is not None:
        link_pb2_grpc.add_WorkerLinkServicer_to_server(WorkerLinkService(shell), server)
        files.append(link_pb2)
    names = [s.full_name for file in files for s in file.DESCRIPTOR.services_by_name.values()]
    reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
    return server


def build_link_server(shell: Shell, *, cluster_token: str) -> grpc.aio.Server:
    """A server for the cluster's own workers alone; not bound, not started."""
    server = _server(Guard(cluster=cluster_token), CALLS_SPARE)
    link_pb2_grpc.add_WorkerLinkServicer_to_server(WorkerLinkService(shell), server)
    return server


def _server(guard: Guard, calls_max: int) -> grpc.aio.Server:
    calls = BoundedCalls(
        calls_max,
        name="a gateway's calls (max_streams, twice max_live_requests, and 1,024)",
        advice="try again later, or at another gateway",
    )
    return grpc.aio.server(interceptors=[guard, calls, RefuseMalformed()], options=SERVER_OPTIONS)
