"""What can happen to a payload between a worker and a store: for ``corruptor``.

Pages are damaged as they lie in the store's memory, grants as the store gives them, messages as
gRPC carries them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from deepinfer.kvstore import hashing, wire
from deepinfer.kvstore.core.events import GetGrant
from deepinfer.kvstore.core.manifest import Manifest, ManifestError
from deepinfer.proto import kvstore_pb2 as pb

Page = memoryview
Damage = Callable[[list[Page], Random], None]
"""Damages the pages of a payload, in their order."""
Misgive = Callable[[GetGrant, Random], GetGrant]
"""Gives a reader something else than it asked for."""
Message = Callable[[int, bytes, Random], bytes]
"""Damages the nth message of a read, or of a put, over gRPC."""


# ---- damage to pages -----------------------------------------------------------------------


def flip_bit(pages: list[Page], chance: Random) -> None:
    """One bit."""
    page = chance.choice(pages)
    page[chance.randrange(len(page))] ^= 1 << chance.randrange(8)


def flip_bits(pages: list[Page], chance: Random) -> None:
    """An even number of bits, all at the same place of their bytes."""
    bit = 1 << chance.randrange(8)
    page = chance.choice(pages)
    for at in chance.sample(range(len(page)), 2 * chance.randint(1, 8)):
        page[at] ^= bit


def cut(pages: list[Page], chance: Random) -> None:
    """The end is missing: it is zeros (random bytes end in zeros once in 2^64)."""
    page = pages[-1]
    size = chance.randrange(8, len(page))
    page[len(page) - size :] = bytes(size)


def exchange_blocks(pages: list[Page], chance: Random) -> None:
    """Two blocks are at each other's place."""
    a, b = chance.sample(pages, 2)
    first, second = bytes(a), bytes(b)
    a[:], b[:] = second, first


def shift(pages: list[Page], chance: Random) -> None:
    """All bytes of a block are one place further on."""
    page = chance.choice(pages)
    page[:] = bytes([page[-1]]) + bytes(page[:-1])


def replaced_by(others: Callable[[], list[bytes]]) -> Damage:
    """Another payload's bytes, some of its blocks or all."""

    def damage(pages: list[Page], chance: Random) -> None:
        found = others()
        for at in chance.sample(range(len(pages)), chance.randint(1, len(pages))):
            pages[at][:] = found[at]

    return damage


# ---- what a reader is given ----------------------------------------------------------------


def other_pages(grant_of: Callable[[], GetGrant]) -> Misgive:
    """The right manifest with another payload's pages."""
    return lambda grant, _: grant._replace(pages=grant_of().pages)


def other_payload(grant_of: Callable[[], GetGrant]) -> Misgive:
    """Another payload as a whole, all right in itself."""

    def misgive(grant: GetGrant, _: Random) -> GetGrant:
        found = grant_of()
        return grant._replace(pages=found.pages, manifest=found.manifest)

    return misgive


def fewer_pages(grant: GetGrant, chance: Random) -> GetGrant:
    """Pages are missing at the end."""
    return grant._replace(pages=grant.pages[: chance.randrange(len(grant.pages))])


def flip_manifest(grant: GetGrant, chance: Random) -> GetGrant:
    """A bit of the manifest, but so that it is still one."""
    assert grant.manifest is not None
    while True:
        raw = bytearray(wire.manifest_to_bytes(grant.manifest))
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        try:
            found = wire.manifest_from_bytes(bytes(raw))
        except ManifestError:
            continue
        return grant._replace(manifest=found)


def other_field(name: str, value: object) -> Misgive:
    """A manifest that says something else, its own hash made right again."""

    def misgive(grant: GetGrant, _: Random) -> GetGrant:
        assert grant.manifest is not None
        changed: Manifest = replace(grant.manifest, **{name: value})  # type: ignore[arg-type]
        right = hashing.with_hashes(changed, changed.group_hashes)
        return grant._replace(manifest=right)

    return misgive


# ---- damage on the wire --------------------------------------------------------------------


def flip_chunk(_: int, message: bytes, chance: Random) -> bytes:
    """A bit of a message with bytes of the payload, its tag and length among them."""
    return _flipped(message, chance) if _is_chunk(message) else message


def cut_chunk(_: int, message: bytes, chance: Random) -> bytes:
    """A message with bytes of the payload ends too soon."""
    return message[: chance.randrange(len(message))] if _is_chunk(message) else message


def lose_chunk(nth: int, message: bytes, _: Random) -> bytes:
    """The first message with bytes of the payload brings none."""
    return wire.chunk_to_bytes([]) if nth == 1 else message


def flip_header(nth: int, message: bytes, chance: Random) -> bytes:
    """A bit of the manifest in the header of a read."""
    if nth:
        return message
    response = pb.GetResponse.FromString(message)
    response.header.manifest = _flipped(response.header.manifest, chance)
    return response.SerializeToString()


def flip_put_header(nth: int, message: bytes, chance: Random) -> bytes:
    """A bit of the manifest in the header of a put."""
    if nth:
        return message
    request = pb.PutRequest.FromString(message)
    request.header.manifest = _flipped(request.header.manifest, chance)
    return request.SerializeToString()


def swap_chunks() -> Message:
    """The first two messages with bytes of the payload come in each other's place."""
    held: list[bytes] = []

    def damage(nth: int, message: bytes, _: Random) -> bytes:
        if nth == 1:
            held.append(_payload_of(message))
            return wire.chunk_to_bytes([])
        if nth == 2:
            return wire.chunk_to_bytes([memoryview(_payload_of(message) + held.pop())])
        return message

    return damage


def double_chunk(nth: int, message: bytes, _: Random) -> bytes:
    """The bytes of a message come twice."""
    if nth != 1:
        return message
    payload = _payload_of(message)
    return wire.chunk_to_bytes([memoryview(payload + payload[-8:])])


def _is_chunk(message: bytes) -> bool:
    return wire.chunk_from_bytes(message) is not None


def _payload_of(message: bytes) -> bytes:
    chunk = wire.chunk_from_bytes(message)
    return b"" if chunk is None else bytes(chunk)


def _flipped(data: bytes, chance: Random) -> bytes:
    changed = bytearray(data)
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)
