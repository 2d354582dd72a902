"""One run, written down: everything a seed drew, and what befell which message.

A case can be changed where a seed cannot (``shrink.py`` leaves things out of it), and a file of it
still runs when the drawing of seeds has changed.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from deepinfer.deploy.sim.faults import Mishap
from deepinfer.deploy.sim.network import Tape
from deepinfer.deploy.sim.plan import ClientPlan, Plan, StorePlan, Strike, WeatherPlan, WorkerPlan
from deepinfer.deploy.sim.world import World

T = TypeVar("T")
_PARTS: dict[str, type] = {
    "workers": WorkerPlan,
    "stores": StorePlan,
    "clients": ClientPlan,
    "strikes": Strike,
}
_NAMES = re.compile(r"\(.*\)|\[.*\]|'[^']*'|\b[a-z]{0,2}\d[\w.-]*|-?\d+")
_KIND_CHARS = 90


class CaseError(ValueError):
    """A file that is no case: names what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Case:
    """A plan, and of the mishaps that its weather has those that happen (None: all)."""

    plan: Plan
    mishaps: frozenset[Mishap] | None = None

    def world(self, tape: Tape | None = None) -> World:
        """A world in which this is about to happen."""
        return World(self.plan, tape=tape, mishaps=self.mishaps)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        mishaps = None if self.mishaps is None else sorted(self.mishaps)
        text = json.dumps({"plan": asdict(self.plan), "mishaps": mishaps}, indent=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> Case:
    """Read a case. Raises CaseError, naming the file and what is wrong with it."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        plan = {name: _tupled(value) for name, value in raw["plan"].items()}
        for name, part in _PARTS.items():
            plan[name] = tuple(_made(part, each) for each in raw["plan"][name])
        plan["weather"] = _made(WeatherPlan, raw["plan"]["weather"])
        mishaps = raw["mishaps"]
        found = None if mishaps is None else frozenset(Mishap(*each) for each in mishaps)
        return Case(_made(Plan, plan), found)
    except OSError as error:
        raise CaseError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CaseError(f"{path} is no case of this version's simulator: {error}") from error


def _made(kind: type[T], values: dict[str, Any]) -> T:
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if unknown := set(values) - known:
        raise ValueError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    return kind(**{name: _tupled(value) for name, value in values.items()})


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def kind_of(error: Exception) -> str:
    """What kind of failure it is: its words without names and numbers."""
    words = _NAMES.sub("_", str(error).split("\n", 1)[0])
    return f"{type(error).__name__}: {words}"[:_KIND_CHARS]
