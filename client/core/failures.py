"""What the statuses of gRPC mean for whoever waits for an answer."""

from __future__ import annotations

from deepinfer.client.core.events import Failure

_FINAL = {
    "ABORTED": Failure.REPLACED,
    "FAILED_PRECONDITION": Failure.FAILED,
    "INVALID_ARGUMENT": Failure.INVALID,
    "NOT_FOUND": Failure.NOT_FOUND,
    "OUT_OF_RANGE": Failure.INVALID,
    "PERMISSION_DENIED": Failure.UNAUTHENTICATED,
    "RESOURCE_EXHAUSTED": Failure.EXHAUSTED,
    "UNAUTHENTICATED": Failure.UNAUTHENTICATED,
    "UNIMPLEMENTED": Failure.FAILED,
}
"""Statuses that another attempt would meet again. Every other one is a reason to come back."""


def failure_of(code: str) -> Failure | None:
    """What a status means for a caller; None if another attempt may do better."""
    return _FINAL.get(code)
