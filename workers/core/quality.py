"""Whether a KV dtype wrecks a model: what was measured, what is allowed, what is said.

A model's logits over a short text with a pool of the dtype are compared with those over a FP16
pool. How the limits came about:

* SmolLM2-135M, whose K has no outliers, loses on that text: int8 and k16v8 .001 nats, and 98% of
  top tokens stay the same; fp8 .008, 95%; fp8_e5m2 .030, 91%. On a text that it predicts
  badly (``docs/results/quality.json``) twice as much: .0012, .012 and .042 nats; 97, 93 and 86%.
  That is the price of the dtype's own rounding, and who asks for the dtype has agreed to it.
* Qwen2.5-Coder-0.5B, whose K reaches 214 in a few channels, was measured to lose .022 nats (88%)
  with int8, .025 (87%) with fp8 and .105 (74%) with fp8_e5m2, but .0005 (98%) with k16v8. Larger
  models of that family become useless with fp8.

So each dtype has its own limits, about twice the dtype's price on the worse text and below what
the second model loses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Mode = Literal["strict", "warn", "off"]
"""Refuse a dtype that fails, serve it all the same and say so, or do not measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What a dtype may cost."""

    kl_nats: float
    """Mean KL divergence from the logits with FP16 KV, at most."""
    agreement: float
    """Share of positions with the same top token, at least."""


LIMITS: Final[Mapping[str, Limit]] = {
    "int8": Limit(kl_nats=0.01, agreement=0.93),
    "k16v8": Limit(kl_nats=0.01, agreement=0.93),
    "fp8": Limit(kl_nats=0.02, agreement=0.90),
    "fp8_e5m2": Limit(kl_nats=0.08, agreement=0.82),
}
"""By canonical dtype. One that is not here is not measured: fp16 is what others are compared to."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to keep KV: a dtype, for int8 perhaps with powers of two on K's channels."""

    dtype: str
    key_scales: bool = False

    @property
    def name(self) -> str:
        """For messages and files."""
        return f"{self.dtype} with K channel scales" if self.key_scales else self.dtype


INT8_SCALED: Final = Candidate("int8", key_scales=True)


def candidates(dtype: str) -> tuple[Candidate, ...]:
    """What a pool of ``dtype`` may be, plain first: empty if there is nothing to measure."""
    if dtype not in LIMITS:
        return ()
    plain = Candidate(dtype)
    return (plain, INT8_SCALED) if dtype == "int8" else (plain,)


def alternatives(dtype: str) -> tuple[Candidate, ...]:
    """What to try in place of ``dtype``, fewest bytes first; after them there is fp16."""
    others = (Candidate("int8"), INT8_SCALED, Candidate("k16v8"))
    return tuple(other for other in others if other.dtype != dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one candidate did to a model. Raises ValueError for what no measurement gives."""

    kl_nats: float
    agreement: float
    positions: int
    saturations: int
    """K and V elements of the text that were clamped."""

    def __post_init__(self) -> None:
        # Comparisons that NaN, which logits of a wrecked model may lead to, does not fail.
        if self.kl_nats < 0 or not 0 <= self.agreement <= 1:
            raise ValueError(f"kl_nats = {self.kl_nats}, agreement = {self.agreement}")
        if self.positions < 1 or self.saturations < 0:
            raise ValueError(f"positions = {self.positions}, saturations = {self.saturations}")

    def passes(self, dtype: str) -> bool:
        """Whether this is within the limits of ``dtype``; NaN is not."""
        limit = LIMITS[dtype]
        return self.kl_nats <= limit.kl_nats and self.agreement >= limit.agreement

    def __str__(self) -> str:
        return f"KL {self.kl_nats:.2g} nats, top token the same at {self.agreement:.1%}"


class KvQualityError(ValueError):
    """A KV dtype that this model does not bear; names what it bears."""


def refusal(dtype: str, measured: Mapping[Candidate, Figures]) -> KvQualityError:
    """Say why ``dtype`` is not served, and which of ``measured`` would be."""
    tried = "; ".join(f"{one.name}: {measured[one]}" for one in candidates(dtype))
    limit = LIMITS[dtype]
    other = next(
        (
            (one, measured[one])
            for one in alternatives(dtype)
            if one in measured and measured[one].passes(one.dtype)
        ),
        None,
    )
    if other is None:
        instead = "of all dtypes only fp16 passes: take --kv-cache-dtype fp16"
    else:
        one, figures = other
        instead = f"{one.name} passes ({figures}): take --kv-cache-dtype {one.dtype}"
    positions = next(iter(measured.values())).positions
    return KvQualityError(
        f"kv_cache_dtype = {dtype!r}: this model loses too much with it. Beside FP16 KV, over "
        f"{positions} tokens: {tried}; allowed are KL {limit.kl_nats:g} and {limit.agreement:.0%}. "
        f"{instead}, or --kv-quality off to serve it all the same"
    )


def remarks(chosen: Candidate, figures: Figures) -> tuple[str, ...]:
    """What there is to say at the start of a pool that is served, a line each."""
    limit = LIMITS[chosen.dtype]
    allowed = f"allowed are {limit.kl_nats:g} and {limit.agreement:.0%}"
    passed = figures.passes(chosen.dtype)
    lines = [
        f"{'' if passed else 'warning: '}KV quality, {chosen.name} beside fp16: {figures} of "
        f"{figures.positions} tokens ({allowed}{'' if passed else ': it fails'})"
    ]
    if figures.saturations:
        lines.append(
            f"warning: {figures.saturations:,} K and V elements of these tokens are beyond the "
            f"range of {chosen.dtype} and were clamped"
        )
    return tuple(lines)
