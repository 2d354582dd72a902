"""Frames over a socket pair: what goes out at once, what has to wait, and who is handed what."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from deepinfer.kvstore.frames import NOW_BYTES_MAX, FrameError, FrameSocket, Rest


@contextmanager
def pair() -> Iterator[tuple[FrameSocket, FrameSocket]]:
    ours, theirs = map(FrameSocket, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        yield ours, theirs
    finally:
        ours.close()
        theirs.close()


def number(value: int) -> dict[str, object]:
    return {"op": "number", "value": value}


def fill(frames: FrameSocket) -> int:
    """Send until there is no room; return how many frames went out."""
    sent = 0
    while frames.send_now({**number(sent), "filling": bytes(NOW_BYTES_MAX // 2)}):
        sent += 1
    return sent


async def numbers(frames: FrameSocket, count: int) -> list[int]:
    found = []
    for _ in range(count):
        received = await frames.receive()
        assert received is not None
        found.append(received[0]["value"])
    return found


def test_a_frame_sent_now_is_whole_or_not_sent() -> None:
    async def main() -> None:
        with pair() as (ours, theirs):
            assert not ours.send_now({**number(0), "filling": bytes(NOW_BYTES_MAX)})
            sent = fill(ours)
            assert sent > 1
            assert not ours.send_now({**number(-1), "filling": bytes(NOW_BYTES_MAX // 2)})
            assert await numbers(theirs, sent) == list(range(sent))
            assert ours.send_now(number(sent))
            assert await numbers(theirs, 1) == [sent]

    asyncio.run(main())


def test_a_frame_sent_now_overtakes_none_that_waits() -> None:
    async def main() -> None:
        with pair() as (ours, theirs):
            sent = fill(ours)
            waiting = asyncio.create_task(ours.send({**number(sent), "filling": bytes(1 << 20)}))
            await asyncio.sleep(0)
            assert await numbers(theirs, 1) == [0]  # there is room again
            assert not ours.send_now(number(-1))
            assert await numbers(theirs, sent) == list(range(1, sent + 1))
            await waiting
            assert ours.send_now(number(-1))

    asyncio.run(main())


def test_any_thread_may_send_now_while_the_loop_sends() -> None:
    async def main() -> None:
        with pair() as (ours, theirs):
            done = threading.Event()
            told: list[int] = []

            def tell() -> None:
                while not done.is_set():
                    if ours.send_now(number(len(told))):
                        told.append(len(told))

            thread = threading.Thread(target=tell)
            found: list[dict[str, Any]] = []

            async def read() -> None:
                while (received := await theirs.receive()) is not None:
                    found.append(received[0])

            reading = asyncio.create_task(read())
            thread.start()
            for _ in range(20):  # longer than the socket holds: each goes out in several pieces
                await ours.send({"op": "long", "filling": bytes(1 << 19)})
            done.set()
            await asyncio.to_thread(thread.join)
            ours.close()
            await reading
            assert [frame["value"] for frame in found if frame["op"] == "number"] == told
            assert sum(frame["op"] == "long" for frame in found) == 20

    asyncio.run(main())


def test_nothing_is_sent_now_over_a_socket_that_is_closed() -> None:
    async def main() -> None:
        with pair() as (ours, theirs):
            theirs.close()
            assert not ours.send_now(number(0))
            ours.close()
            assert not ours.send_now(number(0))

    asyncio.run(main())


def test_a_server_waits_for_what_remains_of_a_frame_before_the_next() -> None:
    async def main() -> None:
        with pair() as (ours, theirs):
            seen: list[int] = []
            begun, go_on = asyncio.Event(), asyncio.Event()

            async def remainder() -> None:
                begun.set()
                await go_on.wait()
                seen.append(-1)

            def handle(frame: dict[str, Any], fds: list[int]) -> Rest | None:
                seen.append(frame["value"])
                return remainder() if frame["value"] == 1 else None

            serving = asyncio.create_task(theirs.serve(handle))
            for value in range(3):
                assert ours.send_now(number(value))
            await begun.wait()
            assert ours.send_now(number(3))
            await asyncio.sleep(0.01)
            assert seen == [0, 1]
            go_on.set()
            ours.close()
            await asyncio.wait_for(serving, 5)
            assert seen == [0, 1, -1, 2, 3]

    asyncio.run(main())


@pytest.mark.parametrize("error", [FrameError("odd"), ValueError("odd")])
def test_what_a_handler_raises_ends_its_server(error: Exception) -> None:
    async def main() -> None:
        with pair() as (ours, theirs):

            def handle(frame: dict[str, Any], fds: list[int]) -> Rest | None:
                raise error

            serving = asyncio.create_task(theirs.serve(handle))
            await asyncio.sleep(0)
            assert ours.send_now(number(0))
            with pytest.raises(type(error), match="odd"):
                await asyncio.wait_for(serving, 5)

    asyncio.run(main())


def test_descriptors_that_nobody_is_there_to_receive_are_closed() -> None:
    async def main() -> None:
        with pair() as (ours, theirs):
            receiving = asyncio.create_task(theirs.receive())
            await asyncio.sleep(0)
            fd = os.memfd_create("passed")
            open_before = len(os.listdir("/proc/self/fd"))
            await ours.send(number(0), [fd])
            ready = theirs._receiver
            assert ready is not None
            while not ready[0].done():  # handed over, and not yet taken
                await asyncio.sleep(0)
                if ready[0].done():
                    receiving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await receiving
            assert len(os.listdir("/proc/self/fd")) == open_before
            os.close(fd)

    asyncio.run(main())
