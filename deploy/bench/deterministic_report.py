"""What `bench deterministic` found, as figures, a table and a sentence."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

if TYPE_CHECKING:
    from deepinfer.deploy.bench.deterministic import Mode, Plan

DIFFERENCES_MAX: Final = 20
"""So many are kept in words; all are counted."""


def name_of(mode: Mode) -> str:
    """What the result calls it."""
    return "deterministic" if mode.deterministic else "ordinary"


def figures(
    plan: Plan, modes: list[Mode], speeds: list[dict[str, float]], *, complete: bool
) -> dict[str, Any]:
    """What the JSON holds; ``speeds`` are those of ordinary and deterministic workers."""
    found: dict[str, Any] = {"complete": complete, "plan": asdict(plan)}
    for mode in modes:
        streams = mode.streams
        wrong = [each for each in streams if not each.identical]
        found[name_of(mode)] = {
            "streams": len(streams),
            "identical": len(streams) - len(wrong),
            "with_log_probabilities": sum(each.numbers for each in streams),
            "bound_95": 3 / len(streams) if streams and not wrong else None,
            "tokens": sum(each.tokens for each in streams),
            "requests": len({each.request for each in streams}),
            "swaps": sum(each.swaps for each in streams),
            "resumes": sum(each.resumes for each in streams),
            "resumes_on_another_worker": sum(each.moves for each in streams),
            "recomputes": sum(each.recomputes for each in streams),
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
    done = found["deterministic"]
    found["as_it_should_be"] = complete and 0 < done["streams"] == done["identical"]
    return found


def table(found: dict[str, Any]) -> Table:
    """Both modes side by side, and their speed."""
    shown = Table("", "deterministic", "ordinary")
    for key, words in (
        ("streams", "streams"),
        ("identical", "identical to the request alone"),
        ("with_log_probabilities", "  with log-probabilities"),
        ("worker_kills", "workers killed"),
        ("swaps", "swaps"),
        ("resumes_on_another_worker", "resumed on another worker"),
        ("recomputes", "recomputed"),
        ("streams_with_cached_prefix", "with a cached prefix"),
    ):
        cells = (f"{found[mode][key]:,}" for mode in ("deterministic", "ordinary"))
        shown.add_row(words, *cells)
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
