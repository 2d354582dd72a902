"""What a full server says: RESOURCE_EXHAUSTED with the bound, its value, and what to do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest

from deepinfer.gateway import service
from deepinfer.gateway.core.events import Report, ReportLinkUp
from deepinfer.gateway.keys import resume_key
from deepinfer.gateway.reporting import REPORTS_MAX
from deepinfer.proto import inference_pb2, inference_pb2_grpc
from deepinfer.proto.crowd import BoundedCalls
from deepinfer.text.load import load_tokenizer
from deepinfer.text.tokenizer import Tokenizer
from support.byte_tokenizer import write_byte_tokenizer
from support.gateway_world import METADATA, SECRET, World, eventually, run_in_world, settle

LONG = 40_000
Live: TypeAlias = Callable[[Callable[[World], Awaitable[None]]], None]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    """Runs a test in a world of its own."""
    write_byte_tokenizer(tmp_path)
    with asyncio.Runner() as runner:
        yield lambda test: run_in_world(runner, tmp_path, test, answer="an answer")


class Kinds(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not at run time
    """One handler of each kind, which answer once ``go`` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        async def one(_: Any, __: Any) -> bytes:
            await self.go.wait()
            return b"1"

        async def written(_: Any, context: Any) -> None:
            await self.go.wait()
            await context.write(b"2")

        async def yielded(_: Any, __: Any) -> AsyncIterator[bytes]:
            await self.go.wait()
            yield b"3"

        match details.method:
            case "/x/one":
                return grpc.unary_unary_rpc_method_handler(one)
            case "/x/read":
                return grpc.stream_unary_rpc_method_handler(one)
            case "/x/written":
                return grpc.unary_stream_rpc_method_handler(written)
            case "/x/yielded":
                return grpc.stream_stream_rpc_method_handler(yielded)
        return None


def test_calls_of_every_kind_are_counted_to_their_ends() -> None:
    async def main() -> None:
        kinds = Kinds()
        bound = BoundedCalls(4, name="calls", advice="wait")
        server = grpc.aio.server(
            interceptors=[bound], handlers=[kinds], options=[("grpc.so_reuseport", 0)]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            calls: list[Any] = [
                channel.unary_unary("/x/one", None, None)(b""),
                channel.stream_unary("/x/read", None, None)(iter([b""])),
                channel.unary_stream("/x/written", None, None)(b""),
                channel.stream_stream("/x/yielded", None, None)(iter([b""])),
            ]
            await eventually(lambda: bound.calls == 4)
            for refused in (
                channel.unary_unary("/x/one", None, None)(b""),
                channel.unary_stream("/x/written", None, None)(b""),
                channel.stream_stream("/x/yielded", None, None)(iter([b""])),
            ):
                assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert (
                    await refused.details() == "calls = 4: so many calls are under way here; wait"
                )
            assert bound.calls == 4
            calls[0].cancel()
            await eventually(lambda: bound.calls == 3)
            kinds.go.set()
            assert await calls[1] == b"1"
            assert [r async for r in calls[2]] == [b"2"]
            assert [r async for r in calls[3]] == [b"3"]
            await eventually(lambda: bound.calls == 0)
            assert await channel.unary_unary("/x/one", None, None)(b"") == b"1"
        await server.stop(None)

    with asyncio.Runner() as runner:
        settle(runner, main())


def test_only_so_many_long_inputs_wait_for_the_tokenizer(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "LONG_INPUTS_BYTES_MAX", 100_000)
    go = threading.Event()
    encode = Tokenizer.encode

    def slow(self: Tokenizer, text: str, **options: bool) -> list[int]:
        if len(text) == LONG:
            go.wait(10)
        return encode(self, text[:4], **options)

    monkeypatch.setattr(Tokenizer, "encode", slow)

    async def test(world: World) -> None:
        async with grpc.aio.insecure_channel(world.gateway.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GenerateRequest(text="x" * LONG)
            request.sampling_params.max_tokens = 2

            async def answered() -> int:
                return len([r async for r in stub.Generate(request, metadata=METADATA)])

            calls = [asyncio.create_task(answered()) for _ in range(3)]
            done, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            (refused,) = [task.exception() for task in done]
            assert isinstance(refused, grpc.aio.AioRpcError)
            assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            details = str(refused.details())
            assert "long_inputs_bytes_max = 100,000: requests of 80," in details
            assert details.endswith("try again later, or at another gateway")
            assert (await _refusals(world)) == 1
            go.set()
            assert all(await asyncio.gather(*waiting))

    live(test)


def test_tokens_that_the_model_does_not_have_are_not_resumed_behind(live: Live) -> None:
    async def test(world: World) -> None:
        name = "gateway-0-" + "ab" * 12
        resume = inference_pb2.ResumeRequest(
            request_id=name, resume_key=resume_key(SECRET, name), claim=1
        )
        resume.request.text = "x"
        resume.progress.add(index=0, token_ids=[70, 259])
        async with grpc.aio.insecure_channel(world.gateway.address) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Resume(resume, metadata=METADATA)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert await call.details() == "progress[0].token_ids[1] = 259: must be from 0 to 258"

    live(test)


def test_ids_without_a_token_take_no_memory(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_byte_tokenizer(tmp_path))
    for token_id in (*range(300), 1 << 31, (1 << 32) - 1):
        tokenizer.token_bytes(token_id)
    assert len(tokenizer._bytes) == tokenizer.vocab_size == 259


async def _refusals(world: World) -> float:
    assert world.gateway.shell is not None
    name = 'deepinfer_requests_refused_total{reason="long_inputs"}'
    return world.gateway.shell.metrics()[name]


def test_reports_that_nobody_reads_do_not_pile_up(live: Live) -> None:
    """Their stream is given up with what waits for it, and opened anew."""

    async def test(world: World) -> None:
        shell, reports = world.gateway.shell, world.controller.reports
        assert shell is not None
        await eventually(lambda: bool(reports))
        complete = sum(report.complete for report in reports)
        send = shell._send_report
        assert send is not None
        (said,) = shell.core.handle(ReportLinkUp(), shell.now_ms())
        assert isinstance(said, Report)
        for number in range(REPORTS_MAX + 2):  # in one turn of the loop: none is written meanwhile
            send(replace(said.report, number=900 + number, complete=False))
        assert shell._send_report is None
        await eventually(lambda: sum(report.complete for report in reports) > complete)

    live(test)
