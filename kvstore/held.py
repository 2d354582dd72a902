"""A payload taken from memory where it has lain since it was fetched: verified once more first."""

from __future__ import annotations

import threading
from concurrent.futures import Executor
from contextlib import ExitStack

from deepinfer.kvstore.core.manifest import Manifest
from deepinfer.kvstore.core.messages import StoreStatus
from deepinfer.kvstore.hashing import GroupHasher
from deepinfer.kvstore.transfers import Outcome, Stopped, Take, give, in_thread


async def take_held(
    executor: Executor, manifest: Manifest, payload: memoryview, take: Take
) -> Outcome:
    """Have ``payload`` (``payload_bytes`` long) taken group by group, each once its hash is right.

    When it returns nothing reads the payload any more. BAD_PAYLOAD: it is not what the manifest
    says, and what was taken of it is not to be used.
    """
    stop = threading.Event()
    good = await in_thread(executor, stop, lambda: _take(manifest, payload, take, stop))
    if good:
        return Outcome(StoreStatus.OK, manifest, "")
    return Outcome(StoreStatus.BAD_PAYLOAD, manifest, "its bytes have changed since they came")


def _take(manifest: Manifest, payload: memoryview, take: Take, stop: threading.Event) -> bool:
    hasher = GroupHasher(manifest)
    with ExitStack() as waits:
        for begin in range(0, manifest.payload_bytes, manifest.group_bytes):
            if stop.is_set():
                raise Stopped
            group = payload[begin : begin + manifest.group_bytes]
            hasher.update(group)
            if not hasher.agrees(manifest):
                return False
            first_block = begin // manifest.block_bytes
            give(take, first_block, [group], manifest.block_bytes, stop, waits)
    return hasher.matches(manifest)
