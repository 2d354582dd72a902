"""The SDK where something does not fit, is not there, or takes too long; each has its own error."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import pytest

from deepinfer.client import (
    AsyncClient,
    DeadlineExceeded,
    Delta,
    RequestFailed,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from deepinfer.client.core.config import ClientConfig
from deepinfer.gateway.keys import resume_key
from deepinfer.gateway.service import MESSAGE_BYTES_MAX, RECEIVE_BYTES_MAX
from deepinfer.kvstore.core.ids import RequestId, Seq
from deepinfer.proto import inference_pb2, inference_pb2_grpc
from support.byte_tokenizer import write_byte_tokenizer
from support.gateway_world import METADATA, SECRET, TOKEN, World, eventually, run_in_world

ANSWER = "".join(f"{i}: grün und schön. " for i in range(12))
Test: TypeAlias = Callable[[World], Awaitable[None]]
Live: TypeAlias = Callable[[Test], None]
MIB = 1 << 20


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Runs an asynchronous test in a world of its own."""
    folder = write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    with asyncio.Runner() as runner:
        yield lambda test: run_in_world(runner, folder, test, answer=ANSWER)


@asynccontextmanager
async def served(service: inference_pb2_grpc.InferenceServicer) -> AsyncIterator[str]:
    """A server with another Inference service; yields its address."""
    server = grpc.aio.server(
        options=(("grpc.so_reuseport", 0), ("grpc.max_send_message_length", -1))
    )
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def alone(test: Callable[[], Awaitable[None]]) -> None:
    """Run a test that needs no world, on a loop that outlives its servers."""

    async def run() -> None:
        async with asyncio.timeout(30):
            await test()

    with asyncio.Runner() as runner:
        runner.run(run())
        gc.collect()
        runner.run(asyncio.sleep(0))


def test_a_request_of_ten_megabytes_is_refused_here_and_there(live: Live) -> None:
    async def test(world: World) -> None:
        text = "x" * (10 * MIB)
        async with world.client() as client:
            with pytest.raises(ResourceExhausted, match=r"10,485,7\d\d bytes.*at most 4,194,304"):
                await client.generate(text)
        async with grpc.aio.insecure_channel(world.gateway.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            for size, words in (
                (10 * MIB, r"takes 10,485,7\d\d bytes: must be at most 4,194,304"),
                (20 * MIB, rf"larger than max.*{RECEIVE_BYTES_MAX}"),
            ):
                request = inference_pb2.GenerateRequest(text="x" * size)
                with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
                    await stub.Generate(request, metadata=METADATA).read()
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            # A Resume has room for what was received since, and not for a larger request.
            key = resume_key(SECRET, "r")
            resume = inference_pb2.ResumeRequest(request_id="r", resume_key=key, claim=1)
            resume.request.text = "x" * (MESSAGE_BYTES_MAX + 1)
            with pytest.raises(grpc.aio.AioRpcError, match="must be at most 4,194,304"):
                await stub.Resume(resume, metadata=METADATA).read()
            resume.request.text = "x"
            resume.progress.add(token_ids=[2**31] * MIB)
            with pytest.raises(grpc.aio.AioRpcError, match="progress") as caught:
                await stub.Resume(resume, metadata=METADATA).read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not world.worker.runs

    live(test)


class Verbose(inference_pb2_grpc.InferenceServicer):
    """Says more in one message than any client takes."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield inference_pb2.GenerateResponse(chunk={"text": "x" * (10 * MIB)})

    async def GetStatus(self, request: Any, context: Any) -> Any:
        return inference_pb2.GetStatusResponse(json="x" * (10 * MIB))


def test_a_message_of_ten_megabytes_from_a_gateway_is_refused() -> None:
    async def test() -> None:
        async with served(Verbose()) as address, AsyncClient(address, token=TOKEN) as client:
            for call in (lambda: client.generate("x"), client.status):
                with pytest.raises(ResourceExhausted, match=r"larger than max.*4194304"):
                    await call()

    alone(test)


def test_an_unknown_request_is_nobodys_unless_one_has_its_key(live: Live) -> None:
    async def test(world: World) -> None:
        async with world.client() as client:
            with pytest.raises(LookupError, match="'r' is none of this client's: give resume_key"):
                await client.abort("r")
            with pytest.raises(
                Unauthenticated, match="does not belong to request_id 'r'"
            ) as caught:
                await client.abort("r", resume_key="k" * 64)
            assert caught.value.code == "PERMISSION_DENIED"
            # Its gateway may be dead: whoever is asked tells the controller.
            await client.abort("r", resume_key=resume_key(SECRET, "r"))
            await eventually(lambda: world.controller.cancelled == [Seq(RequestId("r"), 0)])
        async with grpc.aio.insecure_channel(world.gateway.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            resume = inference_pb2.ResumeRequest(request_id="q", resume_key="no", claim=1)
            resume.request.text = "x"
            with pytest.raises(grpc.aio.AioRpcError, match="request_id 'q'") as failed:
                await stub.Resume(resume, metadata=METADATA).read()
            assert failed.value.code() is grpc.StatusCode.PERMISSION_DENIED
            # With its key it is taken over, as a request of a gateway that died.
            resume.resume_key = resume_key(SECRET, "q")
            resume.progress.add(token_ids=world.worker.answer[:5])
            ids = [
                i
                async for response in stub.Resume(resume, metadata=METADATA)
                for i in response.chunk.token_ids
            ]
            assert ids == world.worker.answer[5:128]

    live(test)


class HalfDone(inference_pb2_grpc.InferenceServicer):
    """Ends one choice of two well, and then says what no client knows."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield inference_pb2.GenerateResponse(accepted={"request_id": "r", "resume_key": "k"})
        yield inference_pb2.GenerateResponse(chunk={"token_ids": [70], "text": "F"})
        yield inference_pb2.GenerateResponse(
            complete={"finish_reason": "stop", "completion_tokens": 1}
        )
        yield inference_pb2.GenerateResponse()


def test_a_request_that_fails_after_one_choice_has_ended_says_so() -> None:
    async def test() -> None:
        async with served(HalfDone()) as address, AsyncClient(address, token=TOKEN) as client:
            with pytest.raises(RequestFailed, match="response = None: this client does not know"):
                await asyncio.wait_for(client.generate("x", n=2), 10)

    alone(test)


class Silent(inference_pb2_grpc.InferenceServicer):
    """Takes calls and never says anything."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(3600)
        yield inference_pb2.GenerateResponse()


def test_a_deadline_holds_although_no_gateway_says_anything() -> None:
    async def test() -> None:
        config = ClientConfig(deadline_slack_ms=100)
        async with (
            served(Silent()) as address,
            AsyncClient([address, "127.0.0.1:1"], token=TOKEN, config=config) as client,
        ):
            for _ in range(3):  # the SDK begins at either
                with pytest.raises(DeadlineExceeded, match="deadline of 300 ms") as caught:
                    await client.generate("x", deadline_s=0.3, n=2)
                completion = caught.value.completion
                assert (completion.request_id, completion.prompt_tokens) == ("", 0)
                assert [c.finish_reason for c in completion.choices] == ["deadline"] * 2
                assert completion.completion_tokens == 0

    alone(test)


def test_a_deadline_holds_although_the_gateway_dies(live: Live) -> None:
    async def test(world: World) -> None:
        world.worker.pace_s = 0.02
        config = ClientConfig(deadline_slack_ms=100)
        async with AsyncClient(world.gateway.address, token=TOKEN, config=config) as client:
            stream = client.stream("x", deadline_s=1.0)
            received = 0
            async for event in stream:
                received += isinstance(event, Delta)
                if received == 5:
                    break
            await world.gateway.stop()
            with pytest.raises(DeadlineExceeded, match="no gateway says so") as caught:
                await stream.completion()
        partial = caught.value.completion
        assert partial.request_id == stream.request_id
        assert partial.prompt_tokens == 1
        assert len(partial.token_ids) >= 5
        assert partial.token_ids == tuple(world.worker.answer[: len(partial.token_ids)])
        assert partial.text
        assert partial.timings.ttft_s is not None
        await world.gateway.start()

    live(test)


def test_nobody_there_is_said() -> None:
    async def test() -> None:
        config = ClientConfig(connect_give_up_ms=400)
        endpoints = ["127.0.0.1:1", "127.0.0.1:2"]
        async with AsyncClient(endpoints, token=TOKEN, config=config) as client:
            for call in (lambda: client.generate("x"), client.status, client.models):
                with pytest.raises(Unavailable, match="Connection refused"):
                    await call()

    alone(test)


def test_no_token_is_said_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="token = ''"):
        AsyncClient("127.0.0.1:1", token="")
