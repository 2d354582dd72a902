"""The asynchronous client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from deepinfer.client import wire
from deepinfer.client.channels import MESSAGE_BYTES_MAX, Channels
from deepinfer.client.core.config import ClientConfig
from deepinfer.client.core.events import Fail
from deepinfer.client.core.failures import failure_of
from deepinfer.client.driver import Driver
from deepinfer.client.errors import ClientClosed, ResourceExhausted, Unavailable, Untrusted
from deepinfer.client.request import Message, Options, Prompt, build_request, check_messages
from deepinfer.client.results import Completion, Model
from deepinfer.client.stream import AsyncStream
from deepinfer.client.tls import TlsOptions, advice, handshake_failed
from deepinfer.proto import inference_pb2, inference_pb2_grpc

CALL_TIMEOUT_S = 10.0

R = TypeVar("R")


class AsyncClient:
    """Talks to a cluster through any of its gateways.

    Args:
        endpoints: gateways as host:port, or grpcs://host:port for TLS; a lost stream is taken up
            at the next one.
        token: the cluster's bearer token.
        tls: whether, and how, to speak TLS with the endpoints; True trusts what the system does.
        config: times of reconnecting.

    Use it on one event loop. An asynchronous context manager: leaving it closes it.

    Raises:
        ValueError: no endpoint, one that cannot be read, an empty token, or unusable ``tls``.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        token: str,
        tls: bool | TlsOptions = False,
        config: ClientConfig | None = None,
    ) -> None:
        self._channels = Channels(endpoints, token, tls)
        self._config = config or ClientConfig()
        self._drivers: set[Driver] = set()
        self._closed = False

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """Send a request and return its events.

        Args:
            prompt: text, token ids, or chat messages ``{"role": …, "content": …}``.
            options: sampling parameters and the rest; see ``Options``.

        Raises:
            InvalidRequest: the request cannot be written; one that the gateway refuses raises
                from the iteration.
            ResourceExhausted: it is larger than any gateway takes.
        """
        self._check_open()
        request = build_request(prompt, options)
        if (size := request.ByteSize()) > MESSAGE_BYTES_MAX:
            raise ResourceExhausted(
                f"the request takes {size:,} bytes: must be at most {MESSAGE_BYTES_MAX:,}",
                code="RESOURCE_EXHAUSTED",
            )
        driver = Driver(self._channels, request, self._config, self._drivers.discard)
        self._drivers.add(driver)
        return AsyncStream(driver)

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """Send a request and wait for its end; see ``stream``. Cancelling aborts the request."""
        async with self.stream(prompt, **options) as stream:
            return await stream.completion()

    async def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Completion:
        """Send messages and wait for the answer; see ``stream``."""
        check_messages(messages)
        return await self.generate(messages, **options)

    async def status(self) -> dict[str, Any]:
        """The cluster's status document."""
        response = await self._call(
            lambda stub: stub.GetStatus(
                inference_pb2.GetStatusRequest(),
                metadata=self._channels.metadata,
                timeout=CALL_TIMEOUT_S,
            )
        )
        document: dict[str, Any] = json.loads(response.json)
        return document

    async def models(self) -> tuple[Model, ...]:
        """The models that are served."""
        response = await self._call(
            lambda stub: stub.ListModels(
                inference_pb2.ListModelsRequest(),
                metadata=self._channels.metadata,
                timeout=CALL_TIMEOUT_S,
            )
        )
        return tuple(
            Model(
                id=model.id,
                max_context_tokens=model.max_context_tokens,
                vocab_size=model.vocab_size,
                eos_token_ids=tuple(model.eos_token_ids),
                kv_cache_dtype=model.kv_cache_dtype,
                has_chat_template=model.has_chat_template,
            )
            for model in response.models
        )

    async def abort(
        self, request_id: str, *, resume_key: str | None = None, claim: int = 2**31, n: int = 1
    ) -> None:
        """End a request and free all it holds.

        Args:
            request_id: one of this client's, or any other with its ``resume_key``.
            resume_key: what its ``Accepted`` said.
            claim: the highest attempt number in use; the default is above every one.
            n: the request's choices.

        Raises:
            LookupError: no request of this client has the id, and there is no resume key.
        """
        if resume_key is None:
            for driver in self._drivers:
                if driver.request_id == request_id:
                    await driver.close()
                    return
            raise LookupError(f"request {request_id!r} is none of this client's: give resume_key")
        request = inference_pb2.AbortRequest(
            request_id=request_id, resume_key=resume_key, claim=claim, n=n
        )
        await self._call(
            lambda stub: stub.Abort(
                request, metadata=self._channels.metadata, timeout=CALL_TIMEOUT_S
            )
        )

    async def close(self) -> None:
        """Abort what is under way and close the connections."""
        self._closed = True
        await asyncio.gather(*(driver.close() for driver in list(self._drivers)))
        await self._channels.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed("the client is closed")

    async def _call(self, method: Callable[[inference_pb2_grpc.InferenceStub], Awaitable[R]]) -> R:
        """Call one endpoint after the other until one answers."""
        self._check_open()
        problem: grpc.aio.AioRpcError | None = None
        for endpoint in self._channels.endpoints:
            try:
                return await method(self._channels.stub(endpoint))
            except grpc.aio.AioRpcError as error:
                failure = failure_of(error.code().name)
                if failure is not None:
                    fail = Fail(failure, error.code().name, error.details() or "")
                    raise wire.error_of(fail, "", error) from error
                problem = error
        assert problem is not None, "there is at least one endpoint"
        kind = Untrusted if handshake_failed(problem) else Unavailable
        why = f"{problem.details()}{advice(problem, secure=self._channels.secure(endpoint))}"
        raise kind(f"no endpoint answers: {why}", code=problem.code().name) from problem
