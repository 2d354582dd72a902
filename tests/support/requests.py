"""Requests for tests that do not care what is in them."""

from __future__ import annotations

from deepinfer.kvstore.core.ids import RequestId
from deepinfer.kvstore.core.requests import RequestRecord, SamplingParams


def record(
    name: str = "r1",
    *,
    prompt: tuple[int, ...] = (1, 2, 3),
    deadline_ms: int | None = None,
    stop_token_ids: tuple[int, ...] = (),
    sampling: SamplingParams | None = None,
) -> RequestRecord:
    """A request of three prompt tokens and 128 new ones at most."""
    return RequestRecord(
        request=RequestId(name),
        prompt_ids=prompt,
        sampling=sampling or SamplingParams(),
        arrival_ms=0,
        seed=7,
        deadline_ms=deadline_ms,
        stop_token_ids=stop_token_ids,
    )
