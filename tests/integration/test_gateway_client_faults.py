"""A real gateway and the real SDK over gRPC, when things die, stall or lie."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest

from deepinfer.client import (
    Aborted,
    Accepted,
    AsyncClient,
    Delta,
    Finished,
    Replaced,
    Unauthenticated,
    Unavailable,
)
from deepinfer.client.core.config import ClientConfig
from deepinfer.gateway.core.config import GatewayConfig
from deepinfer.kvstore.core.ids import Run, Seq
from deepinfer.proto import ids_pb2, inference_pb2, inference_pb2_grpc, link_pb2, link_pb2_grpc
from support.byte_tokenizer import write_byte_tokenizer
from support.gateway_world import (
    CLUSTER_METADATA,
    METADATA,
    TOKEN,
    GatewayHost,
    World,
    eventually,
    run_in_world,
)

ANSWER = "".join(f"{i}: grün und schön. " for i in range(12))
Test: TypeAlias = Callable[[World], Awaitable[None]]
Live: TypeAlias = Callable[..., None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Live]:
    """Runs an asynchronous test in a world of its own."""
    with asyncio.Runner() as runner:

        def run(test: Test, config: GatewayConfig | None = None) -> None:
            run_in_world(runner, folder, test, answer=ANSWER, config=config)

        yield run


def test_a_gateway_restarted_twice_mid_stream_loses_nothing(live: Live) -> None:
    async def test(world: World) -> None:
        async with (
            world.client() as client,
            client.stream("x", max_tokens=400, stop=["11: "]) as stream,
        ):
            received: list[int] = []
            text = ""
            kills = [30, 90]
            async for event in stream:
                if isinstance(event, Delta):
                    assert event.position == len(received)
                    received += event.token_ids
                    text += event.text
                if kills and len(received) >= kills[0]:
                    del kills[0]
                    await world.gateway.stop()
                    await world.gateway.start()
        assert isinstance(event, Finished)
        assert event.choice.timings.reconnects >= 2
        assert text + event.text == ANSWER[: ANSWER.index("11: ")] == event.choice.text
        assert received == list(event.choice.token_ids)
        assert event.choice.matched_stop == "11: "

    live(test)


def test_a_dead_gateway_is_replaced_by_another(live: Live) -> None:
    async def test(world: World) -> None:
        second = GatewayHost(
            world.gateway.card, world.gateway.controller, world.gateway.config, "gateway-1"
        )
        await second.start()
        world.gateways.append(second)
        config = ClientConfig(give_up_ms=10_000)
        # The SDK begins at either: kill the one that serves.
        async with AsyncClient(
            [g.address for g in world.gateways], token=TOKEN, config=config
        ) as client:
            stream = client.stream("x", max_tokens=200)
            first = await anext(stream)
            assert isinstance(first, Accepted)
            serving, other = world.gateways
            if first.gateway == "gateway-1":
                serving, other = other, serving
            await serving.stop()
            world.worker.address = other.address
            completion = await stream.completion()
        assert completion.text == world.tokenizer.decode(world.worker.answer[:200])
        assert completion.timings.reconnects >= 1
        await serving.start()

    live(test)


def test_a_broken_worker_link_is_attached_again(live: Live) -> None:
    async def test(world: World) -> None:
        async with world.client() as client, client.stream("x", max_tokens=200) as stream:
            broken = 0
            async for event in stream:
                if isinstance(event, Delta) and event.position > 40 * (broken + 1) and broken < 3:
                    broken += 1
                    shell = world.gateway.shell
                    assert shell is not None
                    for link in list(shell._links.values()):
                        link.close()
        assert isinstance(event, Finished)
        assert event.choice.token_ids == tuple(world.worker.answer[:200])
        attached = [m for m in world.worker.received if m.WhichOneof("message") == "attached"]
        assert len(attached) == 1 + broken == 4

    live(test)


def test_a_lower_run_and_doubled_tokens_are_not_heard(live: Live) -> None:
    async def test(world: World) -> None:
        worker = world.worker
        worker.pace_s = 3600.0
        async with world.client() as client, client.stream("x", max_tokens=6) as stream:
            await eventually(lambda: any(r.limit for r in worker.runs.values()))
            (seq, first), _ = next(iter(worker.runs.items()))
            worker.say(seq, first, 0, [1, 2])
            second = world.controller.place(seq)
            await eventually(lambda: worker.runs[seq, second].limit > 0)
            assert worker.runs[seq, second].tokens == [1, 2]
            worker.say(seq, first, 2, [90, 91])  # late, of the lower run
            worker.say(seq, second, 1, [2, 3])
            worker.say(seq, second, 1, [2, 3])  # doubled
            worker.say(seq, second, 5, [95])  # a gap
            worker.say(seq, Run(1, 99), 3, [99])  # never attached
            assert not worker.runs[seq, second].dropped
            worker.say(seq, second, 2, [77, 78])  # contradicts what is held
            await eventually(lambda: worker.runs[seq, second].dropped)
            worker.say(seq, second, 3, [88])  # nothing of it is heard any more
            third = world.controller.place(seq)
            await eventually(lambda: worker.runs[seq, third].limit > 0)
            assert worker.runs[seq, third].tokens == [1, 2, 3]
            worker.say(seq, third, 3, [4, 5, 6], "length")
            completion = await stream.completion()
        assert completion.token_ids == (1, 2, 3, 4, 5, 6)
        assert worker.runs[seq, first].dropped
        assert world.gateway.shell is not None
        counters = world.gateway.shell.core.counters
        assert counters["tokens_outdated_total"] == 3
        assert counters["tokens_after_gap_dropped_total"] == 1
        assert counters["tokens_contradicting_dropped_total"] == 2
        assert counters["tokens_unattached_total"] == 1

    live(test)


def test_abort_frees_the_run_and_ends_the_stream(live: Live) -> None:
    async def test(world: World) -> None:
        world.worker.pace_s = 0.02
        async with world.client() as client:
            stream = client.stream("x")
            async for event in stream:
                if isinstance(event, Delta):
                    break
            await client.abort(stream.request_id)
            await eventually(lambda: all(r.dropped for r in world.worker.runs.values()))
            await eventually(lambda: world.controller.cancelled == world.seqs())
            await eventually(lambda: not world.controller.levels)
            with pytest.raises(Aborted):
                await stream.completion()
            assert [event async for event in stream] == []
            with pytest.raises(LookupError, match="none of this client's"):
                await client.abort(stream.request_id)

    live(test)


def test_cancelling_the_iteration_or_dropping_the_stream_aborts(live: Live) -> None:
    async def test(world: World) -> None:
        world.worker.pace_s = 3600.0
        async with world.client() as client:
            task = asyncio.create_task(client.generate("x"))
            await eventually(lambda: len(world.worker.runs) == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await eventually(lambda: len(world.controller.cancelled) == 1)
            stream = client.stream("y")
            await anext(stream)
            del stream
            await eventually(lambda: len(world.controller.cancelled) == 2)

    live(test)


def test_an_abort_with_the_key_reaches_whoever_iterates(live: Live) -> None:
    async def test(world: World) -> None:
        world.worker.pace_s = 3600.0
        async with world.client() as client, world.client() as other:
            stream = client.stream("x")
            accepted = await anext(stream)
            assert isinstance(accepted, Accepted)
            with pytest.raises(Unauthenticated, match="resume_key"):
                await other.abort(accepted.request_id, resume_key="0" * 64)
            await other.abort(accepted.request_id, resume_key=accepted.resume_key)
            completion = await stream.completion()
            assert completion.finish_reason == "abort"

    live(test)


def test_an_orphan_is_cancelled_and_can_still_be_resumed(live: Live) -> None:
    async def test(world: World) -> None:
        world.worker.pace_s = 0.05
        async with grpc.aio.insecure_channel(world.gateway.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GenerateRequest(text="x")
            request.sampling_params.max_tokens = 30
            call = stub.Generate(request, metadata=METADATA)
            accepted = (await call.read()).accepted
            chunk = (await call.read()).chunk
            call.cancel()
            await eventually(lambda: world.controller.cancelled == world.seqs())
            await eventually(lambda: all(r.dropped for r in world.worker.runs.values()))
            assert world.gateway.shell is not None
            assert world.gateway.shell.snapshot()["kept_requests"] == 0

            world.worker.pace_s = 0.001
            resume = inference_pb2.ResumeRequest(
                request_id=accepted.request_id,
                resume_key=accepted.resume_key,
                claim=1,
                request=request,
                progress=[inference_pb2.ChoiceProgress(index=0, token_ids=chunk.token_ids)],
            )
            ids = list(chunk.token_ids)
            async for response in stub.Resume(resume, metadata=METADATA):
                assert response.chunk.position == len(ids) or not response.HasField("chunk")
                ids += response.chunk.token_ids
            assert ids == world.worker.answer[:30]

            # An ended request is kept for those who lost its last words, whoever they say they are.
            resume.claim = 2
            again = [r async for r in stub.Resume(resume, metadata=METADATA)]
            assert again[-1].complete.finish_reason == "length"
            resume.claim = 1
            with pytest.raises(grpc.aio.AioRpcError, match="older than attempt 2"):
                async for _ in stub.Resume(resume, metadata=METADATA):
                    pass
            resume.resume_key = resume.resume_key[::-1]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Resume(resume, metadata=METADATA):
                    pass
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED

    live(test, GatewayConfig(orphan_grace_ms=300))


def test_a_slow_reader_costs_only_its_record(live: Live) -> None:
    async def test(world: World) -> None:
        async with (
            grpc.aio.insecure_channel(world.gateway.address) as channel,
            world.client() as client,
        ):
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GenerateRequest(text="x")
            request.sampling_params.max_tokens = 100
            slow = stub.Generate(request, metadata=METADATA)
            responses = [await anext(aiter(slow))]
            quick = await client.generate("y", max_tokens=100)
            assert quick.token_ids == tuple(world.worker.answer[:100])
            await eventually(lambda: all(r.finished for r in world.worker.runs.values()))
            responses += [response async for response in slow]
            ids = [i for r in responses for i in r.chunk.token_ids]
            assert ids == world.worker.answer[:100]
            assert responses[-1].complete.completion_tokens == 100

    live(test)


def test_another_client_may_take_a_request_over(live: Live) -> None:
    async def test(world: World) -> None:
        world.worker.pace_s = 3600.0
        async with world.client() as client:
            stream = client.stream("x")
            accepted = await anext(stream)
            assert isinstance(accepted, Accepted)
            async with grpc.aio.insecure_channel(world.gateway.address) as channel:
                resume = inference_pb2.ResumeRequest(
                    request_id=accepted.request_id,
                    resume_key=accepted.resume_key,
                    claim=7,
                    request=inference_pb2.GenerateRequest(text="x"),
                )
                call = inference_pb2_grpc.InferenceStub(channel).Resume(resume, metadata=METADATA)
                assert (await call.read()).accepted.claim == 7
                with pytest.raises(Replaced):
                    await stream.completion()
                call.cancel()

    live(test)


def test_nobody_there_is_unavailable_after_a_while(live: Live) -> None:
    async def test(world: World) -> None:
        await world.gateway.stop()
        config = ClientConfig(connect_give_up_ms=300)
        async with AsyncClient(world.gateway.address, token=TOKEN, config=config) as client:
            with pytest.raises(Unavailable):
                await client.generate("x")
            with pytest.raises(Unavailable, match="no endpoint answers"):
                await client.status()
        await world.gateway.start()

    live(test)


def test_malformed_messages_are_refused(live: Live) -> None:
    async def test(world: World) -> None:
        async with grpc.aio.insecure_channel(world.gateway.address) as channel:

            async def refusal(body: bytes) -> grpc.StatusCode:
                call = channel.unary_stream("/deepinfer.v1.Inference/Generate", None, None)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in call(body, metadata=METADATA):
                        pass
                return caught.value.code()

            bad_utf8 = b"\x1a\x02\xff\xfe"  # field 3, text: two bytes that are no UTF-8
            assert await refusal(bad_utf8) is grpc.StatusCode.INVALID_ARGUMENT
            assert await refusal(b"\xff") is grpc.StatusCode.INVALID_ARGUMENT
            assert await refusal(b"") is grpc.StatusCode.INVALID_ARGUMENT
            huge = inference_pb2.GenerateRequest(text="x" * (4 << 20)).SerializeToString()
            assert await refusal(huge) is grpc.StatusCode.RESOURCE_EXHAUSTED
            unknown = channel.unary_unary("/deepinfer.v1.Inference/Nothing", None, None)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await unknown(b"")
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

    live(test)


HELLO = link_pb2.Hello(worker=ids_pb2.WorkerRef(worker="w", incarnation=1))
NESTED = link_pb2.FromWorker(attach=link_pb2.Attach(), more=[link_pb2.FromWorker()])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "first message must be hello"),
        ([link_pb2.FromWorker(tokens=link_pb2.Tokens())], "first message must be hello"),
        ([link_pb2.FromWorker(hello=link_pb2.Hello())], "must not be empty"),
        ([None, link_pb2.FromWorker()], "must be attach, scores, tokens or notice"),
        ([None, link_pb2.FromWorker(tokens=link_pb2.Tokens(finish_reason="x"))], "finish_reason"),
        ([None, link_pb2.FromWorker(notice=link_pb2.LinkNotice())], "notice.kind = 0"),
        ([link_pb2.FromWorker(hello=HELLO, more=[NESTED])], "hello.more: must be empty"),
        ([None, link_pb2.FromWorker(attach=link_pb2.Attach(), more=[NESTED])], "more.more: must"),
    ],
)
def test_a_worker_that_talks_nonsense_is_cut_off(
    live: Live, messages: list[link_pb2.FromWorker | None], words: str
) -> None:
    async def test(world: World) -> None:
        hello = link_pb2.FromWorker()
        hello.hello.worker.worker = "w"
        async with grpc.aio.insecure_channel(world.gateway.address) as channel:
            call = link_pb2_grpc.WorkerLinkStub(channel).Connect(metadata=CLUSTER_METADATA)
            for message in messages:
                await call.write(message or hello)
            await call.done_writing()
            with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    live(test)


def test_the_synchronous_client(live: Live) -> None:
    """In a process of its own: gRPC's asynchronous side wants one loop a process."""
    script = textwrap.dedent(
        """
        import sys
        from deepinfer.client import Client, ClientClosed, Delta, InvalidRequest
        address, token = sys.argv[1:]
        with Client(address, token=token) as client, Client([address], token=token) as other:
            one = client.generate("x", max_tokens=20)
            with other.stream([1, 2], max_tokens=20, n=2) as stream:
                ids = {0: [], 1: []}
                for event in stream:
                    if isinstance(event, Delta):
                        ids[event.choice] += event.token_ids
            assert ids == {0: list(one.token_ids), 1: list(one.token_ids)}, ids
            assert client.models()[0].id == "bytes"
            assert client.status()["swapped"] == 0
            stream = client.stream("x")
            assert client.chat([{"role": "user", "content": "x"}], max_tokens=3).token_ids
            try:
                client.generate("x", temperature=-1.0)
            except InvalidRequest as error:
                assert "temperature" in str(error)
            else:
                raise AssertionError("temperature -1 was accepted")
            next(stream)
            stream.close()
            assert stream.request_id
        try:
            client.status()
        except ClientClosed:
            print("done", one.text)
        """
    )

    async def test(world: World) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-W",
            "error",
            "-c",
            script,
            world.gateway.address,
            TOKEN,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode == 0, err.decode()
        assert out.decode().strip() == f"done {world.tokenizer.decode(world.worker.answer[:20])}"
        assert err == b"", err.decode()

    live(test)


def test_aborting_before_acceptance(live: Live) -> None:
    async def test(world: World) -> None:
        await world.gateway.stop()
        async with world.client() as client:
            stream = client.stream("x")
            task = asyncio.create_task(stream.completion())
            await asyncio.sleep(0.05)
            await stream.aclose()
            with pytest.raises(Aborted):
                await task
        await world.gateway.start()

    live(test)


def test_levels_follow_a_request(live: Live) -> None:
    async def test(world: World) -> None:
        world.worker.pace_s = 3600.0
        async with world.client() as client:
            stream = client.stream("x", max_tokens=9, n=2, priority=3, exact=True)
            await anext(stream)
            await eventually(
                lambda: (
                    all(v.HasField("attached") for v in world.controller.levels.values())
                    and len(world.controller.levels) == 2
                )
            )
            (seq, level), _ = world.controller.levels.items()
            assert (level.claim, level.prompt_tokens, level.max_tokens) == (0, 1, 9)
            assert (level.priority, level.exact, level.cancelled) == (3, True, False)
            worker, run = world.worker, next(r for s, r in world.worker.runs if s == seq)
            worker.say(seq, run, 0, worker.answer[:9], "length")
            await eventually(lambda: seq not in world.controller.levels)
            assert len(world.controller.levels) == 1
            numbers = [report.number for report in world.controller.reports]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            assert world.controller.reports[0].address == world.gateway.address
            assert isinstance(seq, Seq)

    live(test)
