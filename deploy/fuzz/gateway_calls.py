"""Every RPC of a gateway: clients', workers' and health's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deepinfer.deploy.fuzz.calls import END, TICK, Calls, Service, handlers_of, numbered
from deepinfer.deploy.fuzz.messages import (
    SECRET,
    from_worker_messages,
    generate_messages,
    resume_messages,
)
from deepinfer.deploy.fuzz.shapes import Bytes, Proto, Records, recorded
from deepinfer.deploy.fuzz.target import Case, Shape, Target
from deepinfer.deploy.fuzz.texts import byte_tokenizer
from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.gateway.core.events import Tick
from deepinfer.gateway.health import Health, HealthService
from deepinfer.gateway.intake import ModelCard
from deepinfer.gateway.malformed import RefuseMalformed
from deepinfer.gateway.service import InferenceService, WorkerLinkService
from deepinfer.gateway.shell import Shell
from deepinfer.kvstore.core.ids import GatewayId, Incarnation
from deepinfer.proto import inference_pb2, inference_pb2_grpc, link_pb2, link_pb2_grpc

CODES: Final = frozenset(
    getattr(grpc.StatusCode, name)
    for name in (
        "PERMISSION_DENIED", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNAVAILABLE",
        "ABORTED", "FAILED_PRECONDITION", "DEADLINE_EXCEEDED", "INTERNAL",
    )
)  # fmt: skip
MESSAGES: Final[Mapping[str, type[Message]]] = {
    "Generate": inference_pb2.GenerateRequest,
    "Resume": inference_pb2.ResumeRequest,
    "Abort": inference_pb2.AbortRequest,
    "GetStatus": inference_pb2.GetStatusRequest,
    "ListModels": inference_pb2.ListModelsRequest,
    "Connect": link_pb2.FromWorker,
    "Check": health_pb2.HealthCheckRequest,
    "List": health_pb2.HealthListRequest,
    "Watch": health_pb2.HealthCheckRequest,
}
READY: Final = {
    "ready": True,
    "workers": {"worker-0": {"state": "serving"}},
    "gateways": {"gateway-0": {"alive": True}},
    "sequences": [{"request": "r"}],
}


class _Clock:
    """Milliseconds that pass when a case says so."""

    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now


async def _status() -> Mapping[str, object]:
    return READY


def _service(card: ModelCard) -> Service:
    clock = _Clock()
    config = GatewayConfig(max_live_requests=4, max_streams=8)
    shell = Shell(GatewayId("gateway-0"), Incarnation(1), config, card, now_ms=clock)
    reported: list[object] = []
    shell.report_to(reported.append)
    inference = handlers_of(
        inference_pb2_grpc.add_InferenceServicer_to_server,
        InferenceService(shell, SECRET, _status),
    )
    links = handlers_of(link_pb2_grpc.add_WorkerLinkServicer_to_server, WorkerLinkService(shell))
    health = handlers_of(
        health_pb2_grpc.add_HealthServicer_to_server,
        HealthService(Health(shell.gateway, _status)),
    )
    found = inference | links | health

    def tick() -> None:
        for _ in range(3):
            clock.now += 31_000
            shell.tell(Tick())

    def check() -> None:
        shell.core.check()
        tick()
        shell.core.check()

    async def close() -> None:
        shell.report_to(None)

    methods = {name: _wrapped(found[name], name) for name in MESSAGES}
    return Service(methods, CODES, tick, check, close)


def _wrapped(handler: Any, name: str) -> Any:
    """As the server has it, behind the interceptor that refuses what does not decode."""

    def continuation(_: object) -> Awaitable[Any]:
        async def found() -> Any:
            return handler

        return found()

    details: Any = SimpleNamespace(method=f"/deepinfer.v1.Inference/{name}")
    coroutine = RefuseMalformed().intercept_service(continuation, details)
    try:
        coroutine.send(None)  # it waits for nothing
    except StopIteration as ended:
        return ended.value
    raise AssertionError("the interceptor waits")


@contextmanager
def _opened(folder: Path) -> Iterator[Case]:
    tokenizer = byte_tokenizer(folder)
    card = ModelCard(
        model="bytes",
        tokenizer=tokenizer,
        max_context_tokens=256,
        vocab_size=tokenizer.vocab_size,
        kv_cache_dtype="fp16",
        eos_token_ids=tokenizer.eos_ids,
    )
    loop = asyncio.new_event_loop()

    async def case(data: bytes) -> None:
        service = _service(card)
        try:
            await Calls(service).make(data)
        finally:
            await service.close()

    try:
        yield lambda data: loop.run_until_complete(case(data))
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def _seeds() -> list[bytes]:
    resumes = resume_messages()
    name, key = resumes[0].request_id, resumes[0].resume_key
    said = from_worker_messages()[:6]
    for message in said:
        kind = message.WhichOneof("message")
        if kind != "hello":
            getattr(message, str(kind)).seq.request = name
        if kind == "tokens":
            message.tokens.index += 2  # behind those that the client has
    link: list[tuple[str, Message | bytes]] = [("Connect", message) for message in said]
    abort = inference_pb2.AbortRequest(request_id=name, resume_key=key, claim=2, n=1)
    stories: list[list[tuple[str, Message | bytes]]] = [
        [("Generate", generate_messages()[0]), ("GetStatus", b""), ("ListModels", b"")],
        [("Generate", message) for message in generate_messages()],
        [("Resume", resumes[0]), *link, (TICK, b""), ("Resume", resumes[0])],
        [("Resume", resumes[1]), *link, ("Abort", abort), (END, b""), *link[:2]],
        [*link[:2], ("Resume", resumes[2]), *link[1:], ("Abort", abort), (TICK, b"")],
        [("Check", b""), ("List", b""), ("Watch", b""), ("Resume", resumes[3])],
    ]
    return [recorded(numbered(tuple(MESSAGES), story)) for story in stories]


_SHAPES: Final[list[Shape]] = [*(Proto(kind) for kind in MESSAGES.values()), Bytes(), Bytes()]

TARGETS: Final = (
    Target(
        name="rpc_gateway",
        about="every RPC of a gateway: Inference, WorkerLink, Health",
        seeds=_seeds,
        shape=Records(_SHAPES),
        open=_opened,
        errors=(),
    ),
)
"""Those of this module."""
