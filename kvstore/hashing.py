"""xxh3-64 over a payload that passes by in pieces, as ``core.manifest`` defines its hashes."""

from __future__ import annotations

import bisect
import itertools
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

import xxhash

from deepinfer.kvstore import wire
from deepinfer.kvstore.core.manifest import Manifest, to_dict


class Groups(NamedTuple):
    """How a payload is cut for hashing: as much of its manifest as a hasher has to know."""

    payload_bytes: int
    group_bytes: int


class GroupHasher:
    """Hashes a payload group by group; pieces may end anywhere."""

    __slots__ = ("_group", "_group_bytes", "_left", "_payload_bytes", "hashed_bytes", "hashes")

    def __init__(self, manifest: Manifest | Groups) -> None:
        self.hashes: list[int] = []
        self.hashed_bytes = 0
        self._payload_bytes = manifest.payload_bytes
        self._group_bytes = manifest.group_bytes
        self._left = min(self._group_bytes, self._payload_bytes)
        self._group = xxhash.xxh3_64()

    def update(self, piece: memoryview) -> None:
        """Take the next bytes; the caller keeps to ``payload_bytes`` in total."""
        while len(piece):
            part = piece[: self._left]
            assert len(part), "more bytes than the manifest's payload"
            self._group.update(part)
            self.hashed_bytes += len(part)
            self._left -= len(part)
            piece = piece[len(part) :]
            if self._left == 0:
                self.hashes.append(self._group.intdigest())
                self._group.reset()
                self._left = min(self._group_bytes, self._payload_bytes - self.hashed_bytes)

    def fill_in(self, manifest: Manifest) -> Manifest:
        """The manifest with what was hashed; every byte must have passed."""
        assert self.hashed_bytes == self._payload_bytes, (self.hashed_bytes, self._payload_bytes)
        return with_hashes(manifest, self.hashes)

    def agrees(self, manifest: Manifest) -> bool:
        """Whether every whole group so far is what the manifest says."""
        return self.hashes == list(manifest.group_hashes[: len(self.hashes)])

    def matches(self, manifest: Manifest) -> bool:
        """Whether every byte has passed and is what the manifest says."""
        return (
            self.hashed_bytes == manifest.payload_bytes
            and tuple(self.hashes) == manifest.group_hashes
            and payload_hash(manifest) == manifest.payload_hash
        )


class Follower:
    """Hashes a payload behind its writer, in pages that the writer still fills.

    Every byte is hashed once, after the writer has said that it is written. If it was not, or
    changes later, the hash is another than the manifest's: it is the writer's own loss.
    """

    __slots__ = ("_hasher", "_run", "_runs", "groups")

    def __init__(self, runs: list[memoryview], groups: Groups) -> None:
        self.groups = groups
        self._hasher = GroupHasher(groups)
        self._runs = runs
        self._run = 0

    @property
    def left_bytes(self) -> int:
        """Bytes still to be hashed."""
        return self.groups.payload_bytes - self._hasher.hashed_bytes

    def follow(self, bytes_max: int) -> None:
        """Hash the next bytes, at most as many as are left."""
        while bytes_max:
            piece = self._runs[0][self._run : self._run + bytes_max]
            self._hasher.update(piece)
            bytes_max -= len(piece)
            self._run += len(piece)
            if self._run == len(self._runs[0]):
                self._runs.pop(0)
                self._run = 0

    def matches(self, manifest: Manifest) -> bool:
        """Hash what is left; whether all of it is what the manifest says."""
        if self.groups != (manifest.payload_bytes, manifest.group_bytes):
            return False
        self.follow(self.left_bytes)
        return self._hasher.matches(manifest)


class LongFollower:
    """As ``Follower``, of a long payload, in as many threads as call ``some``."""

    __slots__ = ("_ends", "_hashes", "_next", "_runs", "_taking", "_written", "groups", "jobs")

    def __init__(self, runs: list[memoryview], groups: Groups) -> None:
        self.groups = groups
        self.jobs: list[Future[None]] = []
        """Threads that hash behind the writer: whoever submits them."""
        self._runs = runs
        self._ends = list(itertools.accumulate(map(len, runs)))
        self._hashes = [0] * -(-groups.payload_bytes // groups.group_bytes)
        self._taking = threading.Lock()
        self._next = 0
        self._written = 0

    @property
    def left_bytes(self) -> int:
        """Bytes that no thread has taken."""
        return max(0, self.groups.payload_bytes - self._next * self.groups.group_bytes)

    def written(self, count: int) -> bool:
        """Hear that so many bytes are there; whether there is a group to be taken."""
        with self._taking:
            self._written = max(self._written, count)
            return self._has_next()

    def some(self) -> None:
        """Hash groups that are written until none is left to take."""
        while True:
            with self._taking:
                if not self._has_next():
                    return
                group = self._next
                self._next += 1
            state = xxhash.xxh3_64()
            for piece in self._pieces(group):
                state.update(piece)
            self._hashes[group] = state.intdigest()

    def matches(self, manifest: Manifest) -> bool:
        """Whether all of it, every thread being through, is what the manifest says."""
        return (
            self.groups == (manifest.payload_bytes, manifest.group_bytes)
            and self._next == len(self._hashes)
            and tuple(self._hashes) == manifest.group_hashes
            and payload_hash(manifest) == manifest.payload_hash
        )

    def _has_next(self) -> bool:
        end = min((self._next + 1) * self.groups.group_bytes, self.groups.payload_bytes)
        return self._next < len(self._hashes) and end <= self._written

    def _pieces(self, group: int) -> Iterator[memoryview]:
        size = self.groups.group_bytes
        begin, end = group * size, min((group + 1) * size, self.groups.payload_bytes)
        run = bisect.bisect_right(self._ends, begin)
        while begin < end:
            first = self._ends[run] - len(self._runs[run])
            piece = self._runs[run][begin - first : end - first]
            yield piece
            begin += len(piece)
            run += 1


def with_hashes(manifest: Manifest, hashes: Sequence[int]) -> Manifest:
    """The manifest with its groups' hashes, and its own."""
    groups = tuple(hashes)
    return replace(
        manifest, group_hashes=groups, payload_hash=payload_hash(manifest, group_hashes=groups)
    )


def payload_hash(manifest: Manifest, *, group_hashes: tuple[int, ...] | None = None) -> int:
    """``payload_hash`` as it should be, given the rest of the manifest.

    ``group_hashes`` takes the place of the manifest's own: to check a manifest twice over costs
    more than to hash it.
    """
    rest = to_dict(manifest)
    del rest["payload_hash"]
    if group_hashes is not None:
        rest["group_hashes"] = struct.pack(f"<{len(group_hashes)}Q", *group_hashes)
    return xxhash.xxh3_64_intdigest(wire.pack(rest))
