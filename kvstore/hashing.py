"""xxh3-64 over a payload that passes by in pieces, as ``core.manifest`` defines its hashes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import xxhash

from deepinfer.kvstore import wire
from deepinfer.kvstore.core.manifest import Manifest, to_dict


class GroupHasher:
    """Hashes a payload group by group; pieces may end anywhere."""

    __slots__ = ("_group", "_group_bytes", "_left", "_payload_bytes", "hashed_bytes", "hashes")

    def __init__(self, manifest: Manifest) -> None:
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
        hashed = replace(manifest, group_hashes=tuple(self.hashes))
        return replace(hashed, payload_hash=payload_hash(hashed))

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


def payload_hash(manifest: Manifest) -> int:
    """``payload_hash`` as it should be, given the rest of the manifest."""
    rest = to_dict(manifest)
    del rest["payload_hash"]
    return xxhash.xxh3_64_intdigest(wire.pack(rest))


def matches(manifest: Manifest, pieces: Iterable[memoryview]) -> bool:
    """Whether the pieces, in order, are exactly the payload that the manifest describes."""
    hasher = GroupHasher(manifest)
    for piece in pieces:
        if hasher.hashed_bytes + len(piece) > manifest.payload_bytes:
            return False
        hasher.update(piece)
        if not hasher.agrees(manifest):
            return False
    return hasher.matches(manifest)
