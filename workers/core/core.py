"""The worker's protocol."""

from __future__ import annotations

from deepinfer.kvstore.core.ids import NodeId, WorkerRef
from deepinfer.workers.core.config import WorkerConfig
from deepinfer.workers.core.events import WorkerEffect, WorkerEvent


class WorkerCore:
    """One life of one worker."""

    def __init__(self, ref: WorkerRef, node: NodeId, config: WorkerConfig) -> None:
        self.ref = ref
        self.node = node
        self.config = config

    def handle(self, event: WorkerEvent, now_ms: int) -> list[WorkerEffect]:
        """Return what the shell must do about one event."""
        raise NotImplementedError(type(event).__name__)

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
