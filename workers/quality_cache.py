"""What the quality gate found out, in one small file a model: a second start measures nothing."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from deepinfer.workers.core.quality import Candidate, Figures
from deepinfer.workers.model.key_scales import KeyScales

log = logging.getLogger(__name__)

VERSION: Final = 1
BYTES_MAX: Final = 1 << 24
"""Of a file; the exponents of the largest model take a hundredth."""


@dataclass(slots=True)
class Findings:
    """Figures by candidate, and the exponents that were measured with, if any were."""

    figures: dict[Candidate, Figures] = field(default_factory=dict)
    scales: KeyScales | None = None


class QualityCache:
    """The findings of one model, text, block size and device.

    A folder that cannot be written costs time at the next start, and nothing else.
    """

    def __init__(
        self, folder: Path, model: str, tokens: Sequence[int], block_size: int, device: str
    ) -> None:
        text = hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]
        self._about = {
            "version": VERSION,
            "model": model,
            "text": text,
            "block_size": block_size,
            "device": device,
        }
        name = hashlib.sha256(json.dumps(self._about).encode()).hexdigest()[:8]
        self._path = folder / f"{model}-{name}.json"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep every other process of this machine out; waits for the one that is in.

        A process that dies is out.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            log.warning("KV quality is measured again at every start: %s", error)
            yield
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def read(self) -> Findings:
        """What is known; nothing, if the file is not there or is not what was written."""
        try:
            with self._path.open("rb") as file:
                raw = file.read(BYTES_MAX + 1)
            return _findings(json.loads(raw), self._about)
        except FileNotFoundError:
            return Findings()
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.warning("%s is not used: %s", self._path, error)
            return Findings()

    def write(self, found: Findings) -> None:
        """Replace the file."""
        document = self._about | {
            "figures": [asdict(one) | asdict(f) for one, f in found.figures.items()],
            "key_exponents": None if found.scales is None else found.scales.to_lists(),
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self._path.parent, suffix=".part", delete=False
            ) as file:
                json.dump(document, file)
            os.replace(file.name, self._path)
        except OSError as error:
            log.warning("KV quality is measured again at the next start: %s", error)


def _findings(document: Any, about: dict[str, Any]) -> Findings:
    """Raises ValueError, KeyError or TypeError for a document that this module did not write."""
    if any(document[name] != value for name, value in about.items()):
        raise ValueError("it is about something else")
    found = Findings()
    for row in document["figures"]:
        one = Candidate(str(row["dtype"]), bool(row["key_scales"]))
        figures = Figures(
            kl_nats=float(row["kl_nats"]),
            agreement=float(row["agreement"]),
            positions=int(row["positions"]),
            saturations=int(row["saturations"]),
        )
        found.figures[one] = figures
    if document["key_exponents"] is not None:
        found.scales = KeyScales.from_lists(document["key_exponents"])
    elif any(one.key_scales for one in found.figures):
        raise ValueError("the key exponents are missing")
    return found
