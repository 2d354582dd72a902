"""What a replay is judged by: times, attainment, shares of each mode; over seeds; and the verdict.

Targets are multiples of what FP16 takes for one request alone: of the mean TTFT, and of the mean
TPOT, over requests of the trace that are served one at a time by an idle worker, each with an empty
prefix cache. A request *attains* a target when it ended as it should, and its TTFT, and its TPOT if
it has two tokens or more, are at most so much. TPOT of a request is the mean time of each token
after its first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deepinfer.deploy.bench.results import percentile
from deepinfer.deploy.bench.trace_drive import Replayed, Served
from deepinfer.kvstore.core.precision import Precision

MULTIPLES: Final = {"tight": 5.0, "loose": 10.0}
AIM: Final = "tight"
"""The targets that slo is given."""
GAIN: Final = 0.05
"""Attainment that FP8 must gain over FP16 for the rate to count as one where FP8 helps."""
KEEP: Final = 0.8
"""Share of the gain that slo must keep there."""
NEAR: Final = 0.01
"""How far below FP16 it may be elsewhere."""


@dataclass(frozen=True, slots=True)
class Alone:
    """Means of requests that FP16 serves one at a time."""

    ttft_ms: float
    tpot_ms: float
    requests: int

    @classmethod
    def of(cls, served: Sequence[Served]) -> Alone:
        """Of requests that all ended as they should, one of them with two tokens or more."""
        ttfts = [s.ttft_ms for s in served if s.ttft_ms is not None]
        tpots = [s.tpot_ms for s in served if s.tpot_ms is not None]
        assert len(ttfts) == len(served), "a request alone has failed"
        return cls(_mean(ttfts), _mean(tpots), len(served))


def cell(replayed: Replayed, alone: Alone) -> dict[str, Any]:
    """The figures of one replay."""
    served = replayed.served
    good = [s for s in served if s.ok]
    tokens, us = sum(replayed.tokens.values()), sum(replayed.step_us)
    top = len(replayed.step_us) - 1
    in_fp16, in_fp8 = replayed.step_us[0], replayed.step_us[top] if top else 0
    return {
        "requests": len(served),
        "errors": sum(1 for s in served if s.finish is not None and not s.ok),
        "unfinished": sum(1 for s in served if s.finish is None),
        "seconds": replayed.end_us / 1e6,
        "tokens": tokens,
        "ttft_ms": _spread([s.ttft_ms for s in good if s.ttft_ms is not None]),
        "tpot_ms": _spread([s.tpot_ms for s in good if s.tpot_ms is not None]),
        "attainment": {
            name: attainment(served, factor * alone.ttft_ms, factor * alone.tpot_ms)
            for name, factor in MULTIPLES.items()
        },
        "share_of_time": _shares({"fp16": in_fp16, "mixed": us - in_fp16 - in_fp8, "fp8": in_fp8}),
        "share_of_tokens": _shares({p.value: replayed.tokens[p] for p in Precision}),
        "switches": replayed.switches,
        "swaps": replayed.swaps,
        "cached_prompt_tokens": replayed.cached_tokens,
    }


def attainment(
    served: Sequence[Served], ttft_target_ms: float, tpot_target_ms: float
) -> dict[str, float]:
    """Shares of requests that hold the TTFT target, the TPOT target, and both."""
    ttft = [s.ok and s.ttft_ms is not None and s.ttft_ms <= ttft_target_ms for s in served]
    tpot = [s.ok and (s.tpot_ms is None or s.tpot_ms <= tpot_target_ms) for s in served]
    both = [a and b for a, b in zip(ttft, tpot, strict=True)]
    count = max(1, len(served))
    return {"ttft": sum(ttft) / count, "tpot": sum(tpot) / count, "both": sum(both) / count}


def over_seeds(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean, least and most of the figures of one policy at one rate."""
    shown: dict[str, Any] = {
        f"attainment_{name}_{what}": _over([c["attainment"][name][what] for c in cells])
        for name in MULTIPLES
        for what in ("ttft", "tpot", "both")
    }
    for name in ("ttft_ms", "tpot_ms"):
        for quantile in ("p50", "p90", "p99"):
            values = [c[name][quantile] for c in cells if quantile in c[name]]
            if values:
                shown[f"{name}_{quantile}"] = _over(values)
    for name in ("share_of_time", "share_of_tokens"):
        shown[f"fp8_{name}"] = _over([c[name]["fp8"] for c in cells])
    for name in ("switches", "swaps", "errors", "unfinished"):
        shown[name] = _over([float(c[name]) for c in cells])
    return shown


def verdict(rates: Sequence[Mapping[str, Any]], level: str) -> dict[str, Any] | None:
    """What slo does for attainment (both targets) at ``level``, rate by rate; None: not all of
    the policies were run.

    ``holds``: at rates where FP8 gains ``GAIN`` over FP16, slo keeps ``KEEP`` of it, and no other
    policy that does computes a smaller share of tokens in FP8 (``least_share``; it counts for the
    targets that slo was given); elsewhere it is at most ``NEAR`` below FP16; and it is nowhere
    below threshold. Of means over seeds.
    """
    key = f"attainment_{level}_both"
    found = []
    for one in rates:
        policies = one["policies"]
        if any(name not in policies for name in ("fp16", "fp8", "threshold", "slo")):
            return None
        means = {name: policies[name][key]["mean"] for name in policies}
        gain, kept = means["fp8"] - means["fp16"], means["slo"] - means["fp16"]
        helps = gain >= GAIN
        above = means["slo"] - means["threshold"]
        shares = {name: policies[name]["fp8_share_of_tokens"]["mean"] for name in policies}
        rivals = [
            name
            for name in policies
            if name != "slo" and helps and means[name] - means["fp16"] >= KEEP * gain
        ]
        least = all(shares["slo"] <= shares[name] for name in rivals)
        found.append(
            {
                "rate": one["rate"],
                "fp8_gain": gain,
                "slo_gain": kept,
                "kept": kept / gain if helps else None,
                "slo_over_threshold": above,
                "slo_over_threshold_of_seeds": _over(_paired(policies, key, "threshold")),
                "slo_gain_of_seeds": _over(_paired(policies, key, "fp16")),
                "fp8_share_of_tokens": shares["slo"],
                "fp8_share_of_seeds": policies["slo"]["fp8_share_of_tokens"],
                "shares_of_others_that_keep_it": {name: shares[name] for name in rivals},
                "least_share": least if helps else None,
                "holds": above >= 0
                and (kept >= KEEP * gain and (least or level != AIM) if helps else kept >= -NEAR),
            }
        )
    return {
        "rates": found,
        "rates_where_fp8_helps": sum(1 for one in found if one["kept"] is not None),
        "holds": all(one["holds"] for one in found),
    }


def _paired(policies: Mapping[str, Any], key: str, other: str) -> list[float]:
    slo, beside = policies["slo"][key]["seeds"], policies[other][key]["seeds"]
    return [a - b for a, b in zip(slo, beside, strict=True)]


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    named = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {"mean": _mean(values)} | {name: percentile(values, q) for name, q in named.items()}


def _shares(counts: Mapping[str, float]) -> dict[str, float]:
    total = sum(counts.values()) or 1
    return {name: count / total for name, count in counts.items()}


def _over(values: Sequence[float]) -> dict[str, Any]:
    return {"mean": _mean(values), "min": min(values), "max": max(values), "seeds": list(values)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
