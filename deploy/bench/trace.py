"""`deepinfer bench trace`: recorded arrivals against each precision policy.

Requests of a trace come at real intervals, scaled to a rate, with prompts and answers of recorded
lengths. At every rate and for every seed (another part of the trace) the same requests are
served under each policy: FP16 always, FP8 always, ``threshold`` and ``slo``. What counts is how
many hold targets, multiples of what one request alone takes in FP16 (``trace_figures``);
``slo`` is given the tight ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from deepinfer.deploy.bench import trace_report
from deepinfer.deploy.bench.plots import check_plots
from deepinfer.deploy.bench.prompts import read_text
from deepinfer.deploy.bench.results import write_result
from deepinfer.deploy.bench.steps import Steps, counted
from deepinfer.deploy.bench.trace_costs import ASSUMED, capacity, read_costs
from deepinfer.deploy.bench.trace_figures import (
    AIM,
    MULTIPLES,
    Alone,
    cell,
    over_seeds,
    verdict,
)
from deepinfer.deploy.bench.trace_files import Arrival, read_trace
from deepinfer.deploy.bench.trace_load import Shape, Words, one_by_one, window
from deepinfer.deploy.bench.trace_places import Place, Simulated, on_card
from deepinfer.deploy.config import ConfigError
from deepinfer.kvstore.core.precision import PrecisionError, PrecisionSettings, resolve_policy

PLACES: Final = ("simulate", "cpu", "card")
POLICIES: Final = ("fp16", "fp8", "threshold", "slo")
LOADS: Final = (0.6, 0.85, 1.1, 1.2, 1.3, 1.4)
"""Rates by default, as shares of what FP16 can serve for ever."""
CPU_RATES: Final = (0.25, 0.5)
CONTEXTS: Final = {"simulate": 32_768, "cpu": 512, "card": 32_768}
"""Tokens that a prompt and its answer may have, by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is replayed, where and how often. Checked on construction (ConfigError)."""

    trace: Path
    where: str = "simulate"
    rates: tuple[float, ...] = ()
    """Requests a second and worker; (): ``LOADS`` of what one worker can serve."""
    policies: tuple[str, ...] = POLICIES
    seeds: int = 5
    first_seed: int = 0
    """Seeds from here on: parts of the trace that no one has looked at before."""
    seconds: float = 10.0
    """Requests come for so long, on average."""
    max_context: int | None = None
    """None: what ``CONTEXTS`` says."""
    alone: int = 24
    """Requests that are served one at a time."""
    workers: int = 1
    costs: Path | None = None
    text: Path | None = None
    model: str = "demo"
    shape: str = "qwen2.5-3b"

    def __post_init__(self) -> None:
        def check(name: str, legal: bool, allowed: str) -> None:
            if not legal:
                raise ConfigError(f"{name} = {getattr(self, name)!r}: must be {allowed}")

        check("where", self.where in PLACES, f"one of {', '.join(PLACES)}")
        different = len(set(self.rates)) == len(self.rates)
        legal = all(0 < rate <= 10_000 for rate in self.rates)
        check("rates", legal and different, "different numbers above 0, at most 10000")
        for name in self.policies:
            try:
                resolve_policy(name)
            except PrecisionError as error:
                raise ConfigError(f"policies: {error}") from error
        different = len(set(self.policies)) == len(self.policies)
        check("policies", bool(self.policies) and different, "different policies")
        check("seeds", 1 <= self.seeds <= 100, "between 1 and 100")
        check("first_seed", 0 <= self.first_seed < 1 << 31, "between 0 and 2147483647")
        check("seconds", 0 < self.seconds <= 3600, "above 0, at most 3600")
        check("alone", 1 <= self.alone <= 1000, "between 1 and 1000")
        check("workers", 1 <= self.workers <= 10_000, "between 1 and 10000")
        if self.workers > 1:
            check("workers", self.where == "simulate", f"1 where {self.where}")
        if self.costs is not None:
            check("costs", self.where == "simulate", f"left out where {self.where}")
        least = 64
        legal = self.max_context is None or least <= self.max_context <= 1 << 20
        check("max_context", legal, f"between {least} and {1 << 20}")

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer may have."""
        return self.max_context or CONTEXTS[self.where]

    def command(self, rates: tuple[float, ...]) -> str:
        """What measures the same again."""
        parts = [f"deepinfer bench trace --trace {self.trace} --where {self.where}"]
        parts += [f"--rates {','.join(f'{rate:g}' for rate in rates)}"]
        parts += [f"--policies {','.join(self.policies)}", f"--seeds {self.seeds}"]
        parts += [f"--first-seed {self.first_seed}"] if self.first_seed else []
        parts += [f"--seconds {self.seconds:g}", f"--max-context {self.context}"]
        parts += [f"--alone {self.alone}"]
        parts += [f"--workers {self.workers}"] if self.workers > 1 else []
        parts += [f"--costs {self.costs}"] if self.costs else []
        parts += [f"--text {self.text}"] if self.text else []
        parts += [f"--model {self.model}"] if self.where == "cpu" else []
        parts += [f"--shape {self.shape}"] if self.where == "card" else []
        return " ".join(parts)


def parse_rates(text: str | None) -> tuple[float, ...]:
    """Numbers separated by commas; () for None.

    Raises:
        ConfigError: something else stands between the commas.
    """
    if text is None:
        return ()
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"rates = {text!r}: must be numbers separated by commas") from error


def run_trace(plan: Plan, *, output: Path, console: Console) -> bool:
    """Replay, and write ``trace_<where>.json`` and ``.png``.

    For Mooncake's traces that is ``trace_<where>_mooncake``, for 1,000 workers
    ``trace_<where>_1000``, from seed 5 on ``trace_<where>_from_5``.

    Returns whether requests were served without errors; the verdict on ``slo`` is in the result.

    Raises:
        ConfigError: an option, the trace, the text or the costs cannot be used.
    """
    if plan.where != "card":  # there the picture is drawn where it can be
        check_plots()
    arrivals = read_trace(plan.trace)
    text = read_text(plan.text)
    place = open_place(plan, console)
    try:
        with counted(console, 1) as steps:
            found, rates = measure(plan, place, arrivals, text, steps)
    finally:
        place.close()
    kind = "_mooncake" if arrivals[0].hash_ids else ""
    stem = f"trace_{plan.where}{kind}" + (f"_{plan.workers}" if plan.workers > 1 else "")
    stem += f"_from_{plan.first_seed}" if plan.first_seed else ""
    write_result(output / f"{stem}.json", plan.command(rates), found)
    trace_report.draw(found, output / f"{stem}.png", console)
    for shown in trace_report.tables(found):
        console.print(shown)
    console.print(trace_report.judgement(found))
    cells = [one for policy in found["cells"] for one in policy["seeds"]]
    return not any(one["errors"] for one in cells)


def open_place(plan: Plan, console: Console) -> Place:
    """Make what serves."""
    if plan.where == "simulate":
        return Simulated(read_costs(plan.costs) if plan.costs else ASSUMED, plan.workers)
    if plan.where == "card":
        return on_card(plan.shape, plan.context)
    from deepinfer.deploy.bench.trace_cluster import OnCluster

    return OnCluster(plan.model, console)


def measure(
    plan: Plan, place: Place, arrivals: tuple[Arrival, ...], text: str, steps: Steps
) -> tuple[dict[str, Any], tuple[float, ...]]:
    """Every policy at every rate for every seed; the figures, and the rates that were taken."""
    shape = Shape.for_context(arrivals, plan.context)
    words = place.words(text)
    rates = plan.rates or _rates(plan, place, arrivals, shape)
    runs = len(rates) * len(plan.policies) * plan.seeds
    steps.expect(runs + 1)
    steps.tell("one at a time")
    alone = serve_alone(plan, place, arrivals, words, shape)
    steps.advance()
    tight = MULTIPLES[AIM]
    cells: dict[tuple[float, str], list[dict[str, Any]]] = {}
    # By policy first: a cluster is started for each.
    for policy in plan.policies:
        settings = PrecisionSettings(
            policy=resolve_policy(policy),
            ttft_target_ms=tight * alone.ttft_ms,
            tpot_target_ms=tight * alone.tpot_ms,
        )
        for number, rate in enumerate(rates):
            for place_of_seed in range(plan.seeds):
                seed = plan.first_seed + place_of_seed
                steps.tell(f"{policy}, {rate:g}/s, seed {seed}")
                asks = window(
                    arrivals,
                    words,
                    shape,
                    count=max(2, round(rate * plan.seconds * place.workers)),
                    rate=rate * place.workers,
                    seed=seed,
                    lap=64 * (1 + number * plan.seeds + place_of_seed),
                )
                replayed = place.serve(asks, settings, seed)
                cells.setdefault((rate, policy), []).append(cell(replayed, alone))
                steps.advance()
    found = {
        "trace": _trace_facts(plan, arrivals, shape),
        "where": plan.where,
        "place": place.facts(),
        "seconds": plan.seconds,
        "seeds": plan.seeds,
        "first_seed": plan.first_seed,
        "alone": {
            "requests": alone.requests,
            "ttft_mean_ms": alone.ttft_ms,
            "tpot_mean_ms": alone.tpot_ms,
        },
        "targets_ms": {
            name: {"ttft": factor * alone.ttft_ms, "tpot": factor * alone.tpot_ms}
            for name, factor in MULTIPLES.items()
        },
        "slo_targets": AIM,
        "rates": (
            summary := [
                {
                    "rate": rate,
                    "policies": {
                        policy: over_seeds(cells[rate, policy]) for policy in plan.policies
                    },
                }
                for rate in rates
            ]
        ),
        "verdict": {name: verdict(summary, name) for name in MULTIPLES},
        "cells": [
            {"rate": rate, "policy": policy, "seeds": of_seeds}
            for (rate, policy), of_seeds in cells.items()
        ],
    }
    return found, rates


def serve_alone(
    plan: Plan, place: Place, arrivals: tuple[Arrival, ...], words: Words, shape: Shape
) -> Alone:
    """What FP16 takes for one request at a time."""
    settings = PrecisionSettings(policy=resolve_policy("fp16"))
    asks = one_by_one(arrivals, words, shape, count=plan.alone, lap=0)
    served = [place.serve([ask], settings, number).served[0] for number, ask in enumerate(asks)]
    if not all(one.ok for one in served):
        raise ConfigError(f"trace {plan.trace}: a request alone did not end as it should")
    return Alone.of(served)


def _rates(
    plan: Plan, place: Place, arrivals: tuple[Arrival, ...], shape: Shape
) -> tuple[float, ...]:
    limits = place.limits
    if limits is None or not limits.costs:
        return CPU_RATES
    most = capacity(
        limits.costs[0],
        **_mean_lengths(arrivals, shape),
        step_tokens=limits.max_batch_tokens,
        seats=limits.max_batch_seqs,
    )
    return tuple(float(f"{load * most:.3g}") for load in LOADS)


def _mean_lengths(arrivals: tuple[Arrival, ...], shape: Shape) -> Mapping[str, float]:
    count = len(arrivals)
    length: Callable[[int], int] = shape.tokens
    return {
        "input_tokens": sum(length(arrival.input_tokens) for arrival in arrivals) / count,
        "output_tokens": sum(length(arrival.output_tokens) for arrival in arrivals) / count,
    }


def _trace_facts(plan: Plan, arrivals: tuple[Arrival, ...], shape: Shape) -> dict[str, Any]:
    return {
        "file": plan.trace.name,
        "requests": len(arrivals),
        "lasted_s": arrivals[-1].at_ms / 1000,
        "prefixes": "as recorded" if arrivals[0].hash_ids else "none in common",
        "lengths_times": shape.factor,
        "mean_tokens": dict(_mean_lengths(arrivals, shape)),
    }
