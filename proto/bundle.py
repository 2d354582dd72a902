"""Several messages of a worker's link in one: a step's tokens of all sequences cost one write.

Each write and each read wakes an event loop; with a message a sequence and step that would be most
of what a link costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

from deepinfer.proto import link_pb2

BUNDLE_BYTES_MAX: Final = 1 << 20
"""Of a bundle, unless its first message alone is larger: far below what either side receives."""

Said = TypeVar("Said", link_pb2.FromWorker, link_pb2.ToWorker)


def bundles(messages: Iterable[Said]) -> Iterator[Said]:
    """Put ``messages``, in order, into as few as fit; the first of each carries the others."""
    first: Said | None = None
    size = 0
    for message in messages:
        added = message.ByteSize()
        if first is not None and size + added > BUNDLE_BYTES_MAX:
            yield first
            first = None
        if first is None:
            first, size = message, added
        else:
            first.more.append(message)
            size += added
    if first is not None:
        yield first


def unbundled(said: Said) -> Iterator[Said]:
    """The messages of a bundle, in order.

    Raises:
        ValueError: one of those carried carries others.
    """
    yield said
    for message in said.more:
        if message.more:
            raise ValueError("more.more: must be empty")
        yield message
