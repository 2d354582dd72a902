"""The synchronous client does what the asynchronous one does, TLS and leaving early included.

In a process of its own: gRPC's asynchronous side wants one loop a process.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path

from deepinfer.client import AsyncClient, AsyncStream, Client, Stream
from support.byte_tokenizer import write_byte_tokenizer
from support.gateway_world import TOKEN, World, eventually, run_in_world

SCRIPT = textwrap.dedent(
    """
    import gc, sys, threading, time
    from deepinfer.client import Aborted, Client, ClientClosed, DeadlineExceeded, Delta, Untrusted

    def read(stream):
        for event in stream:
            if isinstance(event, Delta):
                break  # and what follows is dropped

    with Client(sys.argv[1], token=sys.argv[2]) as client:
        read(client.stream("break out"))

        stream = client.stream("abort")
        next(stream)
        threading.Timer(0.05, stream.abort).start()
        try:
            stream.completion()
        except Aborted as error:
            assert error.request_id == stream.request_id
        else:
            raise AssertionError("it was aborted")

        with client.stream("leave") as stream:
            next(stream)

        try:
            client.generate("late", deadline_s=0.2)
        except DeadlineExceeded as error:
            assert error.completion.finish_reason == "deadline"

        left = client.stream("close the client")
        next(left)
    left.abort()
    for call in (left.completion, lambda: next(left), left.close, client.status):
        try:
            call()
        except ClientClosed as error:
            assert str(error) == "the client is closed"
        else:
            raise AssertionError("the client was closed")

    with Client(sys.argv[1], token=sys.argv[2], tls=True) as client:
        try:
            client.chat([{"role": "user", "content": "x"}])
        except Untrusted as error:
            print("done")
    """
)


def test_leaving_early_deadlines_and_tls(tmp_path: Path) -> None:
    async def test(world: World) -> None:
        world.worker.pace_s = 0.05
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-W", "error", "-c", SCRIPT, world.gateway.address, TOKEN),
            env={"GRPC_VERBOSITY": "ERROR", "PATH": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 50)
        assert process.returncode == 0, err.decode()
        assert (err, out) == (b"", b"done\n")
        shell = world.gateway.shell
        assert shell is not None
        # break, abort, leave, deadline, close: each has freed what it held.
        await eventually(lambda: len(world.controller.cancelled) == 5)
        await eventually(lambda: not world.controller.levels)
        assert shell.snapshot()["live_requests"] == 0

    with asyncio.Runner() as runner:
        folder = write_byte_tokenizer(tmp_path / "tokenizer")
        run_in_world(runner, folder, test, answer="hello there " * 30)


def test_both_offer_the_same() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(Client) == public(AsyncClient)
    assert public(Stream) - {"close"} == public(AsyncStream) - {"aclose"}
