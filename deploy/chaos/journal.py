"""The file in which a campaign keeps its trials, a line each: from there it goes on."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from deepinfer.deploy.chaos.rows import Trial
from deepinfer.deploy.errors import ConfigError


@dataclass(slots=True)
class Journal:
    """The trials so far. The first line has what they have in common."""

    path: Path
    header: dict[str, Any]
    trials: list[Trial] = field(default_factory=list)
    missed: int = 0
    """Trials in which nobody parked, or that a broken cluster made void: run again."""

    @classmethod
    def open(cls, path: Path, header: dict[str, Any]) -> Self:
        """Go on with a file, or begin one.

        Raises:
            ConfigError: it is of another campaign, or no journal; says where they differ.
        """
        journal = cls(path, header)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            journal._write(header)
            return journal
        whole, _, torn = path.read_text("utf-8").rpartition("\n")
        if torn:  # by a crash in the middle of a line
            path.write_text(whole + "\n", encoding="utf-8")
        try:
            first, *lines = [json.loads(line) for line in whole.splitlines()] or [None]
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} is no journal of a campaign: {error}") from error
        if not isinstance(first, dict):
            raise ConfigError(f"{path} is no journal of a campaign: it has no header")
        differing = [
            f"{name} was {first.get(name)!r} and is {value!r}"
            for name, value in header.items()
            if first.get(name) != value
        ]
        if differing:
            raise ConfigError(
                f"{path} is of another campaign ({'; '.join(differing)}): name another --output, "
                "or remove it"
            )
        for line in lines:
            if "missed" in line:
                journal.missed += 1
            else:
                journal.trials.append(Trial.from_dict(line))
        return journal

    def add(self, trial: Trial) -> None:
        """Keep a trial; it is on the disk when this returns."""
        self.trials.append(trial)
        self._write(json.loads(trial.to_json()))

    def miss(self, number: int, why: str) -> None:
        """Keep that a trial has to be run again."""
        self.missed += 1
        self._write({"missed": number, "why": why})

    @property
    def counted(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.counted]

    def left(self, count: int) -> list[int]:
        """The numbers below ``count`` that have no trial that counts yet."""
        done = {trial.number for trial in self.counted}
        return [number for number in range(count) if number not in done]

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())
