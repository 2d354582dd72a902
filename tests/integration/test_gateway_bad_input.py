"""Whatever a client writes: it is told what is wrong and what is legal, and nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]  # has no stubs
from grpc_status import rpc_status

from deepinfer.client import AsyncClient, DeepInferError
from deepinfer.proto import inference_pb2
from support.bad_input import BAD, wrong
from support.byte_tokenizer import write_byte_tokenizer
from support.gateway_world import METADATA, World, run_in_world

Request = inference_pb2.GenerateRequest
Sampling = inference_pb2.SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


async def assert_serves(world: World, client: AsyncClient) -> None:
    """A good request works, and the bad ones have left nothing."""
    shell = world.gateway.shell
    assert shell is not None
    assert shell.core.live_requests == 0
    assert shell.snapshot()["streams"] == 0
    assert not world.worker.runs
    assert (await client.generate("Hello")).text == "fine"


def test_every_bad_request_is_refused_by_name(runner: asyncio.Runner, folder: Path) -> None:
    async def test(world: World) -> None:
        found = []
        async with world.client() as client:
            for bad in BAD:
                error: DeepInferError | None = None
                try:
                    await client.generate(bad.prompt, **bad.options)
                except DeepInferError as caught:
                    error = caught
                found.append(wrong(bad, error))
            assert [problem for problem in found if problem] == []
            await assert_serves(world, client)

    run_in_world(runner, folder, test, answer="fine")


RAW: tuple[tuple[Request, str, str], ...] = (
    (Request(), "input", "None: must be one of tokenized, text and chat"),
    (Request(text="x", deadline_ms=0), "deadline_ms", "0: must be from 1 to"),
    (Request(text="x", deadline_ms=-7), "deadline_ms", "-7: must be from 1 to"),
    (Request(chat=inference_pb2.ChatInput()), "chat.messages", "at least one message"),
    (
        Request(tokenized=inference_pb2.TokenizedInput(input_ids=[])),
        "tokenized.input_ids",
        "[]: must be at least one token",
    ),
    (
        Request(text="x", sampling_params=Sampling(stop_token_ids=[2**32 - 1])),
        "sampling_params.stop_token_ids[0]",
        "4294967295: must be from 0 to 258",
    ),
)


UNREADABLE: tuple[tuple[bytes, str, str], ...] = (
    (b"\x1a\x02\xff\xfe", "text", r"b'\xff\xfe': must be UTF-8"),
    (b"\x1a\x03ab\xc3", "text", r"b'ab\xc3': must be UTF-8"),
    (b"\x0a\x01\xff", "model", r"b'\xff': must be UTF-8"),
    (
        Request(text="x", sampling_params=Sampling(stop=["ok", "bad"]))
        .SerializeToString()
        .replace(b"bad", b"b\xffd"),
        "sampling_params.stop[1]",
        r"b'b\xffd': must be UTF-8",
    ),
    (
        Request(chat={"messages": [{"role": "user", "content": "bad"}]})
        .SerializeToString()
        .replace(b"bad", b"b\xffd"),
        "chat.messages[0].content",
        r"b'b\xffd': must be UTF-8",
    ),
    (b"\x1a\x7fshort", "request", "'7 bytes': must be a protobuf message"),
    (b"\xff" * 40, "request", "'40 bytes': must be a protobuf message"),
)


def assert_refused(error: grpc.aio.AioRpcError, name: str, says: str) -> None:
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # quacks like a Call
    assert status is not None
    bad = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad)
    assert [violation.field for violation in bad.field_violations] == [name]
    assert says in bad.field_violations[0].description == error.details()


def test_raw_calls_get_the_field_as_a_detail(runner: asyncio.Runner, folder: Path) -> None:
    async def test(world: World) -> None:
        path = "/deepinfer.v1.Inference/Generate"
        async with grpc.aio.insecure_channel(world.gateway.address) as channel:
            call = channel.unary_stream(path, None, None)

            async def refusal(data: bytes) -> grpc.aio.AioRpcError:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in call(data, metadata=METADATA):
                        pass
                return caught.value

            for request, name, says in RAW:
                assert_refused(await refusal(request.SerializeToString()), name, says)
            for data, name, says in UNREADABLE:
                assert_refused(await refusal(data), name, says)
        async with world.client() as client:
            await assert_serves(world, client)

    run_in_world(runner, folder, test, answer="fine")
