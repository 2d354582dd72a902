"""An orderly stop: nothing new comes in, what runs may finish, and only then everything ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from deepinfer.deploy import interrupts
from deepinfer.deploy.access import CONTROLLER

ASK_S = 1.0
"""How long the controller may take to answer before it is asked anew: it may be restarting."""
POLL_S = 0.05
SAY_S = 5.0
"""How often the wait is spoken of, at most."""


def finish_requests(
    actors: Mapping[str, Any], grace_s: float, say: Callable[[str], None]
) -> int | None:
    """Have gateways refuse new requests, and wait until those they have accepted have ended.

    Args:
        actors: Ray's handle of each actor, by name.
        grace_s: how long they may take.
        say: told what is waited for.

    Returns:
        How many choices of requests had not ended in time; None if nobody could say.
    """
    gateways = [name for name in actors if name.startswith("gateway-")]
    deadline = time.monotonic() + grace_s
    left: int | None = None
    said_s: float | None = None
    while True:
        levels = _ask(actors[CONTROLLER], gateways)
        if levels is not None:
            left = sum(requests for _, _, _, requests in levels)
            if len(levels) == len(gateways) and all(drained for _, _, drained, _ in levels):
                return 0
        now_s = time.monotonic()
        if now_s >= deadline:
            return left
        if left and (said_s is None or now_s - said_s >= SAY_S):
            said_s = now_s
            more = "request is" if left == 1 else "requests are"
            say(f"{left} {more} running: up to {deadline - now_s:.0f} s more for them")
        interrupts.check()
        time.sleep(POLL_S)


def _ask(controller: Any, gateways: list[str]) -> list[tuple[str, bool, bool, int]] | None:
    """Tell the controller once more, and hear how far they are; None if it does not answer."""
    import ray
    from ray.exceptions import RayError

    try:
        answer: list[tuple[str, bool, bool, int]] = ray.get(
            controller.drain.remote(gateways), timeout=ASK_S
        )
    except RayError:  # GetTimeoutError is one
        return None
    return answer
