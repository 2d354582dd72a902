"""Who is at the other end of a same-node connection: by the kernel's word, while it lives."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable

from deepinfer.kvstore import wire
from deepinfer.kvstore.core.events import PutGrant, PutId
from deepinfer.kvstore.core.ids import Incarnation, WorkerId, WorkerRef
from deepinfer.kvstore.hashing import Follower, LongFollower

_SO_PEERPIDFD = 77  # Linux 6.5; Python's socket module does not name it yet
_UCRED = struct.Struct("3i")


class Put:
    """One put under way."""

    grant: PutGrant

    def __init__(self) -> None:
        self.follower: Follower | LongFollower | None = None
        """From the first ``written`` on."""
        self.granted = False
        """Its writer has been told of its pages, or is being told."""
        self.revoked = False


class Peer:
    """One writer process, known by its pidfd until it ends."""

    def __init__(self, ref: WorkerRef, pid: int, pidfd: int) -> None:
        self.ref = ref
        self.pid = pid
        self.pidfd = pidfd
        self.puts: dict[PutId, Put] = {}


class Peers:
    """Every writer process that has connected and lives; ``on_gone`` hears of each one's end."""

    def __init__(self, on_gone: Callable[[WorkerRef], object]) -> None:
        self._on_gone = on_gone
        self._peers: dict[WorkerRef, Peer] = {}

    def identify(self, sock: socket.socket, worker: object, incarnation: object) -> Peer:
        """The process that connected, which says that it is a worker's life.

        Raises WireError when it is not the same user's, or another process is that worker.
        """
        if type(worker) is not str or not 0 < len(worker) <= wire.ID_MAX:
            raise wire.WireError("hello.worker", worker, f"1 to {wire.ID_MAX} characters")
        if type(incarnation) is not int:
            raise wire.WireError("hello.incarnation", incarnation, "an integer")
        ref = WorkerRef(WorkerId(worker), Incarnation(incarnation))
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, uid, _ = _UCRED.unpack(credentials)
        if uid != os.geteuid():
            raise wire.WireError("peer's user", uid, f"{os.geteuid()}")
        if pid == 0:
            raise wire.WireError("peer's pid", pid, "visible in the store's pid namespace")
        known = self._peers.get(ref)
        if known is not None:
            if known.pid != pid:
                raise wire.WireError("hello.worker", ref, f"another than pid {known.pid}'s")
            return known
        peer = Peer(ref, pid, _open_pidfd(sock, pid))
        self._peers[ref] = peer
        asyncio.get_running_loop().add_reader(peer.pidfd, self._gone, peer)
        return peer

    def close(self) -> None:
        """Forget everyone."""
        for peer in list(self._peers.values()):
            self._forget(peer)

    def _gone(self, peer: Peer) -> None:
        self._forget(peer)
        self._on_gone(peer.ref)

    def _forget(self, peer: Peer) -> None:
        asyncio.get_running_loop().remove_reader(peer.pidfd)
        os.close(peer.pidfd)
        del self._peers[peer.ref]


def _open_pidfd(sock: socket.socket, pid: int) -> int:
    """A pidfd of the process that connected; where the kernel can, one that no pid reuse fools."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, struct.calcsize("i"))
        fd: int = struct.unpack("i", raw)[0]
        return fd
    except OSError:
        return os.pidfd_open(pid)
