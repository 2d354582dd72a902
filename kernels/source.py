"""The text of a CUDA source file with the project's own includes written into it.

CuPy and NVRTC hash or look up nothing that a string includes, so a kernel is compiled, cached and
shipped as one text.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import Final

CSRC: Final = Path(__file__).parent / "csrc"
"""Where the ``.cu`` and ``.cuh`` files are."""

_INCLUDE: Final = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*$', re.MULTILINE)
_ONCE: Final = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*$", re.MULTILINE)


@functools.cache
def inlined(name: str) -> str:
    """The text of ``csrc/name``, every ``#include "file"`` replaced by that file, once each.

    Line numbers and file names survive in ``#line`` directives. Raises ValueError naming the
    file that is missing, and who includes it.
    """
    return _expand(name, seen={name}, parent=None)


@functools.cache
def digest(name: str) -> str:
    """32 hexadecimal digits that change whenever ``inlined(name)`` does."""
    return hashlib.sha256(inlined(name).encode()).hexdigest()[:32]


def _expand(name: str, *, seen: set[str], parent: str | None) -> str:
    path = CSRC / name
    if not path.is_file():
        by = "" if parent is None else f", included by {parent}"
        raise ValueError(f"kernel source {name!r} is not in {CSRC}{by}")
    text = _ONCE.sub("", path.read_text())
    parts = [f'#line 1 "{name}"\n']
    at = 0
    for match in _INCLUDE.finditer(text):
        parts.append(text[at : match.start()])
        included = match[1]
        if included not in seen:
            seen.add(included)
            parts.append(_expand(included, seen=seen, parent=name))
            line = text.count("\n", 0, match.end()) + 2
            parts.append(f'\n#line {line} "{name}"')
        at = match.end()
    parts.append(text[at:])
    return "".join(parts)
