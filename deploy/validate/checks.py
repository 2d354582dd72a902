"""One check of a kernel, and what became of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from deepinfer.deploy.validate.accuracy import Accuracy
from deepinfer.kernels.compiler import KernelSpec


@dataclass(frozen=True, slots=True)
class Check:
    """``run`` computes results and compares them; it raises AssertionError for what is broken.

    ``specs`` are the kernels it launches, to be compiled before.
    """

    kernel: str
    variant: str
    """The KV dtype, or the form of the weights; "" where there is one only."""
    name: str
    run: Callable[[], Iterable[Accuracy]]
    specs: tuple[KernelSpec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a check found; ``misses`` is empty if all rules hold."""

    target: str
    """What the kernels were compiled for."""
    kernel: str
    variant: str
    name: str
    seconds: float
    results: int
    """Results that were compared by numbers."""
    row_cosine: float
    cosine: float
    error: float
    share: float
    """The largest error as a part of what the rule allows."""
    misses: tuple[str, ...]

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Outcome:
        """The inverse of ``dataclasses.asdict`` through JSON."""
        return cls(**(fields | {"misses": tuple(fields["misses"])}))


def perform(check: Check, target: str) -> Outcome:
    """Run one check; whatever a kernel does, the next one still gets its turn."""
    began = time.monotonic()
    results: list[Accuracy] = []
    misses: list[str] = []
    try:
        with torch.inference_mode():
            results.extend(check.run())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except (AssertionError, ArithmeticError, RuntimeError, ValueError) as error:
        # RuntimeError: also what the driver, CuPy and torch say of a launch that failed.
        misses.append(f"{type(error).__name__}: {error}".strip()[:400])
    misses += [result.problem for result in results if result.problem is not None]
    return Outcome(
        target=target,
        kernel=check.kernel,
        variant=check.variant,
        name=check.name,
        seconds=round(time.monotonic() - began, 3),
        results=len(results),
        row_cosine=worst([each.row_cosine for each in results], min, 1.0),
        cosine=worst([each.cosine for each in results], min, 1.0),
        error=worst([each.error for each in results], max, 0.0),
        share=worst([each.share for each in results], max, 0.0),
        misses=tuple(misses),
    )


def worst(values: list[float], choose: Callable[[Iterable[float]], float], none: float) -> float:
    """NaN is worse than anything."""
    if any(math.isnan(value) for value in values):
        return math.nan
    return choose(values) if values else none
