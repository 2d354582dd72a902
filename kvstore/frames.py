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
from collections import deque
from collections.abc import Sequence
from typing import Any

from deepinfer.kvstore import wire
from deepinfer.kvstore.core.manifest import MANIFEST_BYTES_MAX

FRAME_BYTES_MAX = MANIFEST_BYTES_MAX + (1 << 20)
"""A manifest and a page list."""
_READ_BYTES = 1 << 16
_FDS_MAX = 16
_HEAD = struct.Struct("<I")


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
        self._waiting: list[asyncio.Future[None]] = []
        self._reading = False
        self._readable: asyncio.Future[None] | None = None
        self._closed = False

    async def send(self, frame: dict[str, object], fds: Sequence[int] = ()) -> None:
        """Send one frame. Raises OSError when the peer is gone."""
        body = wire.pack({**frame, "fds": len(fds)} if fds else frame)
        data = memoryview(_HEAD.pack(len(body)) + body)
        async with self._sending:
            try:
                while data:
                    data, fds = data[await self._send_some(data, fds) :], ()
            except BaseException:
                if len(data) < _HEAD.size + len(body):
                    # Half a frame is out: nothing can follow it.
                    with contextlib.suppress(OSError):
                        self.sock.shutdown(socket.SHUT_RDWR)
                raise

    def send_hint(self, frame: dict[str, object]) -> None:
        """Send one short frame if that can be done at once; nobody must need it."""
        body = wire.pack(frame)
        if self._closed or self._sending.locked():
            return
        with contextlib.suppress(OSError):  # no room now; or whoever reads hears of it
            if self.sock.send(_HEAD.pack(len(body)) + body) < _HEAD.size + len(body):
                self.sock.shutdown(socket.SHUT_RDWR)  # half a frame: nothing can follow it

    async def _send_some(self, data: memoryview, fds: Sequence[int]) -> int:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while True:
            try:
                return self.sock.sendmsg([data], rights)
            except BlockingIOError:
                await self._until_writable()

    async def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next frame and its descriptors, which are the caller's now; None at the end.

        Raises FrameError for what is not a frame, OSError when the connection breaks.
        """
        while True:
            frame = self._take()
            if frame is not None:
                return frame
            await self._until_readable()
            try:
                data, ancillary, flags, _ = self.sock.recvmsg(
                    _READ_BYTES, socket.CMSG_SPACE(_FDS_MAX * 4), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                continue
            for level, kind, packed in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds = array.array("i")
                    fds.frombytes(packed[: len(packed) - len(packed) % fds.itemsize])
                    self._fds.extend(fds)
            if flags & socket.MSG_CTRUNC or len(self._fds) > _FDS_MAX:
                raise FrameError(f"more than {_FDS_MAX} descriptors at once")
            if not data:
                return None
            self._buffer += data

    def _take(self) -> tuple[dict[str, Any], list[int]] | None:
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

    async def _until_readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready = self._wait_for(loop)
        self._readable = ready
        if not self._reading:
            # It stays from one frame to the next: most come when somebody waits for them.
            loop.add_reader(self.sock.fileno(), self._wake_reader, loop)
            self._reading = True
        try:
            await ready
        finally:
            self._waiting.remove(ready)
            self._readable = None

    def _wake_reader(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._readable is None or self._readable.done():
            # Nobody is there to take it yet, and the loop would ask again and again.
            loop.remove_reader(self.sock.fileno())
            self._reading = False
        else:
            self._readable.set_result(None)

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

    def _wait_for(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        if self._closed:
            raise ConnectionAbortedError("closed here")
        ready: asyncio.Future[None] = loop.create_future()
        self._waiting.append(ready)
        return ready

    def close(self) -> None:
        """Close the socket and whatever descriptors nobody took; who waits gets an OSError."""
        if self._closed:
            return
        self._closed = True
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.sock.fileno())
        loop.remove_writer(self.sock.fileno())
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        while self._fds:
            os.close(self._fds.popleft())
        for ready in self._waiting:
            if not ready.done():
                ready.set_exception(ConnectionAbortedError("closed here"))
