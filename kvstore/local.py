"""The same-node path: workers map the store's slabs and copy straight into and out of them.

Over the Unix socket go only words and, once each, the slabs' descriptors:

================  =============================================================================
worker -> store   ``hello``; ``begin_put``, ``written``, ``finish_put``, ``abort_put``,
                  ``commit``; ``begin_get``, ``end_get``
store -> worker   ``welcome``; ``slab`` (before the first grant of its pages); ``granted``,
                  ``finished``, ``committed``; ``revoke``: stop writing, then say ``abort_put``
================  =============================================================================

A worker that was granted pages may write into them until it says otherwise or its process is gone,
whatever became of the ticket or of this connection: so only ``finish_put``, ``abort_put`` and the
process's own end (its pidfd) give them back. Who is at the other end is the kernel's word
(SO_PEERCRED), not the worker's: it must be the same user, and two processes cannot be one writer.

``written`` says how far a writer has come: the store hashes behind it rather than all of it at the
end. It may be left out, and what it says is not believed: what has another hash than
``finish_put`` names is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from deepinfer.kvstore import wire
from deepinfer.kvstore.core.events import (
    BeginGet,
    BeginPut,
    Commit,
    PutGrant,
    PutId,
    ReadId,
    WriterGone,
)
from deepinfer.kvstore.core.ids import Ticket
from deepinfer.kvstore.core.manifest import Manifest, ManifestError
from deepinfer.kvstore.core.messages import StoreStatus
from deepinfer.kvstore.frames import FrameError, FrameSocket, Rest
from deepinfer.kvstore.hashing import Follower, LongFollower
from deepinfer.kvstore.peers import Peer, Peers, Put
from deepinfer.kvstore.runtime import VERIFY_INLINE_BYTES, StoreRuntime

_log = logging.getLogger(__name__)

VERSION = 3
_HELLO_S = 5.0
READ_S = 120.0


class _Connection:
    """One connection of a peer."""

    def __init__(self, frames: FrameSocket, peer: Peer) -> None:
        self.frames = frames
        self.peer = peer
        self.slabs_sent = 0
        self.reads: dict[ReadId, asyncio.TimerHandle] = {}
        """Under way, each with what ends the connection if it takes too long."""
        self.serving = asyncio.current_task()
        self.tasks: set[asyncio.Task[None]] = set()


class LocalServer:
    """Listens on a Unix socket at ``path``, which must not exist and is removed at the end.

    ``read_s``: a reader that has not copied a payload by then is hung up on, for its pages are
    nobody else's as long as it may copy from them.
    """

    def __init__(self, runtime: StoreRuntime, path: str, *, read_s: float = READ_S) -> None:
        self._runtime = runtime
        self.path = path
        self._read_s = read_s
        self._peers = Peers(lambda writer: runtime.send(WriterGone(writer)))
        self._serving: set[asyncio.Task[None]] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(path)
            os.chmod(path, 0o600)
            self._listener.listen(64)
            self._listener.setblocking(False)
        except BaseException:
            self._listener.close()
            raise
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Hang up on everyone."""
        self._accepting.cancel()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(self._accepting, *self._serving, return_exceptions=True)
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self._peers.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(self._listener)
            task = asyncio.create_task(self._serve(sock))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, sock: socket.socket) -> None:
        frames = FrameSocket(sock)
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(_HELLO_S):
                connection = await self._greet(frames)
            if connection is not None:
                await frames.serve(partial(self._handle, connection))
        except (OSError, TimeoutError, wire.WireError) as error:
            _log.warning("a same-node connection ends: %r", error)
        finally:
            if connection is not None:
                for task in connection.tasks:
                    task.cancel()
                # A reader that lost its connection may still copy, but it finds the bytes wrong if
                # they change, or cannot say that it has done: its pages need not wait. A writer's
                # must.
                for read in sorted(connection.reads):
                    connection.reads[read].cancel()
                    self._runtime.end_get(read)
            frames.close()

    # ---- who is there ----

    async def _greet(self, frames: FrameSocket) -> _Connection | None:
        received = await frames.receive()
        if received is None:
            return None
        frame, fds = received
        for fd in fds:
            os.close(fd)
        try:
            if frame["op"] != "hello" or frame.get("version") != VERSION:
                raise wire.WireError("hello.version", frame.get("version"), f"{VERSION}")
            peer = self._peers.identify(frames.sock, frame.get("worker"), frame.get("incarnation"))
        except wire.WireError as error:
            await frames.send({"op": "refused", "detail": str(error)})
            return None
        core, pool = self._runtime.core, self._runtime.pool
        await frames.send(
            {
                "op": "welcome",
                "version": VERSION,
                "store": core.store,
                "incarnation": core.incarnation,
                "page_bytes": pool.page_bytes,
                "slab_pages": pool.slab_pages,
                "slab_bytes": pool.slab_bytes,
            }
        )
        return _Connection(frames, peer)

    # ---- what it wants ----

    def _handle(
        self, connection: _Connection, frame: dict[str, Any], fds: list[int]
    ) -> Rest | None:
        """Act on one frame; return its answer's way out if it does not get out at once.

        What has to wait for more than that goes on in a task. Raises WireError.
        """
        for fd in fds:  # none are expected
            os.close(fd)
        match frame["op"]:
            case "begin_put":
                ticket = wire.ticket_from_list(frame.get("ticket"))
                size, call = _count(frame, "payload_bytes"), _count(frame, "call")
                writer, life = connection.peer.ref, self._runtime.core.incarnation
                return self._begin_put(connection, call, BeginPut(ticket, writer, size, True, life))
            case "written":
                self._written(connection.peer, frame)
            case "finish_put":
                put = wire.put_from_list(frame.get("put"))
                raw = frame.get("manifest")
                if type(raw) is not bytes:
                    raise wire.WireError("manifest", type(raw).__name__, "bytes")
                return self._finish_put(connection, _count(frame, "call"), put, raw)
            case "abort_put":
                put = wire.put_from_list(frame.get("put"))
                if connection.peer.puts.pop(put, None) is not None:
                    self._runtime.abort_put(put)
            case "commit":
                ticket, call = wire.ticket_from_list(frame.get("ticket")), _count(frame, "call")
                return self._commit(connection, call, ticket)
            case "begin_get":
                ticket = wire.ticket_from_list(frame.get("ticket"))
                call = _count(frame, "call")
                return self._begin_get(connection, call, BeginGet(ticket))
            case "end_get":
                read = wire.read_from_list(frame.get("read"))
                timer = connection.reads.pop(read, None)
                if timer is not None:
                    timer.cancel()
                    self._runtime.end_get(read)
            case op:
                raise FrameError(f"unknown op {op!r}")
        return None

    def _answer(self, connection: _Connection, frame: dict[str, object]) -> Rest | None:
        if connection.frames.send_now(frame):
            return None
        return connection.frames.send(frame)

    def _spawn(self, connection: _Connection, work: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.create_task(self._guarded(connection, work))
        connection.tasks.add(task)
        task.add_done_callback(connection.tasks.discard)

    async def _guarded(self, connection: _Connection, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except OSError:
            # Nobody to answer: end the connection, which its reader notices.
            with contextlib.suppress(OSError):
                connection.frames.sock.shutdown(socket.SHUT_RDWR)

    def _begin_put(self, connection: _Connection, call: int, body: BeginPut) -> Rest | None:
        put = Put()
        put.grant = self._runtime.grant_put(body, partial(self._revoke, connection, put))
        if put.grant.put is None or self._runtime.mapped:
            return self._granted(connection, call, put)
        self._spawn(connection, partial(self._map_and_grant, connection, call, put))
        return None

    def _revoke(self, connection: _Connection, put: Put) -> None:
        put.revoked = True
        if put.granted:
            self._spawn(connection, partial(self._send_revoke, connection, put))

    async def _send_revoke(self, connection: _Connection, put: Put) -> None:
        assert put.grant.put is not None
        await connection.frames.send({"op": "revoke", "put": [*put.grant.put]})

    async def _map_and_grant(self, connection: _Connection, call: int, put: Put) -> None:
        put.grant = await self._runtime.map_granted(put.grant)
        rest = self._granted(connection, call, put)
        if rest is not None:
            await rest

    def _granted(self, connection: _Connection, call: int, put: Put) -> Rest | None:
        grant = put.grant
        frame: dict[str, object] = {
            "op": "granted",
            "call": call,
            "status": grant.status.value,
            "hold": None if grant.put is None else [*grant.put],
            "pages": [*grant.pages],
        }
        if grant.put is None:
            return self._answer(connection, frame)
        # From the moment the pages' numbers are on their way they are the writer's.
        connection.peer.puts[grant.put] = put
        put.granted = True
        if not put.revoked and self._slabs_known(connection) and connection.frames.send_now(frame):
            return None
        return self._send_grant(connection, put, frame)

    async def _send_grant(
        self, connection: _Connection, put: Put, frame: dict[str, object]
    ) -> None:
        try:
            await self._send_behind_slabs(connection, frame)
        except BaseException:
            # A frame that was not sent whole was not read: the writer has no pages.
            held = put.grant.put
            if held is not None and connection.peer.puts.pop(held, None) is not None:
                self._runtime.abort_put(held)
            raise
        if put.revoked:  # perhaps before its writer knew of it
            await self._send_revoke(connection, put)

    def _written(self, peer: Peer, frame: dict[str, Any]) -> None:
        put = peer.puts.get(wire.put_from_list(frame.get("put")))
        written, group = _count(frame, "bytes"), _count(frame, "group_bytes")
        if put is None:  # revoked, or given up meanwhile
            return
        if put.follower is None:
            if not group > 0:
                raise wire.WireError("group_bytes", group, "1 or more")
            put.follower = self._runtime.follow(put.grant, group)
        follower = put.follower
        if follower.groups.group_bytes != group or written > follower.groups.payload_bytes:
            raise wire.WireError("written", (written, group), f"{follower.groups}")
        if isinstance(follower, LongFollower):
            self._runtime.follow_on(follower, written)
            return
        done = follower.groups.payload_bytes - follower.left_bytes
        follower.follow(min(max(0, written - done), VERIFY_INLINE_BYTES))

    def _finish_put(
        self, connection: _Connection, call: int, put: PutId, raw: bytes
    ) -> Rest | None:
        found = connection.peer.puts.pop(put, None)
        if found is None:
            return self._finished(connection, call, StoreStatus.NOT_YOURS, "no such put")
        try:
            manifest = wire.manifest_from_bytes(raw)
        except ManifestError as error:
            self._runtime.abort_put(put)
            return self._finished(connection, call, StoreStatus.BAD_PAYLOAD, str(error))
        follower = found.follower or self._runtime.follow(found.grant, manifest.group_bytes)
        if isinstance(follower, LongFollower) or follower.left_bytes > VERIFY_INLINE_BYTES:
            verify = partial(self._verify, connection, call, found.grant, manifest, follower)
            self._spawn(connection, verify)
            return None
        good = follower.matches(manifest)
        return self._verified(connection, call, found.grant, manifest, follower, good)

    async def _verify(
        self,
        connection: _Connection,
        call: int,
        grant: PutGrant,
        manifest: Manifest,
        follower: Follower | LongFollower,
    ) -> None:
        try:
            good = await self._runtime.verify(manifest, follower)
        except BaseException:
            assert grant.put is not None
            self._runtime.abort_put(grant.put)  # its writer has said that it is through
            raise
        rest = self._verified(connection, call, grant, manifest, follower, good)
        if rest is not None:
            await rest

    def _verified(
        self,
        connection: _Connection,
        call: int,
        grant: PutGrant,
        manifest: Manifest,
        follower: Follower | LongFollower,
        good: bool,
    ) -> Rest | None:
        detail = "" if good else "length or hash differs from the manifest's"
        size = follower.groups.payload_bytes
        status = self._runtime.finish_put(grant, manifest, size, good).status
        return self._finished(connection, call, status, detail)

    def _finished(
        self, connection: _Connection, call: int, status: StoreStatus, detail: str
    ) -> Rest | None:
        return self._answer(
            connection, {"op": "finished", "call": call, "status": status.value, "detail": detail}
        )

    def _commit(self, connection: _Connection, call: int, ticket: Ticket) -> Rest | None:
        body = Commit(ticket, connection.peer.ref, self._runtime.core.incarnation)
        reply = self._runtime.control(body)
        return self._answer(
            connection,
            {
                "op": "committed",
                "call": call,
                "status": reply.status.value,
                "used_bytes": reply.used_bytes,
                "budget_bytes": reply.budget_bytes,
            },
        )

    def _begin_get(self, connection: _Connection, call: int, body: BeginGet) -> Rest | None:
        grant = self._runtime.begin_get(body)
        if grant.read is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(self._read_s, self._overdue, connection, grant.read)
            connection.reads[grant.read] = timer
        raw = None if grant.manifest is None else wire.manifest_to_bytes(grant.manifest)
        frame: dict[str, object] = {
            "op": "granted",
            "call": call,
            "status": grant.status.value,
            "hold": None if grant.read is None else [*grant.read],
            "pages": [*grant.pages],
            "manifest": raw,
        }
        if self._slabs_known(connection):
            return self._answer(connection, frame)
        return self._send_behind_slabs(connection, frame)

    def _overdue(self, connection: _Connection, read: ReadId) -> None:
        """Hang up: what the reader says of it later would not be true any more."""
        who = connection.peer.ref.worker
        _log.warning("%s has not ended read %s in %g s: hanging up", who, read, self._read_s)
        assert connection.serving is not None, "connections are served by tasks"
        connection.serving.cancel()

    async def _send_behind_slabs(self, connection: _Connection, frame: dict[str, object]) -> None:
        await self._send_slabs(connection)
        await connection.frames.send(frame)

    def _slabs_known(self, connection: _Connection) -> bool:
        return connection.slabs_sent == len(self._runtime.pool.slabs)

    async def _send_slabs(self, connection: _Connection) -> None:
        slabs = self._runtime.pool.slabs
        while not self._slabs_known(connection):
            slab = slabs[connection.slabs_sent]
            connection.slabs_sent += 1
            await connection.frames.send({"op": "slab"}, [slab.fd])


def _count(frame: dict[str, Any], name: str) -> int:
    value = frame.get(name)
    if type(value) is not int or value < 0:
        raise wire.WireError(name, value, "an integer of 0 or more")
    return value
