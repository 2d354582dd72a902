"""A client that is there and reads nothing: its gateway lets go of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.proto import inference_pb2, inference_pb2_grpc
from deepinfer.proto.bearer import bearer
from support.byte_tokenizer import write_byte_tokenizer
from support.gateway_world import TOKEN, World, eventually, run_in_world


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def test_a_gateway_lets_go_of_a_client_that_is_there_and_reads_nothing(
    tmp_path: Path, runner: asyncio.Runner
) -> None:
    """Its handler waits in a write for a window that never opens."""
    config = GatewayConfig(unread_ms=400, orphan_grace_ms=100)

    async def test(world: World) -> None:
        small = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
        async with grpc.aio.insecure_channel(world.gateway.address, options=small) as channel:
            request = inference_pb2.GenerateRequest(text="hi")
            sampling = request.sampling_params
            sampling.max_tokens, sampling.logprobs = 400, 20  # long messages
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                request, metadata=bearer(TOKEN)
            )
            assert (await call.read()).HasField("accepted")
            shell = world.gateway.shell
            assert shell is not None
            await eventually(lambda: shell.core.counters["streams_unread_total"] == 1)
            await eventually(
                lambda: not shell.core.live_requests and not shell.snapshot()["streams"]
            )
            async with asyncio.timeout(5):  # its handler has ended, too
                await shell.close("over")
            call.cancel()

    write_byte_tokenizer(tmp_path)
    run_in_world(runner, tmp_path, test, answer="so it goes on and on " * 20, config=config)
