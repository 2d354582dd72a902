"""How every bench writes its result: the figures, and all that is needed to measure them again."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("deepinfer-cluster", "torch", "ray", "grpcio", "protobuf", "numpy", "transformers")


def provenance(command: str) -> dict[str, Any]:
    """The command, versions, device and date (UTC) of a measurement made now on this machine."""
    return {
        "command": without_folders(command),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {"python": platform.python_version()} | _versions(),
    }


def without_folders(command: str) -> str:
    """A command whose absolute paths are their last parts: where files lie is this machine's."""
    return re.sub(r"(?<![^\s=])~?/(?:[^\s/]+/)*([^\s/]+)/?(?=\s|$)", r"\1", command)


def write_result(path: Path, command: str, figures: dict[str, Any]) -> None:
    """Write ``figures`` with their provenance as JSON; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".json.part")
    scratch.write_text(json.dumps(provenance(command) | figures, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)


def percentile(values: list[float], q: float) -> float:
    """The q-quantile (0..1) by linear interpolation between order statistics."""
    if not values:
        raise ValueError("percentile of no values")
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def _cpu_name() -> str:
    if sys.platform == "linux":
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        if match:
            return match[1].strip()
    return platform.processor() or platform.machine()
