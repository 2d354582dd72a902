"""The accuracy rules: how far a kernel's result may be from float64 on the same inputs.

Rows are what the last axis holds. Cosines show a wrong direction that no largest error would,
largest errors a single wrong element that no cosine would.

A result in halves cannot be nearer than their grid is fine, and below 2^-14 that is 2^-24 whatever
the value. So for cosines, and for them alone, each element of such a result is first moved towards
the expected value by ``HALF_ROUNDING``: what rounding to that grid may cost the right value.
That is at most the half-ulp of a number from 2^-14 on, and next to nothing of usual ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

ROW_COSINE_MIN: Final = 0.999999
COSINE_MIN: Final = 0.9999999
COSINE_MIN_E5M2: Final = 0.999999
"""Of whole tensors; E5M2 has two bits of mantissa."""
HALF_ROUNDING: Final = 2.0**-25
"""Half a step of float16's subnormal numbers."""
ATTENTION_ERROR_MAX: Final = 0.001
MODEL_RATIO_MAX: Final = 1.1
"""A model's error against float32 may be so many times that of torch's own FP16 attention."""
MODEL_RATIO_MAX_QUANTISED: Final = 1.5
"""With K and V quantised: a value beside a rounding boundary falls to either side in each of them,
and then errs by a whole code."""


class Miss(AssertionError):
    """A result breaks a rule that is not of numbers: other bits, a write where none belongs."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """One result beside what it should be; cosines are 1 where the rule has none."""

    what: str
    error: float
    """The largest; NaN where something is not finite."""
    allowed: float
    row_cosine: float = 1.0
    cosine: float = 1.0
    cosine_min: float = COSINE_MIN

    @property
    def share(self) -> float:
        """``error`` as a part of what is allowed."""
        return self.error / self.allowed

    @property
    def problem(self) -> str | None:
        """What is broken; None: nothing."""
        # Comparisons that NaN fails.
        if (
            self.error <= self.allowed
            and self.row_cosine >= ROW_COSINE_MIN
            and self.cosine >= self.cosine_min
        ):
            return None
        return (
            f"{self.what}: error {self.error:.3g} of {self.allowed:.3g}, cosine of the worst row "
            f"1 - {1 - self.row_cosine:.2e}, of all 1 - {1 - self.cosine:.2e}"
        )


def attention(what: str, out: Tensor, expected: Tensor, *, e5m2: bool = False) -> Accuracy:
    """The rule of attention: 0.001, or two half-ulps where outputs are so large."""
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    allowed = max(ATTENTION_ERROR_MAX, half_ulp(largest) * 2 if largest >= 2 else 0.0)
    return _compared(what, out, expected, allowed, COSINE_MIN_E5M2 if e5m2 else COSINE_MIN)


def product(what: str, out: Tensor, expected: Tensor) -> Accuracy:
    """The rule of linear layers: two half-ulps of the largest value."""
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    return _compared(what, out, expected, 2 * half_ulp(largest), COSINE_MIN)


def half_ulp(value: float) -> float:
    """Half the distance of float16's numbers about ``value``."""
    exponent = math.floor(math.log2(value)) if value > 0 else -14
    return 0.5 * 2.0 ** (max(exponent, -14) - 10)


def _compared(
    what: str, out: Tensor, expected: Tensor, allowed: float, cosine_min: float
) -> Accuracy:
    if out.shape != expected.shape:
        raise Miss(f"{what}: shape {list(out.shape)} instead of {list(expected.shape)}")
    got, want = out.double(), expected.double()
    if not bool(torch.isfinite(got).all()):
        return Accuracy(what, math.nan, allowed, math.nan, math.nan, cosine_min)
    error = float((got - want).abs().max()) if got.numel() else 0.0
    if out.dtype == torch.float16:
        off = got - want
        got = want + off.sign() * (off.abs() - HALF_ROUNDING).clamp_min(0)
    # A row of zeros has no direction; the largest error judges it.
    directed = want.flatten(0, -2).norm(dim=-1) > 0
    rows = torch.nn.functional.cosine_similarity(
        got.flatten(0, -2)[directed], want.flatten(0, -2)[directed], dim=-1
    )
    if not rows.numel():
        return Accuracy(what, error, allowed)
    whole = torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0)
    return Accuracy(
        what,
        error,
        allowed,
        float(rows.min()),
        float(whole),
        cosine_min,
    )
