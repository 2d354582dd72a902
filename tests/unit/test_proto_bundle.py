"""Bundles of the link: the same messages in the same order, in as few as fit."""

from __future__ import annotations

import pytest

from deepinfer.proto import ids_pb2, link_pb2
from deepinfer.proto.bundle import BUNDLE_BYTES_MAX, bundles, unbundled


def ack(index: int) -> link_pb2.ToWorker:
    seq = ids_pb2.Seq(request="r", choice=0)
    return link_pb2.ToWorker(ack=link_pb2.Ack(seq=seq, next_index=index))


def large(index: int, tokens: int) -> link_pb2.ToWorker:
    attached = link_pb2.Attached(tokens=[1 << 30] * tokens)
    attached.seq.choice = index
    return link_pb2.ToWorker(attached=attached)


def taken_apart(packed: list[link_pb2.ToWorker]) -> list[bytes]:
    again = [link_pb2.ToWorker.FromString(one.SerializeToString()) for one in packed]
    bare = []
    for bundle in again:
        for message in unbundled(bundle):
            alone = link_pb2.ToWorker()
            alone.CopyFrom(message)
            alone.ClearField("more")
            bare.append(alone.SerializeToString())
    return bare


def test_all_that_waits_goes_into_one_message() -> None:
    messages = [ack(i) for i in range(9)]
    expected = [message.SerializeToString() for message in messages]
    packed = list(bundles(messages))
    assert len(packed) == 1
    assert len(packed[0].more) == 8
    assert taken_apart(packed) == expected


def test_a_bundle_stays_below_its_bound_unless_one_message_is_larger() -> None:
    messages = [ack(0), large(1, 300_000), ack(2), large(3, 100_000), large(4, 60_000), ack(5)]
    sizes = [message.ByteSize() for message in messages]
    expected = [message.SerializeToString() for message in messages]
    assert sizes[1] > BUNDLE_BYTES_MAX > sizes[3] + sizes[4]
    packed = list(bundles(messages))
    assert [len(bundle.more) for bundle in packed] == [0, 0, 3]
    assert taken_apart(packed) == expected


def test_nothing_is_no_bundle() -> None:
    assert list(bundles(list[link_pb2.ToWorker]())) == []


def test_a_bundle_in_a_bundle_is_refused() -> None:
    inner = ack(1)
    inner.more.append(ack(2))
    outer = ack(0)
    outer.more.append(inner)
    with pytest.raises(ValueError, match=r"more\.more: must be empty"):
        list(unbundled(outer))
