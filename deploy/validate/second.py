"""The checks once more, in a process whose kernels are compiled for another target.

Run as a program it performs them and writes each outcome as a line of JSON to standard output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO

from deepinfer.deploy.validate.checks import Outcome, perform
from deepinfer.deploy.validate.subject import Subject
from deepinfer.deploy.validate.suite import card_checks
from deepinfer.kernels.compiler import TARGET_VARIABLE, device_target

_WORDS_MAX = 600
_GRACE_S = 10.0
_ANNOUNCEMENT = "checks: "
"""Begins the line that says how many outcomes will follow."""


class SecondRun:
    """A process that performs the same checks for ``target``; ``seen`` is told each outcome."""

    def __init__(
        self, subject: Subject, target: str, *, quick: bool, seen: Callable[[Outcome], None]
    ) -> None:
        self._subject = subject
        self._target = target
        self._quick = quick
        self._seen = seen
        self._count = 0
        self._announced: int | None = None
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._errors: IO[str] | None = None

    def start(self) -> None:
        """Start it; it must not have been started before."""
        assert self._process is None
        path = self._subject.path
        arguments = {
            "shape": self._subject.shape,
            "path": None if path is None else str(path),
            "quick": self._quick,
        }
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 (finish does)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(arguments)],
            env={**os.environ, TARGET_VARIABLE: self._target},
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def finish(self) -> None:
        """Wait for all outcomes; one more if the process ended before its last check.

        It says itself how many there are: what only this card's own code can do is left out.
        """
        if self._process is None:
            self.start()
        assert self._process is not None
        assert self._reader is not None
        assert self._errors is not None
        try:
            self._reader.join()
            code = self._process.wait(timeout=_GRACE_S)
        finally:
            self._process.kill()  # at an interrupt it is in the middle of its work
            self._process.communicate()
        self._errors.seek(0)
        words = self._errors.read().strip()[-_WORDS_MAX:]
        self._errors.close()
        if code == 0 and self._count == self._announced:
            return
        of = "an unknown number of" if self._announced is None else self._announced
        missing = f"ended with code {code} after {self._count} of {of} checks: {words}"
        self._seen(
            Outcome(
                target=self._target,
                kernel="process",
                variant="",
                name=f"checks for {self._target}",
                seconds=0.0,
                results=0,
                row_cosine=1.0,
                cosine=1.0,
                error=0.0,
                share=0.0,
                misses=(missing,),
            )
        )

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_ANNOUNCEMENT):
                self._announced = int(line.removeprefix(_ANNOUNCEMENT))
            elif line.startswith("{"):
                self._count += 1
                self._seen(Outcome.from_json(json.loads(line)))


def main(arguments: str) -> None:
    """Perform every check for the current target and tell each outcome."""
    from deepinfer.deploy.validate.run import compile_for, usable_card

    wanted = json.loads(arguments)
    path = None if wanted["path"] is None else Path(wanted["path"])
    card, _ = usable_card()
    checks = card_checks(Subject(shape=wanted["shape"], path=path), card, quick=wanted["quick"])
    sys.stdout.write(f"{_ANNOUNCEMENT}{len(checks)}\n")
    compile_for(checks)
    for check in checks:
        outcome = perform(check, device_target())
        sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
