"""Whoever leaves a request, and however, frees its blocks, its payload, its record and its stream.

What is asserted is that nothing is left; how long that took is printed (``pytest -rP`` shows it).
"""

from __future__ import annotations

import asyncio
import signal
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from deepinfer.client import Aborted, Accepted, AsyncClient, AsyncStream
from support.local_cluster import TOKEN, LocalCluster, local_cluster, run_on
from support.tiny_model import write_tiny_llama

BLOCKS = 400
LONG: dict[str, int | float | bool] = {"max_tokens": 800, "temperature": 0.0, "ignore_eos": True}
PROMPT = 700
"""With as many tokens two requests fit the pool, and two that have grown do not."""
CHUNK = 8
"""So small that a prompt takes a while, and its request is met in the middle of it."""

Leave: TypeAlias = Callable[[AsyncClient, list[AsyncStream]], Awaitable[None]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return write_tiny_llama(folder, layers=4, context=2048)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


async def open_stream(client: AsyncClient, prompt_tokens: int) -> AsyncStream:
    stream = client.stream([7] * prompt_tokens, **LONG)  # type: ignore[arg-type]
    assert isinstance(await anext(stream), Accepted)
    return stream


async def by_abort(_: AsyncClient, held: list[AsyncStream]) -> None:
    """Says so, and goes on reading: gets ``Aborted``."""
    stream = held.pop()
    stream.abort()
    with pytest.raises(Aborted):
        await stream.completion()


async def by_closing(_: AsyncClient, held: list[AsyncStream]) -> None:
    async with held.pop():
        pass


async def by_breaking_out(_: AsyncClient, held: list[AsyncStream]) -> None:
    """The last reference goes with the loop's end."""

    async def read(stream: AsyncStream) -> None:
        async for _event in stream:
            break

    await asyncio.wait_for(read(held.pop()), 10)


async def by_dropping(_: AsyncClient, held: list[AsyncStream]) -> None:
    held.clear()


async def by_cancelling_the_task(_: AsyncClient, held: list[AsyncStream]) -> None:
    async def read(stream: AsyncStream) -> None:
        await stream.completion()

    task = asyncio.create_task(read(held.pop()))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_closing_the_client(client: AsyncClient, _: list[AsyncStream]) -> None:
    await client.close()


WAYS: tuple[Leave, ...] = (
    by_abort,
    by_closing,
    by_dropping,
    by_cancelling_the_task,
    by_closing_the_client,
)


async def leave_and_time(
    cluster: LocalCluster, way: Leave, client: AsyncClient, held: list[AsyncStream], state: str
) -> None:
    began_s = time.monotonic()
    await way(client, held)
    await cluster.until_free()
    took_s = time.monotonic() - began_s
    sys.stdout.write(f"{state}, {way.__name__}: free after {took_s * 1e3:.0f} ms\n")


@pytest.mark.parametrize(("state", "prompt_tokens"), [("decode", 3), ("prefill", 1200)])
def test_a_request_that_runs(
    model: Path, runner: asyncio.Runner, state: str, prompt_tokens: int
) -> None:
    async def test() -> None:
        async with local_cluster(model, blocks=BLOCKS + 200, prefill_chunk_tokens=CHUNK) as cluster:
            for way in (*WAYS, by_breaking_out):
                async with cluster.client() as client:
                    stream = await open_stream(client, prompt_tokens)
                    await cluster.until_state(stream.request_id, state)
                    if way is by_breaking_out and state == "prefill":
                        continue  # there is nothing to break out of before the first token
                    held = [stream]
                    del stream
                    await leave_and_time(cluster, way, client, held, state)

    run_on(runner, test)


def test_a_request_that_is_swapped_out(model: Path, runner: asyncio.Runner) -> None:
    async def test() -> None:
        async with local_cluster(model, blocks=BLOCKS) as cluster:
            for way in WAYS:
                async with cluster.client() as client, cluster.client() as other:
                    mine, others = [await open_stream(client, PROMPT)], None
                    others = await open_stream(other, PROMPT)
                    deadline = time.monotonic() + 30
                    while "swapped" not in (now := await cluster.states()).values():
                        assert time.monotonic() < deadline, now
                        await asyncio.sleep(0.002)
                    (out,) = [request for request, state in now.items() if state == "swapped"]
                    if out == others.request_id:  # either may be the victim
                        client, other = other, client
                        mine, others = [others], mine.pop()
                    assert (await cluster.status())["stores"]["store-0"]["used_bytes"] > 0
                    began_s = time.monotonic()
                    await way(client, mine)
                    assert cluster.store is not None
                    while (
                        out in await cluster.states()
                        or (await cluster.store.status())["used_bytes"]
                    ):
                        assert time.monotonic() < began_s + 20, await cluster.held()
                        await asyncio.sleep(0.005)
                    took_s = time.monotonic() - began_s
                    sys.stdout.write(f"swapped, {way.__name__}: free after {took_s * 1e3:.0f} ms\n")
                    # The other has not been touched by any of it.
                    assert list((await cluster.states()).values()) == ["decode"]
                    await others.aclose()
                    await cluster.until_free()

    run_on(runner, test)


def test_a_client_that_is_killed_is_an_orphan_for_its_grace(
    model: Path, runner: asyncio.Runner
) -> None:
    grace_s = 0.7
    script = textwrap.dedent(
        """
        import sys
        from deepinfer.client import Client, Delta
        with Client(sys.argv[1], token=sys.argv[2]) as client:
            for event in client.stream([7] * 9, max_tokens=1500, temperature=0.0, ignore_eos=True):
                if isinstance(event, Delta):
                    print("token", flush=True)
        """
    )

    async def test() -> None:
        async with local_cluster(
            model, blocks=BLOCKS, orphan_grace_ms=round(grace_s * 1000)
        ) as cluster:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                script,
                cluster.addresses["gateway-0"],
                TOKEN,
                stdout=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None
            assert await process.stdout.readline() == b"token\n"
            process.send_signal(signal.SIGKILL)
            await process.wait()
            killed_s = time.monotonic()
            await cluster.until_free()
            took_s = time.monotonic() - killed_s
            sys.stdout.write(
                f"killed: free after {took_s * 1e3:.0f} ms, with a grace of {grace_s:g} s\n"
            )
            # It was not let go of before its client could no longer come back.
            deadline = time.monotonic() + 30
            while (counters := (await cluster.status())["counters"])[
                "deepinfer_orphans_total"
            ] != 1:
                assert time.monotonic() < deadline, counters
                await asyncio.sleep(0.02)
            transport = process._transport  # type: ignore[attr-defined]  # or its __del__ warns
            transport.close()

    run_on(runner, test)
