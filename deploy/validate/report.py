"""What a validation found: a table, its misses as sentences, and everything for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.table import Table

from deepinfer.deploy.bench.card_facts import card_facts
from deepinfer.deploy.validate import accuracy
from deepinfer.deploy.validate.checks import Outcome, worst
from deepinfer.workers.gpu.card import Card

_MISSES_SHOWN: Final = 20

RULES: Final = {
    "row_cosine_min": accuracy.ROW_COSINE_MIN,
    "cosine_min": accuracy.COSINE_MIN,
    "cosine_min_e5m2": accuracy.COSINE_MIN_E5M2,
    "attention_error_max": accuracy.ATTENTION_ERROR_MAX,
    "attention_half_ulps_from_2_on": 2,
    "linear_half_ulps": 2,
    "model_error_over_sdpa_fp16_max": accuracy.MODEL_RATIO_MAX,
    "model_error_over_sdpa_fp16_max_quantised": accuracy.MODEL_RATIO_MAX_QUANTISED,
}


def figures(subject: str, card: Card, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Everything for JSON; NaN is written as null."""
    return {
        "gpu": card_facts(card),
        "model": subject,
        "rules": RULES,
        "checks": len(outcomes),
        "missed": sum(bool(each.misses) for each in outcomes),
        "groups": [_row(group) for group in _grouped(outcomes)],
        "outcomes": [
            {name: _finite(value) for name, value in asdict(each).items()} for each in outcomes
        ],
    }


def table(outcomes: Sequence[Outcome]) -> Table:
    """A line for each kernel, variant and target."""
    shown = Table()
    for heading in ("kernel", "variant", "target"):
        shown.add_column(heading)
    for heading in ("checks", "results", "1 - row cosine", "1 - cosine", "largest error", "missed"):
        shown.add_column(heading, justify="right")
    for group in _grouped(outcomes):
        row = _row(group)
        numbers = row["results"] > 0
        share = row["share"]
        of_limit = "nan" if share is None else f"{share:.0%} of the limit"
        shown.add_row(
            row["kernel"],
            row["variant"],
            row["target"],
            str(row["checks"]),
            str(row["results"]) if numbers else "by element",
            _less(row["row_cosine"]) if numbers else "",
            _less(row["cosine"]) if numbers else "",
            of_limit if numbers else "",
            f"[red]{row['missed']}[/red]" if row["missed"] else "0",
        )
    return shown


def misses(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What was missed, a line each, the first ones."""
    lines = [
        f"missed ({each.target}): {each.kernel} {each.variant} {each.name}: {miss}"
        for each in outcomes
        for miss in each.misses
    ]
    yield from lines[:_MISSES_SHOWN]
    if len(lines) > _MISSES_SHOWN:
        yield f"and {len(lines) - _MISSES_SHOWN} more, in the JSON"


def sentence(outcomes: Sequence[Outcome]) -> str:
    """The result in one line."""
    missed = sum(bool(each.misses) for each in outcomes)
    targets = ", ".join(dict.fromkeys(each.target for each in outcomes))
    return f"{len(outcomes) - missed} of {len(outcomes)} checks pass ({targets})"


def _grouped(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """By kernel and variant in the order of the checks, and then by target."""
    targets = list(dict.fromkeys(each.target for each in outcomes))
    kinds = list(dict.fromkeys((each.kernel, each.variant) for each in outcomes))
    groups = [
        [each for each in outcomes if (each.kernel, each.variant, each.target) == (*kind, target)]
        for kind in kinds
        for target in targets
    ]
    return [group for group in groups if group]


def _row(group: Sequence[Outcome]) -> dict[str, Any]:
    first = group[0]
    counted = [each for each in group if each.results]
    return {
        "kernel": first.kernel,
        "variant": first.variant,
        "target": first.target,
        "checks": len(group),
        "results": sum(each.results for each in group),
        "row_cosine": _finite(worst([each.row_cosine for each in counted], min, 1.0)),
        "cosine": _finite(worst([each.cosine for each in counted], min, 1.0)),
        "error": _finite(worst([each.error for each in counted], max, 0.0)),
        "share": _finite(worst([each.share for each in counted], max, 0.0)),
        "missed": sum(bool(each.misses) for each in group),
        "seconds": round(sum(each.seconds for each in group), 1),
    }


def _less(cosine: float | None) -> str:
    return "nan" if cosine is None else f"{max(0.0, 1 - cosine):.1e}"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
