"""The counters as Prometheus text."""

from __future__ import annotations

import math
from collections.abc import Mapping


def render(counters: Mapping[str, float]) -> str:
    """Write each counter under its own name; ``*_total`` and ``*_seconds`` only ever grow.

    A bound that is not set (``max_swapped_requests``) is infinite.
    """
    lines = []
    counters = {"max_swapped_requests": math.inf} | dict(counters)
    for name in sorted(counters):
        kind = "counter" if name.endswith(("_total", "_seconds")) else "gauge"
        lines += [f"# TYPE {name} {kind}", f"{name} {_number(counters[name])}"]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return "+Inf" if math.isinf(value) else f"{value:.17g}"
