"""Frames over a Unix socket: a length, a msgpack map, and descriptors that travel beside it.

::

    4 bytes little-endian length | msgpack map with "op"

A frame may say that ``fds`` descriptors came with it; they are sent with its first byte and so
arrive no later than its last.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from deepinfer.kvstore import wire
from deepinfer.kvstore.core.manifest import MANIFEST_BYTES_MAX

FRAME_BYTES_MAX = MANIFEST_BYTES_MAX + (1 << 20)
"""A manifest and a page list."""
NOW_BYTES_MAX = 1 << 15
"""What ``send_now`` sends at most: the kernel takes as much whole or not at all."""
_READ_BYTES = 1 << 16
_FDS_MAX = 16
_HEAD = struct.Struct("<I")


_T = TypeVar("_T")
Frame = tuple[dict[str, Any], list[int]]
"""A frame and the descriptors that came with it."""
Rest = Coroutine[Any, Any, None]
"""What is still to be done about a frame and has to be waited for."""


class FrameError(ConnectionError):
    """The peer sent what is not a frame; the connection cannot go on."""


class FrameSocket:
    """A connected, non-blocking Unix stream socket that carries frames."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._buffer = bytearray()
        self._fds: deque[int] = deque()
        self._sending = asyncio.Lock()
        self._senders = 0
        self._wire = threading.Lock()
        """Held while the socket is written to or closed: ``send_now`` may come from any thread."""
        self._half_out = False
        self._waiting: list[asyncio.Future[Any]] = []
        self._reading = False
        self._receiver: tuple[asyncio.Future[Any], Callable[[], object]] | None = None
        self._closed = False

    async def send(self, frame: dict[str, object], fds: Sequence[int] = ()) -> None:
        """Send one frame. Raises OSError when the peer is gone."""
        body = wire.pack({**frame, "fds": len(fds)} if fds else frame)
        data = memoryview(_HEAD.pack(len(body)) + body)
        self._senders += 1
        try:
            async with self._sending:
                try:
                    while data:
                        data, fds = data[await self._send_some(data, fds) :], ()
                except BaseException:
                    if self._half_out:  # nothing can follow it
                        with contextlib.suppress(OSError):
                            self.sock.shutdown(socket.SHUT_RDWR)
                    raise
        finally:
            self._senders -= 1

    def send_now(self, frame: dict[str, object]) -> bool:
        """Send one frame if it can go out at once and whole; False: nothing was sent.

        From any thread. A frame never overtakes those that ``send`` was asked for before.
        """
        body = wire.pack(frame)
        data = _HEAD.pack(len(body)) + body
        if len(data) > NOW_BYTES_MAX:
            return False
        with self._wire:
            if self._closed or self._half_out or self._senders:
                return False
            try:
                sent = self.sock.send(data)
            except OSError:  # no room now; or whoever reads hears of it
                return False
            if sent < len(data):
                self._half_out = True  # nothing can follow it
                with contextlib.suppress(OSError):
                    self.sock.shutdown(socket.SHUT_RDWR)
            return sent == len(data)

    async def _send_some(self, data: memoryview, fds: Sequence[int]) -> int:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while True:
            try:
                with self._wire:
                    sent = self.sock.sendmsg([data], rights)
                    self._half_out = sent < len(data)
                    return sent
            except BlockingIOError:
                await self._until_writable()

    async def receive(self) -> Frame | None:
        """The next frame and its descriptors, which are the caller's now; None at the end.

        Raises FrameError for what is not a frame, OSError when the connection breaks.
        """
        return await self._received(self._take, _close_all)

    async def serve(self, handle: Callable[[dict[str, Any], list[int]], Rest | None]) -> None:
        """Give every frame and its descriptors to ``handle``, until the peer hangs up.

        It is called as soon as the frame is there, without a turn of the loop in between; what it
        returns is waited for before the next (or, when this is cancelled, closed). Raises as
        ``receive``, and what ``handle`` raises.
        """

        def handled() -> Rest | None:
            while (frame := self._take()) is not None:
                rest = handle(*frame)
                if rest is not None:
                    return rest
            return None

        while (rest := await self._received(handled, lambda rest: rest.close())) is not None:
            await rest

    def _take(self) -> Frame | None:
        if len(self._buffer) < _HEAD.size:
            return None
        (length,) = _HEAD.unpack_from(self._buffer)
        if length > FRAME_BYTES_MAX:
            raise FrameError(f"a frame of {length} bytes: at most {FRAME_BYTES_MAX} are allowed")
        if len(self._buffer) < _HEAD.size + length:
            return None
        body = bytes(self._buffer[_HEAD.size : _HEAD.size + length])
        del self._buffer[: _HEAD.size + length]
        try:
            frame = wire.unpack(body, bytes_max=FRAME_BYTES_MAX)
        except ValueError as error:
            raise FrameError(str(error)) from None
        if not isinstance(frame, dict) or not isinstance(frame.get("op"), str):
            raise FrameError("a frame is a map with an op")
        count = frame.get("fds", 0)
        if type(count) is not int or not 0 <= count <= len(self._fds):
            raise FrameError(f"{count!r} descriptors announced, {len(self._fds)} came")
        return frame, [self._fds.popleft() for _ in range(count)]

    async def _received(
        self, take: Callable[[], _T | None], drop: Callable[[_T], None]
    ) -> _T | None:
        """What ``take`` makes of what has come, as soon as it makes something; None at the end.

        ``drop`` is given what nobody is there any more to receive.
        """
        taken = take()
        if taken is not None:
            return taken
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[_T | None] = self._wait_for(loop)
        self._receiver = ready, take
        if not self._reading:
            # It stays from one frame to the next: most come when somebody waits for them.
            loop.add_reader(self.sock.fileno(), self._read, loop)
            self._reading = True
        try:
            return await ready
        except asyncio.CancelledError:
            if ready.done() and not ready.cancelled() and ready.exception() is None:
                taken = ready.result()
                if taken is not None:
                    drop(taken)
            raise
        finally:
            self._waiting.remove(ready)
            self._receiver = None

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._receiver is None or self._receiver[0].done():
            # Nobody is there to take it yet, and the loop would ask again and again.
            loop.remove_reader(self.sock.fileno())
            self._reading = False
            return
        ready, take = self._receiver
        try:
            more = self._read_some()
            taken = take() if more else None
        except BlockingIOError:
            return
        except Exception as error:  # noqa: BLE001 - is raised where it is waited for
            if not ready.done():
                ready.set_exception(error)
            return
        if not ready.done() and (taken is not None or not more):
            ready.set_result(taken)

    def _read_some(self) -> bool:
        """Take in bytes and descriptors; False at the end."""
        data, ancillary, flags, _ = self.sock.recvmsg(
            _READ_BYTES, socket.CMSG_SPACE(_FDS_MAX * 4), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, packed in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(packed[: len(packed) - len(packed) % fds.itemsize])
                self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC or len(self._fds) > _FDS_MAX:
            raise FrameError(f"more than {_FDS_MAX} descriptors at once")
        self._buffer += data
        return bool(data)

    async def _until_writable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = self._wait_for(loop)

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        loop.add_writer(self.sock.fileno(), wake)
        try:
            await ready
        finally:
            self._waiting.remove(ready)
            if not self._closed:
                loop.remove_writer(self.sock.fileno())

    def _wait_for(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Any]:
        if self._closed:
            raise ConnectionAbortedError("closed here")
        ready: asyncio.Future[Any] = loop.create_future()
        self._waiting.append(ready)
        return ready

    def close(self) -> None:
        """Close the socket and whatever descriptors nobody took; who waits gets an OSError."""
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.sock.fileno())
        loop.remove_writer(self.sock.fileno())
        with self._wire:
            self._closed = True
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
            self.sock.close()
        while self._fds:
            os.close(self._fds.popleft())
        for ready in self._waiting:
            if not ready.done():
                ready.set_exception(ConnectionAbortedError("closed here"))


def _close_all(frame: Frame) -> None:
    for fd in frame[1]:
        os.close(fd)
