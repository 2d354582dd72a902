"""One trial that counts, as a line of the campaign's file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from deepinfer.deploy.chaos.history import Faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Others:
    """Time between tokens of the streams that were on nobody's victim, seconds a token."""

    before_s: float | None = None
    """Mean before the kill."""
    after_s: float | None = None
    """Mean in the two seconds after it."""
    longest_s: float | None = None
    """Longest in these."""

    @property
    def ratio(self) -> float | None:
        if self.before_s is None or self.after_s is None or not self.before_s:
            return None
        return self.after_s / self.before_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One kill or pause that counts: the process had parked. Times are in seconds."""

    number: int
    counted: bool = True
    """False: nobody parked. Such a trial is a row only if something was wrong."""
    job: int = 0
    """Which of the campaign's clusters."""
    target: str
    point: str
    path: str
    victim: str
    kills: int = 1
    """Processes' deaths: two where one had to die for another to come to the point."""
    pause_s: float = 0.0
    """SIGSTOP for so long instead of SIGKILL; 0: SIGKILL."""
    parked_s: float
    """From choosing the point to a process standing there."""
    loads: int
    """Loads that were sent until then."""
    streams: int
    on_victim: int
    """Streams that ran, or whose payload lay, on the victim."""
    roomy: bool = False
    """The load left a worker and blocks to spare."""
    tokens: int
    faults: Faults
    errors: tuple[str, ...] = ()
    """Of streams that the SDK gave up."""
    left_over: tuple[str, ...] = ()
    """What was held when all had ended: a leak."""
    recovered_s: tuple[float, ...] = ()
    """For each stream on the victim that went on: from the kill to its next token."""
    admitted_s: float | None = None
    """From the kill to the first token of a request sent right after it."""
    detected_s: float | None = None
    """From the signal until the controller's status says so; None: it went on before that."""
    paused_s: float
    """The longest time that any stream went without a token, from the kill on."""
    settled_s: float
    """From the kill until nothing was held by anyone."""
    restarted_s: float | None = None
    """From the kill (or SIGCONT) until the victim served again; None: it is not to come back."""
    quarantined_pages: int = 0
    """Most pages that stores kept from others while the victim stood still."""
    others: Others = field(default_factory=Others)
    swaps: int = 0
    resumes: int = 0
    recomputes: int = 0
    reconnects: int = 0
    timeline: tuple[tuple[tuple[int, str], ...], ...] = ()
    """For each stream what came when, in milliseconds from the kill; see ``History.marks``."""

    @property
    def right(self) -> bool:
        """Nothing lost, doubled, reordered, changed, unfinished or leaked."""
        return self.faults == Faults() and not self.errors and not self.left_over

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Trial:
        """The reverse of ``to_json``, once parsed."""
        known = {f.name for f in fields(cls)}
        values = {name: _frozen(value) for name, value in found.items() if name in known}
        values["faults"] = Faults(**found["faults"])
        values["others"] = Others(**found["others"])
        return cls(**values)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
