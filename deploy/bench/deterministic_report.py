"""What `bench deterministic` found, as figures, a table and a sentence.

A result has *portions*, one for each seed: what a machine has no time for at once is counted over
several runs into one file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from deepinfer.deploy.config import ConfigError

if TYPE_CHECKING:
    from deepinfer.deploy.bench.deterministic import Mode, Plan

DIFFERENCES_MAX: Final = 20
"""So many are kept in words; all are counted."""
MODES: Final = ("deterministic", "ordinary")
SUBJECT: Final = ("model", "kv_cache_dtype", "card")
"""Portions of one file have these in common."""
COUNTS: Final = (
    "streams",
    "identical",
    "with_log_probabilities",
    "tokens",
    "swaps",
    "resumes",
    "resumes_on_another_worker",
    "recomputes",
    "placed_again",
    "streams_swapped",
    "streams_recomputed",
    "streams_with_cached_prefix",
    "worker_kills",
)


def name_of(mode: Mode) -> str:
    """What the result calls it."""
    return MODES[0] if mode.deterministic else MODES[1]


def portion(
    plan: Plan, modes: Sequence[Mode], speeds: Sequence[dict[str, float]], *, complete: bool
) -> dict[str, Any]:
    """One run; ``speeds`` are those of ordinary and deterministic workers, if measured."""
    found: dict[str, Any] = {"complete": complete, "plan": asdict(plan)}
    for mode in modes:
        streams = mode.streams
        wrong = [each for each in streams if not each.identical]
        found[name_of(mode)] = {
            "streams": len(streams),
            "identical": len(streams) - len(wrong),
            "with_log_probabilities": sum(each.numbers for each in streams),
            "tokens": sum(each.tokens for each in streams),
            "swaps": sum(each.swaps for each in streams),
            "resumes": sum(each.resumes for each in streams),
            "resumes_on_another_worker": sum(each.moves for each in streams),
            "recomputes": sum(each.recomputes for each in streams),
            "placed_again": sum(each.placed_again for each in streams),
            "streams_swapped": sum(each.swaps > 0 for each in streams),
            "streams_recomputed": sum(each.recomputes > 0 for each in streams),
            "streams_with_cached_prefix": sum(each.cached_tokens > 0 for each in streams),
            "worker_kills": mode.kills,
            "seconds": round(mode.seconds, 1),
            "differences": dict(Counter(each.wrong.split(" ")[0] for each in wrong)),
            "first_differences": [
                {"request": each.request, "what": each.wrong} for each in wrong[:DIFFERENCES_MAX]
            ],
        }
    if len(speeds) == 2:
        ordinary, deterministic = speeds
        found["tokens_per_second"] = {
            name: {
                "ordinary": ordinary[name],
                "deterministic": deterministic[name],
                "ratio": round(deterministic[name] / ordinary[name], 3),
            }
            for name in ordinary
        }
    return found


def others(path: Path, subject: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """The portions of other seeds that a file has already.

    Raises:
        ConfigError: it is of another model, KV dtype or device, or no such result.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        portions: list[dict[str, Any]] = found["portions"]
        for name in SUBJECT:
            if found.get(name) != subject.get(name):
                raise ConfigError(
                    f"{path} is of {name} = {found.get(name)!r}, not {subject.get(name)!r}: name "
                    "another --output, or remove it"
                )
        return [each for each in portions if each["plan"]["seed"] != seed]
    except FileNotFoundError:
        return []
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no result of this bench: {error}") from error


def figures(portions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The sums over all portions, and the portions."""
    found: dict[str, Any] = {"complete": all(each["complete"] for each in portions)}
    for mode in MODES:
        parts = [each[mode] for each in portions]
        total: dict[str, Any] = {name: sum(part[name] for part in parts) for name in COUNTS}
        good = 0 < total["streams"] == total["identical"]
        total["bound_95"] = 3 / total["streams"] if good else None
        found[mode] = total
    for each in portions:
        if "tokens_per_second" in each:
            found["tokens_per_second"] = each["tokens_per_second"]
    done = found["deterministic"]
    found["as_it_should_be"] = found["complete"] and 0 < done["streams"] == done["identical"]
    found["portions"] = list(portions)
    return found


def table(found: dict[str, Any]) -> Table:
    """Both modes side by side, and their speed."""
    shown = Table("", *MODES)
    for key, words in (
        ("streams", "streams"),
        ("identical", "identical to the request alone"),
        ("with_log_probabilities", "  with log-probabilities"),
        ("worker_kills", "workers killed"),
        ("swaps", "swaps"),
        ("resumes_on_another_worker", "resumed on another worker"),
        ("recomputes", "computed again for a payload"),
        ("placed_again", "computed again for a worker"),
        ("streams_with_cached_prefix", "with a cached prefix"),
    ):
        shown.add_row(words, *(f"{found[mode][key]:,}" for mode in MODES))
    for name, each in found.get("tokens_per_second", {}).items():
        batch = name.removeprefix("decode_")
        words = "prompts, tok/s" if name == "prompts" else f"decode at batch {batch}, tok/s"
        shown.add_row(
            words,
            f"{each['deterministic']:,.0f} ({each['ratio']:.0%})",
            f"{each['ordinary']:,.0f}",
        )
    return shown


def sentence(found: dict[str, Any]) -> str:
    """The result in one."""
    done, other = found["deterministic"], found["ordinary"]
    bound = "" if done["bound_95"] is None else f" (95% bound {done['bound_95']:.2g})"
    return (
        f"{done['identical']:,} of {done['streams']:,} streams identical{bound} over "
        f"{done['swaps']:,} swaps, {done['resumes_on_another_worker']:,} moves, "
        f"{done['worker_kills']:,} kills; without the mode {other['identical']:,} of "
        f"{other['streams']:,}"
    )
