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
from collections.abc import Callable, Sequence
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

    async def _send_some(self, data: memoryview, fds: Sequence[int]) -> int:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        loop = asyncio.get_running_loop()
        while True:
            try:
                return self.sock.sendmsg([data], rights)
            except BlockingIOError:
                await self._ready(loop.add_writer, loop.remove_writer)

    async def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next frame and its descriptors, which are the caller's now; None at the end.

        Raises FrameError for what is not a frame, OSError when the connection breaks.
        """
        loop = asyncio.get_running_loop()
        while True:
            frame = self._take()
            if frame is not None:
                return frame
            try:
                data, ancillary, flags, _ = self.sock.recvmsg(
                    _READ_BYTES, socket.CMSG_SPACE(_FDS_MAX * 4), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                await self._ready(loop.add_reader, loop.remove_reader)
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

    async def _ready(self, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
        if self._closed:
            raise ConnectionAbortedError("closed here")
        fd = self.sock.fileno()
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        add(fd, wake)
        self._waiting.append(ready)
        try:
            await ready
        finally:
            self._waiting.remove(ready)
            if not self._closed:
                remove(fd)

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
