"""Every manifest survives the wire; nothing else gets through it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.kvstore import wire
from deepinfer.kvstore.core.ids import Incarnation as Life
from deepinfer.kvstore.core.ids import RequestId, Run, Seq, Ticket, WorkerId, WorkerRef
from deepinfer.kvstore.core.manifest import (
    GROUPS_MAX,
    MANIFEST_BYTES_MAX,
    TEXT_MAX,
    TOKENS_MAX,
    Manifest,
    ManifestError,
    from_dict,
    to_dict,
)
from deepinfer.kvstore.core.states import State
from deepinfer.proto import kvstore_pb2
from kvstore_kit import draft, ticket

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    blocks, group = draw(st.integers(1, 12)), draw(st.integers(1, 15))
    block_bytes = draw(st.integers(1, 1 << 28))
    groups = -(-blocks // group)
    tokens = st.lists(u32, min_size=blocks, max_size=blocks * 4)
    return Manifest(
        dtype=draw(st.sampled_from(["fp16", "int8", "fp8", "fp8_e5m2", "k16v8"])),
        layout=draw(st.text(min_size=1, max_size=20)),
        block_bytes=block_bytes,
        blocks=blocks,
        payload_bytes=blocks * block_bytes,
        token_ids=tuple(draw(tokens)),
        state=draw(st.sampled_from([State.PREFILL, State.DECODE])),
        precision=draw(st.text(min_size=1, max_size=20)),
        model=draw(st.text(min_size=1, max_size=20)),
        run=Run(draw(u64), draw(u64)),
        group_blocks=group,
        group_hashes=tuple(draw(st.lists(u64, min_size=groups, max_size=groups))),
        payload_hash=draw(u64),
    )


@given(manifests())
def test_token_ids_are_packed_once_for_a_manifest_and_its_successors(manifest: Manifest) -> None:
    later = replace(manifest, payload_hash=0)
    assert later.token_ids is manifest.token_ids
    assert to_dict(later)["token_ids"] == to_dict(manifest)["token_ids"]
    others = (*manifest.token_ids[:-1], manifest.token_ids[-1] ^ 1)
    other = from_dict(to_dict(replace(manifest, token_ids=others)))
    assert other.token_ids == others != manifest.token_ids


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_token_ids_that_no_wire_has_room_for_are_refused(bad: int) -> None:
    good = draft(ticket(1), 2, block_bytes=4)
    with pytest.raises(ManifestError, match=r"manifest.token_ids = .*: must be within 0 to 2"):
        replace(good, token_ids=(*good.token_ids[1:], bad))


@given(manifests())
def test_a_manifest_comes_back_as_it_was(manifest: Manifest) -> None:
    assert wire.manifest_from_bytes(wire.manifest_to_bytes(manifest)) == manifest


def test_the_largest_manifest_fits_the_cap() -> None:
    largest = replace(
        draft(ticket(1), 1),
        block_bytes=1,
        blocks=GROUPS_MAX,
        payload_bytes=GROUPS_MAX,
        token_ids=(2**32 - 1,) * TOKENS_MAX,
        layout="\U0001f600" * TEXT_MAX,
        precision="\U0001f600" * TEXT_MAX,
        model="\U0001f600" * TEXT_MAX,
        group_blocks=1,
        group_hashes=(2**64 - 1,) * GROUPS_MAX,
    )
    raw = wire.manifest_to_bytes(largest)
    assert len(raw) <= MANIFEST_BYTES_MAX
    assert wire.manifest_from_bytes(raw) == largest


Change = Callable[[dict[str, Any]], object]
GOOD = to_dict(draft(ticket(1), 3))
WRONG: list[tuple[Change, str]] = [
    (lambda d: d.pop("model"), "manifest.model = 'absent': must be present"),
    (lambda d: d.update(color=1), "manifest.(all) = 'color': must be a map with only the fields"),
    (lambda d: d.update(version=2), "manifest.version = 2: must be 1"),
    (lambda d: d.update(version=True), "manifest.version = True: must be an integer"),
    (lambda d: d.update(dtype="auto"), "manifest.dtype = 'auto': must be fp16, int8"),
    (lambda d: d.update(encoding="zip"), "manifest.encoding = 'zip': must be one of"),
    (lambda d: d.update(dtype="fp8"), "manifest.encoding = 'offset-binary': must be native for"),
    (lambda d: d.update(order="layer-major"), "manifest.order = 'layer-major': must be one of"),
    (lambda d: d.update(layout=""), "manifest.layout = '': must be 1 to 512 characters"),
    (lambda d: d.update(model="m" * 513), "must be 1 to 512 characters"),
    (lambda d: d.update(model=b"m"), "manifest.model = b'm': must be text"),
    (lambda d: d.update(block_bytes=0), "manifest.block_bytes = 0: must be between 1 and"),
    (lambda d: d.update(block_bytes=1 << 29), "must be between 1 and 268435456"),
    (lambda d: d.update(blocks=0), "manifest.blocks = 0: must be between 1 and"),
    (lambda d: d.update(payload_bytes=1), "must be blocks * block_bytes = 147456"),
    (lambda d: d.update(token_ids=b"12345"), "manifest.token_ids = '5 bytes': must be a whole"),
    (lambda d: d.update(token_ids=b""), "manifest.token_ids = '0 bytes': must be a whole"),
    (lambda d: d.update(token_ids=bytes(8)), "must be 3 (one a block) to 131072 tokens"),
    (lambda d: d.update(token_ids=bytes(4 * TOKENS_MAX + 4)), "1 to 131072 of them"),
    (lambda d: d.update(state="swapped"), "manifest.state = 'swapped': must be prefill or decode"),
    (lambda d: d.update(state=[]), "manifest.state = []: must be prefill or decode"),
    (lambda d: d.update(run=bytes(8)), "manifest.run = (0,): must be two 64-bit integers"),
    (lambda d: d.update(group_blocks=1), "manifest.group_hashes = '1 hashes': must be 3"),
    (lambda d: d.update(payload_hash=-1), "manifest.payload_hash = -1: must be between 0 and"),
    (lambda d: d.update(payload_hash=2**64), "must be between 0 and 18446744073709551615"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[m for _, m in WRONG])
def test_what_is_wrong_is_named(change: Change, message: str) -> None:
    raw = dict(GOOD)
    change(raw)
    with pytest.raises(ManifestError) as caught:
        from_dict(raw)
    assert message in str(caught.value)


@given(st.binary(max_size=300))
@settings(max_examples=300)
def test_any_bytes_are_a_manifest_or_a_manifest_error(raw: bytes) -> None:
    with pytest.raises(ManifestError):
        wire.manifest_from_bytes(raw)


@given(manifests(), st.data())
def test_a_flipped_bit_is_a_manifest_error_or_another_manifest(
    manifest: Manifest, data: st.DataObject
) -> None:
    raw = bytearray(wire.manifest_to_bytes(manifest))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(ManifestError):
        assert wire.manifest_from_bytes(bytes(raw)) != manifest


@pytest.mark.parametrize(
    "raw", [b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"]
)
def test_bombs_are_refused(raw: bytes) -> None:
    with pytest.raises(ManifestError):
        wire.manifest_from_bytes(raw)
    with pytest.raises(ManifestError, match="1048577 bytes"):
        wire.manifest_from_bytes(bytes(MANIFEST_BYTES_MAX + 1))


@given(st.text(min_size=1, max_size=20), u32, u64, u64, u64, u64)
def test_names_come_back_over_both_wires(
    request: str, choice: int, e1: int, c1: int, e2: int, c2: int
) -> None:
    t = Ticket(Seq(RequestId(request), choice), Run(e1, c1), Run(e2, c2))
    assert wire.ticket_from_proto(wire.ticket_to_proto(t)) == t
    assert wire.ticket_from_list(wire.unpack(wire.pack(wire.ticket_to_list(t)), bytes_max=999)) == t
    writer = WorkerRef(WorkerId(request), Life(e1))
    assert wire.writer_from_proto(wire.writer_to_proto(writer)) == writer


@given(st.lists(st.binary(max_size=400), max_size=4))
def test_a_chunk_is_protobufs_own(pieces: list[bytes]) -> None:
    """The hand-written chunk message is, byte for byte, what protobuf reads and writes."""
    whole = b"".join(pieces)
    raw = wire.chunk_to_bytes([memoryview(piece) for piece in pieces])
    assert raw == kvstore_pb2.PutRequest(chunk=whole).SerializeToString()
    assert raw == kvstore_pb2.GetResponse(chunk=whole).SerializeToString()
    chunk = wire.put_request_from_bytes(raw)
    assert isinstance(chunk, memoryview)
    assert bytes(chunk) == whole
