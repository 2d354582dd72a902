"""The fenced blocks of the documents, and which of them are commands to run.

A block that cannot be run where tests run (it needs a network, a GPU, another machine) has the line
``<!-- not run: REASON -->`` before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHELL = frozenset({"console", "sh", "bash"})
PYTHON = "python"
SILENT = frozenset({"text", "yaml", "json", "toml", "proto", "promql"})
"""Languages of blocks that are not commands."""

_FENCE = re.compile(
    r"^(?P<fence>`{3,})(?P<language>[^\n`]*)\n(?P<body>.*?)^(?P=fence)\s*$", re.M | re.S
)
_MARK = re.compile(r"<!-- not run: (?P<reason>[^\n]+?) -->\s*\Z")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    document: str
    """Path below the repository."""
    line: int
    language: str
    body: str
    not_run: str
    """Why it is not run; empty if it is."""

    @property
    def name(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def runs(self) -> bool:
        return not self.not_run and (self.language in SHELL or self.language == PYTHON)

    @property
    def script(self) -> str:
        """What to give the shell or Python: of a console block the lines behind a prompt."""
        if self.language != "console":
            return self.body
        lines, typed = [], False
        for line in self.body.splitlines():
            if line.startswith("$ ") or (typed and line.startswith("> ")):
                lines.append(line[2:])
                typed = True
            else:
                typed = False
        return "\n".join(lines) + "\n"


def documents() -> list[Path]:
    """README.md, then the documents by name."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks_of(document: Path) -> list[Block]:
    """Every fenced block, in order."""
    text = document.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        before = text[: match.start()]
        mark = _MARK.search(before)
        found.append(
            Block(
                document=str(document.relative_to(ROOT)),
                line=before.count("\n") + 1,
                language=match["language"].strip(),
                body=match["body"],
                not_run=mark["reason"] if mark else "",
            )
        )
    return found
