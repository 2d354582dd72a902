"""The worker's end of the same-node path: one connection to one life of one store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any

import numpy as np

from deepinfer.kvstore import wire
from deepinfer.kvstore.copier import SHARE_BYTES, THREADS, CopyIn, CopyOut, join, submit
from deepinfer.kvstore.copying import byte_views
from deepinfer.kvstore.core.events import PutId
from deepinfer.kvstore.core.ids import Incarnation, Ticket, WorkerRef
from deepinfer.kvstore.core.manifest import Manifest, ManifestError
from deepinfer.kvstore.core.messages import StoreReply, StoreStatus
from deepinfer.kvstore.frames import FrameSocket, Rest
from deepinfer.kvstore.host_pool import PageMap, Slab
from deepinfer.kvstore.local import VERSION
from deepinfer.kvstore.transfers import Into, OnMap, Outcome, Source, Stopped, in_thread

_log = logging.getLogger(__name__)

INLINE_BYTES = 1 << 20
"""Up to here what lies in host memory is copied and hashed in the event loop, in about 0.1 ms: to
hand it to a thread and back takes the loop as long."""


class LocalLink:
    """Made by ``connect``. When the connection ends, ``alive`` turns false, whatever waits fails
    with ConnectionError, and the slabs are unmapped as soon as no copy uses them."""

    def __init__(
        self, frames: FrameSocket, executor: Executor, on_map: OnMap | None, welcome: dict[str, Any]
    ) -> None:
        self._frames = frames
        self._executor = executor
        self._on_map = on_map
        self.store: str = welcome["store"]
        self.incarnation = Incarnation(welcome["incarnation"])
        self._map = PageMap(welcome["page_bytes"], welcome["slab_pages"])
        self._slab_bytes: int = welcome["slab_bytes"]
        self._slab_fds: list[int] = []
        """Of a slab that has come and is about to be mapped."""
        self._unmap: list[Callable[[], None] | None] = []
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._called = 0
        self._stops: dict[PutId, threading.Event] = {}
        self._copies = 0
        self._unmapped = asyncio.Event()
        self.alive = True
        self.unacknowledged: list[PutId] = []
        """Puts whose writer has stopped and whose store could not be told."""
        self._giving_back: set[asyncio.Task[None]] = set()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(
        cls,
        path: str,
        writer: WorkerRef,
        executor: Executor,
        on_map: OnMap | None = None,
        *,
        timeout_s: float = 5.0,
    ) -> LocalLink:
        """Raises OSError (TimeoutError is one) when there is no such store here, or it refuses."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        frames = FrameSocket(sock)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_connect(sock, path)
                await frames.send(
                    {
                        "op": "hello",
                        "version": VERSION,
                        "worker": writer.worker,
                        "incarnation": writer.incarnation,
                    }
                )
                received = await frames.receive()
            welcome = {} if received is None else received[0]
            if welcome.get("op") != "welcome":
                raise ConnectionRefusedError(str(welcome.get("detail", "no welcome")))
            return cls(frames, executor, on_map, welcome)
        except BaseException:
            frames.close()
            raise

    async def close(self) -> None:
        """Hang up and unmap; copies under way are stopped and waited for."""
        self._reading.cancel()
        await asyncio.gather(self._reading, *self._giving_back, return_exceptions=True)
        await self._unmapped.wait()

    # ---- payloads ----

    async def put(self, ticket: Ticket, draft: Manifest, source: Source) -> Outcome:
        """Write a payload into the store; it is verified there, and still invisible."""
        if draft.block_bytes != self._map.page_bytes:
            detail = f"block_bytes {draft.block_bytes}: the store's are {self._map.page_bytes}"
            return Outcome(StoreStatus.BAD_PAYLOAD, None, detail)
        granted = await self._call(
            {
                "op": "begin_put",
                "ticket": wire.ticket_to_list(ticket),
                "payload_bytes": draft.payload_bytes,
            }
        )
        status = wire.status_from_proto(granted["status"])
        if status is not StoreStatus.OK:
            return Outcome(status, None, "")
        put = wire.put_from_list(granted["hold"])
        stop = self._stops[put]
        self._copies += 1
        with self._calling() as (call, answer):
            finish: dict[str, object] = {"op": "finish_put", "put": [*put], "call": call}

            def written(count: int) -> None:
                said = {"op": "written", "put": [*put], "bytes": count}
                self._frames.send_now({**said, "group_bytes": draft.group_bytes})

            def write() -> tuple[Manifest, bool]:
                copying = CopyIn(self._map, granted["pages"], draft, source, stop, written)
                manifest = copying.run(self._executor)
                finish["manifest"] = wire.manifest_to_bytes(manifest)
                # From here: before the loop has heard that the copy is done, the store has.
                return manifest, self._frames.send_now(finish)

            try:
                manifest, sent = await in_thread(self._executor, stop, write)
            except BaseException as error:
                self._copy_done(put)
                await self.acknowledge(put)
                if isinstance(error, Stopped):
                    return Outcome(StoreStatus.SEALED, None, "revoked by the store")
                raise
            self._copy_done(put)
            if not sent:
                await self._send(finish, unless_sent=put)
            finished = await answer
        status = wire.status_from_proto(finished["status"])
        return Outcome(status, manifest, str(finished["detail"]))

    async def commit(self, ticket: Ticket) -> StoreReply:
        """Make a payload visible. Raises ConnectionError when nothing is known of the answer."""
        answer = await self._call({"op": "commit", "ticket": wire.ticket_to_list(ticket)})
        status = wire.status_from_proto(answer["status"])
        return StoreReply(ticket, status, answer["used_bytes"], answer["budget_bytes"])

    async def acknowledge(self, put: PutId) -> None:
        """Tell the store that nothing here will write into the put's pages any more."""
        try:
            await self._frames.send({"op": "abort_put", "put": [*put]})
        except OSError:
            self.unacknowledged.append(put)

    async def get(self, ticket: Ticket, into: Into) -> Outcome:
        """Copy a payload out of the store and check the copy, or have it taken from there.

        Raises ConnectionError when the link is gone; also when it went while the payload was taken:
        the pages may have been another's then.
        """
        granted = await self._call({"op": "begin_get", "ticket": wire.ticket_to_list(ticket)})
        status = wire.status_from_proto(granted["status"])
        if status is not StoreStatus.OK:
            return Outcome(status, None, "")
        read = wire.read_from_list(granted["hold"])
        stop = threading.Event()
        self._copies += 1
        held = False
        try:
            manifest = wire.manifest_from_bytes(granted["manifest"])
            buffers = into(manifest)
            if buffers is None:
                return Outcome(StoreStatus.BAD_PAYLOAD, manifest, "refused by its reader")
            if not callable(buffers):
                buffers = byte_views("into", buffers, manifest.payload_bytes)
            copying = CopyOut(self._map, granted["pages"], manifest, buffers, stop)
            if manifest.payload_bytes <= INLINE_BYTES and not callable(buffers):
                copying.some()
            elif manifest.payload_bytes < SHARE_BYTES:
                await in_thread(self._executor, stop, copying.some)
            else:
                # All from here: the loop is about to leave its processor to one of them.
                others = submit(self._executor, THREADS - 1, copying.some)
                await in_thread(self._executor, stop, lambda: join(others, copying.some))
        except ManifestError as error:
            return Outcome(StoreStatus.BAD_PAYLOAD, None, str(error))
        finally:
            self._copy_done(None)
            with contextlib.suppress(OSError):
                await self._frames.send({"op": "end_get", "read": [*read]})
                held = True  # a store that had given the pages away would have hung up first
        if callable(buffers) and not held:
            raise ConnectionAbortedError("the store hung up")
        if copying.good:
            return Outcome(StoreStatus.OK, manifest, "")
        return Outcome(StoreStatus.BAD_PAYLOAD, manifest, "the copied bytes have another hash")

    def _adopt(self, fd: int) -> None:
        slab = Slab.adopt(fd, self._slab_bytes)
        undo = None
        try:
            if self._on_map is not None:
                address = np.frombuffer(slab.view, np.uint8).ctypes.data
                undo = self._on_map(address, slab.length)
        except BaseException:
            slab.close()
            raise
        self._map.slabs.append(slab)
        self._unmap.append(undo)

    def _unmap_all(self) -> None:
        for undo in self._unmap:
            if undo is not None:
                undo()
        self._unmap.clear()
        self._map.close()

    # ---- the connection ----

    async def _call(self, frame: dict[str, object]) -> dict[str, Any]:
        """Send a frame and wait for its answer. Raises ConnectionError when the link is gone."""
        with self._calling() as (call, answer):
            await self._send({**frame, "call": call})
            try:
                return await answer
            except asyncio.CancelledError:
                if answer.done() and not answer.cancelled() and answer.exception() is None:
                    await self._give_back(answer.result())
                raise

    @contextlib.contextmanager
    def _calling(self) -> Iterator[tuple[int, asyncio.Future[dict[str, Any]]]]:
        """A call's number and its answer, for as long as somebody waits for it.

        Raises ConnectionError when the link is gone.
        """
        self._called += 1
        call = self._called
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[call] = answer
        try:
            yield call, answer
        finally:
            del self._calls[call]
            if not answer.cancel() and not answer.cancelled():
                answer.exception()  # has been seen, if only here

    async def _send(self, frame: dict[str, object], *, unless_sent: PutId | None = None) -> None:
        """Send a frame. Raises ConnectionError when the link is gone.

        ``unless_sent``: the put to acknowledge later if the frame did not go out.
        """
        try:
            if not self.alive:
                raise ConnectionAbortedError("the store hung up")
            await self._frames.send(frame)
        except BaseException as error:
            if unless_sent is not None:
                self.unacknowledged.append(unless_sent)
            if isinstance(error, OSError):
                raise ConnectionAbortedError(str(error)) from error
            raise

    async def _read(self) -> None:
        try:
            await self._frames.serve(self._take_in)
        except Exception:  # noqa: BLE001 - also what on_map raises; who waits hears of it below
            _log.exception("the link to store %s ends", self.store)
        finally:
            self.alive = False
            for answer in self._calls.values():
                if not answer.done():
                    answer.set_exception(ConnectionAbortedError("the store hung up"))
            for stop in self._stops.values():
                stop.set()
            self._frames.close()
            for fd in self._slab_fds:
                os.close(fd)
            self._unmap_if_idle()

    def _take_in(self, frame: dict[str, Any], fds: list[int]) -> Rest | None:
        match frame["op"]:
            case "slab" if len(fds) == 1:
                self._slab_fds.append(fds[0])
                return self._adopt_next()
            case "granted" | "finished" | "committed":
                self._answered(frame)
            case "revoke":
                put = wire.put_from_list(frame.get("put"))
                if put in self._stops:
                    self._stops[put].set()
        for fd in fds:
            os.close(fd)
        return None

    async def _adopt_next(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, self._adopt, self._slab_fds.pop())

    def _answered(self, frame: dict[str, Any]) -> None:
        answer = self._calls.get(frame.get("call", 0))
        if answer is None or answer.done():
            # In a task: a store that does not read before it is read from would wait for ever.
            task = asyncio.create_task(self._give_back(frame))
            self._giving_back.add(task)
            task.add_done_callback(self._giving_back.discard)
            return
        if frame.get("hold") is not None and "manifest" not in frame:
            # Now, not when the caller wakes up: a revoke may be the very next frame.
            self._stops[wire.put_from_list(frame["hold"])] = threading.Event()
        answer.set_result(frame)

    async def _give_back(self, frame: dict[str, Any]) -> None:
        """What was granted to a caller who has given up: pages or a read that nobody will use."""
        hold = frame.get("hold")
        if hold is None:
            return
        if "manifest" in frame:
            with contextlib.suppress(OSError):
                await self._frames.send({"op": "end_get", "read": hold})
        else:
            put = wire.put_from_list(hold)
            self._stops.pop(put, None)
            await self.acknowledge(put)

    def _copy_done(self, put: PutId | None) -> None:
        if put is not None:
            self._stops.pop(put, None)
        self._copies -= 1
        if not self.alive:
            self._unmap_if_idle()

    def _unmap_if_idle(self) -> None:
        if self._copies == 0 and not self._unmapped.is_set():
            self._unmap_all()
            self._unmapped.set()
