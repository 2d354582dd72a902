"""Numbers out of the files that Linux keeps of each process in /proc."""

from __future__ import annotations

import re


def number(text: str, name: str) -> int:
    """What the line ``name:`` of such a file says, in its own unit; ``VmRSS`` and its like: KiB."""
    match = re.search(rf"^{name}:\s*(\d+)", text, re.M)
    assert match is not None, f"/proc names no {name}"
    return int(match[1])
