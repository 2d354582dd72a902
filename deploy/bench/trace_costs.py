"""What simulated steps take: costs that were measured on a card, or that are given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deepinfer.deploy.config import ConfigError
from deepinfer.kvstore.core.precision import LEVELS_MAX, PrecisionError, StepCost

BYTES_MAX: Final = 1 << 20

_ROWS: Final = (1, 4, 16, 64, 256, 512, 2048)
_H200_US: Final = (2100.0, 2155.0, 2360.0, 3730.0, 4375.0, 6510.0, 19_425.0)
_US_PER_CONTEXT_TOKEN: Final = 0.0083
_ASSUMED: Final = (0.6, 0.6, 0.62, 0.75, 0.9, 0.95, 1.0)
"""An FP8 step's time as a share of an FP16 step's of as many rows: what reads weights gains, what
computes does not."""


@dataclass(frozen=True, slots=True)
class Costs:
    """A cost for each level, and where they come from."""

    source: str
    levels: tuple[StepCost, ...]

    def facts(self) -> dict[str, Any]:
        """For a result's JSON."""
        return {"source": self.source, "costs": [facts_of(cost) for cost in self.levels]}


def facts_of(cost: StepCost) -> dict[str, Any]:
    """A cost as ``read_costs`` reads it."""
    return {
        "rows": list(cost.rows),
        "us": list(cost.us),
        "us_per_context_token": cost.us_per_context_token,
    }


ASSUMED: Final = Costs(
    "FP16: steps of Qwen2.5-3B measured on an H200 (docs/results/kernels_model.json, loop_step_ms "
    "less the context's part); FP8: assumed, 0.6 of that up to 16 rows, rising to 1.0 at 2,048",
    (
        StepCost(_ROWS, _H200_US, _US_PER_CONTEXT_TOKEN),
        StepCost(
            _ROWS,
            tuple(us * share for us, share in zip(_H200_US, _ASSUMED, strict=True)),
            _US_PER_CONTEXT_TOKEN,
        ),
    ),
)
"""Where none are given."""


def read_costs(path: Path) -> Costs:
    """Costs from a JSON file: ``{"source": ..., "costs": [{"rows": [...], "us": [...],
    "us_per_context_token": ...}, ...]}``, one entry a level, FP16 first.

    A result of ``bench kernels --part nested-model`` has them under ``nested``.

    Raises:
        ConfigError: the file cannot be read, or holds something else; names the field.
    """
    try:
        with path.open("rb") as file:
            read = file.read(BYTES_MAX + 1)
        if len(read) > BYTES_MAX:
            raise ConfigError(f"costs {path}: must be {BYTES_MAX} bytes at most")
        found = json.loads(read)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"costs {path}: {error}") from error
    holder = found.get("nested", found) if isinstance(found, dict) else None
    entries = holder.get("costs") if isinstance(holder, dict) else None
    if not isinstance(entries, list) or not 2 <= len(entries) <= LEVELS_MAX:
        raise ConfigError(f"{path}: costs must be a list of 2 to {LEVELS_MAX}, one for each level")
    levels = tuple(_cost(f"{path}: costs[{i}]", entry) for i, entry in enumerate(entries))
    return Costs(_source(path, found), levels)


def _source(path: Path, found: dict[str, Any]) -> str:
    said = found.get("source")
    if isinstance(said, str) and said:
        return said
    gpu = found.get("gpu")
    card = gpu.get("name") if isinstance(gpu, dict) else None
    return f"{path.name}" + (f", measured on {card}" if isinstance(card, str) else "")


def _cost(place: str, entry: Any) -> StepCost:
    if not isinstance(entry, dict):
        raise ConfigError(f"{place} = {entry!r}: must be an object with rows and us")
    values: dict[str, Sequence[float]] = {}
    for name, kinds in (("rows", int), ("us", (int, float))):
        numbers = entry.get(name)
        if not isinstance(numbers, list) or not all(
            isinstance(number, kinds) and not isinstance(number, bool) for number in numbers
        ):
            raise ConfigError(f"{place}.{name} = {numbers!r}: must be a list of numbers")
        values[name] = numbers
    context = entry.get("us_per_context_token", 0.0)
    if not isinstance(context, int | float) or isinstance(context, bool):
        raise ConfigError(f"{place}.us_per_context_token = {context!r}: must be a number")
    rows = tuple(int(number) for number in values["rows"])
    try:
        return StepCost(rows, tuple(float(us) for us in values["us"]), float(context))
    except PrecisionError as error:
        raise ConfigError(f"{place}.{error}") from error


def capacity(
    cost: StepCost, *, input_tokens: float, output_tokens: float, step_tokens: int, seats: int
) -> float:
    """Requests a second that one worker can serve for ever: prompts in full steps, answers in full
    batches. Bursts, unlike lengths and mixed steps leave less."""
    context = input_tokens + output_tokens / 2
    prompt_us = cost.predict(step_tokens, step_tokens) * input_tokens / step_tokens
    answer_us = cost.predict(seats, round(seats * context)) * output_tokens / seats
    return 1e6 / (prompt_us + answer_us)
