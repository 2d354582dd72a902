"""Hundreds of waiting streams and one that reads nothing, at one gateway: nobody else notices."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from deepinfer.client import Accepted, Delta
from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.kvstore.core.ids import Run, Seq
from deepinfer.proto import inference_pb2, inference_pb2_grpc
from support.byte_tokenizer import write_byte_tokenizer
from support.gateway_world import METADATA, World, eventually, run_in_world

CROWD = 300
TOKENS = 200
CROWD_TOKENS = 6
ANSWER = "The quick brown fox jumps over the lazy dog. " * 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_waiting_streams_and_a_slow_reader_are_nobody_elses_business(folder: Path) -> None:
    async def test(world: World) -> None:
        shell = world.gateway.shell
        assert shell is not None
        place, waiting = world.controller.place, []

        def leave_waiting(seq: Seq) -> Run:
            waiting.append(seq)
            return Run(1, 0)

        options = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
        async with (
            world.client() as client,
            grpc.aio.insecure_channel(world.gateway.address, options=options) as channel,
        ):
            world.controller.place = leave_waiting  # type: ignore[method-assign]  # no blocks
            crowd = [client.stream(f"request {i}", max_tokens=CROWD_TOKENS) for i in range(CROWD)]
            firsts = await asyncio.gather(*(anext(stream) for stream in crowd))
            assert all(isinstance(first, Accepted) for first in firsts)
            assert len({s.request_id for s in crowd}) == CROWD
            await eventually(lambda: len(waiting) == CROWD)
            assert shell.snapshot()["streams"] == CROWD

            world.controller.place = place  # type: ignore[method-assign]
            request = inference_pb2.GenerateRequest(text="x")
            request.sampling_params.max_tokens = TOKENS
            request.sampling_params.logprobs = 20
            stub = inference_pb2_grpc.InferenceStub(channel)
            slow = stub.Generate(request, metadata=METADATA)
            await eventually(lambda: len(world.seqs()) == 1)

            # One that reads gets all of its tokens, one message each, though the other is stuck.
            messages = 0
            async for event in client.stream("y", max_tokens=TOKENS):
                messages += isinstance(event, Delta)
            assert messages > TOKENS // 2
            await eventually(lambda: all(r.finished for r in world.worker.runs.values()))
            assert shell.snapshot()["streams"] == CROWD + 1  # the slow reader's is still open

            # It was: what waited for it comes in few messages now, and nothing is missing.
            ids, stuck = [], 0
            async for response in slow:
                ids += response.chunk.token_ids
                stuck += response.HasField("chunk")
            assert ids == world.worker.answer[:TOKENS]
            assert stuck < TOKENS // 2
            assert shell.snapshot()["streams"] == CROWD

            # The crowd's turn: every one of them ends as it should.
            for seq in waiting:
                place(seq)
            completions = await asyncio.gather(*(stream.completion() for stream in crowd))
            assert {c.token_ids for c in completions} == {tuple(world.worker.answer[:CROWD_TOKENS])}
            await eventually(lambda: shell.snapshot()["streams"] == 0)
            assert shell.snapshot()["live_requests"] == 0

    with asyncio.Runner() as runner:
        config = GatewayConfig(max_live_requests=2 * CROWD, max_streams=2 * CROWD)
        run_in_world(runner, folder, test, answer=ANSWER, config=config)


def test_a_crowd_that_is_dropped_leaves_nothing(folder: Path) -> None:
    async def test(world: World) -> None:
        world.controller.place = lambda seq: Run(1, 0)  # type: ignore[method-assign]
        shell = world.gateway.shell
        assert shell is not None
        async with world.client() as client:
            streams = [client.stream("x", max_tokens=50) for _ in range(CROWD)]
            await asyncio.gather(*(anext(stream) for stream in streams))
            assert shell.snapshot()["live_requests"] == CROWD
            streams.clear()
            await eventually(lambda: shell.snapshot()["live_requests"] == 0, 20)
        await eventually(lambda: shell.snapshot()["streams"] == 0)
        await eventually(lambda: not world.controller.levels, 20)

    with asyncio.Runner() as runner:
        config = GatewayConfig(max_live_requests=2 * CROWD, max_streams=2 * CROWD)
        run_in_world(runner, folder, test, answer=ANSWER, config=config)
